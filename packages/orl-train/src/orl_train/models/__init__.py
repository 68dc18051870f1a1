"""Trainable models: each implements orl_core.protocols.Denoiser and saves an ordinary Hugging Face folder.

Importing this package makes them known to transformers: `AutoModel.from_pretrained(folder)` loads any of them.
"""

from transformers import AutoConfig, AutoModel, PreTrainedModel

from orl_train.models.llada2 import LLaDA2MoeModelLM
from orl_train.models.llada2_config import LLaDA2MoeConfig
from orl_train.models.qwen_dlm import QwenDLMConfig, QwenDLMForBlockDiffusion

__all__ = ["TRAINABLE", "LLaDA2MoeConfig", "LLaDA2MoeModelLM", "QwenDLMConfig", "QwenDLMForBlockDiffusion"]

TRAINABLE: dict[str, type[PreTrainedModel]] = {
    "qwen_dlm": QwenDLMForBlockDiffusion,
    "llada2_moe": LLaDA2MoeModelLM,
}

for config, model in ((QwenDLMConfig, QwenDLMForBlockDiffusion), (LLaDA2MoeConfig, LLaDA2MoeModelLM)):
    AutoConfig.register(config.model_type, config)
    AutoModel.register(config, model)
