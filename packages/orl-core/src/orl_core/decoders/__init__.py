"""Decoders: pure functions that turn a step's statistics into the next canvas."""

from orl_core.decoders.base import CanvasState, Decoder
from orl_core.decoders.draft_edit import DraftEdit
from orl_core.decoders.entropy_bound import EntropyBound
from orl_core.decoders.insert_delete import InsertDelete
from orl_core.decoders.threshold import Threshold

__all__ = ["CanvasState", "Decoder", "DraftEdit", "EntropyBound", "InsertDelete", "Threshold"]
