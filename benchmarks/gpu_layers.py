# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What does a layer cost on a GPU, beside its floor, the FFT algorithm and the kernels of other linear models?

    python -m benchmarks.gpu_layers
    python -m benchmarks.gpu_layers --tables operator --widths 1024 --budgets 32

ceilings   A copy of 1 GiB (bytes read and written) and a large bf16 product: what this device can do.
operator   Eq. (7) alone, dense and diagonal M_k. The floor is the larger of its operations over the product's rate and
           the fewest bytes it must move over the copy's: each input read once, each output written once; three times
           the operations with the backward pass, which makes features again.
blocks     Whole blocks of 6 D^2 parameters: the gated block at each K by our operator and by FFT, Mamba-2 and simple
           GLA (`benchmarks.gpu_peers`; left out, with the reason, where their packages are not installed).

Our operator is checked against the FFT in fp32 before it is timed. bf16 on a GPU, fp32 on a CPU. "torch" is our
operator without its kernels; where there is no Triton both are the same. The report is written after every row, so
that a run may be stopped at any time.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from essm_train.files import write_json
from modeling_essm import ESSMConfig, ESSMModel
from modeling_essm.spectral_ops import SpectralOperator

from . import common
from .gpu_peers import PEERS
from .spectral_heads import fft_heads
from .spectral_layer import FILTER_LENGTH, tuned_fft

TABLES = ("ceilings", "operator", "blocks")
HEADS = 4
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 2e-2}  # as in `spectral_layer`


def with_triton(value: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with ESSM_TRITON at that value: "1" for our kernels, "0" for plain torch, forward and backward."""

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        before = os.environ.get("ESSM_TRITON")
        os.environ["ESSM_TRITON"] = value
        try:
            return function(*args)
        finally:
            del os.environ["ESSM_TRITON"]
            os.environ |= {} if before is None else {"ESSM_TRITON": before}

    return run


plain, kernels = functools.partial(with_triton, "0"), functools.partial(with_triton, "1")


def ceilings(device: torch.device, dtype: torch.dtype, quick: bool) -> dict[str, float]:
    """Bytes a second of a copy, operations a second of a product; medians."""
    size, side = (1 << 20, 256) if quick else (1 << 30, 8192)
    a = torch.empty(size, dtype=torch.uint8, device=device).random_(0, 255)
    b = torch.empty_like(a)
    x, y = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(x)
    seconds = common.paired({"copy": lambda: b.copy_(a), "product": lambda: torch.mm(x, y, out=out)}, device)
    medians = {name: common.spread(values)["median"] for name, values in seconds.items()}
    return {
        "copy_bytes_per_second": 2 * size / medians["copy"],
        "product_flops_per_second": 2 * side**3 / medians["product"],
    }


def operator_inputs(
    B: int, L: int, D: int, K: int, diagonal: bool, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """u, gates and M_k as a model has them."""
    generator = torch.Generator(device).manual_seed(0)
    u = torch.randn(B, L, D, generator=generator, device=device)
    heads = (HEADS,) if diagonal else ()
    gates = torch.randn(B, L, K, *heads, generator=generator, device=device).softmax(2)
    M = torch.randn(K, D, *((1, 1) if diagonal else (D,)), generator=generator, device=device)
    return [t.to(dtype) for t in (u, gates, M if diagonal else M / D**0.5)]


def operator_floor(
    op: SpectralOperator, B: int, L: int, D: int, K: int, diagonal: bool, passes: int, limits: dict[str, float]
) -> dict[str, float]:
    """Seconds by operations and by bytes of Eq. (7); passes is 1 (forward) or 3."""
    per_feature = op.chunk_size + op.num_states(K) + (1 if diagonal else D)
    flops = 2 * passes * B * L * K * D * per_feature
    gates, M = B * L * K * (HEADS if diagonal else 1), K * D * (1 if diagonal else D)
    moved = 2 * (2 * B * L * D + gates + M)  # u, y
    if passes > 1:
        moved = 2 * moved + 2 * B * L * D  # read again with dy, written as gradients
    return {
        "flops": flops,
        "by_operations": flops / limits["product_flops_per_second"],
        "by_bytes": moved / limits["copy_bytes_per_second"],
    }


def both_passes(layer: Callable[..., Tensor], inputs: list[Tensor], dy: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    leaves = [t.detach().requires_grad_() for t in inputs]
    return lambda: torch.autograd.grad(layer(*leaves), leaves, dy)


def check_operator(ours: Callable[..., Tensor], fft: Callable[..., Tensor], inputs: list[Tensor]) -> dict[str, float]:
    """Largest relative error of outputs and gradients against the FFT in fp32; raises RuntimeError if it is large."""
    dy, exact, errors = torch.randn_like(inputs[0]), [t.float() for t in inputs], {}
    expected = (fft(*exact), *both_passes(fft, exact, dy.float())())
    for name, setting in (("kernels", kernels), ("torch", plain)):
        actual = (setting(ours)(*inputs), *setting(both_passes(ours, inputs, dy))())
        errors[name] = max(
            common.require_close(f"{name} {what}", a, e, TOLERANCE[dy.dtype])
            for what, a, e in zip(("y", "du", "dgates", "dM"), actual, expected)
        )
    return errors


def operator_rows(
    args: argparse.Namespace, device: torch.device, dtype: torch.dtype, D: int, K: int, diagonal: bool, limits: dict
) -> Iterator[dict]:
    """Eq. (7) of one shape: the forward pass, then both."""
    B, L = args.batch, args.length
    op = SpectralOperator(FILTER_LENGTH, chunk_size=32 if diagonal else 64)
    fft = fft_heads if diagonal else tuned_fft
    ours = lambda u, gates, M: op(u, gates, M)[0]  # noqa: E731
    errors = check_operator(ours, fft, operator_inputs(1, min(L, 1000), D, K, diagonal, dtype, device))
    inputs = operator_inputs(B, L, D, K, diagonal, dtype, device)
    dy = torch.randn_like(inputs[0])
    for passes in (1, 3):
        if passes == 1:
            layers = {"kernels": kernels(ours), "torch": plain(ours), "fft": fft}
            calls = {name: functools.partial(torch.no_grad()(layer), *inputs) for name, layer in layers.items()}
        else:
            backward = both_passes(ours, inputs, dy)
            calls = {"kernels": kernels(backward), "torch": plain(backward)}
        seconds = common.paired(calls, device, args.rounds, limit_seconds=3.0)
        floor = operator_floor(op, B, L, D, K, diagonal, passes, limits)
        row = {"batch": B, "length": L, "width": D, "budget": K, "mixing": "diagonal" if diagonal else "dense"}
        row |= {"passes": passes, "errors": errors, "floor": floor}
        row["seconds"] = {name: common.spread(values) for name, values in seconds.items()}
        row["peak_bytes"] = {name: common.peak_memory(call, device) for name, call in calls.items()}
        row["over_kernels"] = {name: common.ratio(values, seconds["kernels"]) for name, values in seconds.items()}
        least = max(floor["by_operations"], floor["by_bytes"])
        row["fraction_of_floor"] = least / row["seconds"]["kernels"]["median"]
        yield row


def gated_block(D: int, K: int, length: int, algorithm: str) -> nn.Module:
    """One gated block of the flagship's shape."""
    config = ESSMConfig(
        block="gated",
        hidden_size=D,
        num_hidden_layers=1,
        num_spectral_channels=K,
        num_heads=HEADS,
        filter_length=max(length, 4096),
        spectral_algorithm=algorithm,
    )
    return ESSMModel(config).layers[0]


def blocks(args: argparse.Namespace, D: int, capacity: int) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """The contenders by name, and why others are missing."""
    names = {"ES-SSM": "chunked", "ES-SSM, fft": "fft"}
    made = {name: gated_block(D, capacity, args.length, algorithm) for name, algorithm in names.items()}
    missing = {}
    for name, peer in PEERS.items():
        try:
            made[name] = peer(D)
        except Exception as error:  # packages that are absent or do not import on this machine
            missing[name] = f"{type(error).__name__}: {error}"
    return made, missing


def block_calls(made: dict[str, nn.Module], budgets: list[int], u: Tensor, passes: int) -> dict[str, Callable[[], Any]]:
    """A call of each contender, ES-SSM at each budget, by FFT at the largest and forward only."""
    calls: dict[str, Callable[[], Any]] = {}
    for name, block in made.items():
        runs: dict[str, Callable[[Tensor], Tensor]] = {name: block}
        if name == "ES-SSM":
            runs = {f"{name}, K={K}": functools.partial(block, budget=K) for K in budgets}
            runs |= {f"{name}, kernels, K={K}": functools.partial(block, budget=K) for K in budgets}
        elif name == "ES-SSM, fft":
            runs = {f"{name}, K={budgets[-1]}": functools.partial(block, budget=budgets[-1])}
        for label, run in runs.items():
            setting = kernels if ", kernels" in label else plain
            if passes == 1:
                calls[label] = setting(functools.partial(torch.no_grad()(run), u))
            elif name != "ES-SSM, fft":  # which keeps K D floats a token for the backward pass
                calls[label] = setting(both_passes_of(run, [u.detach().requires_grad_(), *block.parameters()], u))
    return calls


def both_passes_of(run: Callable[[Tensor], Tensor], leaves: list[Tensor], dy: Tensor) -> Callable[[], Any]:
    return lambda: torch.autograd.grad(run(leaves[0]), leaves, dy, allow_unused=True)


def block_rows(args: argparse.Namespace, device: torch.device, dtype: torch.dtype, D: int) -> Iterator[dict]:
    """Whole blocks of one width: the forward pass, then both."""
    torch.manual_seed(0)
    budgets = sorted(set(args.budgets))
    made, missing = blocks(args, D, budgets[-1])
    made = {name: block.to(device, dtype) for name, block in made.items()}
    u = torch.randn(args.batch, args.length, D, device=device, dtype=dtype)
    reference, tokens = f"ES-SSM, K={budgets[-1]}", args.batch * args.length
    for passes in (1, 3):
        calls = block_calls(made, budgets, u, passes)
        for name in [name for name in calls if name in PEERS]:  # its kernels may not compile here
            try:
                calls[name]()
            except Exception as error:
                missing[name] = f"{type(error).__name__}: {str(error)[:200]}"
                del calls[name]
        seconds = common.paired(calls, device, args.rounds, limit_seconds=5.0)
        yield {
            "batch": args.batch,
            "length": args.length,
            "width": D,
            "passes": passes,
            "parameters": {name: sum(p.numel() for p in block.parameters()) for name, block in made.items()},
            "missing": missing,
            "seconds": {name: common.spread(values) for name, values in seconds.items()},
            "tokens_per_second": {name: tokens / common.spread(values)["median"] for name, values in seconds.items()},
            "peak_bytes": {name: common.peak_memory(call, device) for name, call in calls.items()},
            "over_essm": {name: common.ratio(values, seconds[reference]) for name, values in seconds.items()},
        }


def print_operator(rows: list[dict]) -> None:
    header = "mixing D K passes kernels_ms torch_ms fft_ms floor_ms of_floor"
    cells = []
    for r in rows:
        times = [r["seconds"][n]["median"] * 1e3 if n in r["seconds"] else "-" for n in ("kernels", "torch", "fft")]
        floor = max(r["floor"]["by_operations"], r["floor"]["by_bytes"]) * 1e3
        cells.append([r["mixing"], r["width"], r["budget"], r["passes"], *times, floor, r["fraction_of_floor"]])
    common.table(header, cells)


def main(argv: list[str] | None = None) -> dict:
    p = common.parser(__doc__)
    p.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES)
    p.add_argument("--widths", type=int, nargs="+", default=None)
    p.add_argument("--budgets", type=int, nargs="+", default=None)
    p.add_argument("--length", type=int, default=None)
    p.add_argument("--batch", type=int, default=4)
    args = p.parse_args(argv)
    widths = args.widths or ([64] if args.quick else [1024, 512, 2048])
    args.budgets = args.budgets or ([2, 4] if args.quick else [32, 8, 4])
    args.length = args.length or (128 if args.quick else 65536)
    settings = {"widths": widths, "budgets": args.budgets, "length": args.length, "batch": args.batch}
    device, report = common.start("gpu_layers", args, **settings)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.backends.cuda.matmul.allow_tf32 = False
    report["settings"]["dtype"] = str(dtype).removeprefix("torch.")
    report["ceilings"] = limits = ceilings(device, dtype, args.quick)
    print(", ".join(f"{name} {value:.3g}" for name, value in limits.items()))
    report["operator"], report["blocks"] = [], []
    path = common.report_path(report, args, device)
    if "operator" in args.tables:
        for D, K, diagonal in itertools.product(widths, args.budgets, (False, True)):
            for row in operator_rows(args, device, dtype, D, K, diagonal, limits):
                report["operator"].append(row)
                write_json(path, report, indent=1)
            print_operator(report["operator"][-2:])
    if "blocks" in args.tables:
        for D in widths:
            for row in block_rows(args, device, dtype, D):
                report["blocks"].append(row)
                speeds = ", ".join(f"{name} {rate:,.0f}" for name, rate in row["tokens_per_second"].items())
                print(f"D = {D}, {row['passes']} passes, tokens/s: {speeds}", flush=True)
                for name, reason in row["missing"].items():
                    print(f"{name} is missing: {reason}")
                write_json(path, report, indent=1)
    return common.finish(report, args, device)


if __name__ == "__main__":
    main()
