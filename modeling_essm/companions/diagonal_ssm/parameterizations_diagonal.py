# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Where lam, B and C come from: S5 (Smith et al. 2023), S4D (Gu et al. 2022) and LRU (Orvieto et al. 2023).

S5 and S4D are x'(t) = A x(t) + B u(t) held over a step dt; with z = A dt
    zoh:       lam = exp(z),                B_bar = (exp(z) - 1) / A  B
    bilinear:  lam = (1 + z/2) / (1 - z/2), B_bar = dt / (1 - z/2)  B
LRU is discrete from the start: lam = exp(-exp(nu) + i exp(theta)) with exp(gamma) B, gamma = log sqrt(1 - |lam|^2)
when it is new. All three are stable for every value of their weights (S5 as long as `clip_eigs` is on).
Letters: H width, n modes.
"""

from __future__ import annotations

import functools
import math
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import initialization as init

from .mixer_diagonal import DiagonalMixer, MIMOMixer, SISOMixer, inside_the_circle

LARGEST_REAL_PART = -1e-4  # of S5's eigenvalues with clip_eigs, as in its authors' code


class S5Mixer(MIMOMixer):
    """S5: continuous eigenvalues `Lambda` (n, 2), a step `log_step` (n,) for each, `B` (n, H, 2), `C` (H, n, 2)."""

    mode_dims: ClassVar = {"Lambda": 0, "log_step": 0, "B": 0, "C": -2}
    pole_names: ClassVar = ("Lambda", "log_step")

    def __init__(self, config: Any, state_size: int):
        super().__init__(config, state_size)
        self.Lambda = nn.Parameter(torch.empty(state_size, 2))
        self.log_step = nn.Parameter(torch.empty(state_size))

    def system(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        re, im = self.Lambda.to(dtype).unbind(-1)
        re = re.clamp(max=LARGEST_REAL_PART) if self.config.clip_eigs else re
        lam, hold = discretise(torch.complex(re, im), self.log_step.to(dtype).exp(), self.config.discretization)
        return lam, hold[:, None] * as_complex(self.B, dtype), as_complex(self.C, dtype)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Eigenvalues of HiPPO-N or S4D-Lin, steps log-uniform, B and C of unit variance over inputs and modes."""
        init.copy_(self.Lambda, torch.stack(_new_poles(self.config, self.log_step), -1))
        init.uniform_(self.log_step, math.log(self.config.dt_min), math.log(self.config.dt_max))
        init.normal_(self.B, std=(2 * len(self.D)) ** -0.5)
        init.normal_(self.C, std=0.5**0.5)
        init.normal_(self.D)

    def _parameters_of(self, lam: Tensor, B: Tensor, C: Tensor) -> dict[str, Tensor]:
        """Modes keep their steps if their number stays; else all get the geometric mean of the steps.

        With `clip_eigs` a slow mode gets a shorter step, so that its eigenvalue is not clipped. The imaginary part is
        the smallest of those that give lam.
        """
        clip, method, steps = self.config.clip_eigs, self.config.discretization, self.log_step.double()
        z = exponent(inside_the_circle(lam, bounded=clip), method)
        if len(z) != len(steps):
            middle = math.log(self.config.dt_min * self.config.dt_max) / 2
            steps = torch.full_like(z.real, float(steps.mean()) if len(steps) else middle)
        if clip:
            steps = torch.minimum(steps, (z.real / LARGEST_REAL_PART).log())
        dt = steps.exp()
        _, hold = discretise(z / dt, dt, method)
        return {
            "Lambda": torch.view_as_real(z / dt),
            "log_step": steps,
            "B": torch.view_as_real(B / hold[:, None]),
            "C": torch.view_as_real(C),
        }


class LRUMixer(MIMOMixer):
    """LRU: `nu_log`, `theta_log`, `gamma_log` (n,), `B` (n, H, 2), `C` (H, n, 2); y = Re(C x) + D u."""

    mode_dims: ClassVar = {"nu_log": 0, "theta_log": 0, "gamma_log": 0, "B": 0, "C": -2}
    pole_names: ClassVar = ("nu_log", "theta_log", "gamma_log")
    output: ClassVar[str] = "real"

    def __init__(self, config: Any, state_size: int):
        super().__init__(config, state_size)
        self.nu_log = nn.Parameter(torch.empty(state_size))
        self.theta_log = nn.Parameter(torch.empty(state_size))
        self.gamma_log = nn.Parameter(torch.empty(state_size))

    def system(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        modulus = (-self.nu_log.to(dtype).exp()).exp()
        lam = torch.polar(modulus, self.theta_log.to(dtype).exp())
        gamma = self.gamma_log.to(dtype).exp()
        return lam, gamma[:, None] * as_complex(self.B, dtype), as_complex(self.C, dtype)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """|lam|^2 uniform in [r_min^2, r_max^2], phase uniform in (0, max_phase), B and C as published."""
        low, high = self.config.r_min**2, self.config.r_max**2
        squares = torch.empty_like(self.nu_log).uniform_() * (high - low) + low
        phases = torch.empty_like(self.theta_log).uniform_() * self.config.max_phase
        init.copy_(self.nu_log, (-0.5 * squares.log()).log())
        init.copy_(self.theta_log, phases.clamp(min=1e-8).log())
        init.copy_(self.gamma_log, 0.5 * (-torch.expm1(-2 * self.nu_log.exp())).log())
        init.normal_(self.B, std=(2 * len(self.D)) ** -0.5)
        init.normal_(self.C, std=max(1, self.state_size) ** -0.5)
        init.normal_(self.D)

    def _parameters_of(self, lam: Tensor, B: Tensor, C: Tensor) -> dict[str, Tensor]:
        lam = inside_the_circle(lam)
        modulus, phase = lam.abs(), lam.angle().remainder(2 * math.pi).clamp(min=1e-8)
        gamma_log = 0.5 * torch.log1p(-(modulus**2))
        return {
            "nu_log": (-modulus.log()).log(),
            "theta_log": phase.log(),
            "gamma_log": gamma_log,
            "B": torch.view_as_real(B / gamma_log.exp()[:, None]),
            "C": torch.view_as_real(C),
        }


class S4DMixer(SISOMixer):
    """S4D: for each channel a step `log_dt` (H,), eigenvalues -exp(`log_A_real`) + i `A_imag` (H, n) and `C` (H, n, 2).

    B is one: of c b only the product reaches the output.
    """

    mode_dims: ClassVar = {"log_A_real": -1, "A_imag": -1, "C": -2}
    pole_names: ClassVar = ("log_A_real", "A_imag", "log_dt")

    def __init__(self, config: Any, state_size: int):
        super().__init__(config, state_size)
        self.log_dt = nn.Parameter(torch.empty(config.hidden_size))
        self.log_A_real = nn.Parameter(torch.empty(config.hidden_size, state_size))
        self.A_imag = nn.Parameter(torch.empty(config.hidden_size, state_size))

    def system(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        A = torch.complex(-self.log_A_real.to(dtype).exp(), self.A_imag.to(dtype))
        lam, B = discretise(A, self.log_dt.to(dtype).exp()[:, None], self.config.discretization)
        return lam, B, as_complex(self.C, dtype) * self.present

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Eigenvalues of S4D-Lin or S4D-LegS, steps log-uniform, C and D standard normal."""
        re, im = _new_poles(self.config, self.A_imag)
        init.uniform_(self.log_dt, math.log(self.config.dt_min), math.log(self.config.dt_max))
        init.copy_(self.log_A_real, (-re).log().expand_as(self.log_A_real))
        init.copy_(self.A_imag, im.expand_as(self.A_imag))
        init.normal_(self.C, std=0.5**0.5)
        init.normal_(self.D)
        init.ones_(self.present)

    def _parameters_of(self, lam: Tensor, B: Tensor, C: Tensor) -> dict[str, Tensor]:
        """Channels keep their steps. C takes what of B follows neither from lam nor from the step."""
        dt = self.log_dt.double().exp()[:, None]
        A = exponent(inside_the_circle(lam), self.config.discretization) / dt
        _, hold = discretise(A, dt, self.config.discretization)
        return {"log_A_real": (-A.real).log(), "A_imag": A.imag, "C": torch.view_as_real(C * (B / hold))}


MIXERS: dict[str, type[DiagonalMixer]] = {"s5": S5Mixer, "lru": LRUMixer, "s4d": S4DMixer}


def discretise(A: Tensor, dt: Tensor, method: str) -> tuple[Tensor, Tensor]:
    """lam, and the factor of B, of the module's docstring: A complex, dt real, in the shape of A or broadcasting."""
    z = A * dt
    if method == "zoh":
        return z.exp(), expm1(z) / A
    return (1 + z / 2) / (1 - z / 2), dt / (1 - z / 2)


def exponent(lam: Tensor, method: str) -> Tensor:
    """z = A dt of lam, its imaginary part in (-pi, pi] for zoh."""
    return lam.log() if method == "zoh" else 2 * (lam - 1) / (lam + 1)


def expm1(z: Tensor) -> Tensor:
    """exp(z) - 1 of complex z, accurate also near 0: steps are small, and fp32 would lose half of its digits."""
    a, b = z.real, z.imag
    return torch.complex(torch.expm1(a) * b.cos() - 2 * (b / 2).sin() ** 2, a.exp() * b.sin())


def as_complex(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """(.., 2) real and imaginary parts -> (..) complex with parts of `dtype`."""
    return torch.view_as_complex(parameter.to(dtype).contiguous())


@functools.lru_cache(maxsize=64)
def hippo_frequencies(n: int) -> np.ndarray:
    """(n,) imaginary parts, positive and ascending, of the eigenvalues -1/2 +- i w of HiPPO-N of size 2n, fp64.

    HiPPO-LegS plus the rank-one term that makes it normal is -1/2 I + K, K_jk = -+ sqrt((j + 1/2) (k + 1/2)) below and
    above the diagonal (Gu et al. 2022, Smith et al. 2023).
    """
    root = np.sqrt(np.arange(2 * n) + 0.5)
    K = np.triu(np.outer(root, root), 1)
    return np.linalg.eigvalsh(-1j * (K - K.T))[n:]


def _new_poles(config: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """Real and imaginary parts (n,) of new eigenvalues, n the last dimension of `like`."""
    n = like.shape[-1]
    if config.initialization == "linear":
        im = math.pi * np.arange(n)
    else:
        blocks = np.array_split(np.arange(n), config.hippo_blocks)
        im = np.concatenate([hippo_frequencies(len(block)) for block in blocks])
    imaginary = torch.tensor(im, dtype=torch.float64).to(like.device, like.dtype)
    return torch.full_like(imaginary, -0.5), imaginary


__all__ = ["MIXERS", "LRUMixer", "S4DMixer", "S5Mixer"]
