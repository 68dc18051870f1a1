"""Evaluation suite for diffusion language models: accuracy with its interval, and tokens per forward."""

from importlib.metadata import version

__version__ = version("orl-eval")
