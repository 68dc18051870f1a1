"""NVFP4 bit for bit against recorded outputs of both dialects and against the compressed-tensors library."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orl_core.errors import ConfigError, DataError, ShapeError
from orl_core.nvfp4 import Nvfp4Tensor, decode_e2m1, encode_e2m1, from_checkpoint, pack, quantize, unpack

DIALECTS = ("compressed-tensors", "modelopt")
FOLDERS = {"compressed-tensors": "ct", "modelopt": "modelopt"}
MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
BOTH = [
    "heavy_f32",
    "huge_f32",
    "mixed_scale_f32",
    "normal_bf16",
    "normal_f32",
    "rows7_f32",
    "ties_f32",
    "tiny_f32",
    "zero_rows_bf16",
    "zero_rows_f32",
]
RECORDED = [
    *((case, dialect) for case in BOTH for dialect in DIALECTS),
    ("all_zero_f32", "compressed-tensors"),
    ("subnormal_f32", "compressed-tensors"),
    ("ragged_f32", "modelopt"),
]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(
        a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)
    )


def random_matrix(seed: int, dtype: torch.dtype, rows: int = 6, columns: int = 48, lowest: int = -12) -> torch.Tensor:
    """Blocks of very different magnitudes, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.randint(lowest, 4, (rows, -(-columns // 16), 1), generator=generator)
    zero = torch.rand(exponent.shape, generator=generator) < 0.1
    scale = torch.where(zero, 0.0, 2.0**exponent).expand(-1, -1, 16).flatten(1)[:, :columns]
    return (torch.randn(rows, columns, generator=generator) * scale).to(dtype)


@pytest.mark.parametrize(("case", "dialect"), RECORDED)
def test_is_the_recorded_quantisation_bit_for_bit(load_golden, case, dialect):
    golden, _ = load_golden("nvfp4")
    folder = f"{case}/{FOLDERS[dialect]}"
    tensor = quantize(golden[f"{case}/input"], dialect)
    stored = tensor.to_checkpoint("m")
    assert len(stored) == 3
    for name, value in stored.items():
        assert same_bits(value, golden[f"{folder}/{name.removeprefix('m.')}"]), name
    # Compared as numbers: ModelOpt's table reads code 8 as +0.0.
    recorded = golden[f"{folder}/dequant_f32"]
    assert torch.equal(tensor.dequantize(), recorded[:, : tensor.columns])
    assert tensor.columns == golden[f"{case}/input"].shape[1]


@pytest.mark.parametrize("case", [*BOTH, "all_zero_f32", "subnormal_f32"])
def test_decompresses_to_bfloat16_as_compressed_tensors_does(load_golden, case):
    golden, _ = load_golden("nvfp4")
    tensor = quantize(golden[f"{case}/input"], "compressed-tensors")
    assert same_bits(tensor.dequantize(torch.bfloat16), golden[f"{case}/ct/decompress_bf16"])
    assert torch.equal(unpack(tensor.packed), golden[f"{case}/ct/codes"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(4))
def test_agrees_with_the_compressed_tensors_library(dtype, seed):
    from compressed_tensors.compressors.nvfp4.helpers import quantize_and_pack_fp4
    from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy, QuantizationType
    from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam

    args = QuantizationArgs(
        num_bits=4,
        type=QuantizationType.FLOAT,
        strategy=QuantizationStrategy.TENSOR_GROUP,
        symmetric=True,
        dynamic=False,
        group_size=16,
        scale_dtype=torch.float8_e4m3fn,
        zp_dtype=torch.float8_e4m3fn,
    )
    weight = random_matrix(seed, dtype)
    global_scale = generate_gparam(weight.amin(), weight.amax())
    grouped = weight.unflatten(-1, (-1, 16))
    scale, _ = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args, global_scale=global_scale)
    packed = quantize_and_pack_fp4(weight, scale, global_scale=global_scale)

    stored = quantize(weight, "compressed-tensors").to_checkpoint("m")
    assert same_bits(stored["m.weight_global_scale"], global_scale)
    assert same_bits(stored["m.weight_scale"], scale.to(torch.float8_e4m3fn))
    assert same_bits(stored["m.weight_packed"], packed)


@given(st.floats(-10, 10, width=32))
def test_encoding_is_nearest_with_ties_to_the_even_code(x):
    code = encode_e2m1(torch.tensor([x])).item()
    distance = [abs(abs(x) - magnitude) for magnitude in MAGNITUDES]
    best = [i for i, d in enumerate(distance) if d == min(distance)]
    magnitude = best[0] if len(best) == 1 else next(i for i in best if i % 2 == 0)
    assert code == magnitude + (8 if x < 0 else 0)


def test_ties_signs_and_saturation():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, math.inf])
    assert encode_e2m1(ties).tolist() == [0, 2, 2, 4, 4, 6, 6, 7, 7]
    assert encode_e2m1(-ties).tolist() == [8, 10, 10, 12, 12, 14, 14, 15, 15]
    assert encode_e2m1(torch.tensor([0.0, -0.0, -1e-30])).tolist() == [0, 0, 8]


def test_decoding_inverts_encoding_of_every_code():
    codes = torch.arange(16, dtype=torch.uint8)
    values = decode_e2m1(codes)
    assert values.tolist() == MAGNITUDES + [-m for m in MAGNITUDES]
    keeps = codes != 8  # -0.0 is encoded as 0
    assert torch.equal(encode_e2m1(values)[keeps], codes[keeps])


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 10**6))
def test_packing_puts_the_even_column_low_and_is_undone_by_unpacking(rows, half, seed):
    codes = torch.randint(16, (rows, 2 * half), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    packed = pack(codes)
    assert packed.tolist() == [[row[2 * j] + 16 * row[2 * j + 1] for j in range(half)] for row in codes.tolist()]
    assert torch.equal(unpack(packed), codes)


@given(st.integers(0, 10**6), st.sampled_from(DIALECTS))
def test_the_error_is_bounded_by_the_widest_gap_of_the_block(seed, dialect):
    weight = random_matrix(seed, torch.float32, lowest=-3)  # no block scale is subnormal
    tensor = quantize(weight, dialect)
    # Half the widest gap of e2m1 is 1; a block scale rounded down by up to 1/16 cuts the block's largest value at 6.
    bound = tensor.value_scale().repeat_interleave(16, -1) * (1 + 6 / 15)
    assert ((tensor.dequantize() - weight).abs() <= bound).all()


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-42])
def test_zero_and_subnormal_matrices_become_zero_with_global_scale_1(dialect, value):
    tensor = quantize(torch.full((2, 32), value), dialect)
    assert tensor.global_scale.item() == 1.0
    assert torch.equal(tensor.dequantize(), torch.zeros(2, 32))
    assert torch.isfinite(tensor.block_scale.float()).all()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_matrices_may_share_one_global_scale(dialect):
    q, k = random_matrix(0, torch.float32), random_matrix(1, torch.float32) * 8
    amax = torch.maximum(q.abs().max(), k.abs().max())
    parts = [quantize(m, dialect, amax=amax) for m in (q, k)]
    fused = quantize(torch.cat([q, k]), dialect)
    for name in ("packed", "block_scale"):
        assert same_bits(torch.cat([getattr(p, name) for p in parts]), getattr(fused, name))
    assert parts[0].global_scale == parts[1].global_scale == fused.global_scale


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("input_scale", [None, torch.tensor(0.25)])
def test_checkpoints_are_read_back(dialect, input_scale):
    tensor = quantize(random_matrix(0, torch.float32), dialect)
    tensor = Nvfp4Tensor(tensor.packed, tensor.block_scale, tensor.global_scale, dialect, 48, input_scale)
    stored = tensor.to_checkpoint("model.layers.0.mlp.up_proj")
    suffixes = {
        "compressed-tensors": ["weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"],
        "modelopt": ["weight", "weight_scale", "weight_scale_2", "input_scale"],
    }[dialect]
    expected = [f"model.layers.0.mlp.up_proj.{s}" for s in suffixes]
    assert list(stored) == (expected if input_scale is not None else expected[:3])
    assert stored[expected[2]].shape == ((1,) if dialect == "compressed-tensors" else ())
    again = from_checkpoint("model.layers.0.mlp.up_proj", stored)
    assert again.dialect == dialect
    assert again.columns == 48
    for name in ("packed", "block_scale", "global_scale"):
        assert same_bits(getattr(again, name), getattr(tensor, name))
    assert again.input_scale == input_scale


def test_padding_is_dropped_when_the_columns_are_known():
    weight = random_matrix(0, torch.float32, columns=40)
    stored = quantize(weight, "modelopt").to_checkpoint("m")
    assert from_checkpoint("m", stored).dequantize().shape == (6, 48)
    assert from_checkpoint("m", stored, columns=40).dequantize().shape == (6, 40)
    for columns in (32, 49):
        with pytest.raises(ShapeError, match=f"columns is {columns}"):
            from_checkpoint("m", stored, columns=columns)


def test_wrong_weights_are_refused():
    with pytest.raises(ShapeError, match="40 columns; compressed-tensors needs a multiple of 16"):
        quantize(torch.ones(2, 40), "compressed-tensors")
    with pytest.raises(ShapeError, match="float64"):
        quantize(torch.ones(2, 32, dtype=torch.float64), "modelopt")
    with pytest.raises(ShapeError, match=r"\[2, 2, 32\]"):
        quantize(torch.ones(2, 2, 32), "modelopt")
    with pytest.raises(ShapeError, match="empty"):
        quantize(torch.ones(0, 32), "modelopt")
    for bad in (math.inf, math.nan):
        with pytest.raises(DataError, match="infinite or NaN"):
            quantize(torch.full((2, 32), bad), "compressed-tensors")
    with pytest.raises(ConfigError, match="'gguf'"):
        quantize(torch.ones(2, 32), "gguf")  # pyright: ignore[reportArgumentType]


def test_wrong_checkpoints_are_refused():
    stored = quantize(torch.ones(2, 32), "compressed-tensors").to_checkpoint("m")
    with pytest.raises(DataError, match=r"n\.weight, n\.weight_scale, n\.weight_scale_2 not found"):
        from_checkpoint("n", stored)
    with pytest.raises(DataError, match=r"m\.weight_global_scale not found"):
        from_checkpoint("m", {k: v for k, v in stored.items() if "global" not in k})
    for name, wrong in (
        ("m.weight_packed", stored["m.weight_packed"].int()),
        ("m.weight_packed", stored["m.weight_packed"][:, :7]),
        ("m.weight_scale", stored["m.weight_scale"].float()),
        ("m.weight_scale", stored["m.weight_scale"][:1]),
        ("m.weight_global_scale", torch.ones(2)),
    ):
        with pytest.raises(ShapeError, match=name):
            from_checkpoint("m", stored | {name: wrong})
