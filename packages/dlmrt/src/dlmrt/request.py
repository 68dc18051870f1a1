"""A request that has been checked, and the drafts of one that runs."""

from dataclasses import dataclass
from itertools import groupby

from dlmrt.loop.decode import Decoding
from dlmrt.params import GenerationParams
from dlmrt.result import Draft
from dlmrt.text import TextCodec
from orl_core.decoders import Decoder

_MASKED = "░"


@dataclass(frozen=True, slots=True)
class Request:
    """ids: the prompt's tokens after templating. stop_ids: tokens that end the answer."""

    ids: list[int]
    max_new_tokens: int
    stop_ids: frozenset[int]
    decoder: Decoder
    params: GenerationParams


def draft_of(decoding: Decoding, step: int, codec: TextCodec | None) -> Draft:
    """The canvas of a batch of one row as it stands after `step` steps. Reads it from the device."""
    row, state = decoding.live[0], decoding.denoising.state
    end = min(decoding.spec.canvas_length, decoding.spec.max_context - row.start)
    ids = state.answer[0, len(row.tail) : end].tolist()
    unresolved = state.unresolved[0, len(row.tail) : end].tolist()
    stop = next((place for place, token in enumerate(ids) if token in decoding.stop_ids), len(ids) - 1)
    ids, unresolved = ids[: stop + 1], unresolved[: stop + 1]
    pieces: list[tuple[str, bool]] = []
    if codec is not None:
        mask_id = decoding.spec.mask_token_id
        for (masked, open_), run in groupby(zip(ids, unresolved, strict=True), lambda at: (at[0] == mask_id, at[1])):
            tokens = [token for token, _ in run]
            pieces.append((_MASKED * len(tokens) if masked else codec.decode(tokens), open_))
    return Draft(len(row.steps), step, ids, unresolved, pieces)
