"""The kernels compile ahead of time, without a GPU, for every supported architecture, and spill no register."""

import os
import re
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from orl_train.attention import triton_kernel  # noqa: E402
from orl_train.attention.triton_attention import NARROW_TILE, TILE, launch_options  # noqa: E402

KERNELS = [triton_kernel.forward_kernel, triton_kernel.query_gradient_kernel, triton_kernel.key_gradient_kernel]
SHARED_MEMORY = {90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
    pytest.mark.skipif(not CUOBJDUMP.exists(), reason=f"this triton ships no {CUOBJDUMP}"),
]


def source(kernel, head_dim):
    constants = {"GROUP": 4, "D": head_dim, "TILE": TILE, "QUERY_TILE": NARROW_TILE}
    signature, attributes = {}, {}
    for index, parameter in enumerate(kernel.params):
        name = parameter.name
        if name in constants:
            signature[name] = "constexpr"
        elif name in ("scale", "gradient_scale"):
            signature[name] = "fp32"
        elif name in ("Lse", "Delta"):
            signature[name] = "*fp32"
        elif name in ("Vis", "Start", "Middle", "End", "Index"):
            signature[name] = "*i32"
        else:
            signature[name] = "i32" if name[0].islower() or name in ("H", "T") else "*bf16"
        stride = re.fullmatch(r"[a-z]+_[bht]", name) and name not in ("vis_b", "list_b")
        if signature[name].startswith("*") or stride:
            attributes[(index,)] = [["tt.divisibility", 16]]
    used = {name: value for name, value in constants.items() if name in signature}
    return ASTSource(kernel, signature, used, attributes)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.fn.__name__)
@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_compiles_without_spills_within_shared_memory(tmp_path, monkeypatch, capability, kernel, head_dim):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    options = launch_options(kernel, head_dim)
    compiled = triton.compile(source(kernel, head_dim), target=GPUTarget("cuda", capability, 32), options=options)
    assert compiled.metadata.shared <= SHARED_MEMORY[capability]
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    usage = subprocess.run([CUOBJDUMP, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    spilled = [int(x) for x in re.findall(r"(?:STACK|LOCAL):(\d+)", usage)]
    assert len(spilled) == 2
    assert spilled == [0, 0], usage
