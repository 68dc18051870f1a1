"""What a training run writes: model folders that dlmrt and transformers load, and checkpoints that a run continues."""

import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from orl_core.errors import ConfigError
from orl_train import checkpoint
from orl_train.data.tokenizer import EOS, MASK, PAD, tokenizer_config
from orl_train.errors import CheckpointError
from orl_train.generation import default_decoder
from orl_train.lora import has_lora, load_trained_state, trained_state
from orl_train.models.qwen_dlm import QwenDLMForBlockDiffusion

COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
UPDATES = "updates.safetensors"


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """transformers draws a bar for every folder it reads or writes; a run has a progress display of its own."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def save_weights(model: Any, state: Mapping[str, Tensor], folder: Path, dtype: torch.dtype) -> None:
    """Writes config.json and `state`, the model's whole state under its checkpoint names, as safetensors.

    Tied weights are written once.
    """
    tied = {name for name, source in model.all_tied_weights_keys.items() if source in state}
    written = {name: tensor.detach().to(dtype) for name, tensor in state.items() if name not in tied}
    with no_progress_bars():
        model.save_pretrained(folder, state_dict=written)
    config = checkpoint.read_json(folder / "config.json")
    config["dtype"] = str(dtype).removeprefix("torch.")
    checkpoint.write_json(folder / "config.json", config)


def copy_companions(start: Path, folder: Path) -> None:
    """Copies what makes a model folder complete beside its weights: tokenizer, chat template, decoding defaults."""
    for name in COMPANIONS:
        if (start / name).is_file():
            shutil.copyfile(start / name, folder / name)


def save_model(model: QwenDLMForBlockDiffusion, tokenizer: Tokenizer, folder: Path, dtype: torch.dtype) -> None:
    """Writes an ordinary Hugging Face folder with decoding defaults, loadable by dlmrt and transformers."""
    save_weights(model, model.state_dict(), folder, dtype)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, mask_token=MASK)
    fast.save_pretrained(str(folder))
    checkpoint.write_json(folder / "tokenizer_config.json", tokenizer_config())
    checkpoint.write_json(
        folder / "generation_config.json",
        {
            "eos_token_id": tokenizer.token_to_id(EOS),
            "pad_token_id": tokenizer.token_to_id(PAD),
            "max_new_tokens": 192,
            "decoder": default_decoder(model.family),
        },
    )


def keep_weights_in_model_folder(accelerator: Accelerator) -> None:
    """accelerate saves and loads everything but the weights: these are in `model/` beside its `state/`, once.

    Under LoRA those hold the updates added in, and `state/` keeps what is trained by itself.
    """

    def skip(models: list[Any], weights: list[Any], folder: str) -> None:
        weights.clear()
        for model in map(accelerator.unwrap_model, models):
            if has_lora(model):
                save_file(trained_state(model), Path(folder) / UPDATES)

    def load(models: list[Any], folder: str) -> None:
        while models:
            model = accelerator.unwrap_model(models.pop())
            if has_lora(model):
                load_trained_state(model, load_file(Path(folder) / UPDATES))
            else:
                load_model(model, Path(folder).parent / "model" / "model.safetensors")

    accelerator.register_save_state_pre_hook(skip)
    accelerator.register_load_state_pre_hook(load)


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The checkpoints of a run below `folder`, of which the newest `keep` stay.

    settings: those that a run must have to continue from one.
    """

    folder: Path
    keep: int
    settings: dict[str, Any]


def write_run(
    accelerator: Accelerator,
    write_state: Callable[[Path], None],
    write_model: Callable[[Path], None],
    checkpoints: Checkpoints,
    step: int,
) -> None:
    """Writes the checkpoint after `step` updates and removes those that are not to be kept.

    write_state: writes all but the model to the folder it is given, which exists; write_model: writes the model in
    float32. Both are called on the main process.
    """

    def write(target: Path) -> None:
        (target / "state").mkdir()
        write_state(target / "state")
        write_model(target / "model")
        checkpoint.write_json(target / "run.json", {"step": step, "config": checkpoints.settings})

    if accelerator.is_main_process:
        checkpoint.write_folder(checkpoint.checkpoint_path(checkpoints.folder, step), write)
        checkpoint.prune(checkpoints.folder, checkpoints.keep)
    accelerator.wait_for_everyone()


def save_run(
    accelerator: Accelerator,
    write_model: Callable[[Path], None],
    checkpoints: Checkpoints,
    step: int,
) -> None:
    """`write_run` with the state that accelerate keeps."""

    def write_state(state: Path) -> None:
        accelerator.save_state(str(state))

    write_run(accelerator, write_state, write_model, checkpoints, step)


def newest_run(checkpoints: Checkpoints) -> tuple[Path | None, int]:
    """The newest checkpoint and the updates it has seen; (None, 0) if there is none.

    Raises ConfigError if it was made with other settings, CheckpointError if its run.json is damaged.
    """
    found = checkpoint.latest(checkpoints.folder)
    if found is None:
        return None, 0
    run = checkpoint.read_json(found / "run.json")
    if run.get("config") != checkpoints.settings:
        raise ConfigError(
            f"{found} was made with other settings; use another output folder, the same settings, or --no-resume"
        )
    if not isinstance(run.get("step"), int):
        raise CheckpointError(f"{found} is damaged (run.json names no step); remove it")
    return found, run["step"]


@contextmanager
def reading(found: Path) -> Iterator[None]:
    """Raises CheckpointError, with advice, for what goes wrong while the checkpoint `found` is read."""
    try:
        yield
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, SafetensorError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{found} is damaged ({error}); remove it to continue from the checkpoint before it"
        ) from error


def resume_run(accelerator: Accelerator, checkpoints: Checkpoints) -> int:
    """Loads the newest checkpoint and returns the updates it has seen; 0 if there is none.

    Raises ConfigError if it was made with other settings, CheckpointError if it is damaged.
    """
    found, step = newest_run(checkpoints)
    if found is None:
        return 0
    with reading(found):
        accelerator.load_state(str(found / "state"))
    return step
