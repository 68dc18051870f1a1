"""The built-in rollout: orl-core's decoders on the training model, recomputing the context at every step.

Simple and slow; it needs nothing but the model. dlmrt's engine gives the same trajectories faster (see engine_rollout).
Shape legend: B live rows, C canvas, T context + canvas, V vocabulary, d width.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from orl_core.capture import CaptureMode, PageShape, StateCapture, StatePages
from orl_core.decoders import CanvasState, Decoder
from orl_core.entropy import TokenStats, sample_gumbel, token_stats
from orl_core.errors import ConfigError
from orl_core.residual import expected_embedding, residual_receivers
from orl_core.rng import CounterRng, Stream
from orl_core.trajectory import BlockTrace, Trajectory
from orl_core.visibility import PADDING_SEGMENT, Visibility


@dataclass(slots=True)
class _Row:
    prompt: Tensor
    seed: int
    answer: list[int] = field(default_factory=list)
    context: list[int] = field(default_factory=list)
    blocks: list[Callable[[], BlockTrace]] = field(default_factory=list)
    finish_reason: str | None = None


class ReferenceRollout:
    """An orl_core.protocols.RolloutEngine over a trainable model of `orl_train.models`.

    stop_ids: tokens after which an answer ends.
    capture: "async" copies captured states in a worker thread, "sync" between the steps; the trajectories are the same.
    capture_limit_mib: most memory that the pages of captured states may take, None for what is available.
    """

    def __init__(
        self,
        model: Any,
        stop_ids: frozenset[int],
        *,
        capture: CaptureMode = "async",
        capture_limit_mib: int | None = None,
    ) -> None:
        self.model, self.stop_ids = model, stop_ids
        self.canvas_length: int = model.config.canvas_length
        self.suppressed: int | None = model.config.mask_token_id
        self.capture_mode: CaptureMode = capture
        self.capture_limit_mib = capture_limit_mib
        self._pages: StatePages | None = None

    @torch.no_grad()
    def rollout(
        self,
        prompts: Sequence[Tensor],
        decoder: Decoder,
        *,
        max_new_tokens: int,
        seeds: Sequence[int],
        residual: bool = True,
        capture: bool = True,
    ) -> list[Trajectory]:
        """One trajectory per prompt (int64 [P] each). Raises ConfigError for a prompt longer than the context or a
        decoder of the other family, CaptureMemoryError if the pages of the states do not fit into memory."""
        check_rollout(self.model, prompts, decoder, max_new_tokens, seeds)
        rows = [_Row(prompt, seed, context=prompt.tolist()) for prompt, seed in zip(prompts, seeds, strict=True)]
        block = 0
        capturing = StateCapture(self._room(len(rows), decoder), self.capture_mode) if capture and rows else None
        with capturing or nullcontext():
            while live := [row for row in rows if row.finish_reason is None]:
                answers = self._denoise_block(live, decoder, block, residual, capturing)
                for row, tokens in zip(live, answers, strict=True):
                    self._take_answer(row, tokens, max_new_tokens)
                block += 1
        return [
            Trajectory(
                row.prompt.cpu(),
                torch.tensor(row.answer),
                [trace() for trace in row.blocks],
                row.finish_reason or "length",
                row.seed,
            )
            for row in rows
        ]

    def _room(self, rows: int, decoder: Decoder) -> StatePages:
        """Pages for the states of a block; those of the call before if they are large enough."""
        embedding = self.model.embedding
        shape = PageShape(
            rows=rows,
            steps=decoder.max_steps,
            canvas=self.canvas_length,
            width=embedding.shape[1],
            dtype=embedding.dtype,
        )
        if self._pages is None or not self._pages.shape.holds(shape):
            self._pages = None  # freed before the larger ones are asked for
            pinned = embedding.device.type == "cuda"
            self._pages = StatePages(shape, limit_mib=self.capture_limit_mib, pinned=pinned)
        return self._pages

    def _take_answer(self, row: _Row, tokens: list[int], max_new_tokens: int) -> None:
        for token in tokens:
            row.answer.append(token)
            row.context.append(token)
            if token in self.stop_ids:
                row.finish_reason = "stop"
                return
            if len(row.answer) == max_new_tokens:
                row.finish_reason = "length"
                return

    def _denoise_block(
        self, rows: list[_Row], decoder: Decoder, block: int, residual: bool, capturing: StateCapture | None
    ) -> list[list[int]]:
        """Denoises the next block of every row and appends its traces; the new tokens of each."""
        embedding, canvas, blocks = self.model.embedding, self.canvas_length, self.model.context_blocks
        device = embedding.device
        starts = [len(row.context) // blocks * blocks if blocks else len(row.context) for row in rows]
        tails = [row.context[start:] for row, start in zip(rows, starts, strict=True)]
        context_BT, visibility = _context([row.context for row in rows], starts, canvas, blocks, device)
        mask = self.model.attention_mask(visibility)
        seeds_B = torch.tensor([row.seed for row in rows], device=device)
        block_B = torch.full_like(seeds_B, block)
        draws = CounterRng(seeds_B)
        fixed_BC = torch.tensor([[*tail, *[0] * (canvas - len(tail))] for tail in tails], device=device)
        first_B = torch.tensor([len(tail) for tail in tails], device=device)
        editable_BC = torch.arange(canvas, device=device) >= first_B[:, None]
        state = decoder.init(fixed_BC, editable_BC, draws, block_B)
        z_BCd = embedding.new_zeros(len(rows), canvas, embedding.shape[1])
        for step in range(decoder.max_steps):
            consumed = (state.canvas, z_BCd, state.unresolved)
            receives_BC = residual_receivers(decoder.family, state.unresolved, state.step > 0) & residual
            logits_BCV = self._logits(context_BT, visibility.position, mask, state, z_BCd, receives_BC)
            logits_BCV = logits_BCV / decoder.temperature(state)[:, None, None]
            stats = self._stats(logits_BCV, decoder, draws, block_B, state)
            state = decoder.step(stats, state, draws, block_B)
            z_BCd = expected_embedding(torch.softmax(logits_BCV, -1), embedding)
            if capturing is not None:
                capturing.record(step, *consumed, stats.entropy, stats.top_prob)
            if bool(state.done.all()):
                break
        tokens_BC = decoder.result(state)
        for index, row in enumerate(rows):
            row.blocks.append(_trace(capturing, index, int(state.step[index]), tokens_BC[index], block, starts[index]))
        return [tokens[len(tail) :] for tokens, tail in zip(tokens_BC.tolist(), tails, strict=True)]

    def _logits(
        self,
        context_BT: Tensor,
        positions: Tensor,
        mask: Tensor,
        state: CanvasState,
        z_BCd: Tensor,
        receives_BC: Tensor,
    ) -> Tensor:
        context = context_BT.shape[1]
        ids = torch.cat([context_BT, state.canvas], 1)
        z = torch.cat([z_BCd.new_zeros(len(ids), context, z_BCd.shape[-1]), z_BCd], 1)
        receives = torch.cat([torch.zeros_like(context_BT, dtype=torch.bool), receives_BC], 1)
        hidden = self.model.hidden(ids, positions, mask, z, receives)
        logits = self.model.logits(hidden[:, context:]).float()
        if self.suppressed is not None:
            logits[..., self.suppressed] = -torch.inf
        return logits

    def _stats(
        self, logits_BCV: Tensor, decoder: Decoder, draws: CounterRng, block_B: Tensor, state: CanvasState
    ) -> TokenStats:
        if decoder.greedy:
            return token_stats(logits_BCV)
        _, length, vocab_size = logits_BCV.shape
        uniform = draws.uniform(Stream.CANDIDATE, block_B, state.step, length, vocab_size)
        return token_stats(logits_BCV, sample_gumbel(logits_BCV, uniform))


def _trace(
    capturing: StateCapture | None, row: int, steps: int, tokens: Tensor, block: int, start: int
) -> Callable[[], BlockTrace]:
    if capturing is not None:
        return capturing.trace(row, steps, len(tokens), tokens, block, start)
    return partial(BlockTrace.uncaptured, steps, tokens.cpu(), block, start)


def _context(
    contexts: list[list[int]], starts: list[int], canvas: int, blocks: int | None, device: torch.device
) -> tuple[Tensor, Visibility]:
    """What precedes the canvases, padded on the right, int64 [B, longest], and the visibility of [context | canvas].

    blocks: length of the blocks in which clean tokens see one another, None for a token-causal context.
    """
    lengths = torch.tensor(starts)
    longest = max(starts)
    ids = torch.zeros(len(starts), longest, dtype=torch.int64)
    for line, context, start in zip(ids, contexts, starts, strict=True):
        line[:start] = torch.tensor(context[:start])
    position = torch.arange(longest + canvas).repeat(len(starts), 1)
    clean_limit = position + 1 if blocks is None else (position // blocks + 1) * blocks
    is_canvas = position >= longest
    real = is_canvas | (position < lengths[:, None])
    canvas_position = position - longest + lengths[:, None]
    visibility = Visibility(
        segment=torch.where(real, 0, PADDING_SEGMENT).to(device),
        position=torch.where(is_canvas, canvas_position, position).to(device),
        state=is_canvas.long().to(device),
        limit=torch.where(is_canvas, lengths[:, None], clean_limit).to(device),
    )
    return ids.to(device), visibility


def check_rollout(
    model: Any, prompts: Sequence[Tensor], decoder: Decoder, max_new_tokens: int, seeds: Sequence[int]
) -> None:
    """Raises ConfigError for a request that cannot be rolled out."""
    if len(prompts) != len(seeds):
        raise ConfigError(f"there are {len(prompts)} prompts but {len(seeds)} seeds; give each prompt one")
    if decoder.family != model.family:
        raise ConfigError(f"the decoder is of the {decoder.family} family but the model of the {model.family} family")
    limit = model.config.max_position_embeddings
    longest = max((len(prompt) for prompt in prompts), default=0)
    if longest + max_new_tokens > limit:
        raise ConfigError(
            f"the longest prompt has {longest} tokens and max_new_tokens is {max_new_tokens}; together they must stay "
            f"within the context of {limit}"
        )
