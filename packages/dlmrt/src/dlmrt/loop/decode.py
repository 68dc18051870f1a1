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
from orl_core.capture import CaptureMode
from orl_core.decoders import Decoder
from orl_core.trajectory import BlockTrace


@dataclass(slots=True)
class Row:
    """One prompt and its answer so far.

    start   position of the current block's first token; the context is [0, start)
    tail    prompt tokens inside the first block (aligned layout)
    tokens  answer tokens, up to and including the end token
    steps   denoising steps of each finished block
    last_block  tokens of the block that finished last, as they will be committed
    traces  gives the trace of each finished block, waiting for its copy
    """

    prompt: list[int]
    seed: int
    start: int
    tail: list[int]
    tokens: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None
    last_block: list[int] = field(default_factory=list)
    traces: list[Callable[[], BlockTrace]] = field(default_factory=list)


def first_start(spec: BlockSpec, prompt_length: int) -> int:
    """Where the first block of an answer begins."""
    if spec.layout == "prompt_end":
        return prompt_length
    return prompt_length // spec.canvas_length * spec.canvas_length


def cache_capacity(spec: BlockSpec, prompt_length: int, max_new_tokens: int) -> int:
    """Cache positions of a request in the worst case: whole canvases up to its last token."""
    start = first_start(spec, prompt_length)
    blocks = -(-(prompt_length + max_new_tokens - start) // spec.canvas_length)
    return start + blocks * spec.canvas_length


class Decoding:
    """The rows of one request. Call `prefill` once, then for each block: iterate `denoise`, `finish_block`, `commit`,
    until `live` is empty.

    stop_ids: tokens after which an answer ends. cache: at least `cache_capacity` positions for every row.
    capture: keeps every state, copied "async" by a worker or "sync" between the steps; None keeps none. With it, the
    decoding is a context manager; it must be left before the traces are read.
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
    ) -> None:
        self.model, self.spec, self.decoder, self.cache, self.driver = model, model.spec, decoder, cache, driver
        self.max_new_tokens, self.stop_ids = max_new_tokens, stop_ids
        self._options = {"residual": residual, "z_top_k": z_top_k}
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
        self.denoising = Denoising(self.model, self.decoder, len(self.live), **self._options)
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

    def denoise(self) -> Iterator[int]:
        """Denoises the next block of every live row, yielding the number of steps taken after each one."""
        canvas = self.spec.canvas_length
        starts = [row.start for row in self.live]
        # Where the context ends inside the block, the canvas is as wide as ever but its last positions do not exist.
        widths = [min(canvas, self.spec.max_context - start) for start in starts]
        fixed_BC = self._ids([row.tail for row in self.live], canvas)
        first = torch.tensor([len(row.tail) for row in self.live], device=self.model.device)[:, None]
        past = torch.tensor(widths, device=self.model.device)[:, None]
        position = torch.arange(canvas, device=self.model.device)
        self.denoising.begin(
            canvas_span(starts, widths, canvas, self.model.device),
            self.cache,
            fixed_BC,
            (position >= first) & (position < past),
            seeds=[row.seed for row in self.live],
            blocks=[len(row.steps) for row in self.live],
        )
        yield from self.driver.run(self.denoising, self._capture)

    def finish_block(self) -> None:
        """Takes the block's tokens into the answers, and ends those that hold an end token or are long enough."""
        result_BC = self.denoising.result().clone()  # it may be the canvas itself, which the next block overwrites
        steps = self.denoising.state.step.tolist()
        tokens = result_BC.tolist()
        for index, row in enumerate(self.live):
            width = min(self.spec.canvas_length, self.spec.max_context - row.start)
            row.last_block = tokens[index]
            place = (len(row.steps), row.start)
            if self._capture is not None:
                row.traces.append(self._capture.trace(index, steps[index], width, result_BC[index], *place))
            else:
                answer = result_BC[index, :width].cpu()
                row.traces.append(partial(BlockTrace.uncaptured, steps[index], answer, *place))
            row.steps.append(steps[index])
            for token in row.last_block[len(row.tail) : width]:
                row.tokens.append(token)
                if token in self.stop_ids:
                    row.finish_reason = "stop"
                elif len(row.tokens) == self.max_new_tokens:
                    row.finish_reason = "length"
                if row.finish_reason:
                    break

    def commit(self) -> None:
        """Drops the answers that have ended and writes the others' last block to the cache."""
        kept = [index for index, row in enumerate(self.live) if row.finish_reason is None]
        if len(kept) < len(self.live):
            self.live = [self.live[index] for index in kept]
            if not kept:
                return
            self.cache.keep_rows(torch.tensor(kept, device=self.model.device))
            self._new_buffers()
        canvas = self.spec.canvas_length
        self._encode([row.start for row in self.live], [row.last_block for row in self.live], canvas)
        for row in self.live:
            row.start, row.tail = row.start + canvas, []
