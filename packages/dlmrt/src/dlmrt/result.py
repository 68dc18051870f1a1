"""What a request gives back: the result, and the events of a stream."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

FinishReason = Literal["stop", "length", "repetition", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Wall-clock seconds on the engine's side. decode covers denoising steps, commits and text."""

    prefill: float
    decode: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """A finished answer.

    token_ids      up to and including the end token, or the token that completed a stop string
    text           without special tokens and without the stop string
    finish_reason  "stop" (end token or stop string), "length", "repetition" (GenerationParams.repetition_stop),
                   "cancelled" (holds the blocks finished until then)
    prompt_tokens  tokens of the prompt after templating
    blocks         denoising steps of each block; an abandoned block of a cancelled request counts in none of these
    seed, model    what reproduces the tokens
    logprobs       log-probability in nats of each token at the step that last wrote it; None unless asked for
    z_missed_mass  most probability mass that a top-k residual context left out at any position; 0 for an exact one
    """

    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    blocks: list[int]
    timings: Timings
    seed: int
    model: str
    logprobs: list[float] | None = None
    z_missed_mass: float = 0.0

    @property
    def forwards(self) -> int:
        """Denoising forwards."""
        return sum(self.blocks)

    @property
    def tpf(self) -> float:
        """Tokens per denoising forward."""
        return len(self.token_ids) / max(1, self.forwards)

    @property
    def tpf_commit(self) -> float:
        """Tokens per forward, with one cache commit a block counted as a forward."""
        return len(self.token_ids) / max(1, self.forwards + len(self.blocks))

    @property
    def tokens_per_second(self) -> float:
        """Answer tokens per second of prefill and decoding."""
        return len(self.token_ids) / max(1e-9, self.timings.prefill + self.timings.decode)

    def to_dict(self) -> dict[str, Any]:
        """Everything, the derived numbers included, ready for JSON."""
        derived = ("forwards", "tpf", "tpf_commit", "tokens_per_second")
        return asdict(self) | {name: getattr(self, name) for name in derived}


@dataclass(frozen=True, slots=True)
class Draft:
    """The canvas after one denoising step; none of it is final.

    token_ids   the canvas as it would be read if decoding stopped now, up to its first end token
    unresolved  which of these positions the decoder has not accepted
    pieces      their text in runs (text, unresolved); a masked position reads "░". Text of an earlier block is not
                repeated: it came with BlockCommitted
    """

    block: int
    step: int
    token_ids: list[int]
    unresolved: list[bool]
    pieces: list[tuple[str, bool]]


@dataclass(frozen=True, slots=True)
class BlockCommitted:
    """A block is final. text: what it adds to the answer; text that may turn out to be part of a stop string, or half
    a character, is held back until it is known. With `edit_blocks` the tokens are those that can no longer be edited:
    of an earlier block, of none, or of several at the answer's end. logprobs: of these tokens, if asked for."""

    block: int
    steps: int
    token_ids: list[int]
    text: str
    logprobs: list[float] | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a stream. text: what had been held back and is part of the answer after all."""

    result: GenerationResult
    text: str


Event = Draft | BlockCommitted | Finished
