"""Trainable models: each implements orl_core.protocols.Denoiser and saves an ordinary Hugging Face folder.

TRAINABLE: by the model_type of config.json. Importing this package makes the first two known to transformers, for
`AutoModel.from_pretrained(folder)`; of the third, it loads its own class.
"""

from transformers import AutoConfig, AutoModel, PreTrainedModel

from orl_train.models.diffusion_gemma import DiffusionGemmaForBlockDiffusion
from orl_train.models.llada2 import LLaDA2MoeModelLM
from orl_train.models.llada2_config import LLaDA2MoeConfig
from orl_train.models.qwen_dlm import QwenDLMConfig, QwenDLMForBlockDiffusion

__all__ = [
    "TRAINABLE",
    "DiffusionGemmaForBlockDiffusion",
    "LLaDA2MoeConfig",
    "LLaDA2MoeModelLM",
    "QwenDLMConfig",
    "QwenDLMForBlockDiffusion",
]

TRAINABLE: dict[str, type[PreTrainedModel]] = {
    "qwen_dlm": QwenDLMForBlockDiffusion,
    "llada2_moe": LLaDA2MoeModelLM,
    "diffusion_gemma": DiffusionGemmaForBlockDiffusion,
}

for config, model in ((QwenDLMConfig, QwenDLMForBlockDiffusion), (LLaDA2MoeConfig, LLaDA2MoeModelLM)):
    AutoConfig.register(config.model_type, config)
    AutoModel.register(config, model)
