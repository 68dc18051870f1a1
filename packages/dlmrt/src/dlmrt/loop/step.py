"""The denoising step over static buffers: read them, run the model once, run the decoder, write them back.

A step never asks the host anything and has no shape that depends on data, so that every driver (a Python loop, a
captured graph) runs this same program. Shape legend: B rows, C canvas, d width.
"""

from collections.abc import Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from dlmrt.cache import KVCache, Span
from dlmrt.loop.draws import BlockDraws, Draw
from dlmrt.models.base import BlockModel, BlockSpec
from dlmrt.truncation import Truncation
from dlmrt.vocab import VocabularyPass
from orl_core.decoders import CanvasState, Decoder
from orl_core.residual import residual_receivers


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

    @torch.inference_mode()
    def step(self) -> None:
        """One denoising step of every row; rows that are done stay as they are."""
        state, span, cache = self.state, self.span, self.cache
        assert span is not None
        assert cache is not None
        if self.residual:
            receives_BC = residual_receivers(self.decoder.family, state.unresolved, state.step > 0)
            hidden_BCd = self.model.denoise(state.canvas, self.z, receives_BC, span, cache)
        else:
            hidden_BCd = self.model.denoise(state.canvas, None, None, span, cache)
        draw = None if self.decoder.greedy else Draw(self.seed, self.block, state.step)
        seen = self.vocabulary(
            hidden_BCd, self.decoder.temperature(state), draw, with_z=self.residual, control_BC=~state.unresolved
        )
        self._write(self.decoder.step(seen.tokens, state, self.draws, self.block))
        if seen.z is not None:
            self.z.copy_(seen.z)
        if seen.missed is not None:
            self.missed.copy_(torch.maximum(self.missed, seen.missed.max()))
        self.entropy.copy_(seen.tokens.entropy)
        self.top_prob.copy_(seen.tokens.top_prob)
        self.signal[1] += self.entropy.isnan().sum()  # NaN wherever a logit is NaN or infinite
        self.signal[0] = (~state.done).sum()

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
