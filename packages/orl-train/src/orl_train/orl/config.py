"""Settings of an on-policy residual learning run."""

from dataclasses import dataclass, field
from typing import Any, Literal

from orl_core.decoders import Decoder, EntropyBound, Threshold
from orl_core.errors import ConfigError, require_at_least, require_range
from orl_core.losses import OrlLossConfig
from orl_train.config import Precision
from orl_train.lora import LoraSettings
from orl_train.optim import OptimizerConfig
from orl_train.replay import ReplaySettings

Method = Literal["orl", "rsft", "pretrain"]


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """How prompts are answered.

    prompts: prompts an update, over all ranks; rollouts: answers a prompt; groups: decoders an update, each with a
    threshold of its own drawn uniformly from [low, high]: the entropy bound in nats (uniform family, drawn on a
    logarithmic scale) or the confidence threshold (masked family).
    temperature: at which candidates are sampled; 0 is greedy. The uniform family always decodes at temperature 1, so
    there it is 0 or 1. In the masked family one below 1 also sharpens the probabilities that the threshold is compared
    with, so that more is committed, and more of it wrong.
    confidence_threshold: mean entropy (nats) below which a block of the uniform family may stop. stability_threshold:
    steps over which its most probable tokens must not have changed; 0 stops at the first confident step.
    engine: "auto", "dlmrt" or "reference".
    """

    prompts: int = 24
    rollouts: int = 1
    groups: int = 2
    low: float = 0.95
    high: float = 0.9995
    temperature: float = 0.0
    max_new_tokens: int = 128
    max_steps: int = 48
    confidence_threshold: float = 0.005
    stability_threshold: int = 1
    engine: str = "auto"

    def __post_init__(self) -> None:
        for name in ("prompts", "rollouts", "groups", "max_new_tokens", "max_steps"):
            require_at_least(name, getattr(self, name), 1)
        if not 0 < self.low <= self.high:
            raise ConfigError(f"low is {self.low} and high {self.high}; they must satisfy 0 < low <= high")
        require_at_least("temperature", self.temperature, 0.0)
        require_at_least("stability_threshold", self.stability_threshold, 0)
        if not self.confidence_threshold > 0:
            raise ConfigError(f"confidence_threshold is {self.confidence_threshold} nats; it must be greater than 0")

    def decoder(self, config: Any, draw: float) -> Decoder:
        """The decoder of a model with this configuration for a uniform draw in [0, 1]."""
        if config.state_family == "uniform":
            bound = self.low * (self.high / self.low) ** draw
            return EntropyBound(
                config.vocab_size,
                bound,
                max_steps=self.max_steps,
                confidence_threshold=self.confidence_threshold,
                stability_threshold=self.stability_threshold,
                greedy=self.temperature == 0,
            )
        threshold = self.low + (self.high - self.low) * draw
        return Threshold(config.mask_token_id, config.canvas_length, threshold, sampling_temperature=self.temperature)


@dataclass(frozen=True, slots=True)
class OrlConfig:
    """An ORL run from the model `start`: a folder, or `embedded:base` and the like.

    reference: folder of the frozen model of the KL; the start model where it is not given.
    method: "orl", or one of the controls with the same schedule and budget: "rsft" (fresh verified answers, random
    noise), "pretrain" (the task's own solutions, random noise).
    residual: False trains and rolls out without the residual pathway. off_policy: rollouts come from the start model.
    evaluate_every: updates between evaluations on `evaluate_problems` dev problems (0: never).
    max_barren: updates in a row without any verified answer after which the run stops.
    precision: "bf16" replays under autocast, with logits, losses and weights (and rollouts) in float32; None is what
    `accelerate launch` says, float32 without it.
    lora: trains low-rank updates of the body and the residual adapter instead of all weights; needs orl-train[lora].
    """

    start: str
    reference: str | None = None
    updates: int = 120
    seed: int = 0
    method: Method = "orl"
    residual: bool = True
    off_policy: bool = False
    save_every: int = 20
    keep: int = 2
    evaluate_every: int = 20
    evaluate_problems: int = 64
    max_barren: int = 8
    precision: Precision | None = None
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    replay: ReplaySettings = field(default_factory=ReplaySettings)
    loss: OrlLossConfig = field(default_factory=OrlLossConfig)
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(muon_lr=0.004, adam_lr=5e-4, residual_factor=0.5, warmup=10)
    )
    lora: LoraSettings | None = None

    def __post_init__(self) -> None:
        for name in ("updates", "save_every", "keep", "max_barren"):
            require_at_least(name, getattr(self, name), 1)
        require_at_least("evaluate_every", self.evaluate_every, 0)
        require_range("evaluate_problems", self.evaluate_problems, 1, 100_000)
