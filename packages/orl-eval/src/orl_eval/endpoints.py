"""Who answers: a protocol, and the dlmrt engine in this process behind it."""

import json
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Protocol, Self

from orl_eval.errors import MissingExtraError, SettingError

if TYPE_CHECKING:
    from dlmrt import Engine, GenerationParams


@dataclass(frozen=True, slots=True)
class Answer:
    """A response and what it cost.

    tokens    response tokens up to and including the end token
    forwards  denoising forwards
    commits   cache commits, one a block
    """

    text: str
    finish_reason: str
    tokens: int
    forwards: int
    commits: int


class Answerer(Protocol):
    """Answers one prompt at a time."""

    @property
    def model(self) -> str:
        """The name that the report gives."""
        ...

    def answer(self, prompt: str, seed: int) -> Answer:
        """The response to a prompt; the same seed gives the same response."""
        ...

    def settings(self) -> dict[str, Any]:
        """The decoding settings in force, as plain data."""
        ...

    def environment(self) -> dict[str, Any]:
        """Device, threads and versions, as plain data."""
        ...


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    """What the caller wants otherwise than the model's own defaults; None and {} change nothing.

    options  settings of the decoder by name, such as {"entropy_bound": 0.05}
    """

    decoder: str | None = None
    options: Mapping[str, int | float] = field(default_factory=dict)
    temperature: float | None = None
    residual: bool = True
    max_new_tokens: int | None = None


def parse_options(texts: Iterable[str]) -> dict[str, int | float]:
    """NAME=NUMBER texts as decoder settings. Raises SettingError."""
    options: dict[str, int | float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            number = json.loads(value)
        except ValueError:
            number = None
        if not name or isinstance(number, bool) or not isinstance(number, int | float):
            raise SettingError(f"decoder option is {text!r}; write it as NAME=NUMBER, e.g. entropy_bound=0.05")
        if name in options:
            raise SettingError(f"decoder option {name} is given twice; give it once")
        options[name] = number
    return options


class LocalEngine:
    """A model run by dlmrt in this process."""

    def __init__(self, engine: "Engine", settings: DecodeSettings) -> None:
        """Raises SettingError or the engine's RequestError if the model cannot honour the settings."""
        self._engine = engine
        self._params = generation_params(settings)
        self._decoder = engine.prepare(self._params, prompt="1").decoder

    @classmethod
    def load(cls, model: str, settings: DecodeSettings) -> Self:
        """`model` as `dlmrt.Engine.from_pretrained` takes it: embedded:NAME, a folder or a hub id.

        Raises MissingExtraError without dlmrt, SettingError, or the engine's own errors (all are OrlError).
        """
        try:
            from dlmrt import Engine
        except ModuleNotFoundError as error:
            if error.name != "dlmrt":
                raise
            raise MissingExtraError(
                f"model {model!r} runs in this process, which needs the engine dlmrt, and that is not installed; "
                'install it with: pip install "orl-eval[local]"'
            ) from error
        return cls(Engine.from_pretrained(model), settings)

    @property
    def model(self) -> str:
        return self._engine.name

    def answer(self, prompt: str, seed: int) -> Answer:
        result = self._engine.generate(prompt=prompt, params=replace(self._params, seed=seed))
        return Answer(
            text=result.text,
            finish_reason=result.finish_reason,
            tokens=len(result.token_ids),
            forwards=result.forwards,
            commits=len(result.blocks),
        )

    def settings(self) -> dict[str, Any]:
        defaults = self._engine.defaults
        return {
            "decoder": self._params.decoder or defaults.decoder.name,
            **asdict(self._decoder),  # type: ignore[arg-type]  # every decoder is a dataclass
            "residual": self._params.residual,
            "max_new_tokens": self._params.max_new_tokens or defaults.max_new_tokens,
        }

    def environment(self) -> dict[str, Any]:
        import torch

        versions = {name: version(name) for name in ("orl-eval", "orl-core", "dlmrt", "torch", "transformers")}
        return {
            "device": str(self._engine.model.device),
            "driver": self._engine.driver.name,
            "threads": torch.get_num_threads(),
            "machine": f"{platform.system()} {platform.machine()}",
            "versions": {**versions, "python": platform.python_version()},
        }


def generation_params(settings: DecodeSettings) -> "GenerationParams":
    """The settings as a request to dlmrt. Raises SettingError for an option that no decoder has."""
    from dlmrt import GenerationParams
    from dlmrt.decoding import DECODERS, option_names

    decoder_settings = set().union(*(option_names(name) for name in DECODERS))
    kinds = {field.name: field.type for field in fields(GenerationParams) if field.name in decoder_settings}
    for name, value in settings.options.items():
        if name not in kinds:
            raise SettingError(f"decoder option {name!r} is unknown; there are: {', '.join(sorted(kinds))}")
        if kinds[name] == int | None and not isinstance(value, int):
            raise SettingError(f"decoder option {name} is {value}; it must be a whole number")
    return GenerationParams(
        max_new_tokens=settings.max_new_tokens,
        decoder=settings.decoder,
        temperature=settings.temperature,
        residual=settings.residual,
        **settings.options,  # type: ignore[arg-type]  # checked above
    )
