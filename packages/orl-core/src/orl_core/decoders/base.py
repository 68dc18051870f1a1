"""What every decoder shares: the state of a canvas between two denoising steps, and the protocol.

A decoder is an immutable object of settings whose methods are pure functions on tensors. They never ask the host for
a value, and no shape depends on data, so that a step can be captured in a CUDA graph. Shape legend: B batch, C canvas.
"""

from dataclasses import dataclass, fields, replace
from typing import Protocol

import torch
from torch import Tensor

from orl_core.entropy import TokenStats
from orl_core.noise import Family
from orl_core.rng import DrawSource


@dataclass(frozen=True, slots=True)
class CanvasState:
    """The canvas between two steps.

    canvas     int64 [B, C]  tokens that the denoiser reads next
    editable   bool  [B, C]  False where a prompt token lies inside the block: never changed, never unresolved
    unresolved bool  [B, C]  masked positions (masked family), positions not accepted (uniform family)
    answer     int64 [B, C]  the block's result if decoding stopped now
    answer_prob float32 [B, C] probability of `answer` at the step that last wrote it; 1 where nothing was written
    stable     int64 [B]     consecutive steps over which `answer` did not change (entropy bound)
    post_steps int64 [B]     steps begun without a masked position (draft-and-edit)
    step       int64 [B]     steps taken in this block
    done       bool  [B]     nothing of a finished row changes any more
    """

    canvas: Tensor
    editable: Tensor
    unresolved: Tensor
    answer: Tensor
    answer_prob: Tensor
    stable: Tensor
    post_steps: Tensor
    step: Tensor
    done: Tensor

    def frozen_where_done(self, previous: "CanvasState") -> "CanvasState":
        """This state, with every row that was done in `previous` left exactly as it was there."""
        kept = {}
        for field in fields(self):
            new, old = getattr(self, field.name), getattr(previous, field.name)
            done = previous.done.view(-1, *([1] * (new.dim() - 1)))
            kept[field.name] = torch.where(done, old, new)
        return replace(self, **kept)


class Decoder(Protocol):
    """How canvases are started, updated and read. Decoders are used by the engine, the trainer's rollout and the tests.

    family       which noise the unresolved positions hold
    greedy       True: the candidate of a position is its most probable token; False: it is sampled
    max_steps    upper bound of denoising steps in one block; a decoder always stops by then
    control_ids  tokens that are instructions to the decoder, predicted at resolved positions only and never output
    """

    @property
    def family(self) -> Family: ...
    @property
    def greedy(self) -> bool: ...
    @property
    def max_steps(self) -> int: ...
    @property
    def control_ids(self) -> tuple[int, ...]: ...

    def init(self, fixed_BC: Tensor, editable_BC: Tensor, draws: DrawSource, block_B: Tensor) -> CanvasState:
        """A fresh canvas: noise where `editable_BC`, the tokens of `fixed_BC` elsewhere."""
        ...

    def temperature(self, state: CanvasState) -> Tensor:
        """Temperature by which the logits of the coming step are divided, float32 [B], always > 0."""
        ...

    def step(self, stats: TokenStats, state: CanvasState, draws: DrawSource, block_B: Tensor) -> CanvasState:
        """The state after a forward on `state.canvas` gave `stats`."""
        ...

    def result(self, state: CanvasState) -> Tensor:
        """The block's tokens, int64 [B, C]."""
        ...


def start_state(canvas_BC: Tensor, editable_BC: Tensor) -> CanvasState:
    """Counters at zero, every editable position unresolved; a row without an editable position is done."""
    zeros_B = torch.zeros(canvas_BC.shape[0], dtype=torch.int64, device=canvas_BC.device)
    return CanvasState(
        canvas=canvas_BC,
        editable=editable_BC,
        unresolved=editable_BC,
        answer=canvas_BC,
        answer_prob=torch.ones_like(canvas_BC, dtype=torch.float32),
        stable=zeros_B,
        post_steps=zeros_B,
        step=zeros_B,
        done=~editable_BC.any(-1),
    )


def rank_descending(score_BC: Tensor) -> Tensor:
    """Rank of each entry within its row, 0 for the largest; equal scores rank by position. int64 [B, C]."""
    order = score_BC.sort(dim=-1, descending=True, stable=True).indices
    ranks = torch.arange(score_BC.shape[-1], device=score_BC.device).expand_as(order)
    return torch.empty_like(order).scatter(-1, order, ranks)
