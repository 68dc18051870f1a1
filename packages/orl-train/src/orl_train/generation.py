"""generation_config.json of a block-diffusion model: how it answers unless a request says otherwise."""

from typing import Any

from orl_core.noise import Family


def default_decoder(family: Family) -> dict[str, Any]:
    """The `decoder` table: name and settings of a decoder of orl_core.decoders."""
    if family == "uniform":
        return {"name": "entropy_bound", "entropy_bound": 0.1}
    return {"name": "threshold", "threshold": 0.95}
