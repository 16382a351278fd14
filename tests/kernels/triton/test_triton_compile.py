"""The kernels compiled for GPUs, which needs none, and finds what the interpreter forgives."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from izh.kernels.triton.lora_kernels import expand_rows, expand_tiles, shrink_rows, shrink_tiles

pointers = {"order": "*i32", "ranks": "*i32", "blocks": "*i32", "tiles": "*i32", "slots": "*i64", "low": "*fp32"}
blocks = {"NUM_SPLITS": 3, "BLOCK_N": 16, "BLOCK_R": 16, "BLOCK_K": 128, "BLOCK_D": 128}
for weights in ("fp32", "fp16", "bf16"):
    for kernel in (shrink_rows, expand_rows, shrink_tiles, expand_tiles):
        is_half_expand = kernel is expand_tiles and weights != "fp32"
        given = blocks | {"PRECISION": "tf32" if is_half_expand else "ieee"}
        given = {name: given[name] for name in kernel.arg_names if name in given}
        kinds = pointers | dict.fromkeys(("x", "a", "b", "y"), "*" + weights) | dict.fromkeys(given, "constexpr")
        kinds = {name: kinds.get(name, "i32") for name in kernel.arg_names}
        source = ASTSource(kernel, kinds, constexprs=given)
        ptx = triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32)).asm["ptx"]
        print(kernel.__name__, weights, "tensor cores" if "mma" in ptx else "no tensor cores")
"""


@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernels_compile_and_half_precision_tiles_use_tensor_cores(tmp_path: Path, capability: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", COMPILE, str(capability)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 12
    with_cores = {line.removesuffix(" tensor cores") for line in lines if not line.endswith("no tensor cores")}
    assert with_cores == {f"{kernel}_tiles {half}" for kernel in ("shrink", "expand") for half in ("fp16", "bf16")}
