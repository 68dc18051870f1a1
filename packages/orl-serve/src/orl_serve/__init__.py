"""OpenAI-compatible server for dlmrt; this version holds no server yet."""

from importlib.metadata import version

__version__ = version("orl-serve")
