"""Pure tensor math of on-policy residual learning and block diffusion."""

from importlib.metadata import version

__version__ = version("orl-core")
