"""Memory planned from configurations alone."""

import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from dlmrt.checkpoint.describe import describe
from dlmrt.checkpoint.folder import parse_settings
from dlmrt.checkpoint.footprint import RANKS, footprint, parameter_counts

CONFIGS = Path(__file__).parents[1] / "configs"


def config(name: str):
    return parse_settings(json.loads((CONFIGS / f"{name}.json").read_text()), {}).config


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("qwen3_4b", 4.02e9, 4.02e9),  # "4.0B" on the model card
        ("llada2_1_mini", 16.26e9, 1.43e9),  # 16.26B and 1.43B: Ling-V2's table of the model that it was made from
        ("llada2_flash", 102.9e9, 6.15e9),  # "100 billion total, only 6.1 billion activated"
        ("diffusion_gemma_26b_a4b", 25.25e9, 3.84e9),  # "26B-A4B", with the vision tower that is not counted here
    ],
)
def test_parameters_are_the_published_numbers(name, total, active):
    counted = parameter_counts(config(name))
    assert counted == (pytest.approx(total, rel=3e-3), pytest.approx(active, rel=3e-3))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_plans_follow_from_the_tensors(path):
    model = config(path.stem)
    total, _ = parameter_counts(model)
    plans = {n: footprint(model, context=4096, dtype=torch.bfloat16, ranks=n) for n in RANKS}
    assert plans[1].weight_bytes == 2 * total
    for fewer, more in pairwise(RANKS):
        assert plans[fewer].weight_bytes / 2 <= plans[more].weight_bytes < 0.56 * plans[fewer].weight_bytes
        assert plans[fewer].kv_cache_bytes / 2 <= plans[more].kv_cache_bytes <= plans[fewer].kv_cache_bytes
    small = footprint(model, context=4096, dtype=torch.bfloat16, nvfp4=True)
    assert small.kv_cache_bytes == plans[1].kv_cache_bytes
    assert 9 / 32 * plans[1].weight_bytes < small.weight_bytes < 0.45 * plans[1].weight_bytes


def test_key_value_heads_are_replicated_once_each_rank_has_one():
    mini = config("llada2_1_mini")  # 4 key/value heads
    caches = [footprint(mini, context=1024, dtype=torch.bfloat16, ranks=n).kv_cache_bytes for n in RANKS]
    assert caches == [1024 * 40960, 1024 * 20480, 1024 * 10240, 1024 * 10240]


def test_nvfp4_leaves_vocabulary_norms_router_and_adapter_as_they_are():
    dlm = config("qwen_dlm_4b")
    kept = sum(
        torch.Size(shape).numel()
        for name, shape in dlm.tensor_shapes().items()
        if ".layers." not in name or name.endswith("norm.weight")
    )
    projections = parameter_counts(dlm)[0] - kept
    planned = footprint(dlm, context=1024, dtype=torch.bfloat16, nvfp4=True).weight_bytes
    assert planned == kept * 2 + projections * 9 // 16 + 4 * 7 * 36


def test_info_shows_active_parameters_and_the_plan_of_every_number_of_devices(tmp_path):
    golden = CONFIGS.parent / "golden" / "llada2_moe_tiny"
    raw = json.loads((golden / "config.json").read_text()) | {"mask_token_id": 318}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    shutil.copy(golden / "model.safetensors", tmp_path)
    shown = describe(str(tmp_path), context=256)
    routed = 2 * 16 * 3 * 32 * 64
    assert shown.active_parameters == shown.parameters - routed * 12 // 16
    assert [(plan.nvfp4, plan.ranks) for plan in shown.plans] == [(q, n) for q in (False, True) for n in RANKS]
    assert shown.plans[0].weight_bytes == shown.weight_bytes
    assert shown.plans[0].kv_cache_bytes == shown.kv_cache_bytes
    lines = dict(shown.lines())
    assert f"{shown.active_parameters:,}" in lines["active"]
    small = shown.plans[len(RANKS)]
    assert small.weight_bytes < shown.weight_bytes
    assert lines["nvfp4 on"].startswith(f"1: {(small.weight_bytes + small.kv_cache_bytes) / 2**20:.1f} MiB, 2: ")


DOCUMENT = Path(__file__).parents[4] / "docs" / "models.md"


@pytest.mark.skipif(not DOCUMENT.is_file(), reason="the package is tested without the repository's documents")
def test_the_table_of_the_documentation_is_what_the_configurations_give():
    rows = [line.strip("| \n").split(" | ") for line in DOCUMENT.read_text().splitlines() if "B (" in line]
    assert {name for name, *_ in rows} == {path.stem for path in CONFIGS.glob("*.json")} - {"qwen3_4b"}
    for name, parameters, context, *cells in rows:
        model = config(name)
        total, active = parameter_counts(model)
        assert parameters == f"{total / 1e9:.2f}B ({active / 1e9:.2f}B)"
        plans = (
            footprint(model, context=int(context), dtype=torch.bfloat16, ranks=ranks, nvfp4=nvfp4)
            for nvfp4 in (False, True)
            for ranks in (1, 8)
        )
        assert cells == [f"{p.weight_bytes / 2**30:.2f} + {p.kv_cache_bytes / 2**30:.2f}" for p in plans]
