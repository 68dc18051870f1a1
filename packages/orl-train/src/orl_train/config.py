"""Settings of a run: frozen dataclasses read from a TOML file, with every mistake named before work starts."""

import dataclasses
import tomllib
import typing
from pathlib import Path
from typing import Any, TypeVar

from orl_core.errors import ConfigError

T = TypeVar("T")
Precision = typing.Literal["no", "bf16"]  # as accelerate names them


def load_config(cls: type[T], path: Path, overrides: dict[str, Any] | None = None) -> T:
    """Reads `path` into the dataclass `cls`; `overrides` maps dotted names ("optimizer.steps") to values.

    Raises ConfigError for a missing file, bad TOML, an unknown name, or a value of the wrong type.
    """
    try:
        data = tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"no configuration file {path}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    for name, value in (overrides or {}).items():
        *sections, key = name.split(".")
        target = data
        for section in sections:
            target = target.setdefault(section, {})
            if not isinstance(target, dict):
                raise ConfigError(f"{path}: {section} is no table, so {name} cannot be set")
        target[key] = value
    return build_config(cls, data, str(path))


def build_config(cls: type[T], data: dict[str, Any], where: str) -> T:
    """Builds the dataclass `cls` from nested dictionaries; nested dataclass fields take tables."""
    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"{cls} is not a dataclass")
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    unknown = sorted(set(data) - set(names))
    if unknown:
        raise ConfigError(f"{where}: unknown setting {unknown[0]!r}; allowed are {', '.join(names)}")
    values: dict[str, Any] = {}
    for name, value in data.items():
        hint = hints[name]
        table = _table(hint)
        if table is not None and (value is not None or table is hint):
            if not isinstance(value, dict):
                raise ConfigError(f"{where}: {name} must be a table, not {value!r}")
            values[name] = build_config(table, value, f"{where}: [{name}]")
        else:
            values[name] = _checked(value, hint, f"{where}: {name}")
    try:
        return cls(**values)
    except TypeError as error:
        raise ConfigError(f"{where}: {error}") from error


def _table(hint: Any) -> type | None:
    """The dataclass of a table, `Table` or `Table | None`; None for any other type."""
    kinds = (hint, *typing.get_args(hint))
    return next((kind for kind in kinds if isinstance(kind, type) and dataclasses.is_dataclass(kind)), None)


def _checked(value: Any, hint: Any, where: str) -> Any:
    allowed = typing.get_args(hint) or (hint,)
    if len(allowed) == 2 and allowed[1] is type(None):
        return None if value is None else _checked(value, allowed[0], where)
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where} is {value!r}; it must be a list")
        return tuple(_checked(item, allowed[0], f"{where}[{index}]") for index, item in enumerate(value))
    if typing.get_origin(hint) is typing.Literal:
        if value not in allowed:
            raise ConfigError(f"{where} is {value!r}; it must be one of {', '.join(map(str, allowed))}")
        return value
    if float in allowed and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    types = tuple(kind for kind in allowed if isinstance(kind, type))
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise ConfigError(f"{where} is {value!r}; it must be of type {' or '.join(kind.__name__ for kind in types)}")
    return value


def to_dict(config: Any) -> dict[str, Any]:
    """The settings as nested dictionaries, for logs and checkpoints; an optional table that is not set is left out."""
    hints = typing.get_type_hints(type(config))
    values = dataclasses.asdict(config)
    return {name: value for name, value in values.items() if value is not None or _table(hints[name]) is None}
