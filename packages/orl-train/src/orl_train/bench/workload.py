"""What the bench trains on: a model, prompts, and how they are answered."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from orl_core.arithmetic import problems
from orl_core.decoders import Decoder, Threshold
from orl_train.attention.interface import NAME
from orl_train.model_folder import model_folder
from orl_train.models.qwen_dlm import QwenDLMConfig, QwenDLMForBlockDiffusion
from orl_train.saving import no_progress_bars

_MASK, _STOPS = 1, (2, 3, 4)


@dataclass(frozen=True, slots=True)
class Workload:
    """name: of the model. prompts: int64 [P] each. decoder, max_new_tokens, stop_ids: how they are answered."""

    name: str
    model: QwenDLMForBlockDiffusion
    prompts: Sequence[Tensor]
    decoder: Decoder
    max_new_tokens: int
    stop_ids: frozenset[int]


def random_workload(prompts: int, *, context: int = 320, steps: int = 8, seed: int = 0, **shape: Any) -> Workload:
    """Random weights in the shape of the embedded models, random prompts of 3/4 to 5/4 of `context` tokens.

    A block takes `steps` steps; an answer has up to three blocks and ends at random. shape: of another model.
    """
    g = torch.Generator().manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "residual_intermediate_size": 384,
        "canvas_length": 32,
        "max_position_embeddings": 2048,
        "attn_implementation": NAME,
    } | shape
    config = QwenDLMConfig(
        state_family="masked",
        mask_token_id=_MASK,
        tie_word_embeddings=True,
        eos_token_id=_STOPS[0],
        **settings,
    )
    model = QwenDLMForBlockDiffusion(config)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.08, generator=g)
    lengths = torch.randint(3 * context // 4, 5 * context // 4 + 1, (prompts,), generator=g).tolist()
    return Workload(
        name="random",
        model=model,
        prompts=[torch.randint(5, config.vocab_size, (length,), generator=g) for length in lengths],
        decoder=Threshold(_MASK, config.canvas_length, 1.0, steps=steps, sampling_temperature=1.0),
        max_new_tokens=3 * config.canvas_length,
        stop_ids=frozenset(_STOPS),
    )


def start_workload(start: str, prompts: int) -> Workload:
    """A model (folder, or "embedded:base") on arithmetic problems, answered as `orl-train orl` does by default.

    Raises ConfigError if there is no such model.
    """
    from tokenizers import Tokenizer

    from orl_train.orl.config import RolloutSettings

    folder = model_folder(start)
    with no_progress_bars():
        model = QwenDLMForBlockDiffusion.from_pretrained(folder, dtype=torch.float32, attn_implementation=NAME)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    settings = RolloutSettings()
    stop: Any = model.config.eos_token_id
    return Workload(
        name=start,
        model=model,
        prompts=[torch.tensor(tokenizer.encode(p.prompt + "\n").ids) for p in problems("train", prompts)],
        decoder=settings.decoder(model.config, 0.5),
        max_new_tokens=settings.max_new_tokens,
        stop_ids=frozenset([stop]),
    )
