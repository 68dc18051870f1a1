"""Entropy-bound decoding of a uniform-state canvas (arXiv 2505.24857; DiffusionGemma, QwenDLM)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from orl_core.decoders.base import CanvasState, start_state
from orl_core.entropy import TokenStats
from orl_core.errors import ConfigError, require_at_least
from orl_core.noise import Family
from orl_core.rng import DrawSource, Stream


@dataclass(frozen=True, slots=True)
class EntropyBound:
    """Accept the k positions of lowest entropy with cumsum(H) - H_k <= bound; renoise the others.

    The step temperature is t_min + (t_max - t_min) * remaining / max_steps, remaining running max_steps..1. Decoding
    stops when the argmax canvas is unchanged over `stability_threshold` steps and the mean entropy (nats) of the canvas
    is below `confidence_threshold`. The result is the argmax canvas of the last step, not the accepted canvas.
    Prompt tokens inside the block count as accepted, with entropy 0.
    """

    vocab_size: int
    entropy_bound: float = 0.1
    max_steps: int = 48
    t_min: float = 1.0
    t_max: float = 1.0
    stability_threshold: int = 1
    confidence_threshold: float = 0.005
    greedy: bool = True

    def __post_init__(self) -> None:
        require_at_least("vocab_size", self.vocab_size, 1)
        require_at_least("max_steps", self.max_steps, 1)
        require_at_least("stability_threshold", self.stability_threshold, 0)
        if not self.entropy_bound >= 0:
            raise ConfigError(f"entropy_bound is {self.entropy_bound} nats; it must be at least 0")
        if not self.confidence_threshold > 0:
            raise ConfigError(f"confidence_threshold is {self.confidence_threshold} nats; it must be greater than 0")
        if not 0 < self.t_min <= self.t_max:
            raise ConfigError(f"t_min is {self.t_min} and t_max {self.t_max}; they must satisfy 0 < t_min <= t_max")

    @property
    def family(self) -> Family:
        return "uniform"

    @property
    def control_ids(self) -> tuple[int, ...]:
        return ()

    def init(self, fixed_BC: Tensor, editable_BC: Tensor, draws: DrawSource, block_B: Tensor) -> CanvasState:
        noise_BC = draws.tokens(Stream.CANVAS, block_B, torch.zeros_like(block_B), fixed_BC.shape[-1], self.vocab_size)
        return start_state(torch.where(editable_BC, noise_BC, fixed_BC), editable_BC)

    def temperature(self, state: CanvasState) -> Tensor:
        remaining_B = (self.max_steps - state.step).float()
        return self.t_min + (self.t_max - self.t_min) * (remaining_B / self.max_steps)

    def accept(self, entropy_BC: Tensor) -> Tensor:
        """bool [B, C]: the positions of lowest entropy whose joint mutual information is bounded."""
        # Stable, so that equal entropies are taken in the order of their positions on every device and batch size.
        ascending_BC, order_BC = entropy_BC.sort(dim=-1, stable=True)
        chosen_BC = ascending_BC.cumsum(-1) - ascending_BC <= self.entropy_bound
        return torch.zeros_like(chosen_BC).scatter(-1, order_BC, chosen_BC)

    def step(self, stats: TokenStats, state: CanvasState, draws: DrawSource, block_B: Tensor) -> CanvasState:
        entropy_BC = torch.where(state.editable, stats.entropy, torch.zeros_like(stats.entropy))
        accepted_BC = self.accept(entropy_BC) & state.editable
        renoise_BC = draws.tokens(Stream.RENOISE, block_B, state.step, state.canvas.shape[-1], self.vocab_size)
        canvas_BC = torch.where(accepted_BC, stats.candidate, renoise_BC)
        answer_BC = torch.where(state.editable, stats.argmax, state.canvas)

        unchanged_B = (answer_BC == state.answer).all(-1) & (state.step > 0)
        stable_B = torch.where(unchanged_B, state.stable + 1, torch.zeros_like(state.stable))
        editable_count_B = state.editable.sum(-1).clamp(min=1)
        confident_B = entropy_BC.sum(-1) / editable_count_B < self.confidence_threshold
        step_B = state.step + 1
        settled_B = (stable_B >= self.stability_threshold) & confident_B
        return CanvasState(
            canvas=torch.where(state.editable, canvas_BC, state.canvas),
            editable=state.editable,
            unresolved=state.editable & ~accepted_BC,
            answer=answer_BC,
            answer_prob=torch.where(state.editable, stats.top_prob, state.answer_prob),
            stable=stable_B,
            post_steps=state.post_steps,
            step=step_B,
            done=state.done | settled_B | (step_B >= self.max_steps),
        ).frozen_where_done(state)

    def result(self, state: CanvasState) -> Tensor:
        return state.answer
