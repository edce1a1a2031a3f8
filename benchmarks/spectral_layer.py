# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Is Eq. (7) by matrix products (`chunked`) faster and smaller than by FFT, and how near is it to its own floor?

    python -m benchmarks.spectral_layer                                     every shape
    python -m benchmarks.spectral_layer --lengths 4096 --mixing diagonal

M_k are dense, as in the paper's block, or diagonal with gates for each of K heads, as in the elastic block with
"softmax"; of its nested heads each mixes only the filters up to its own, and "unnested" computes all. Two FFT
layers stand against `chunked`; both cache the filters' spectra, take one real FFT of u, and compute no final state:
  paper   the authors' order (dense M_k only): K inverse FFTs in groups of 8 channels, einsum with M_k, weighted sum.
  tuned   the fastest we know how to write: groups sized to the cache, gates applied before mixing, one product.
The floor is the time of the layer's matrix products alone, in the best of several groupings, in the same rounds; three
times that with the backward pass. Outputs and gradients are checked against the FFT in fp32 before anything is timed.
fp32 on the CPU, bf16 on a GPU.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from modeling_essm.spectral_basis import spectral_basis
from modeling_essm.spectral_ops import SpectralOperator

from . import common

FILTER_LENGTH = 65536
CHUNK = {"dense": 64, "diagonal": 32, "nested": 32}  # the blocks' defaults
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 2e-2}  # K = 32 states in fp32: 3e-5; bf16 operands: 3e-3
GROUP_BYTES = {"cpu": 16 << 20, "cuda": 1 << 30}  # of one group's features in `tuned_fft`


@functools.lru_cache(maxsize=1)
def filter_spectra(K: int, L: int, device: torch.device) -> Tensor:
    """(K, L + 1) complex64."""
    phi = torch.from_numpy(spectral_basis(FILTER_LENGTH).filters(K)[:L])
    return torch.fft.rfft(phi.T.contiguous(), 2 * L).to(torch.complex64).to(device)


def features_of(u: Tensor, K: int, group: int) -> Iterator[tuple[slice, Tensor]]:
    """Channels, and the features (B, k, D, L) that they make of u (B, L, D), a group after the other."""
    L, phi_f = u.shape[1], filter_spectra(K, u.shape[1], u.device)
    u_f = torch.fft.rfft(u.float().mT.contiguous(), 2 * L)  # (B, D, L + 1)
    group = group or max(1, GROUP_BYTES[u.device.type] // (u_f.numel() * u_f.element_size()))
    for a in range(0, K, group):
        g = slice(a, min(a + group, K))
        yield g, torch.fft.irfft(u_f[:, None] * phi_f[g, None], 2 * L)[..., :L].to(u.dtype)


def paper_fft(u: Tensor, gates: Tensor, M: Tensor) -> Tensor:
    """u (B, L, D), gates (B, L, K), dense M (K, D, D) -> (B, L, D)."""
    y = torch.zeros_like(u)
    for g, features in features_of(u, len(M), 8):
        y = y + torch.einsum("bkle,blk->ble", torch.einsum("bkdl,kde->bkle", features, M[g]), gates[..., g])
    return y


def tuned_fft(u: Tensor, gates: Tensor, M: Tensor) -> Tensor:
    """As `paper_fft`; of diagonal M (K, D) with gates (B, L, K, K)."""
    y = torch.zeros_like(u)
    gates = gates.reshape(*gates.shape[:3], -1).permute(0, 2, 3, 1).unsqueeze(3)  # (B, K, heads, 1, L)
    for g, features in features_of(u, len(M), 0):
        gated = (features.unflatten(2, (gates.shape[2], -1)) * gates[:, g]).flatten(2, 3)
        y = y + (
            torch.einsum("bkdl,kd->bld", gated, M[g]) if M.ndim == 2 else gated.flatten(1, 2).mT @ M[g].flatten(0, 1)
        )
    return y


def products(op: SpectralOperator, u: Tensor, M: Tensor, group: int) -> Callable[[], None]:
    """The layer's matrix products and nothing else, `group` chunks at a time: W [u; x], and of dense M_k also F M."""
    (B, L, D), K, C = u.shape, len(M), op.chunk_size
    n, width = B * -(-L // C), C + op.num_states(K)
    W, inputs = u.new_empty(C * K, width).normal_(std=0.01), u.new_empty(n, width, D).normal_()
    mixing, y = u.new_empty(K * D, D).normal_(std=0.01), u.new_empty(n, C, D)
    features = u.new_empty(min(group, n), C * K, D)

    @torch.no_grad()
    def run() -> None:
        for a in range(0, n, group):
            x = inputs[a : a + group]
            F = features[: len(x)]
            torch.bmm(W.expand(len(x), -1, -1), x, out=F)
            if M.ndim == 3:
                torch.mm(F.view(-1, K * D), mixing, out=y[a : a + group].view(-1, D))

    return run


def fastest_products(op: SpectralOperator, u: Tensor, M: Tensor) -> Callable[[], None]:
    groups = (1, 2, 4, 8, 16) if u.device.type == "cpu" else (16, 64, 256, 1024)
    candidates = {group: products(op, u, M, group) for group in groups}
    seconds = common.paired(candidates, u.device, rounds=3, warmup=1)
    return candidates[min(seconds, key=lambda group: min(seconds[group]))]


def make_inputs(B: int, L: int, D: int, K: int, mixing: str, device: torch.device) -> list[Tensor]:
    """u, gates and channel_mixing as a model has them: unit inputs, gates near 1/K, mixing of the size of 1/sqrt(D)."""
    generator, diagonal = torch.Generator().manual_seed(0), mixing != "dense"
    u = torch.randn(B, L, D, generator=generator)
    gates = torch.randn(B, L, K, *([K] if diagonal else []), generator=generator).softmax(2)
    gates = gates.triu() if mixing == "nested" else gates
    M = torch.randn(K, D, *([] if diagonal else [D]), generator=generator)
    return [t.to(device, common.dtype_of(device)) for t in (u, gates, M if diagonal else M / D**0.5)]


def both_passes(layer: Callable[..., Tensor], inputs: list[Tensor], dy: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    leaves = [t.detach().requires_grad_() for t in inputs]
    return lambda: torch.autograd.grad(layer(*leaves), leaves, dy)


def check(layers: dict[str, Callable[..., Tensor]], inputs: list[Tensor]) -> float:
    """Largest relative error of outputs and gradients against the FFT in fp32; raises if it is too large."""
    dy, exact, worst = torch.randn_like(inputs[0]), [t.float() for t in inputs], 0.0
    expected = (tuned_fft(*exact), *both_passes(tuned_fft, exact, dy.float())())
    for name, layer in layers.items():
        actual = (layer(*inputs), *both_passes(layer, inputs, dy)())
        for what, a, e in zip(("y", "du", "dgates", "dM"), actual, expected):
            if what == "dgates":  # those that are zero have none
                a, e = (gradient.masked_fill(inputs[1] == 0, 0.0) for gradient in (a, e))
            worst = max(worst, common.require_close(f"{name} {what}", a, e, TOLERANCE[dy.dtype]))
    return worst


def measure(B: int, L: int, D: int, K: int, mixing: str, device: torch.device, rounds: int) -> list[dict[str, Any]]:
    op = SpectralOperator(FILTER_LENGTH, chunk_size=CHUNK[mixing])
    nested = mixing == "nested"
    layers: dict[str, Callable[..., Tensor]] = {"chunked": lambda u, gates, M: op(u, gates, M, nested=nested)[0]}
    layers |= {"tuned": tuned_fft} | ({"paper": paper_fft} if mixing == "dense" else {})
    layers |= {"unnested": lambda u, gates, M: op(u, gates, M)[0]} if nested else {}
    error = check(layers, make_inputs(1, L, D, K, mixing, device))
    inputs = make_inputs(B, L, D, K, mixing, device)
    dy, floor, rows = torch.randn_like(inputs[0]), fastest_products(op, inputs[0], inputs[2]), []
    forward = {name: functools.partial(torch.no_grad()(layer), *inputs) for name, layer in layers.items()}
    both: dict[str, Any] = {name: both_passes(layer, inputs, dy) for name, layer in layers.items()}
    for passes, calls, factor in (("forward", forward, 1), ("both", both, 3)):
        memory = {name: common.peak_memory(call, device) for name, call in calls.items()}
        seconds = common.paired({**calls, "floor": floor}, device, rounds)
        seconds["floor"] = [factor * s for s in seconds["floor"]]
        row: dict[str, Any] = {"mixing": mixing, "batch": B, "length": L, "width": D, "budget": K, "passes": passes}
        row |= {"relative_error": error, "peak_bytes": memory}
        row["seconds"] = {name: common.spread(samples) for name, samples in seconds.items()}
        row["over_floor"] = common.ratio(seconds["chunked"], seconds["floor"])
        row["speedup_over"] = {name: common.ratio(seconds[name], seconds["chunked"]) for name in [*layers][1:]}
        row["memory_of"] = {name: memory["chunked"] / memory[name] for name in [*layers][1:]}
        rows.append(row)
    return rows


def main(argv: list[str] | None = None) -> dict[str, Any]:
    p = common.parser(__doc__)
    p.add_argument("--mixing", nargs="+", choices=CHUNK, default=[*CHUNK])
    for name in ("widths", "lengths", "batches", "budgets", "threads"):
        p.add_argument(f"--{name}", type=common.positive, nargs="+")
    args = p.parse_args(argv)
    device, report = common.start("spectral_layer", args, filter_length=FILTER_LENGTH, rounds=args.rounds)
    one = args.quick or device.type == "cuda"
    shapes = itertools.product(
        args.threads or ([1] if one else [1, 2]),
        args.widths or [64 if args.quick else 256],
        args.mixing,
        args.batches or ([1] if args.quick else [1, 4]),
        args.lengths or ([1024] if args.quick else [1024, 4096, 16384]),
        args.budgets or ([4] if args.quick else [2, 4, 8, 16, 32]),
    )
    torch.backends.cuda.matmul.allow_tf32 = False  # fp32 means fp32
    report["results"] = []
    for count, D, mixing, B, L, K in shapes:
        with common.threads(count):
            rows = [{"threads": count} | row for row in measure(B, L, D, K, mixing, device, args.rounds)]
        report["results"] += rows
        common.table(rows)
    return common.finish(report, args)


if __name__ == "__main__":
    main()
