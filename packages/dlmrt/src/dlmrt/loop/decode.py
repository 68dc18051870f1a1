"""Decoding a batch of prompts block by block: prefill, denoise, finish, commit.

Rows may have prompts of different lengths and end at different blocks; each decodes exactly as it would alone.
Shape legend: B live rows, C canvas.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Self

import torch

from dlmrt.cache import KVCache, block_causal_span, canvas_span, causal_span
from dlmrt.loop.capture import Capture
from dlmrt.loop.host import HostDriver
from dlmrt.loop.step import Denoising
from dlmrt.models.base import BlockModel, BlockSpec
from dlmrt.truncation import Truncation
from orl_core.capture import CaptureMode
from orl_core.decoders import Decoder
from orl_core.trajectory import BlockTrace


@dataclass(slots=True)
class Row:
    """One prompt and its answer so far.

    start   position of the current block's first token; the context is [0, start)
    tail    prompt tokens inside the first block (aligned layout)
    tokens  answer tokens that can no longer change, up to and including the end token
    probs   their probabilities at the steps that last wrote them, if they are kept
    drafted, drafted_probs  the same of finished blocks that may still be edited
    steps   denoising steps of each finished block
    last_block  tokens of the block that is to be committed; empty if none is yet
    traces  gives the trace of each finished block, waiting for its copy
    """

    prompt: list[int]
    seed: int
    start: int
    tail: list[int]
    tokens: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    finish_reason: Literal["stop", "length", "repetition"] | None = None
    last_block: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    drafted_probs: list[float] = field(default_factory=list)
    traces: list[Callable[[], BlockTrace]] = field(default_factory=list)


def first_start(spec: BlockSpec, prompt_length: int) -> int:
    """Where the first block of an answer begins."""
    if spec.layout == "prompt_end":
        return prompt_length
    return prompt_length // spec.canvas_length * spec.canvas_length


def cache_capacity(spec: BlockSpec, prompt_length: int, max_new_tokens: int, edit_blocks: int = 0) -> int:
    """Cache positions of a request in the worst case: whole canvases up to its last token."""
    start = first_start(spec, prompt_length)
    blocks = -(-(prompt_length + max_new_tokens - start) // spec.canvas_length)
    return start + max(blocks, 1 + edit_blocks) * spec.canvas_length


def repeats(tokens: Sequence[int], length: int, longest: int) -> bool:
    """Whether the last `length` tokens are one sequence of at most `longest` tokens, over and over."""
    last = tokens[-length:]
    return len(last) == length and any(last[period:] == last[:-period] for period in range(1, longest + 1))


class Decoding:
    """The rows of one request. Call `prefill` once, then for each block: iterate `denoise`, `finish_block`, `commit`,
    until `live` is empty.

    stop_ids: tokens after which an answer ends. cache: at least `cache_capacity` positions for every row.
    capture: keeps every state, copied "async" by a worker or "sync" between the steps; None keeps none. With it, the
    decoding is a context manager; it must be left before the traces are read.
    edit_blocks: finished blocks of the answer that stay in the canvas, bidirectional with the block being drafted,
    where a decoder that edits may revise them. A block is committed, and its tokens are final, when it leaves the
    canvas.
    repetition_stop: ends an answer whose last so many canvases repeat a sequence of at most one. logprobs: keeps the
    probabilities of the answer's tokens.
    """

    def __init__(
        self,
        model: BlockModel,
        decoder: Decoder,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        cache: KVCache,
        driver: HostDriver,
        *,
        max_new_tokens: int,
        stop_ids: frozenset[int] = frozenset(),
        residual: bool = True,
        z_top_k: int | None = None,
        capture: CaptureMode | None = None,
        truncation: Truncation | None = None,
        edit_blocks: int = 0,
        repetition_stop: int | None = None,
        logprobs: bool = False,
    ) -> None:
        self.model, self.spec, self.decoder, self.cache, self.driver = model, model.spec, decoder, cache, driver
        self.max_new_tokens, self.stop_ids = max_new_tokens, stop_ids
        self.edit_blocks, self.repetition_stop, self.logprobs = edit_blocks, repetition_stop, logprobs
        self._options: dict[str, Any] = {"residual": residual, "z_top_k": z_top_k}
        self._options |= {"truncation": truncation, "edit_blocks": edit_blocks}
        starts = [first_start(self.spec, len(prompt)) for prompt in prompts]
        self.rows = [
            Row(list(prompt), seed, start, list(prompt[start:]))
            for prompt, seed, start in zip(prompts, seeds, starts, strict=True)
        ]
        self.live = list(self.rows)
        self.denoising = Denoising(self.model, self.decoder, len(self.live), **self._options)
        self._capture = Capture(self.denoising, capture) if capture is not None else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._capture is not None:
            self._capture.__exit__(*error)

    def _new_buffers(self) -> None:
        missed = self.denoising.missed
        self.denoising = Denoising(self.model, self.decoder, len(self.live), **self._options)
        self.denoising.missed.copy_(missed)
        if self._capture is not None:
            self._capture.denoising = self.denoising

    def _ids(self, rows: Sequence[Sequence[int]], length: int) -> torch.Tensor:
        """int64 [B, length], padded on the right; what lies there is never seen and is overwritten later."""
        return torch.tensor([[*row, *[0] * (length - len(row))] for row in rows], device=self.model.device)

    def prefill(self) -> None:
        """Writes the prompts' keys and values to the cache."""
        length = max(row.start for row in self.live)
        if length:
            self._encode([0] * len(self.live), [row.prompt[: row.start] for row in self.live], length)

    @torch.inference_mode()
    def _encode(self, starts: list[int], tokens: list[list[int]], length: int) -> None:
        if self.spec.commit == "causal":
            span = causal_span(starts, length, self.model.device)
        else:
            span = block_causal_span(starts, length, self.spec.canvas_length, self.model.device)
        self.model.encode(self._ids(tokens, length), span, self.cache)

    def width(self, row: Row) -> int:
        """Positions of the row's canvas that exist: whole blocks up to the one being drafted, within the context."""
        canvas = self.spec.canvas_length
        blocks = (len(row.tail) + len(row.drafted)) // canvas + 1
        return min(blocks * canvas, self.spec.max_context - row.start)

    def denoise(self) -> Iterator[int]:
        """Denoises the next block of every live row, yielding the number of steps taken after each one."""
        canvas, device = self.denoising.length, self.model.device
        starts = [row.start for row in self.live]
        # Where the context ends inside the block, the canvas is as wide as ever but its last positions do not exist.
        widths = [self.width(row) for row in self.live]
        fixed_BC = self._ids([row.tail + row.drafted for row in self.live], canvas)
        first = torch.tensor([len(row.tail) for row in self.live], device=device)[:, None]
        past = torch.tensor(widths, device=device)[:, None]
        position = torch.arange(canvas, device=device)
        self.denoising.begin(
            canvas_span(starts, widths, canvas, device),
            self.cache,
            fixed_BC,
            (position >= first) & (position < past),
            seeds=[row.seed for row in self.live],
            blocks=[len(row.steps) for row in self.live],
            drafted=self._drafted(position >= first, position) if self.edit_blocks else None,
        )
        yield from self.driver.run(self.denoising, self._capture)

    def _drafted(self, after_tail_BC: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        known = [len(row.tail) + len(row.drafted) for row in self.live]
        drafted_BC = after_tail_BC & (position < torch.tensor(known, device=position.device)[:, None])
        prob_BC = torch.ones(drafted_BC.shape)
        for line, row in zip(prob_BC, self.live, strict=True):
            line[len(row.tail) : len(row.tail) + len(row.drafted_probs)] = torch.tensor(row.drafted_probs)
        return drafted_BC, prob_BC.to(position.device)

    def finish_block(self) -> None:
        """Takes the block's tokens into the answers, and ends those that hold an end token or are long enough."""
        result_BC = self.denoising.result().clone()  # it may be the canvas itself, which the next block overwrites
        steps = self.denoising.state.step.tolist()
        tokens = result_BC.tolist()
        probs = self.denoising.state.answer_prob.tolist() if self.logprobs else [[]] * len(tokens)
        for index, row in enumerate(self.live):
            width = self.width(row)
            place = (len(row.steps), row.start)
            if self._capture is not None:
                row.traces.append(self._capture.trace(index, steps[index], width, result_BC[index], *place))
            else:
                answer = result_BC[index, :width].cpu()
                row.traces.append(partial(BlockTrace.uncaptured, steps[index], answer, *place))
            row.steps.append(steps[index])
            new, new_probs = tokens[index][len(row.tail) : width], probs[index][len(row.tail) : width]
            final, row.finish_reason = self._ending(row, new)
            row.last_block = []
            if row.finish_reason is None and width == self.denoising.length:
                final, row.last_block = (
                    self.spec.canvas_length - len(row.tail),
                    tokens[index][: self.spec.canvas_length],
                )
            row.tokens += new[:final]
            row.probs += new_probs[:final]
            row.drafted, row.drafted_probs = new[final:], new_probs[final:]

    def _ending(self, row: Row, new: list[int]) -> tuple[int, Literal["stop", "length", "repetition"] | None]:
        """How many of the canvas' tokens belong to an answer that ends in it, and why it ends; else (0, None)."""
        for count, token in enumerate(new, 1):
            if token in self.stop_ids:
                return count, "stop"
            if len(row.tokens) + count == self.max_new_tokens:
                return count, "length"
        canvas = self.spec.canvas_length
        if self.repetition_stop and repeats(row.tokens + new, self.repetition_stop * canvas, canvas):
            return len(new), "repetition"
        return 0, None

    def commit(self) -> None:
        """Drops the answers that have ended and writes the block that leaves the others' canvas to the cache."""
        kept = [index for index, row in enumerate(self.live) if row.finish_reason is None]
        if len(kept) < len(self.live):
            self.live = [self.live[index] for index in kept]
            if not kept:
                return
            self.cache.keep_rows(torch.tensor(kept, device=self.model.device))
            self._new_buffers()
        if not self.live[0].last_block:  # all rows are at the same block of their answers
            return
        canvas = self.spec.canvas_length
        self._encode([row.start for row in self.live], [row.last_block for row in self.live], canvas)
        for row in self.live:
            row.start, row.tail = row.start + canvas, []
