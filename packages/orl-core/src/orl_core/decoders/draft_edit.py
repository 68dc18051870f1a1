"""Draft-and-edit decoding of a masked canvas (LLaDA2.1 technical report)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from orl_core.decoders.base import CanvasState
from orl_core.decoders.masked import masked_canvas, positions_to_commit
from orl_core.entropy import TokenStats
from orl_core.errors import require_at_least, require_range
from orl_core.noise import Family
from orl_core.rng import DrawSource


@dataclass(frozen=True, slots=True)
class DraftEdit:
    """Masked positions are filled (probability > `threshold`, at least `min_transfer` a step) and, in the same forward,
    filled positions are rewritten where the candidate differs and its probability > `edit_threshold`.

    Once no mask remains, at most `max_post_steps` further steps only edit. Decoding stops after a step that began
    without masks and edited nothing. Prompt tokens are never edited. Published modes (threshold / edit threshold):
    quality 0.7 / 0.5, speed 0.5 / 0.0.

    canvas_length: the most positions a block may have; it bounds the number of steps.
    sampling_temperature: softmax temperature; 0 is greedy.
    """

    mask_id: int
    canvas_length: int
    threshold: float = 0.95
    edit_threshold: float = 0.9
    max_post_steps: int = 16
    min_transfer: int = 1
    sampling_temperature: float = 0.0

    def __post_init__(self) -> None:
        require_range("threshold", self.threshold, 0.0, 1.0)
        require_range("edit_threshold", self.edit_threshold, 0.0, 1.0)
        require_at_least("canvas_length", self.canvas_length, 1)
        require_at_least("max_post_steps", self.max_post_steps, 0)
        require_at_least("min_transfer", self.min_transfer, 1)
        require_at_least("sampling_temperature", self.sampling_temperature, 0.0)

    @property
    def family(self) -> Family:
        return "masked"

    @property
    def greedy(self) -> bool:
        return self.sampling_temperature == 0

    @property
    def max_steps(self) -> int:
        return self.canvas_length + self.max_post_steps

    @property
    def control_ids(self) -> tuple[int, ...]:
        return ()

    def init(self, fixed_BC: Tensor, editable_BC: Tensor, draws: DrawSource, block_B: Tensor) -> CanvasState:
        return masked_canvas(fixed_BC, editable_BC, self.mask_id, self.canvas_length)

    def temperature(self, state: CanvasState) -> Tensor:
        return torch.full_like(state.step, self.sampling_temperature or 1.0, dtype=torch.float32)

    def step(self, stats: TokenStats, state: CanvasState, draws: DrawSource, block_B: Tensor) -> CanvasState:
        quota_B = torch.full_like(state.step, self.min_transfer)
        fill_BC = positions_to_commit(stats, state.unresolved, self.threshold, quota_B)
        confident_BC = stats.candidate_prob > self.edit_threshold
        edit_BC = state.editable & ~state.unresolved & confident_BC & (stats.candidate != state.canvas)
        canvas_BC = torch.where(fill_BC | edit_BC, stats.candidate, state.canvas)
        unresolved_BC = state.unresolved & ~fill_BC

        began_filled_B = ~state.unresolved.any(-1)
        filled_B = ~unresolved_BC.any(-1)
        post_steps_B = state.post_steps + began_filled_B.to(state.post_steps.dtype)
        nothing_changed_B = began_filled_B & ~edit_BC.any(-1)
        out_of_budget_B = filled_B & (post_steps_B >= self.max_post_steps)
        return CanvasState(
            canvas=canvas_BC,
            editable=state.editable,
            unresolved=unresolved_BC,
            answer=canvas_BC,
            answer_prob=torch.where(fill_BC | edit_BC, stats.candidate_prob, state.answer_prob),
            stable=state.stable,
            post_steps=post_steps_B,
            step=state.step + 1,
            done=state.done | nothing_changed_B | out_of_budget_B,
        ).frozen_where_done(state)

    def result(self, state: CanvasState) -> Tensor:
        return state.canvas
