"""The model families that the engine runs, by the `model_type` of their config.json."""

from dlmrt.models.base import BlockModel
from dlmrt.models.diffusion_gemma import DiffusionGemma
from dlmrt.models.llada2 import LLaDA2
from dlmrt.models.qwen3 import Qwen3

MODELS: dict[str, type[BlockModel]] = {
    "qwen3": Qwen3,
    "qwen3_moe": Qwen3,
    "qwen_dlm": Qwen3,
    "sdar": Qwen3,
    "sdar_moe": Qwen3,
    "llada2_moe": LLaDA2,
    "diffusion_gemma": DiffusionGemma,
}
