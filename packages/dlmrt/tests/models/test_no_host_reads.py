"""A denoising step of each family with experts asks nothing of the host, so that it can be captured."""

import pytest
import torch

from dlmrt.cache import canvas_span
from dlmrt.checkpoint.folder import parse_settings
from dlmrt.decoding import build_decoder
from dlmrt.loop.step import Denoising
from dlmrt.params import GenerationParams

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
SDAR = {
    "model_type": "sdar_moe",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "mask_token_id": 63,
} | MOE


@pytest.mark.parametrize("kind", ["llada2", "diffusion_gemma", "sdar_moe"])
def test_steps_under_the_guard(llada2_golden, diffusion_gemma_golden, no_host_reads, kind):
    golden = {"llada2": llada2_golden, "diffusion_gemma": diffusion_gemma_golden}.get(kind)
    raw = SDAR if golden is None else golden.raw | {"mask_token_id": 318}
    settings = parse_settings(raw, {})
    shapes = settings.config.tensor_shapes()
    generator = torch.Generator().manual_seed(0)
    drawn = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    model = settings.model_class.from_tensors(settings.config, golden.tensors if golden else drawn)
    spec = model.spec
    decoder = build_decoder(spec, settings.defaults.decoder, GenerationParams())
    denoising = Denoising(model, decoder, 1)
    canvas = spec.canvas_length
    empty = torch.zeros(1, canvas, dtype=torch.int64)
    denoising.begin(
        canvas_span([0], [canvas], canvas, "cpu"), model.new_cache(1, canvas), empty, empty == 0, seeds=[1], blocks=[0]
    )
    denoising.step()  # tables and masks are built once, outside of a capture
    with no_host_reads():
        denoising.step()
    assert denoising.state.step.tolist() == [2]
