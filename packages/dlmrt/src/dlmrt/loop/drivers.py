"""The drivers of the denoising step, by name."""

from dlmrt.errors import RequestError
from dlmrt.loop.host import HostDriver

DRIVERS = {"host": HostDriver}


def make_driver(name: str) -> HostDriver:
    """The driver of that name; "auto" is the fastest that works here. Raises RequestError for an unknown name."""
    if name == "auto":
        name = "host"
    if name not in DRIVERS:
        raise RequestError(f"driver {name!r} is unknown; choose one of {['auto', *DRIVERS]}")
    return DRIVERS[name]()
