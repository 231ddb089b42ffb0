"""The Triton kernels, without a GPU: what they compute, under the interpreter; and that a GPU could run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flatout.augment import (
    Affine,
    Augment,
    Blur,
    Contrast,
    Crop,
    Erase,
    Gamma,
    Grayscale,
    HFlip,
    Hue,
    Invert,
    Noise,
    Resize,
    ResizedCrop,
    Standard,
)

pytest.importorskip("triton")


def test_kernels_under_the_interpreter_do_what_the_reference_does():
    checks = Path(__file__).with_name("interpreted.py")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--noconftest", str(checks)]
    finished = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout[-5000:]
    assert "[100%]" in finished.stdout


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize(
    ("aug", "dtype", "channels_last"),
    [
        (Standard(), torch.bfloat16, True),
        (
            Augment([ResizedCrop(40), Affine(9), Blur(3), Noise(), Erase(), Hue(0.1), Contrast(0.2)]),
            torch.float32,
            True,
        ),
        (Augment([Resize((99, 70), antialias=False), HFlip(), Gamma(0.2), Invert()]), torch.float16, False),
        (Augment([Crop(20, padding=3), Grayscale()]), torch.float32, False),
    ],
)
def test_kernels_compile_for_a_gpu_that_is_not_here(aug, dtype, channels_last, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from flatout.augment import kernel_launch, triton_kernels

    def compiled(function, types, constants):
        signature = {name: types.get(name, "constexpr") for name in function.arg_names}
        values = {name: value for name, value in constants.items() if name in function.arg_names}
        return compile(ASTSource(function, signature, values), target=GPUTarget("cuda", 90, 32)).asm

    images = torch.zeros(1, 64, 48, 3, dtype=torch.uint8).movedim(3, 1)
    program = aug._program(images, training=True)
    plan = kernel_launch.KernelPlan(program, images, dtype=dtype, channels_last=channels_last, fill=0)
    kept = "*u32" if plan.packed else "*fp32"
    out = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}[dtype]

    common = {"rows": "*fp32", "sums": "*i64", "n": "i32"}
    types = {**common, "index": "*i64", "table": "*fp64", "epoch": "i32", "seed": "i64"}
    assert compiled(triton_kernels.draw_kernel, types, plan.drawing)["cubin"]
    for constants in plan.passes:
        types = {**common, "source_stride": "i32"}
        types["source"] = "*u8" if constants["SOURCE"] < triton_kernels.BUFFER.value else kept
        types["sink"] = out if constants is plan.passes[-1] else kept
        code = compiled(triton_kernels.pass_kernel, types, constants)
        assert code["cubin"]
    assert ("st.global.b64" in code["ptx"]) == (channels_last and dtype != torch.float32)  # pixels stored by fours
