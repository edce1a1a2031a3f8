# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Triton kernels: what they compute, in Triton's interpreter, and how they compile for an H100; no GPU is needed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT
from operators import H, make_inputs, relative_error, run

from modeling_essm import kernels_essm
from modeling_essm.spectral_ops import SpectralOperator

needs_triton = pytest.mark.skipif(kernels_essm.triton is None, reason="needs triton")


def python(*args, **environment):
    """A process with that environment, whose output shows where it fails."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests")))} | environment
    done = subprocess.run([sys.executable, *args], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_kernels_in_the_interpreter():
    """A process of its own: Triton reads the variable when kernels are defined."""
    file = Path(__file__).with_name("kernels_in_the_interpreter.py")
    output = python("-m", "pytest", "-q", str(file), TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert re.search(r"\d+ passed", output) and "skipped" not in output


def test_nothing_changes_without_triton():
    """The module imports, chooses nothing, and the operator runs, also where the interpreter is asked for."""
    python(
        "-c",
        """
import sys
sys.modules["triton"] = None
import torch
from modeling_essm import kernels_essm
from modeling_essm.spectral_ops import SpectralOperator
assert not kernels_essm.use_kernels(torch.device("cuda"), torch.float32, 18, 16, 64)
u, gates, M = torch.ones(1, 40, 16), torch.ones(1, 40, 2), torch.ones(2, 16, 16)
y, _ = SpectralOperator(64, chunk_size=16)(u, gates, M)
assert y.isfinite().all()
""",
        TRITON_INTERPRET="1",
    )


def test_a_cpu_does_not_import_triton():
    python(
        "-c",
        """
import sys, torch
from modeling_essm.spectral_ops import SpectralOperator
SpectralOperator(64)(torch.ones(1, 40, 16), torch.ones(1, 40, 2), torch.ones(2, 16, 16))
assert "modeling_essm.kernels_essm" not in sys.modules
""",
        TRITON_INTERPRET="0",
    )


@needs_triton
def test_the_choice(monkeypatch):
    """A GPU is pretended; nothing runs on it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    capability, cuda = (9, 0), torch.device("cuda")

    def chosen(dtype=torch.bfloat16, N=48, C=64, D=1024, G=1, mixing=None):
        return kernels_essm.use_kernels(cuda, dtype, N, C, D, G, mixing)

    monkeypatch.delenv("ESSM_TRITON", raising=False)
    assert not chosen()
    monkeypatch.setenv("ESSM_TRITON", "1")
    assert chosen()
    assert chosen(mixing=(1024, 512))  # dense
    assert chosen(mixing=(128, 128)) and chosen(mixing=(16, 64), G=4)  # heads
    assert chosen(mixing=(1, 1), G=4)  # diagonal
    assert chosen(torch.float32) and not chosen(torch.float32, mixing=(1024, 512))
    assert not chosen(mixing=(8, 8)) and not chosen(mixing=(256, 256)) and not chosen(mixing=(1, 1), G=128)
    assert not chosen(C=8) and not chosen(C=65) and not chosen(N=65)
    assert not chosen(torch.float16) and not chosen(torch.float64)
    capability = (8, 0)
    assert not chosen()
    capability = (9, 0)
    assert chosen() and not kernels_essm.use_kernels(torch.device("cpu"), torch.bfloat16, 48, 64, 1024)
    monkeypatch.setenv("ESSM_TRITON", "0")
    assert not chosen()


@pytest.mark.parametrize(
    ("programs", "n", "segment"),
    [(1, 1, 1), (1, 256, 256), (64, 200, 256), (132, 4096, 4096), (64, 1024, 256), (1, 1000, 64), (1, 10**5, 512)],
)
def test_segments_of_a_scan(programs, n, segment):
    """One unless an H100's 132 multiprocessors would wait for few programs with many chunks."""
    assert kernels_essm._segment(programs, n) == segment


KERNELS = [
    "_scan_forward",
    "_scan_backward",
    "_dense_forward",
    "_dense_backward",
    "_heads_forward",
    "_heads_backward",
    "_heads_mixing_gradient",
    "_diagonal_forward",
    "_diagonal_backward",
]
POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}
SHARED_MEMORY = 227 * 1024  # bytes that a program of an H100 may have


def launched(monkeypatch, dtype):
    """Arguments, and constants and options, of every kernel's largest tiles: C = 64, 48 states."""
    launches = {}

    def record(kernel, grid, *args, **options):
        launches[kernel.fn.__name__] = kernel, args, options

    monkeypatch.setattr(kernels_essm, "_launch", record)
    shapes = {"dense": (256, 256), "heads": (2, 128, 128), "diagonal": (256, 1, 1)}
    for shape in shapes.values():
        u, _, M = make_inputs(1, 64, 32, D=256, dtype=dtype)
        M = torch.ones(32, *shape, dtype=dtype)
        basis = kernels_essm.Realization(H, 48, 64)
        chunks, x = u, torch.ones(1, 48, 256)
        gates = torch.ones(1, 64, 32, dtype=dtype) if M.ndim == 3 else torch.ones(1, 64, 32, 2, dtype=dtype)
        mix, unmix = kernels_essm.DENSE if M.ndim == 3 else kernels_essm.HEADS
        y = mix(basis, chunks, x, gates, M)
        unmix(basis, y, chunks, x, gates, M)
    readout, powers = torch.ones(64, 48, 112), torch.ones(24, 48, 48)
    kernels_essm.scan_states(u[None], None, readout, powers, None)
    kernels_essm.scan_gradients(u[None].float(), x[None], readout, powers, None)
    return launches


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.bfloat16) for name in KERNELS] + [(name, torch.float32) for name in KERNELS if "scan" in name],
    ids=str,
)
def test_compiled_for_an_h100(name, dtype, monkeypatch, tmp_path):
    """Ahead of time: it fits an H100, spills no register, and its products are those of whole warp groups."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    tools = Path(kernels_essm.triton.__file__).parent / "backends" / "nvidia" / "bin"
    if not (tools / "ptxas").exists() or not (tools / "cuobjdump").exists():
        pytest.skip("needs the CUDA tools of a triton wheel")
    kernel, args, options = launched(monkeypatch, dtype)[name]
    pointers = {key: POINTERS[x.dtype] for key, x in zip(kernel.arg_names, args) if isinstance(x, torch.Tensor)}
    constants = {key: value for key, value in options.items() if key in kernel.arg_names}
    signature = {key: "constexpr" if key in constants else "i32" for key in kernel.arg_names}
    signature |= pointers
    aligned = {*pointers, "D", "d", "e", "D_G"}  # what a launch sees of tensors, and of widths that 16 divides
    attributes = {(i,): [["tt.divisibility", 16]] for i, key in enumerate(kernel.arg_names) if key in aligned}
    source = ASTSource(kernel, signature, constants, attributes)
    launch_options = {key: value for key, value in options.items() if key not in constants}
    compiled = kernels_essm.triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch_options)
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    usage = subprocess.run(
        [tools / "cuobjdump", "-res-usage", cubin], capture_output=True, text=True, check=True
    ).stdout
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    print(name, registers, stack, compiled.metadata.shared)
    assert registers <= 65536 // (32 * options["num_warps"])
    assert stack == 0, usage
    assert compiled.metadata.shared <= SHARED_MEMORY
    if dtype == torch.bfloat16:
        assert "wgmma.mma_async" in compiled.asm["ptx"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("shape", [(256, 192), (4, 64, 48), (256, 1, 1)], ids=["dense", "heads", "diagonal"])
@pytest.mark.parametrize(("L", "C"), [(321, 64), (9, 32), (20_000, 32)])
def test_agree_with_torch_on_a_gpu(L, C, shape, dtype, monkeypatch):
    """The same call with and without kernels."""
    operator, K = SpectralOperator(32_768, chunk_size=C), 32
    heads = len(shape) == 3
    D = shape[0] * shape[1] if heads else shape[0]
    monkeypatch.setenv("ESSM_TRITON", "1")
    if not kernels_essm.use_kernels(torch.device("cuda"), dtype, operator.num_states(K), C, D):
        pytest.skip("needs triton and an H100")
    u, gates, _ = (t.cuda() for t in make_inputs(2, L, K, D=D, dtype=dtype))
    if heads:
        gates = gates[..., None].expand(-1, -1, -1, 2).contiguous()
    M = torch.randn(K, *shape, generator=torch.Generator().manual_seed(0)).to("cuda", dtype)
    actual = run(operator, "chunked", u, gates, M, None, None)
    monkeypatch.setenv("ESSM_TRITON", "0")
    expected = run(operator, "chunked", u, gates, M, None, None)
    for name in expected:
        error = relative_error(actual[name], expected[name])
        assert error < (2e-4 if dtype == torch.float32 else 2e-2), f"{name}: {error:.1e}"  # as of all algorithms
