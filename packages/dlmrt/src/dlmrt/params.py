"""What a request may ask for."""

from dataclasses import dataclass, fields

from dlmrt.errors import RequestError

_INT64 = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationParams:
    """Settings of one request. None means the checkpoint's default (generation_config.json).

    max_new_tokens   upper bound of answer tokens; a default is cut to what the context has left, an explicit one not
    decoder          "entropy_bound", "threshold", "draft_edit", "insert_delete", or a preset: "draft_edit_quality",
                     "draft_edit_speed"
    temperature      0 is greedy: the candidate of a position is its most probable token; above 0 candidates are
                     sampled at that temperature
    top_k            candidates are sampled from that many of the most probable tokens; needs sampling
    top_p            of these, from the fewest whose probabilities add up to top_p; needs sampling
    seed             the same request with the same seed gives the same tokens; int64
    n                answers of Engine.generate_all, drawn with the seeds seed, seed + 1, ..
    logprobs         give each token's log-probability at the step that last wrote it: under the whole distribution of
                     that step, after its temperature and before top_k and top_p
    repetition_stop  at least 2; ends an answer whose last `repetition_stop` canvases only repeat a sequence of at most
                     one canvas
    edit_blocks      draft_edit: finished blocks that may still be edited while the next one is drafted
    stop             strings that end the answer and are not part of its text
    stop_token_ids   tokens that end the answer, besides the checkpoint's own
    residual         False withholds the residual context from a model that has one
    ignore_eos       decode to max_new_tokens, through end tokens (for measurements)
    thinking         passed to the chat template as `enable_thinking`

    The remaining fields override settings of the decoder of the same name in orl_core.decoders; a setting that the
    chosen decoder does not have is refused. Raises RequestError.
    """

    max_new_tokens: int | None = None
    decoder: str | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    n: int = 1
    logprobs: bool = False
    repetition_stop: int | None = None
    edit_blocks: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    residual: bool = True
    ignore_eos: bool = False
    thinking: bool | None = None

    entropy_bound: float | None = None
    max_steps: int | None = None
    t_min: float | None = None
    t_max: float | None = None
    stability_threshold: int | None = None
    confidence_threshold: float | None = None
    threshold: float | None = None
    steps: int | None = None
    edit_threshold: float | None = None
    max_post_steps: int | None = None
    min_transfer: int | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise RequestError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if self.temperature is not None and not 0 <= self.temperature < float("inf"):
            raise RequestError(f"temperature is {self.temperature}; it must be at least 0 (0 is greedy) and finite")
        if not -_INT64 <= self.seed < _INT64:
            raise RequestError(f"seed is {self.seed}; it must fit into 64 bits, from {-_INT64} to {_INT64 - 1}")
        if self.top_k is not None and self.top_k < 1:
            raise RequestError(f"top_k is {self.top_k}; it must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise RequestError(f"top_p is {self.top_p}; it must be greater than 0 and at most 1")
        if self.n < 1 or self.seed + self.n - 1 >= _INT64:
            raise RequestError(
                f"n is {self.n} and seed {self.seed}; n must be at least 1, and seed + n - 1 fit 64 bits"
            )
        if self.repetition_stop is not None and self.repetition_stop < 2:
            raise RequestError(f"repetition_stop is {self.repetition_stop}; it must be at least 2 canvases")
        if self.edit_blocks < 0:
            raise RequestError(f"edit_blocks is {self.edit_blocks}; it must be at least 0")
        if isinstance(self.stop, str) or not all(isinstance(text, str) and text for text in self.stop):
            raise RequestError(f"stop is {self.stop!r}; it must be a sequence of non-empty strings")
        if any(token < 0 for token in self.stop_token_ids):
            raise RequestError(f"stop_token_ids is {self.stop_token_ids}; token ids must not be negative")

    def decoder_options(self) -> dict[str, float | int]:
        """The decoder settings that the request overrides."""
        return {name: value for name in _DECODER_OPTIONS if (value := getattr(self, name)) is not None}


_NAMES = [field.name for field in fields(GenerationParams)]
_DECODER_OPTIONS = tuple(_NAMES[_NAMES.index("entropy_bound") :])
