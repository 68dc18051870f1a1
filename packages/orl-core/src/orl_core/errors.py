"""Errors of orl-core: each says what was given, what is allowed and how to put it right."""


class OrlError(Exception):
    """Base class of every error raised on purpose by the packages of this project."""


class ConfigError(OrlError, ValueError):
    """A setting is outside its allowed range or contradicts another one."""


class ShapeError(OrlError, ValueError):
    """A tensor has another shape or dtype than the function documents."""


class CaptureMemoryError(OrlError, MemoryError):
    """The pages of a capture need more memory than there is or than is allowed."""


class DataError(OrlError, ValueError):
    """Data lacks something that its format prescribes, or holds values that the format cannot represent."""


def require_range(name: str, value: float, low: float, high: float) -> None:
    """Raises ConfigError unless low <= value <= high."""
    if not low <= value <= high:
        raise ConfigError(f"{name} is {value}; it must lie in [{low}, {high}]")


def require_at_least(name: str, value: float, low: float) -> None:
    """Raises ConfigError unless value >= low."""
    if not value >= low:
        raise ConfigError(f"{name} is {value}; it must be at least {low}")
