# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Eq. (7) with heads: how much faster than by FFT, how near to its own matrix products, and with which chunk length?

    python -m benchmarks.spectral_heads
    python -m benchmarks.spectral_heads --widths 256 --lengths 4096 --head_sizes 64 1

With small heads the product with W, which makes the features, is most of the work, and a shorter chunk makes it
smaller: C + N columns instead of 64 + N. There is a gate for each head, but no more than 8. The FFT layer is `tuned` of
`benchmarks.spectral_layer` with a product for each head. The floor is the time of the layer's matrix products alone,
each group's operands in cache, best of several groupings, at the same chunk length, in the same rounds; three times
that with the backward pass. Diagonal M_k (head size 1) have one product and passes over the features, which the floor
leaves out. fp32 on the CPU, one thread; bf16 on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from modeling_essm.spectral_ops import SpectralOperator

from . import common
from .spectral_layer import FILTER_LENGTH, GROUP_BYTES, both_passes, filter_spectra

CHUNKS = (16, 32, 64, 128)
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 2e-2}  # as in `spectral_layer`


def fft_heads(u: Tensor, gates: Tensor, M: Tensor) -> Tensor:
    """(B, L, D), (B, L, K, G), (K, h, d, e) -> (B, L, h e): groups sized to the cache, gates before mixing."""
    L, K = gates.shape[1:3]
    h, d = M.shape[1:3]
    phi_f = filter_spectra(K, L, u.device)
    u_f = torch.fft.rfft(u.float().mT.contiguous(), 2 * L)  # (B, D, L + 1)
    gates = gates.permute(0, 2, 3, 1).unsqueeze(3)  # (B, K, G, 1, L)
    y, group = None, max(1, GROUP_BYTES[u.device.type] // (u_f.numel() * u_f.element_size()))
    for a in range(0, K, group):
        g = slice(a, min(a + group, K))
        features = torch.fft.irfft(u_f[:, None] * phi_f[g, None], 2 * L)[..., :L].to(u.dtype)  # (B, k, D, L)
        gated = (features.unflatten(2, (gates.shape[2], -1)) * gates[:, g]).flatten(2, 3).unflatten(2, (h, d))
        if d == 1:
            part = torch.einsum("bkhl,kh->blh", gated[:, :, :, 0], M[g, :, 0, 0])
        else:
            rows = gated.permute(0, 2, 4, 1, 3).flatten(3)  # (B, h, L, k d)
            part = torch.matmul(rows, M[g].transpose(0, 1).flatten(1, 2)).transpose(1, 2).flatten(2)
        y = part if y is None else y + part
    assert y is not None
    return y


def chunked(op: SpectralOperator, u: Tensor, gates: Tensor, M: Tensor) -> Tensor:
    return op(u, gates, M)[0]


def products(op: SpectralOperator, u: Tensor, M: Tensor, group: int) -> Callable[[], None]:
    """The layer's matrix products and nothing else, `group` chunks at a time."""
    (B, L, D), (K, h, d, e) = u.shape, M.shape
    C, N = op.chunk_size, op.num_states(K)
    n = B * -(-L // C)
    W, inputs = u.new_empty(C + N, K * C).normal_(std=0.01), u.new_empty(n, D, C + N).normal_()
    matrices, y = u.new_empty(h, e, d * K).normal_(std=0.01), u.new_empty(min(group, n), h, e, C)
    features = u.new_empty(min(group, n), D, K * C)

    def one_head() -> None:
        for a in range(0, n, group):
            x = inputs[a : a + group].view(-1, C + N, D)
            F = features[: len(x)].view(len(x), K * C, D)
            torch.bmm(W.view(K * C, C + N).expand(len(x), -1, -1), x, out=F)
            torch.mm(F.view(-1, K * D), matrices.view(K * D, e), out=y[: len(x)].view(-1, e))

    def run() -> None:
        for a in range(0, n, group):
            x = inputs[a : a + group]
            F = features[: len(x)]
            torch.mm(x.view(-1, C + N), W, out=F.view(-1, K * C))
            if d > 1:
                torch.matmul(matrices, F.view(len(x), h, d * K, C), out=y[: len(x)])

    return one_head if h == 1 else run


def fastest_products(op: SpectralOperator, u: Tensor, M: Tensor, device: torch.device) -> Callable[[], None]:
    groups = (1, 2, 4, 8, 16) if device.type == "cpu" else (16, 64, 256, 1024)
    candidates = {g: products(op, u, M, g) for g in groups}
    seconds = common.paired(candidates, device, rounds=3, warmup=1)
    return candidates[min(seconds, key=lambda g: min(seconds[g]))]


def make_inputs(L: int, D: int, d: int, K: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(1, L, D, generator=generator)
    gates = torch.randn(1, L, K, min(D // d, 8), generator=generator).softmax(2)
    M = torch.randn(K, D // d, d, d, generator=generator) / d**0.5
    return [t.to(device, dtype) for t in (u, gates, M)]


def measure(L: int, D: int, d: int, K: int, dtype: torch.dtype, device: torch.device, rounds: int) -> list[dict]:
    """A row for forward and one for forward and backward."""
    inputs = make_inputs(L, D, d, K, dtype, device)
    dy = torch.randn(1, L, D, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    operators = {C: SpectralOperator(FILTER_LENGTH, chunk_size=C) for C in CHUNKS}
    layers: dict = {C: functools.partial(chunked, op) for C, op in operators.items()} | {"fft": fft_heads}
    exact = [t.float() for t in inputs]
    expected = (fft_heads(*exact), *both_passes(fft_heads, exact, dy.float())())
    for name, layer in layers.items():
        for what, a, e in zip(
            ("y", "du", "dgates", "dM"), (layer(*inputs), *both_passes(layer, inputs, dy)()), expected
        ):
            common.require_close(f"{name} {what}", a, e, TOLERANCE[dtype])
    with torch.no_grad():
        floors = {
            f"floor {C}": torch.no_grad()(fastest_products(op, inputs[0], inputs[2], device))
            for C, op in operators.items()
        }
    rows = []
    for passes, factor in (("forward", 1), ("forward+backward", 3)):
        if factor == 1:
            calls = {name: functools.partial(torch.no_grad()(layer), *inputs) for name, layer in layers.items()}
        else:
            calls = {name: both_passes(layer, inputs, dy) for name, layer in layers.items()}
        seconds = common.paired({**calls, **floors}, device, rounds)
        row = {"width": D, "head_size": d, "length": L, "budget": K, "passes": passes, "rounds": len(seconds["fft"])}
        row["seconds"] = {str(name): common.spread(values) for name, values in seconds.items()}
        row["over_floor"] = {C: common.ratio(seconds[C], [factor * s for s in seconds[f"floor {C}"]]) for C in CHUNKS}
        row["speedup_over_fft"] = {C: common.ratio(seconds["fft"], seconds[C]) for C in CHUNKS}
        row["fastest_chunk"] = min(CHUNKS, key=lambda C: row["seconds"][str(C)]["median"])
        rows.append(row)
    return rows


def print_rows(rows: list[dict]) -> None:
    def cells(r: dict) -> list:
        times = [common.ms(r["seconds"][str(name)]) for name in (*CHUNKS, "fft")]
        C = r["fastest_chunk"]
        ratios = [
            "{median:.2f}({min:.2f}-{max:.2f})".format(**r[name][C]) for name in ("speedup_over_fft", "over_floor")
        ]
        return [r["width"], r["head_size"], r["length"], r["budget"], r["passes"], *times, C, *ratios]

    header = "D d L K passes " + " ".join(f"C{C}_ms" for C in CHUNKS)
    common.table(header + " fft_ms best_C fft/best best/floor", [cells(r) for r in rows])


def main(argv: list[str] | None = None) -> dict:
    p = common.parser(__doc__)
    p.add_argument("--widths", type=int, nargs="+", default=None)
    p.add_argument("--lengths", type=int, nargs="+", default=None)
    p.add_argument("--head_sizes", type=int, nargs="+", default=None, help="d, by default D, D/4, D/8, 16 and 1")
    p.add_argument("--budgets", type=int, nargs="+", default=None)
    args = p.parse_args(argv)
    lengths = args.lengths or ((512,) if args.quick else (512, 4096, 16384))
    device, report = common.start("spectral_heads", args, filter_length=FILTER_LENGTH, warmup=2, rounds=args.rounds)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows = []
    with common.threads(1):
        for D in args.widths or ((64,) if args.quick else (256, 512)):
            for d in args.head_sizes or ((16, 1) if args.quick else (D, D // 4, D // 8, 16, 1)):
                for L in lengths:
                    new = [
                        {"dtype": str(dtype)[6:], "threads": 1, **row}
                        for K in args.budgets or ((4,) if args.quick else (4, 8, 32))
                        for row in measure(L, D, d, K, dtype, device, args.rounds)
                    ]
                    print_rows(new)
                    rows += new
    report["results"] = rows
    worst = max(r["over_floor"][r["fastest_chunk"]]["median"] for r in rows if r["head_size"] > 1)
    report["targets"] = [common.target("time over the floor at the best chunk, worst", worst, most=1.4)]
    return common.finish(report, args, device)


if __name__ == "__main__":
    main()
