"""What orl-train alone can do: build a model and run it as the losses do."""

import torch

from orl_train.models.qwen_dlm import QwenDLMConfig, QwenDLMForBlockDiffusion

config = QwenDLMConfig(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    canvas_length=8,
    residual_intermediate_size=32,
)
model = QwenDLMForBlockDiffusion(config)
ids = torch.arange(8)[None]
logits = model.denoise(ids, ids, torch.ones(1, 8, 8, dtype=torch.bool))
assert logits.shape == (1, 8, 40)
assert bool(logits.isfinite().all())
print("orl-train works")
