"""The denoising step over static buffers: read them, run the model once, run the decoder, write them back.

A step never asks the host anything and has no shape that depends on data, so that every driver (a Python loop, a
captured graph) runs this same program. Between two steps, a driver on the host may leave out the rows that are done.
Shape legend: B rows, L rows that the model runs on, C canvas, d width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from dlmrt.cache import KVCache, Span
from dlmrt.loop.draws import BlockDraws, Draw
from dlmrt.models.base import BlockModel, BlockSpec
from dlmrt.truncation import Truncation
from dlmrt.vocab import VocabularyPass, VocabularyStats
from orl_core.decoders import CanvasState, Decoder
from orl_core.entropy import TokenStats
from orl_core.residual import residual_receivers


@dataclass(frozen=True, slots=True)
class _Running:
    """The rows (int64 [L]) that the model still runs on, with their own span and a copy of their cache rows."""

    rows: Tensor
    span: Span
    cache: KVCache


class Denoising:
    """A block being denoised in every row of a batch.

    state        CanvasState; its tensors are written in place
    length       positions of the canvas: C is canvas_length * (1 + edit_blocks)
    z            [B, C, d]    residual context that the next step consumes; zeros at the first step of a block
    entropy      float32 [B, C], top_prob float32 [B, C]: statistics of the last step
    missed       float32 []   most probability mass that a top-k z has left out so far
    signal       int64 [2]    rows that are not done; positions whose logits were not finite
    """

    def __init__(
        self,
        model: BlockModel,
        decoder: Decoder,
        rows: int,
        *,
        residual: bool = True,
        z_top_k: int | None = None,
        truncation: Truncation | None = None,
        edit_blocks: int = 0,
    ) -> None:
        spec, device = model.spec, model.device
        self.model, self.decoder = model, decoder
        self.residual = residual and spec.has_residual
        self.vocabulary = VocabularyPass(
            head=model.head,
            embedding=model.embedding,
            embedding_scale=model.embedding_scale,
            softcap=model.softcap,
            suppressed=tuple(sorted(suppressed_ids(spec) - set(decoder.control_ids))),
            control=decoder.control_ids,
            truncation=truncation,
            z_top_k=z_top_k,
        )
        self.length = spec.canvas_length * (1 + edit_blocks)
        shape = (rows, self.length)

        def buffer(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.state = CanvasState(
            canvas=buffer(*shape),
            editable=buffer(*shape, dtype=torch.bool),
            unresolved=buffer(*shape, dtype=torch.bool),
            answer=buffer(*shape),
            answer_prob=buffer(*shape, dtype=torch.float32),
            stable=buffer(rows),
            post_steps=buffer(rows),
            step=buffer(rows),
            done=buffer(rows, dtype=torch.bool),
        )
        self.z = buffer(*shape, spec.hidden_size, dtype=model.dtype)
        self.entropy = buffer(*shape, dtype=torch.float32)
        self.top_prob = buffer(*shape, dtype=torch.float32)
        self.missed = buffer(dtype=torch.float32)
        self.seed, self.block = buffer(rows), buffer(rows)
        self.signal = buffer(2)
        self.draws = BlockDraws(rows, self.length, decoder.max_steps, spec.vocab_size, device)
        self.span: Span | None = None
        self.cache: KVCache | None = None
        self._running: _Running | None = None

    @torch.inference_mode()
    def begin(
        self,
        span: Span,
        cache: KVCache,
        fixed_BC: Tensor,
        editable_BC: Tensor,
        *,
        seeds: Sequence[int],
        blocks: Sequence[int],
        drafted: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Resets the buffers for the block that `span` describes.

        fixed_BC: int64 tokens of the positions that are not editable. blocks: index of each row's block in its answer.
        drafted: (bool, float32) [B, C] each: editable positions that begin with their token of `fixed_BC` instead of
        noise, and the probabilities of these tokens when they were written; None: no such position.
        """
        self.span, self.cache = span, cache
        self._running = None
        self.seed.copy_(torch.tensor(seeds))
        self.block.copy_(torch.tensor(blocks))
        if self.decoder.family == "uniform":
            self.draws.begin(self.seed, self.block)
        else:
            self.draws.rng.seed_B.copy_(self.seed)
        state = self.decoder.init(fixed_BC, editable_BC, self.draws, self.block)
        if drafted is not None:
            drafted_BC, prob_BC = drafted
            canvas_BC = torch.where(drafted_BC, fixed_BC, state.canvas)
            unresolved_BC = state.unresolved & ~drafted_BC
            state = replace(state, canvas=canvas_BC, answer=canvas_BC, answer_prob=prob_BC, unresolved=unresolved_BC)
        self._write(state)
        self.z.zero_()
        self.entropy.zero_()
        self.top_prob.zero_()
        self.signal[0] = (~self.state.done).sum()
        self.signal[1] = 0

    @property
    def computed(self) -> int:
        """How many rows the model runs on: the whole batch, or those not done when `skip_done` was called."""
        return len(self.seed if self._running is None else self._running.rows)

    @torch.inference_mode()
    def skip_done(self) -> None:
        """Until the block ends, the model runs only on the rows that are not done now. Asks the host for them.

        Their cache rows are copied: a step writes nothing there that is read after the block.
        """
        assert self.span is not None
        assert self.cache is not None
        rows = (~self.state.done).nonzero().squeeze(-1)
        span = self.span.select(rows)
        self._running = _Running(rows, span, self.cache.select(rows, span.keys))

    @torch.inference_mode()
    def step(self) -> None:
        """One denoising step of every row; rows that are done stay as they are."""
        state = self.state
        seen = self._predict()
        tokens = TokenStats(**{f.name: self._all_rows(getattr(seen.tokens, f.name)) for f in fields(TokenStats)})
        self._write(self.decoder.step(tokens, state, self.draws, self.block))
        if seen.z is not None:
            self.z.copy_(self._all_rows(seen.z))
        if seen.missed is not None:
            self.missed.copy_(torch.maximum(self.missed, seen.missed.max()))
        self.entropy.copy_(tokens.entropy)
        self.top_prob.copy_(tokens.top_prob)
        self.signal[1] += self.entropy.isnan().sum()  # NaN wherever a logit is NaN or infinite
        self.signal[0] = (~state.done).sum()

    def _predict(self) -> VocabularyStats:
        """What the model says of the rows that it runs on."""
        state, span, cache = self.state, self.span, self.cache
        assert span is not None
        assert cache is not None
        if self._running is not None:
            span, cache = self._running.span, self._running.cache
        canvas, unresolved = self._computed(state.canvas), self._computed(state.unresolved)
        step = self._computed(state.step)
        z, receives = None, None
        if self.residual:
            z, receives = self._computed(self.z), residual_receivers(self.decoder.family, unresolved, step > 0)
        hidden_LCd = self.model.denoise(canvas, z, receives, span, cache)
        temperature_L = self._computed(self.decoder.temperature(state))
        draw = None
        if not self.decoder.greedy:
            draw = Draw(self._computed(self.seed), self._computed(self.block), step)
        return self.vocabulary(hidden_LCd, temperature_L, draw, with_z=self.residual, control_BC=~unresolved)

    def _computed(self, tensor: Tensor) -> Tensor:
        """[L, ..] of [B, ..]."""
        return tensor if self._running is None else tensor[self._running.rows]

    def _all_rows(self, part: Tensor) -> Tensor:
        """[B, ..] of [L, ..], zeros in the other rows, of which nothing is read."""
        if self._running is None:
            return part
        whole = part.new_zeros(len(self.seed), *part.shape[1:])
        whole[self._running.rows] = part
        return whole

    @torch.inference_mode()
    def result(self) -> Tensor:
        """The block's tokens, int64 [B, C]."""
        return self.decoder.result(self.state)

    def _write(self, new: CanvasState) -> None:
        for field in fields(CanvasState):
            buffer, value = getattr(self.state, field.name), getattr(new, field.name)
            if value is not buffer:
                buffer.copy_(value)


def suppressed_ids(spec: BlockSpec) -> set[int]:
    """Tokens that no position of an answer may hold: the mask and the control tokens."""
    return {token for token in (spec.mask_token_id, spec.delete_token_id, spec.insert_token_id) if token is not None}
