# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""How long does the spectral basis take to build, and is it right where an eigendecomposition is not?

    python -m benchmarks.spectral_basis

Build time is the basis of filter length H and the chunk operators for K = 32, caches cleared; everything is NumPy fp64
on the CPU. phi_k must have exactly k-1 sign changes (Z is totally positive): channels are counted up to the first
that has not, here and for numpy.linalg.eigh of the explicit Hankel matrix in fp64, where channels within 1e-3 of ours
(relative l2, again up to the first that is not) are counted too.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from modeling_essm.spectral_basis import chunk_operators, num_states, spectral_basis

from . import common

CHANNELS, CHUNK, MARGIN = 32, 64, 16


def build(H: int, K: int) -> None:
    spectral_basis.cache_clear()
    chunk_operators.cache_clear()
    N = min(num_states(K, MARGIN), len(spectral_basis(H).sigma))
    chunk_operators(H, N, CHUNK)


def leading(right: np.ndarray) -> int:
    """How many are true before the first that is not."""
    return int(right.size if right.all() else right.argmin())


def oscillating_channels(phi: np.ndarray) -> int:
    """How many leading columns of phi (H, K) pass the oscillation theorem: k-1 sign changes, none of them a zero."""
    negative = np.signbit(phi)
    changes = np.count_nonzero(negative[1:] != negative[:-1], axis=0)
    return leading(changes == np.arange(phi.shape[1]))


def hankel_eigh(H: int, K: int) -> np.ndarray:
    """(H, K) leading eigenvectors of the explicit matrix (128 MB at H = 4096), signs as in `spectral_basis`."""
    i = np.arange(1, H + 1, dtype=np.float64)
    s = i[:, None] + i
    vectors = np.linalg.eigh(2.0 / (s**3 - s))[1][:, ::-1][:, :K]
    return vectors * (np.sign(vectors[-1]) * (-1.0) ** np.arange(K))


def main(argv: list[str] | None = None) -> dict[str, Any]:
    p = common.parser(__doc__, on_cpu=True)
    p.add_argument("--lengths", type=common.positive, nargs="+")
    args = p.parse_args(argv)
    device, report = common.start("spectral_basis", args, dtype="float64", channels=CHANNELS, chunk=CHUNK)
    report["results"] = []
    for H in args.lengths or ((1024,) if args.quick else (1024, 4096, 65536, 2**20)):
        K = min(CHANNELS, spectral_basis(H).num_resolved)
        seconds = common.spread(common.paired({"build": functools.partial(build, H, K)}, device, args.rounds)["build"])
        row: dict[str, Any] = {"H": H, "build_seconds": seconds, "channels": K}
        if H <= 65536:
            phi = spectral_basis(H).filters(K)
            row["oscillating_channels"] = oscillating_channels(phi)
            row["orthonormality_error"] = float(np.abs(phi.T @ phi - np.eye(K)).max())
        if H <= 4096:
            by_eigh = hankel_eigh(H, K)
            row["eigh_oscillating_channels"] = oscillating_channels(by_eigh)
            row["eigh_close_channels"] = leading(np.linalg.norm(by_eigh - phi, axis=0) <= 1e-3)
        report["results"].append(row)
    return common.finish(report, args)


if __name__ == "__main__":
    main()
