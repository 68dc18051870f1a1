"""Threshold decoding of a masked canvas (Fast-dLLM; LLaDA2.0)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from orl_core.decoders.base import CanvasState
from orl_core.decoders.masked import masked_canvas, positions_to_commit
from orl_core.entropy import TokenStats
from orl_core.errors import ConfigError, require_at_least, require_range
from orl_core.noise import Family
from orl_core.rng import DrawSource


@dataclass(frozen=True, slots=True)
class Threshold:
    """Commit every masked position whose candidate probability exceeds `threshold`, and at least the step's quota.

    steps: None gives a quota of one position a step. A number gives LLaDA2.0's schedule: the canvas is divided evenly
    over `steps` steps (the first ones take the remainder), and a step that has fewer confident positions than its
    share commits its share of the most confident ones.
    canvas_length: the most positions a block may have; it bounds the number of steps.
    sampling_temperature: softmax temperature; 0 is greedy.
    """

    mask_id: int
    canvas_length: int
    threshold: float = 0.95
    steps: int | None = None
    sampling_temperature: float = 0.0

    def __post_init__(self) -> None:
        require_range("threshold", self.threshold, 0.0, 1.0)
        require_at_least("canvas_length", self.canvas_length, 1)
        require_at_least("sampling_temperature", self.sampling_temperature, 0.0)
        if self.steps is not None and not 1 <= self.steps <= self.canvas_length:
            raise ConfigError(f"steps is {self.steps}; it must lie in [1, canvas_length = {self.canvas_length}]")

    @property
    def family(self) -> Family:
        return "masked"

    @property
    def greedy(self) -> bool:
        return self.sampling_temperature == 0

    @property
    def max_steps(self) -> int:
        return self.canvas_length

    @property
    def control_ids(self) -> tuple[int, ...]:
        return ()

    def init(self, fixed_BC: Tensor, editable_BC: Tensor, draws: DrawSource, block_B: Tensor) -> CanvasState:
        return masked_canvas(fixed_BC, editable_BC, self.mask_id, self.canvas_length)

    def temperature(self, state: CanvasState) -> Tensor:
        return torch.full_like(state.step, self.sampling_temperature or 1.0, dtype=torch.float32)

    def _quota(self, state: CanvasState) -> Tensor:
        if self.steps is None:
            return torch.ones_like(state.step)
        share, remainder = divmod(self.canvas_length, self.steps)
        return share + (state.step < remainder).to(state.step.dtype)

    def step(self, stats: TokenStats, state: CanvasState, draws: DrawSource, block_B: Tensor) -> CanvasState:
        commit_BC = positions_to_commit(stats, state.unresolved, self.threshold, self._quota(state))
        canvas_BC = torch.where(commit_BC, stats.candidate, state.canvas)
        unresolved_BC = state.unresolved & ~commit_BC
        step_B = state.step + 1
        return CanvasState(
            canvas=canvas_BC,
            editable=state.editable,
            unresolved=unresolved_BC,
            answer=canvas_BC,
            answer_prob=torch.where(commit_BC, stats.candidate_prob, state.answer_prob),
            stable=state.stable,
            post_steps=state.post_steps,
            step=step_B,
            done=state.done | ~unresolved_BC.any(-1),
        ).frozen_where_done(state)

    def result(self, state: CanvasState) -> Tensor:
        return state.canvas
