"""From what a caller gives to a request that has been checked, and the drafts of one that runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from dlmrt.checkpoint.folder import Defaults
from dlmrt.decoding import build_decoder, build_truncation
from dlmrt.errors import RequestError
from dlmrt.loop.decode import Decoding
from dlmrt.models.base import BlockSpec
from dlmrt.params import GenerationParams
from dlmrt.result import Draft
from dlmrt.text import Message, TextCodec
from dlmrt.truncation import Truncation
from orl_core.decoders import Decoder

_MASKED = "░"


@dataclass(frozen=True, slots=True)
class Request:
    """ids: the prompt's tokens after templating. stop_ids: tokens that end the answer."""

    ids: list[int]
    max_new_tokens: int
    stop_ids: frozenset[int]
    decoder: Decoder
    truncation: Truncation | None
    params: GenerationParams


def prompt_ids(
    codec: TextCodec | None,
    params: GenerationParams,
    prompt: str | None,
    messages: Sequence[Message] | None,
    ids: Sequence[int] | None,
) -> list[int]:
    """Token ids of whichever of the three was given. Raises RequestError."""
    if sum(value is not None for value in (prompt, messages, ids)) != 1:
        raise RequestError("give exactly one of prompt, messages and ids")
    if ids is not None:
        if params.stop and codec is None:
            raise RequestError("stop strings need a tokenizer, which this engine has not; use stop_token_ids")
        return [int(token) for token in ids]
    if codec is None:
        raise RequestError("this engine has no tokenizer; give the prompt as ids")
    if prompt is not None:
        if not prompt.strip():
            raise RequestError("the prompt is empty; it must hold some text")
        return codec.encode_prompt(prompt, params.thinking)
    if not messages:
        raise RequestError("messages is empty; it must hold at least one message")
    return codec.encode_messages(messages, params.thinking)


def check_prompt(ids: Sequence[int], max_new_tokens: int, vocab_size: int, context: int) -> None:
    """Raises RequestError for an empty prompt, foreign token ids, or more tokens than the context holds."""
    if not ids:
        raise RequestError("the prompt is empty; it must hold at least one token")
    for token in ids:
        if not 0 <= token < vocab_size:
            raise RequestError(f"the prompt holds token {token}; token ids lie in [0, {vocab_size - 1}]")
    if max_new_tokens < 1:
        raise RequestError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
    if len(ids) + max_new_tokens > context:
        raise RequestError(
            f"the prompt has {len(ids)} tokens and max_new_tokens is {max_new_tokens}, together more than the context "
            f"of {context}; shorten one of them"
        )


def check_request(
    ids: list[int], params: GenerationParams, spec: BlockSpec, defaults: Defaults, context: int
) -> Request:
    """A request for which memory and settings are known to fit. Raises RequestError."""
    left = max(1, context - len(ids))
    wanted = params.max_new_tokens or min(defaults.max_new_tokens or left, left)
    check_prompt(ids, wanted, spec.vocab_size, context)
    if any(token >= spec.vocab_size for token in params.stop_token_ids):
        raise RequestError(f"stop_token_ids is {params.stop_token_ids}; the vocabulary ends at {spec.vocab_size - 1}")
    stop_ids = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else defaults.stop_ids)
    decoder = build_decoder(spec, defaults.decoder, params)
    return Request(ids, wanted, stop_ids, decoder, build_truncation(decoder, params), params)


def draft_of(decoding: Decoding, step: int, codec: TextCodec | None) -> Draft:
    """The canvas of a batch of one row as it stands after `step` steps. Reads it from the device."""
    row, state = decoding.live[0], decoding.denoising.state
    end = decoding.width(row)
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
