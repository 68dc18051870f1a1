"""Answers of many prompts at once, with every state on the way."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dlmrt.errors import RequestError
from dlmrt.loop.decode import Decoding, cache_capacity
from dlmrt.loop.host import HostDriver
from dlmrt.models.base import BlockModel
from dlmrt.request import check_prompt
from orl_core.capture import CaptureMode
from orl_core.decoders import Decoder
from orl_core.trajectory import Trajectory


def rollout(
    model: BlockModel,
    prompts: Sequence[Tensor],
    decoder: Decoder,
    *,
    driver: HostDriver,
    max_new_tokens: int,
    context: int,
    seeds: Sequence[int],
    stop_ids: Sequence[int],
    residual: bool,
    z_top_k: int | None,
    capture: CaptureMode | None,
    name: str,
) -> list[Trajectory]:
    """See `Engine.rollout`. context: most tokens of a prompt and its answer. name: of the model, for the metadata."""
    rows = [prompt.tolist() for prompt in prompts]
    if not rows or len(rows) != len(seeds):
        raise RequestError(f"there are {len(rows)} prompts and {len(seeds)} seeds; give prompts and one seed for each")
    for ids in rows:
        check_prompt(ids, max_new_tokens, model.spec.vocab_size, context)
    if decoder.family != model.spec.family:
        raise RequestError(
            f"the decoder is of the {decoder.family} family and the model of the {model.spec.family} family"
        )
    capacity = max(cache_capacity(model.spec, len(ids), max_new_tokens) for ids in rows)
    with Decoding(
        model,
        decoder,
        rows,
        seeds,
        model.new_cache(len(rows), capacity),
        driver,
        max_new_tokens=max_new_tokens,
        stop_ids=frozenset(stop_ids),
        residual=residual,
        z_top_k=z_top_k,
        capture=capture,
    ) as decoding:
        decoding.prefill()
        while decoding.live:
            for _ in decoding.denoise():
                pass
            decoding.finish_block()
            decoding.commit()
    return [
        Trajectory(
            prompt_ids=torch.tensor(row.prompt),
            response_ids=torch.tensor(row.tokens),
            blocks=[trace() for trace in row.traces],
            finish_reason=row.finish_reason or "length",
            seed=row.seed,
            metadata={"model": name},
        )
        for row in decoding.rows
    ]
