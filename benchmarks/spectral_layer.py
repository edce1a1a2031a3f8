# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Is Eq. (7) by matrix products (`chunked`) faster and smaller than by FFT, and how near is it to its own floor?

    python -m benchmarks.spectral_layer                  every shape
    python -m benchmarks.spectral_layer --lengths 4096 --batches 1

Two FFT layers stand against it, so that neither is made of straw; both cache the filters' spectra, take one real FFT of
u, and compute no final state (`chunked` does):
  paper   the authors' order: K inverse FFTs in groups of 8 channels, einsum with M_k, gate-weighted sum.
  tuned   the fastest we know how to write: groups sized to the cache, gates applied before mixing, so that one
          matrix product per group mixes and sums.
Both differentiate by autograd and so keep K D floats per token for the backward pass, as the published layer does.

The floor is the time of the layer's own two matrix products alone, each group's operands in cache, best of several
groupings and layouts, measured in the same rounds; three times that for forward and backward, recomputation included.
fp32 on the CPU, bf16 and fp32 on a GPU.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from modeling_essm.spectral_basis import spectral_basis
from modeling_essm.spectral_ops import SpectralOperator

from . import common

FILTER_LENGTH, WIDTH = 65536, 256
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 2e-2}  # K = 32 states in fp32: 3e-5; bf16 operands: 3e-3
GROUP_BYTES = {"cpu": 16 << 20, "cuda": 1 << 30}  # of one group's features in `tuned_fft`


@functools.lru_cache(maxsize=1)
def filter_spectra(K: int, L: int, device: torch.device) -> Tensor:
    """(K, L + 1) complex64."""
    phi = torch.from_numpy(spectral_basis(FILTER_LENGTH).filters(K)[:L])
    return torch.fft.rfft(phi.T.contiguous(), 2 * L).to(torch.complex64).to(device)


def paper_fft(u: Tensor, gates: Tensor, M: Tensor, group: int = 8) -> Tensor:
    L, K = gates.shape[1:]
    phi_f = filter_spectra(K, L, u.device)
    u_f = torch.fft.rfft(u.float().mT.contiguous(), 2 * L)  # (B, D, L + 1)
    y = None
    for a in range(0, K, group):
        g = slice(a, min(a + group, K))
        features = torch.fft.irfft(u_f[:, None] * phi_f[g, None], 2 * L)[..., :L]  # (B, k, D, L)
        mixed = torch.einsum("bkdl,kde->bkle", features.to(u.dtype), M[g])
        part = torch.einsum("bkle,blk->ble", mixed, gates[..., g])
        y = part if y is None else y + part
    return y


def tuned_fft(u: Tensor, gates: Tensor, M: Tensor) -> Tensor:
    L, K = gates.shape[1:]
    phi_f = filter_spectra(K, L, u.device)
    u_f = torch.fft.rfft(u.float().mT.contiguous(), 2 * L)  # (B, D, L + 1)
    gates = gates.mT[:, :, None]  # (B, K, 1, L)
    y, group = None, max(1, GROUP_BYTES[u.device.type] // (u_f.numel() * u_f.element_size()))
    for a in range(0, K, group):
        g = slice(a, min(a + group, K))
        features = torch.fft.irfft(u_f[:, None] * phi_f[g, None], 2 * L)[..., :L]  # (B, k, D, L)
        gated = (features.to(u.dtype) * gates[:, g]).flatten(1, 2)  # (B, kD, L)
        part = gated.mT @ M[g].flatten(0, 1)
        y = part if y is None else y + part
    return y


def chunked(op: SpectralOperator, u: Tensor, gates: Tensor, M: Tensor) -> Tensor:
    return op(u, gates, M)[0]


def products(op: SpectralOperator, u: Tensor, K: int, group: int, wide: bool) -> Callable[[], None]:
    """The layer's two matrix products and nothing else: W [u; x] and F M, `group` chunks at a time."""
    (B, L, D), C, N = u.shape, op.chunk_size, op.num_states(K)
    n = B * -(-L // C)
    W = u.new_empty(C * K, C + N).normal_(std=0.01)
    inputs = u.new_empty(n, C + N, D).normal_()
    M, y = u.new_empty(K * D, D).normal_(std=0.01), u.new_empty(n, C, D)
    features = u.new_empty(min(group, n), C * K, D)

    def run() -> None:
        for a in range(0, n, group):
            x = inputs[a : a + group]
            F = features[: len(x)]
            if wide:
                torch.mm(W, x.view(C + N, -1), out=F.view(C * K, -1))
            else:
                torch.bmm(W.expand(len(x), -1, -1), x, out=F)
            torch.mm(F.view(-1, K * D), M, out=y[a : a + group].view(-1, D))

    return run


def fastest_products(op: SpectralOperator, u: Tensor, K: int, device: torch.device) -> Callable[[], None]:
    """The grouping and layout with which the products run fastest here."""
    n = u.shape[0] * -(-u.shape[1] // op.chunk_size)
    groups = (1, 2, 4, 8, 16) if device.type == "cpu" else (16, 64, 256, 1024)
    groups = sorted({min(g, n) for g in groups})
    candidates = {(g, wide): products(op, u, K, g, wide) for g in groups for wide in (False, True)}
    seconds = common.paired(candidates, device, rounds=3, warmup=1)
    return candidates[min(seconds, key=lambda c: min(seconds[c]))]


def product_flops(op: SpectralOperator, B: int, L: int, K: int) -> int:
    """Multiplications and additions of the two products, forward."""
    n, C, D = B * -(-L // op.chunk_size), op.chunk_size, WIDTH
    return 2 * n * C * K * D * (C + op.num_states(K) + D)


def square_product_rate(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of one large square matrix product: what the machine can do at all."""
    size = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / min(common.paired({"mm": lambda: torch.mm(a, b, out=out)}, device, 5)["mm"])


def make_inputs(B: int, L: int, K: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """u, gates and channel_mixing as a model has them: unit inputs, gates near 1/K, mixing of the size of 1/sqrt(D)."""
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(B, L, WIDTH, generator=generator)
    gates = torch.randn(B, L, K, generator=generator).softmax(-1)
    M = torch.randn(K, WIDTH, WIDTH, generator=generator) / WIDTH**0.5
    return [t.to(device, dtype) for t in (u, gates, M)]


def make_output_gradient(B: int, L: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(B, L, WIDTH, generator=torch.Generator().manual_seed(1)).to(device, dtype)


def both_passes(layer: Callable[..., Tensor], inputs: list[Tensor], dy: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    leaves = [t.detach().requires_grad_() for t in inputs]
    return lambda: torch.autograd.grad(layer(*leaves), leaves, dy)


def contenders() -> dict[str, Callable[..., Tensor]]:
    return {
        "chunked": functools.partial(chunked, SpectralOperator(FILTER_LENGTH)),
        "paper": paper_fft,
        "tuned": tuned_fft,
    }


def check(B: int, L: int, K: int, dtype: torch.dtype, device: torch.device) -> float:
    """Largest relative error of outputs and gradients against the paper's layer in fp32; raises if it is too large."""
    inputs, dy = make_inputs(B, L, K, dtype, device), make_output_gradient(B, L, dtype, device)
    exact, tolerance, worst = [t.float() for t in inputs], TOLERANCE[dtype], 0.0
    names = ("y", "du", "dgates", "dM")
    expected = (paper_fft(*exact), *both_passes(paper_fft, exact, dy.float())())
    for name, layer in contenders().items():
        actual = (layer(*inputs), *both_passes(layer, inputs, dy)())
        for what, a, e in zip(names, actual, expected):
            worst = max(worst, common.require_close(f"{name} {what}", a, e, tolerance))
    return worst


def measure(B: int, L: int, K: int, dtype: torch.dtype, device: torch.device, rounds: int) -> list[dict]:
    """One row for forward and one for forward and backward."""
    op, layers = SpectralOperator(FILTER_LENGTH), contenders()
    inputs, dy = make_inputs(B, L, K, dtype, device), make_output_gradient(B, L, dtype, device)
    with torch.no_grad():
        floor = fastest_products(op, inputs[0], K, device)
    rows = []
    for passes, factor in (("forward", 1), ("forward+backward", 3)):
        if factor == 1:
            calls = {name: functools.partial(torch.no_grad()(layer), *inputs) for name, layer in layers.items()}
        else:
            calls = {name: both_passes(layer, inputs, dy) for name, layer in layers.items()}
        memory = {name: common.peak_memory(call, device) for name, call in calls.items()}
        seconds = common.paired({**calls, "products": torch.no_grad()(floor)}, device, rounds)
        floor_seconds = [factor * s for s in seconds["products"]]
        row = {"batch": B, "length": L, "budget": K, "passes": passes, "rounds": len(floor_seconds)}
        row["seconds"] = {name: common.spread(seconds[name]) for name in calls}
        row["seconds"]["floor"] = common.spread(floor_seconds)
        row["peak_bytes"] = memory
        row["products_flops_per_second"] = factor * product_flops(op, B, L, K) / row["seconds"]["floor"]["median"]
        row["over_floor"] = common.ratio(seconds["chunked"], floor_seconds)
        for name in ("paper", "tuned"):
            row[f"speedup_over_{name}"] = common.ratio(seconds[name], seconds["chunked"])
            row[f"memory_of_{name}"] = memory["chunked"] / memory[name]
        rows.append(row)
    return rows


def measure_elasticity(B: int, L: int, dtype: torch.dtype, device: torch.device, rounds: int) -> list[dict]:
    """time(K=4) / time(K=32), the two in turn."""
    layer, rows = contenders()["chunked"], []
    inputs = {K: make_inputs(B, L, K, dtype, device) for K in (4, 32)}
    for passes in ("forward", "forward+backward"):
        if passes == "forward":
            calls = {K: functools.partial(torch.no_grad()(layer), *t) for K, t in inputs.items()}
        else:
            calls = {K: both_passes(layer, t, torch.ones_like(t[0])) for K, t in inputs.items()}
        seconds = common.paired(calls, device, rounds)
        rows.append({"batch": B, "length": L, "passes": passes, "time_ratio": common.ratio(seconds[4], seconds[32])})
    return rows


def targets(rows: list[dict], elasticity: list[dict], device: torch.device) -> list[dict]:
    """The worst case over batch, budget, threads and passes at the target length decides."""
    gpu, out = device.type == "cuda", []
    for name in ("paper", "tuned"):
        for passes in ("forward", "forward+backward"):
            least = min(r[f"speedup_over_{name}"]["median"] for r in rows if r["passes"] == passes)
            out.append(common.target(f"speed over {name} FFT, {passes}, worst", least, least=5.0 if gpu else 2.0))
        most = max(r[f"memory_of_{name}"] for r in rows)
        out.append(common.target(f"memory over {name} FFT, worst", most, most=0.25))
    worst = max(r["over_floor"]["median"] for r in rows)
    out.append(common.target("time over the floor, worst", worst, most=2.0 if gpu else 1.35))
    for passes in ("forward", "forward+backward"):
        most = max(r["time_ratio"]["median"] for r in elasticity if r["passes"] == passes)
        out.append(common.target(f"time(K=4) / time(K=32), {passes}, worst", most, most=0.2))
    return out


def print_rows(rows: list[dict]) -> None:
    def cells(r: dict) -> list:
        speed = ["{median:.2f}({min:.2f}-{max:.2f})".format(**r[f"speedup_over_{n}"]) for n in ("paper", "tuned")]
        memory = [f"{r['peak_bytes'][n] / 2**20:.1f}" for n in ("chunked", "paper", "tuned")]
        times = [common.ms(r["seconds"]["chunked"])]
        times += [f"{r['seconds'][n]['median'] * 1e3:.4g}" for n in ("paper", "tuned")]
        floor = "{median:.2f}({min:.2f}-{max:.2f})".format(**r["over_floor"])
        rate = r["products_flops_per_second"] / 1e9
        shape = [r["dtype"], r["threads"], r["batch"], r["length"], r["budget"], r["passes"]]
        return [*shape, *times, *speed, *memory, floor, f"{rate:.0f}"]

    header = "dtype threads B L K passes chunked_ms paper_ms tuned_ms paper/chunked tuned/chunked "
    common.table(header + "MiB paper_MiB tuned_MiB chunked/floor products_GFLOP/s", [cells(r) for r in rows])


def main(argv: list[str] | None = None) -> dict:
    p = common.parser(__doc__)
    p.add_argument("--lengths", type=int, nargs="+", default=None)
    p.add_argument("--batches", type=int, nargs="+", default=None)
    p.add_argument("--budgets", type=int, nargs="+", default=None)
    p.add_argument("--threads", type=int, nargs="+", default=None, help="CPU only")
    args = p.parse_args(argv)
    lengths = args.lengths or ((1024,) if args.quick else (1024, 4096, 16384))
    batches = args.batches or ((1,) if args.quick else (1, 4))
    budgets = args.budgets or ((4, 32) if args.quick else (2, 4, 8, 16, 32))
    settings = {"filter_length": FILTER_LENGTH, "width": WIDTH, "chunk": 64, "warmup": 2, "rounds": args.rounds}
    device, report = common.start("spectral_layer", args, **settings)
    gpu = device.type == "cuda"
    counts = [torch.get_num_threads()] if gpu else args.threads or ([2] if args.quick else [1, 2])
    torch.backends.cuda.matmul.allow_tf32 = False  # fp32 means fp32
    common.check_peak_memory(device)
    rows, elasticity, report["errors"], report["square_product_flops_per_second"] = [], [], [], []
    target_length = 4096 if 4096 in lengths else max(lengths)
    for dtype in (torch.bfloat16, torch.float32) if gpu else (torch.float32,):
        name = str(dtype).removeprefix("torch.")
        for L, K in itertools.product(lengths, budgets):  # before anything is timed
            error = check(min(batches), L, K, dtype, device)
            report["errors"].append({"dtype": name, "length": L, "budget": K, "relative_error": error})
        worst = max(e["relative_error"] for e in report["errors"] if e["dtype"] == name)
        print(f"{name}: outputs and gradients agree with the FFT in fp32 to {worst:.1e} (limit {TOLERANCE[dtype]:.0e})")
        for count in counts:
            with common.threads(count):
                rate = square_product_rate(dtype, device)
                label = {"dtype": name, "threads": count}
                report["square_product_flops_per_second"].append({**label, "rate": rate})
                print(f"{name}, {count} threads: one large square matrix product runs at {rate / 1e9:.0f} GFLOP/s")
                for B in batches:
                    for L in lengths:
                        new = [{**label, **r} for K in budgets for r in measure(B, L, K, dtype, device, args.rounds)]
                        print_rows(new)
                        rows += new
                    elasticity += [
                        {**label, **r} for r in measure_elasticity(B, target_length, dtype, device, args.rounds)
                    ]
    report["results"], report["elasticity"] = rows, elasticity
    main_dtype = "bfloat16" if gpu else "float32"
    at_target = [r for r in rows if r["length"] == target_length and r["dtype"] == main_dtype]
    report["targets"] = targets(at_target, [r for r in elasticity if r["dtype"] == main_dtype], device)
    print(f"targets at L = {target_length}, {main_dtype}:")
    return common.finish(report, args, device)


if __name__ == "__main__":
    main()
