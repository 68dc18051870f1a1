"""Block-diffusion pretraining on a task: one forward over [clean | noisy] per update, through accelerate.

With self-conditioning an update first predicts without gradient and hands that prediction on, as the residual context,
to a second pass over the same canvas.
"""

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from tokenizers import Tokenizer
from torch import Tensor

from orl_core.arithmetic import draw_problem, problems
from orl_core.errors import ConfigError, require_at_least
from orl_core.noise import Family
from orl_core.residual import ResidualAdapter, expected_embedding
from orl_train import checkpoint
from orl_train.config import Precision, to_dict
from orl_train.data.noisy_batch import NoiseSettings, NoisyBatch, TokenRange, collate, make_sample, sample_generator
from orl_train.data.tokenizer import EOS, MASK, PAD, build_tokenizer
from orl_train.errors import NonFiniteLossError
from orl_train.interrupt import deferred_interrupt, on_any_rank
from orl_train.model_folder import by_weights, model_folder
from orl_train.models.qwen_dlm import QwenDLMConfig, QwenDLMForBlockDiffusion
from orl_train.optim import OptimizerConfig, build_optimizers, schedule_factor
from orl_train.saving import (
    Checkpoints,
    keep_weights_in_model_folder,
    no_progress_bars,
    resume_run,
    save_model,
    save_run,
)
from orl_train.tracking import tracker_options, tracking


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of the Qwen3-style model."""

    hidden_size: int = 192
    layers: int = 6
    heads: int = 3
    kv_heads: int = 3
    intermediate_size: int = 512
    residual_intermediate_size: int = 384
    canvas_length: int = 64
    state_family: Family = "uniform"
    max_position_embeddings: int = 512


@dataclass(frozen=True, slots=True)
class PretrainConfig:
    """A pretraining run.

    start: model to continue from (a folder, or `embedded:base` and the like) with its tokenizer; None begins anew. Its
    shape stays; the state family is that of the settings, so a model of one family can start the other.
    fresh_adapter: the start model's residual adapter is replaced by an untrained one, whose output is zero.
    steps: updates. batch_size: samples an update, over all ranks. micro_batch_size: samples a forward.
    self_conditioning: share of updates that see a residual context.
    clean_weight: loss weight of positions that were not corrupted (uniform family).
    number_weight: loss weight of numbers. Most of the loss is the free choice of words, which cannot be learned; the
    arithmetic, which can, is a small part of it.
    precision: "no" (float32) or "bf16" (autocast).
    """

    steps: int
    seed: int = 0
    batch_size: int = 32
    micro_batch_size: int = 32
    self_conditioning: float = 0.5
    clean_weight: float = 1.0
    number_weight: float = 1.0
    precision: Precision = "bf16"
    save_every: int = 500
    keep: int = 2
    start: str | None = None
    fresh_adapter: bool = False
    model: ModelConfig = field(default_factory=ModelConfig)
    noise: NoiseSettings = field(default_factory=NoiseSettings)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "micro_batch_size", "save_every", "keep"):
            require_at_least(name, getattr(self, name), 1)
        if self.fresh_adapter and self.start is None:
            raise ConfigError("fresh_adapter replaces the start model's adapter, but start is not given; give one")


def arithmetic_tokenizer(seed: int, texts: int = 20_000) -> Tokenizer:
    """The tokenizer of the arithmetic task, built from its own training problems."""
    return build_tokenizer(p.prompt + "\n" + p.solution for p in problems("train", texts, seed))


def build_model(config: PretrainConfig, tokenizer: Tokenizer) -> QwenDLMForBlockDiffusion:
    """A randomly initialised model; the vocabulary is rounded up to a multiple of 64."""
    shape = config.model
    masked = shape.state_family == "masked"
    attention: dict[str, Any] = {"attn_implementation": "eager"}  # at these lengths faster than the CPU's fused one
    return QwenDLMForBlockDiffusion(
        QwenDLMConfig(
            vocab_size=-(-tokenizer.get_vocab_size() // 64) * 64,
            hidden_size=shape.hidden_size,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.hidden_size // shape.heads,
            intermediate_size=shape.intermediate_size,
            max_position_embeddings=shape.max_position_embeddings,
            tie_word_embeddings=True,
            canvas_length=shape.canvas_length,
            state_family=shape.state_family,
            mask_token_id=tokenizer.token_to_id(MASK) if masked else None,
            residual_intermediate_size=shape.residual_intermediate_size,
            pad_token_id=tokenizer.token_to_id(PAD),
            eos_token_id=tokenizer.token_to_id(EOS),
            **attention,
        )
    )


def start_of(config: PretrainConfig) -> tuple[Tokenizer, QwenDLMForBlockDiffusion]:
    """Tokenizer and model that a run begins with: new ones, or those of `config.start` in float32.

    Raises ConfigError for a start that is no model folder or of another canvas, or without the mask token needed.
    """
    if config.start is None:
        tokenizer = arithmetic_tokenizer(config.seed)
        return tokenizer, build_model(config, tokenizer)
    folder = model_folder(config.start)
    with no_progress_bars():
        model = QwenDLMForBlockDiffusion.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    asked, found = config.model.canvas_length, model.config.canvas_length
    if asked != found:
        raise ConfigError(f"the start model has canvas_length {found} but the settings {asked}; they must agree")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model.config.state_family = config.model.state_family
    model.config.mask_token_id = tokenizer.token_to_id(MASK) if config.model.state_family == "masked" else None
    if config.model.state_family == "masked" and model.config.mask_token_id is None:
        raise ConfigError(f"the tokenizer of the start model has no {MASK}; the masked family needs it")
    if config.fresh_adapter:
        size, width = model.config.hidden_size, model.config.residual_intermediate_size
        model.residual_adapter = ResidualAdapter(size, width, model.config.rms_norm_eps)
    return tokenizer, model


class ArithmeticBatches:
    """Batch number n of the run, as micro-batches of NoisyBatch: a pure function of the configuration and n."""

    def __init__(self, config: PretrainConfig, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.config, self.tokenizer = config, tokenizer
        masked = config.model.state_family == "masked"
        ids = tokenizer.get_vocab()
        self.tokens = TokenRange(vocab_size, ids[PAD], ids[MASK] if masked else None)
        self.eos_id = ids[EOS]
        self.token_weight = torch.ones(vocab_size)
        for word, token in tokenizer.get_vocab().items():
            if word.removeprefix("Ġ").isdecimal():
                self.token_weight[token] = config.number_weight

    def sample(self, index: int):
        problem = draw_problem("train", self.config.seed, index)
        encoded = self.tokenizer.encode_batch([problem.prompt + "\n", problem.solution])
        return make_sample(
            torch.tensor(encoded[0].ids),
            torch.tensor([*encoded[1].ids, self.eos_id]),
            canvas_length=self.config.model.canvas_length,
            family=self.config.model.state_family,
            tokens=self.tokens,
            settings=self.config.noise,
            generator=sample_generator(self.config.seed, index, "noise"),
        )

    def micro_batches(self, step: int, rank: int, world: int) -> list[NoisyBatch]:
        """This rank's share of batch `step`, sorted by length so that padding is small."""
        size = self.config.batch_size
        samples = [self.sample(index) for index in range(step * size + rank, (step + 1) * size, world)]
        samples.sort(key=lambda s: len(s.clean) + len(s.noisy))
        micro = self.config.micro_batch_size
        return [collate(samples[i : i + micro], self.tokens.pad_id) for i in range(0, len(samples), micro)]


def residual_context(model: Any, batch: NoisyBatch) -> Tensor:
    """z [B, T, d]: the model's own prediction for the same canvas, without gradient."""
    with torch.no_grad():
        logits = model.denoise(batch.ids, batch.positions, batch.mask)
        return expected_embedding(torch.softmax(logits.float(), -1), model.embedding)


def position_weights(
    batch: NoisyBatch, family: Family, clean_weight: float = 1.0, token_weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(counted bool [B, T], weight float32 [N]): the positions in the loss and what each counts.

    masked: the corrupted positions; uniform: every noisy one, those that were not corrupted with `clean_weight`, since
    the model must also recognise what is right. token_weight: float32 [V], a further factor by target token.
    """
    counted = batch.corrupted if family == "masked" else batch.noisy
    weight = torch.where(batch.corrupted[counted], 1.0, clean_weight)
    if token_weight is not None:
        weight = weight * token_weight[batch.target[counted]]
    return counted, weight


def batch_loss(
    model: Any,
    batch: NoisyBatch,
    family: Family,
    *,
    with_residual: bool,
    clean_weight: float = 1.0,
    token_weight: Tensor | None = None,
) -> Tensor:
    """Sum of weighted cross-entropy over a micro-batch, a float32 scalar; weights as in `position_weights`."""
    z, receives = None, None
    if with_residual:
        z = residual_context(model, batch)
        receives = batch.corrupted if family == "masked" else batch.noisy
    with warnings.catch_warnings():
        # autocast hands the adapter's norm a bfloat16 input beside its float32 weight, as intended
        warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
        hidden = model.hidden(batch.ids, batch.positions, batch.mask, z, receives)
    counted, weight = position_weights(batch, family, clean_weight, token_weight)
    logits = model.lm_head(hidden[counted]).float()
    loss = torch.nn.functional.cross_entropy(logits, batch.target[counted], reduction="none")
    return (loss * weight).sum()


def accumulate(
    accelerator: Accelerator,
    model: Any,
    micro: list[NoisyBatch],
    config: PretrainConfig,
    with_residual: bool,
    token_weight: Tensor | None = None,
) -> float:
    """Adds the gradients of one update, over all ranks, to the parameters; returns the mean loss over all ranks."""
    plain = accelerator.unwrap_model(model)
    family = config.model.state_family
    weights = sum(position_weights(b, family, config.clean_weight, token_weight)[1].sum() for b in micro)
    total: Any = accelerator.reduce(torch.as_tensor(weights, dtype=torch.float32, device=accelerator.device))
    loss_sum = torch.zeros((), device=accelerator.device)
    for batch in micro:
        with accelerator.autocast():
            loss = batch_loss(
                plain,
                batch,
                family,
                with_residual=with_residual,
                clean_weight=config.clean_weight,
                token_weight=token_weight,
            )
        accelerator.backward(loss / total)
        loss_sum += loss.detach()
    if accelerator.num_processes > 1:  # `total` is that of all ranks, so their gradients are summed, not averaged
        for parameter in plain.parameters():
            if parameter.grad is not None:
                parameter.grad = accelerator.reduce(parameter.grad)
    mean: Any = accelerator.reduce(loss_sum) / total
    return float(mean)


def pretrain(
    config: PretrainConfig,
    out: Path,
    *,
    resume: bool = True,
    report: Callable[[dict[str, float]], None] = lambda _: None,
    tracker: str = "none",
) -> Path:
    """Trains and returns the folder of the final model (`out/model`).

    Checkpoints go to `out/checkpoints`; with `resume` the newest one is continued bit-exactly. `report` receives the
    metrics of every update, and so does `tracker` (see `orl_train.tracking`). The first Ctrl-C saves a checkpoint after
    the update it falls into, then raises KeyboardInterrupt. Raises NonFiniteLossError, CheckpointError, ConfigError.
    """
    # the schedules count updates, whatever the number of ranks
    options = tracker_options(tracker, out)
    accelerator = Accelerator(mixed_precision=config.precision, step_scheduler_with_optimizer=False, **options)
    require_at_least("batch_size", config.batch_size, accelerator.num_processes)
    set_seed(config.seed)
    tokenizer, model = start_of(config)
    optimizers = build_optimizers(model, config.optimizer)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda step: schedule_factor(step, config.steps, config.optimizer))
        for o in optimizers
    ]
    prepared = accelerator.prepare(model, *optimizers, *schedules)
    model, optimizers, schedules = prepared[0], prepared[1:3], prepared[3:5]
    keep_weights_in_model_folder(accelerator)
    batches = ArithmeticBatches(config, tokenizer, accelerator.unwrap_model(model).config.vocab_size)
    checkpoints = Checkpoints(out / "checkpoints", config.keep, by_weights(config))
    first = resume_run(accelerator, checkpoints) if resume else 0

    def write_model(folder: Path) -> None:
        save_model(accelerator.unwrap_model(model), tokenizer, folder, torch.float32)

    with deferred_interrupt() as interrupt, tracking(accelerator, to_dict(config)):
        for step in range(first, config.steps):
            started = time.perf_counter()
            micro = batches.micro_batches(step, accelerator.process_index, accelerator.num_processes)
            share = torch.rand(1, generator=sample_generator(config.seed, step, "self-conditioning")).item()
            with_residual = share < config.self_conditioning
            mean = accumulate(accelerator, model, micro, config, with_residual, batches.token_weight)
            norm = _clip(accelerator, model, config.optimizer.clip_norm)
            if not (math.isfinite(mean) and math.isfinite(norm)):
                kept = checkpoint.latest(checkpoints.folder)
                raise NonFiniteLossError(
                    f"the loss is {mean} and its gradient norm {norm} at update {step + 1}; "
                    f"the last good checkpoint is {kept or 'none'}. Start again with a lower learning rate"
                )
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            done = step + 1
            metrics = {
                "step": done,
                "loss": mean,
                "gradient_norm": norm,
                "lr": schedules[0].get_last_lr()[0],
                "residual": float(with_residual),
                "seconds": time.perf_counter() - started,
            }
            accelerator.log(metrics, step=done)
            if accelerator.is_main_process:
                report(metrics)
            stop = on_any_rank(accelerator, interrupt.requested)
            if done < config.steps and (stop or done % config.save_every == 0):
                save_run(accelerator, write_model, checkpoints, done)
            if stop and done < config.steps:
                raise KeyboardInterrupt
        final = out / "model"
        if accelerator.is_main_process:
            plain = accelerator.unwrap_model(model)
            checkpoint.write_folder(final, lambda folder: save_model(plain, tokenizer, folder, torch.bfloat16))
    accelerator.wait_for_everyone()
    return final


def _clip(accelerator: Accelerator, model: Any, limit: float) -> float:
    """Norm of the gradient before it is clipped to `limit`."""
    norm: Any = accelerator.clip_grad_norm_(model.parameters(), limit)
    return float(norm)
