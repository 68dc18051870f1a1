"""A request that is being decoded: its rows, their texts, and what they come to."""

import math
import sys
import time
from collections.abc import Sequence

from dlmrt.answer import AnswerText
from dlmrt.cache import KVCache
from dlmrt.loop.decode import Decoding, Row
from dlmrt.loop.host import HostDriver
from dlmrt.models.base import BlockModel
from dlmrt.request import Request
from dlmrt.result import BlockCommitted, GenerationResult, Timings
from dlmrt.text import TextCodec


class Run:
    """One row for each of a request's answers. Prefills; then, for each block: iterate `decoding.denoise`,
    `finish_block`, `decoding.commit`, until `decoding.live` is empty.

    name: of the model, for the results. The cache has one row an answer.
    """

    def __init__(
        self,
        model: BlockModel,
        request: Request,
        cache: KVCache,
        driver: HostDriver,
        *,
        codec: TextCodec | None,
        z_top_k: int | None,
        name: str,
    ) -> None:
        began = time.perf_counter()
        params = request.params
        self.request, self.name = request, name
        self.decoding = Decoding(
            model,
            request.decoder,
            [request.ids] * params.n,
            range(params.seed, params.seed + params.n),
            cache,
            driver,
            max_new_tokens=request.max_new_tokens,
            stop_ids=request.stop_ids,
            residual=params.residual,
            z_top_k=z_top_k,
            truncation=request.truncation,
            edit_blocks=params.edit_blocks,
            repetition_stop=params.repetition_stop,
            logprobs=params.logprobs,
        )
        self._texts = {row.seed: AnswerText(codec, params.stop) for row in self.decoding.rows}
        self.decoding.prefill()
        self._prefilled = time.perf_counter()
        self._prefill_seconds = self._prefilled - began

    def finish_block(self) -> list[BlockCommitted]:
        """What the block that has been denoised adds to each live answer."""
        known = [len(row.tokens) for row in self.decoding.live]
        self.decoding.finish_block()
        return [self._committed(row, count) for row, count in zip(self.decoding.live, known, strict=True)]

    def _committed(self, row: Row, known: int) -> BlockCommitted:
        answer = self._texts[row.seed]
        text = answer.update(row.tokens)
        if answer.stopped_after is not None:
            del row.tokens[answer.stopped_after :], row.probs[answer.stopped_after :]
            row.finish_reason = "stop"
        return BlockCommitted(
            len(row.steps) - 1, row.steps[-1], row.tokens[known:], text, self._logs(row.probs[known:])
        )

    def results(self) -> list[tuple[GenerationResult, str]]:
        """Each answer, in the order of the seeds, and the text that had been held back of it."""
        return [self._result(row, self._texts[row.seed]) for row in self.decoding.rows]

    def _result(self, row: Row, answer: AnswerText) -> tuple[GenerationResult, str]:
        if row.finish_reason is None:  # cancelled: nothing will edit the finished blocks any more
            row.tokens += row.drafted
            row.probs += row.drafted_probs
        rest = answer.update(row.tokens, final=True)
        result = GenerationResult(
            token_ids=row.tokens,
            text=answer.text,
            finish_reason=row.finish_reason or "cancelled",
            prompt_tokens=len(self.request.ids),
            blocks=row.steps,
            timings=Timings(prefill=self._prefill_seconds, decode=time.perf_counter() - self._prefilled),
            seed=row.seed,
            model=self.name,
            logprobs=self._logs(row.probs),
            z_missed_mass=self.decoding.denoising.missed.item(),
        )
        return result, rest

    def _logs(self, probs: Sequence[float]) -> list[float] | None:
        # A sampled token may have a probability that float32 rounds to 0; JSON has no infinity.
        return [math.log(max(p, sys.float_info.min)) for p in probs] if self.request.params.logprobs else None
