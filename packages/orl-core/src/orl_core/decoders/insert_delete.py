"""Draft-and-edit decoding that may also insert and delete positions (LLaDA2.2)."""

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
class InsertDelete:
    """DraftEdit with two control tokens, predicted where a token stands and never written to the canvas.

    Published rule (LLaDA2.2): DELETE drops the position and the block is filled up with a mask at its end; INSERT puts
    a mask before the token. What the rule leaves open is chosen so: a control token counts where its probability
    exceeds `edit_threshold`; it acts only in a step that began without masks, at most `max_post_steps` times a block;
    all of a step act at once, after its edits, from left to right; what an insertion pushes past the block's end is
    dropped. At a masked position a control token fills nothing: the caller suppresses it there (`control_ids`), or
    masks may be left when the steps run out.

    delete_id, insert_id: the control tokens, which the checkpoint must declare. The rest as in DraftEdit.
    """

    mask_id: int
    canvas_length: int
    delete_id: int
    insert_id: int
    threshold: float = 0.95
    edit_threshold: float = 0.9
    max_post_steps: int = 16
    min_transfer: int = 1
    sampling_temperature: float = 0.0

    def __post_init__(self) -> None:
        if len({self.mask_id, self.delete_id, self.insert_id}) < 3:
            raise ConfigError(
                f"mask_id is {self.mask_id}, delete_id {self.delete_id} and insert_id {self.insert_id}; "
                "they must be three different tokens"
            )
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
        # A block is drafted, and drafted again after each step that opened masks: a position a step at the least.
        return self.canvas_length + self.max_post_steps * (1 + self.canvas_length)

    @property
    def control_ids(self) -> tuple[int, ...]:
        return (self.delete_id, self.insert_id)

    def init(self, fixed_BC: Tensor, editable_BC: Tensor, draws: DrawSource, block_B: Tensor) -> CanvasState:
        return masked_canvas(fixed_BC, editable_BC, self.mask_id, self.canvas_length)

    def temperature(self, state: CanvasState) -> Tensor:
        return torch.full_like(state.step, self.sampling_temperature or 1.0, dtype=torch.float32)

    def step(self, stats: TokenStats, state: CanvasState, draws: DrawSource, block_B: Tensor) -> CanvasState:
        is_delete_BC, is_insert_BC = stats.candidate == self.delete_id, stats.candidate == self.insert_id
        is_control_BC = is_delete_BC | is_insert_BC
        began_filled_B = ~state.unresolved.any(-1)

        fillable_BC = state.unresolved & ~is_control_BC
        quota_B = torch.full_like(state.step, self.min_transfer)
        fill_BC = positions_to_commit(stats, fillable_BC, self.threshold, quota_B)
        confident_BC = stats.candidate_prob > self.edit_threshold
        resolved_BC = state.editable & ~state.unresolved & confident_BC
        write_BC = fill_BC | (resolved_BC & ~is_control_BC & (stats.candidate != state.canvas))
        canvas_BC = torch.where(write_BC, stats.candidate, state.canvas)
        prob_BC = torch.where(write_BC, stats.candidate_prob, state.answer_prob)

        may_shift_B = began_filled_B & (state.post_steps < self.max_post_steps)
        shifts_BC = resolved_BC & may_shift_B[:, None]
        place_BC = shifted_places(state.editable, shifts_BC & is_delete_BC, shifts_BC & is_insert_BC)
        mask_BC = torch.full_like(canvas_BC, self.mask_id)
        canvas_BC = torch.where(state.editable, _moved(canvas_BC, place_BC, mask_BC), canvas_BC)
        prob_BC = torch.where(state.editable, _moved(prob_BC, place_BC, torch.ones_like(prob_BC)), prob_BC)
        open_BC = _moved(state.unresolved & ~fill_BC, place_BC, torch.ones_like(fill_BC))
        unresolved_BC = state.editable & open_BC

        post_steps_B = state.post_steps + began_filled_B.to(state.post_steps.dtype)
        changed_B = write_BC.any(-1) | (shifts_BC & is_control_BC).any(-1)
        settled_B = began_filled_B & ~changed_B
        out_of_budget_B = ~unresolved_BC.any(-1) & (post_steps_B >= self.max_post_steps)
        step_B = state.step + 1
        return CanvasState(
            canvas=canvas_BC,
            editable=state.editable,
            unresolved=unresolved_BC,
            answer=canvas_BC,
            answer_prob=prob_BC,
            stable=state.stable,
            post_steps=post_steps_B,
            step=step_B,
            done=state.done | settled_B | out_of_budget_B | (step_B >= self.max_steps),
        ).frozen_where_done(state)

    def result(self, state: CanvasState) -> Tensor:
        return state.canvas


def shifted_places(editable_BC: Tensor, delete_BC: Tensor, insert_BC: Tensor) -> Tensor:
    """Where each editable token goes, int64 [B, C]; C where it goes nowhere (deleted, pushed past the end, not
    editable). `editable_BC` is one run of positions in each row."""
    kept_BC = editable_BC & ~delete_BC
    width = editable_BC.shape[-1]
    first_B1 = editable_BC.int().argmax(-1, keepdim=True)
    place_BC = first_B1 + (kept_BC.int() + insert_BC.int()).cumsum(-1) - 1
    return torch.where(kept_BC & (place_BC < first_B1 + editable_BC.sum(-1, keepdim=True)), place_BC, width)


def _moved(values_BC: Tensor, place_BC: Tensor, empty_BC: Tensor) -> Tensor:
    """`values_BC` at their new places, `empty_BC` where none goes."""
    spare_B1 = empty_BC[:, :1]
    return torch.cat([empty_BC, spare_B1], -1).scatter(-1, place_BC, values_BC)[:, :-1]
