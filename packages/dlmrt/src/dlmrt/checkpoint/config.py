"""Reading config.json and generation_config.json: typed look-ups that name the key when a value is wrong."""

from collections.abc import Mapping, Sequence
from typing import Any

from dlmrt.errors import ModelConfigError


class Fields:
    """A JSON object whose values are looked up with the type and range that the engine needs."""

    def __init__(self, raw: Mapping[str, Any], prefix: str = "") -> None:
        self.raw, self.prefix = raw, prefix

    def __bool__(self) -> bool:
        return bool(self.raw)

    def _get(self, key: str, default: Any, kinds: type | tuple[type, ...], wanted: str) -> Any:
        value = self.raw.get(key)
        if value is None:
            if default is None:
                raise ModelConfigError(f"config.json has no {self.prefix}{key}; it must be {wanted}")
            return default
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
            raise ModelConfigError(f"config.json has {self.prefix}{key} = {value!r}; it must be {wanted}")
        return value

    def integer(self, key: str, *, default: int | None = None, low: int = 1, high: int = 2**31) -> int:
        value = self._get(key, default, int, "an integer")
        if not low <= value <= high:
            raise ModelConfigError(f"config.json has {self.prefix}{key} = {value}; it must lie in [{low}, {high}]")
        return value

    def divisor(self, key: str, of: int, *, default: int | None = None) -> int:
        value = self.integer(key, default=default)
        if of % value:
            raise ModelConfigError(f"config.json has {self.prefix}{key} = {value}; it must divide {of}")
        return value

    def number(self, key: str, *, default: float | None = None) -> float:
        value = self._get(key, default, (int, float), "a number")
        if not value > 0:
            raise ModelConfigError(f"config.json has {self.prefix}{key} = {value}; it must be greater than 0")
        return float(value)

    def boolean(self, key: str, *, default: bool | None = None) -> bool:
        return self._get(key, default, bool, "true or false")

    def choice(self, key: str, allowed: Sequence[str], *, default: str | None = None) -> str:
        value = self._get(key, default, str, f"one of {', '.join(allowed)}")
        if value not in allowed:
            raise ModelConfigError(f"config.json has {self.prefix}{key} = {value!r}; it must be one of {list(allowed)}")
        return value

    def require(self, key: str, only: Any) -> None:
        """Refuses a setting that would need other code than the engine has."""
        value = self.raw.get(key)
        if value is not None and value != only:
            raise ModelConfigError(f"config.json has {self.prefix}{key} = {value!r}; only {only!r} is supported")

    def section(self, key: str) -> "Fields":
        """A nested object; empty if it is missing."""
        value = self.raw.get(key) or {}
        if not isinstance(value, Mapping):
            raise ModelConfigError(f"config.json has {self.prefix}{key} = {value!r}; it must be an object")
        return Fields(value, f"{self.prefix}{key}.")
