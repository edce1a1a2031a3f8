# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The modes of a linear recurrence, which is all that pruning and truncation see of a layer.

    x_t = lam x_{t-1} + B u_t,    y_t = out(C x_t)

The skip D u_t has no modes and is not part of it. All arithmetic on systems is done in complex128.
Letters: n modes, p inputs, q outputs, H channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

OUTPUTS = {"complex": 1.0, "real": 1.0, "twice_real": 2.0}  # y = C x, Re(C x), 2 Re(C x): factor of every norm bound


@dataclass(frozen=True)
class DiagonalSystem:
    """One layer's modes, discrete and with all factors of step or normalisation inside B.

    A system with many inputs and outputs (S5, LRU) has lam (n,); one recurrence per channel (S4D) has lam (H, n).

    Attributes:
        lam: eigenvalues, complex128, (n,) or (H, n); of a conjugate pair one is stored where `output` is real.
        B: (n, p), or (H, n).
        C: (q, n), or (H, n); with a first dimension of 2 where two directions share lam and B.
        output: "complex" for C x, "real" for Re(C x), "twice_real" for 2 Re(C x).
        present: bool like lam, False for padding of channels that have fewer modes than others; None: all are modes.
    Raises:
        ValueError: shapes that do not fit together, an unknown output.
    """

    lam: Tensor
    B: Tensor
    C: Tensor
    output: str
    present: Tensor | None = None

    def __post_init__(self) -> None:
        if self.output not in OUTPUTS:
            raise ValueError(f"output must be one of {', '.join(OUTPUTS)}, got {self.output!r}")
        if self.lam.ndim not in (1, 2):
            raise ValueError(f"lam must be (n,) or (H, n), got {tuple(self.lam.shape)}")
        n, siso = self.lam.shape[-1], self.lam.ndim == 2
        if (self.B.shape != self.lam.shape) if siso else (self.B.ndim != 2 or self.B.shape[0] != n):
            wanted = f"(H, n) = {tuple(self.lam.shape)}" if siso else f"(n, p) with n = {n}"
            raise ValueError(f"B must be {wanted}, got {tuple(self.B.shape)}")
        if self.C.ndim not in (2, 3) or (self.C.ndim == 3 and self.C.shape[0] != 2) or self.C.shape[-1] != n:
            raise ValueError(f"C must be (q, n) or (2, q, n) with n = {n}, got {tuple(self.C.shape)}")
        if siso and self.C.shape[-2:] != self.lam.shape:
            raise ValueError(f"C must be (H, n) or (2, H, n) = {tuple(self.lam.shape)}, got {tuple(self.C.shape)}")
        if self.present is not None and self.present.shape != self.lam.shape:
            raise ValueError(f"present must be {tuple(self.lam.shape)}, got {tuple(self.present.shape)}")
        for name in ("lam", "B", "C"):
            if getattr(self, name).dtype != torch.complex128:
                raise ValueError(f"{name} must be complex128, got {getattr(self, name).dtype}")

    @property
    def siso(self) -> bool:
        """Whether every channel has its own recurrence with one input and one output."""
        return self.lam.ndim == 2

    @property
    def bidirectional(self) -> bool:
        return self.C.ndim == 3

    @property
    def modes(self) -> int:
        """Stored modes, without padding."""
        return self.lam.numel() if self.present is None else int(self.present.sum())
