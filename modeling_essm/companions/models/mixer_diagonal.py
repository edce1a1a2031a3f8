# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The layer around the recurrence, in three parameterizations, and what tools that compress it read and write.

    x_t = lam x_{t-1} + B u_t,    y_t = 2 Re(C x_t) + D u_t                             (LRU: Re(C x_t) + D u_t)

S5 (Smith et al. 2023) and LRU (Orvieto et al. 2023) have H inputs, H outputs and n modes, S4D (Gu et al. 2022) one
recurrence of n modes per channel. S5 and S4D are x'(t) = A x(t) + B u(t) held over a step dt; with z = A dt
    zoh:       lam = exp(z),                B_bar = (exp(z) - 1) / A  B
    bilinear:  lam = (1 + z/2) / (1 - z/2), B_bar = dt / (1 - z/2)  B
LRU: lam = exp(-exp(nu) + i exp(theta)) with exp(gamma) B, gamma = log sqrt(1 - |lam|^2) when it is new. Two directions
share lam and B: y = C_1 x-> + C_2 x<- + D u. Complex weights are real tensors whose last dimension holds real and
imaginary part. The recurrence runs in complex64, with weights or inputs in fp64 in complex128.
Letters: B batch, L steps, H width, n modes.
"""

from __future__ import annotations

import functools
import math
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import initialization as init

from .scan_diagonal import fft_of_channels, naive_of_channels, naive_scan, parallel_scan, power_of_rows

LEAST_MODULUS, MOST_MODULUS = 1e-8, 1 - 1e-7  # where |lam| is kept when it is written: its logarithms stay finite
LARGEST_REAL_PART = -1e-4  # of S5's eigenvalues with clip_eigs, as in its authors' code
# Steps up to which the definition is the fastest on a CPU, for many inputs and for channels. Longer sequences of many
# inputs need the states, which the parallel scan makes in about two thirds of the time of complex FFTs; one recurrence
# per channel needs the outputs alone, which real FFTs give two to four times faster than Toeplitz products.
SHORT, SHORT_OF_CHANNELS = 8, 2


class DiagonalMixer(nn.Module):
    """What the parameterizations share. Their weights are made by `reset_parameters`; those that were loaded stay.

    Attributes:
        mode_dims: for each parameter or buffer that has modes the dimension that counts them.
        output_names: the parameters that are C: modes whose C is zero do not reach the output.
        pole_names: the parameters that make lam; a few bits less of them move every later state, so models keep them
            in fp32. As published, neither they nor B decay.
        output, siso: as of `modeling_essm.companions.systems.DiagonalSystem`.
    """

    mode_dims: ClassVar[dict[str, int]]
    output_names: ClassVar[tuple[str, ...]] = ("C",)
    pole_names: ClassVar[tuple[str, ...]]
    output: ClassVar[str] = "twice_real"
    siso: ClassVar[bool] = False
    C: nn.Parameter
    D: nn.Parameter
    present: Tensor  # of S4D

    def __init__(self, config: Any, state_size: int):
        super().__init__()
        self.config, self.bidirectional = config, config.bidirectional
        H, directions = config.hidden_size, (2,) if config.bidirectional else ()
        self.C = nn.Parameter(torch.empty(*directions, H, state_size, 2))
        self.D = nn.Parameter(torch.empty(H))

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As in torch; also a parameter that is loaded or replaced is marked for optimizers: no weight decay."""
        if param is not None and (name in self.pole_names or name == "B"):
            param._no_weight_decay = True  # type: ignore[attr-defined]
        super().register_parameter(name, param)

    @property
    def state_size(self) -> int:
        """n: stored modes, of one channel in S4D, padding included."""
        return self.C.shape[-2]

    def system(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """lam, discrete B and C as `DiagonalSystem` has them, with gradients, complex with parts of `dtype`."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        raise NotImplementedError

    def forward(
        self, u: Tensor, state: Tensor | None = None, real: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """
        Args:
            u: (B, L, H) inputs, L >= 1. state: (B, n), in S4D (B, H, n), complex, before them; None for zero.
            real: (B, L) bool, for each row False first and True from some step on, or False throughout: steps that are
                not real neither read nor move the state, and their outputs are undefined. None: all are real.
        Returns:
            y (B, L, H) in u's dtype, and the state after the last step; None with two directions.
        Raises:
            ValueError: a state with two directions.
        """
        if self.bidirectional and state is not None:
            raise ValueError("a bidirectional layer reads whole sequences: state must be None")
        dtype = torch.promote_types(torch.promote_types(u.dtype, self.D.dtype), torch.float32)
        with torch.autocast(u.device.type, enabled=False):
            x = u.to(dtype)
            x = x if real is None else x.masked_fill(~real[..., None], 0.0)
            skip = self.D.to(dtype) * x
            if self.state_size == 0:  # the sums are zero: DDP wants a gradient of every parameter
                skip = skip + sum(getattr(self, name).sum() for name in self._parameters) * 0.0
                channels = (len(self.D),) if self.siso else ()
                state = torch.empty(len(u), *channels, 0, dtype=skip.dtype.to_complex(), device=skip.device)
                return skip.to(u.dtype), None if self.bidirectional else state
            lam, B, C = self.system(dtype)
            C = 2 * C if self.output == "twice_real" else C
            if state is None or real is None:  # a zero state does not move on zeros
                y, last = self._run(lam, B, C, x, None if state is None else state.to(x.device, lam.dtype))
            else:
                y, last = self._run_from_first_real(lam, B, C, x, state.to(x.device, lam.dtype), real)
            return (y + skip).to(u.dtype), last

    def _run(self, lam: Tensor, B: Tensor, C: Tensor, u: Tensor, x0: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Re(C x) of the recurrence on u (B, L, H), in both directions if there are two, and the last state."""
        raise NotImplementedError

    def _run_from_first_real(
        self, lam: Tensor, B: Tensor, C: Tensor, u: Tensor, x0: Tensor, real: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same where each row begins at its first real step: what follows from x0 is added, shifted to there."""
        y, last = self._run(lam, B, C, u, None)
        free, _ = self._run(lam, B, C, torch.zeros_like(u), x0)
        lengths = real.sum(1)
        since = torch.arange(u.shape[1], device=u.device) - (u.shape[1] - lengths[:, None])  # (B, L)
        y = y + free.gather(1, since.clamp(min=0)[..., None].expand_as(free))
        assert last is not None
        return y, last + power_of_rows(lam, lengths) * x0

    @torch.no_grad()
    def lti(self) -> tuple[Tensor, Tensor, Tensor, str, Tensor | None]:
        """The fields of `DiagonalSystem`, in its order: the modes, with step or normalisation inside B, in complex128.
        D is not part of them."""
        present = self.present.clone() if self.siso and not bool(self.present.all()) else None
        return (*self.system(torch.float64), self.output, present)

    @torch.no_grad()
    def set_lti(self, lam: Tensor, B: Tensor, C: Tensor, present: Tensor | None = None) -> None:
        """Become the layer of these modes, whose number may differ: parameters are new objects of fitting shape.

        |lam| is moved into [1e-8, 1 - 1e-7], where its logarithms are finite; else `lti()` gives back the same system.

        Args:
            lam, B, C, present: as of `lti()`; present only for S4D.
        Raises:
            ValueError: shapes that do not fit the layer, values that are not finite, |lam| > 1.
        """
        lam, B, C = (x.to(self.D.device, torch.complex128) for x in (lam, B, C))
        H, n = len(self.D), lam.shape[-1]
        modes = (H, n) if self.siso else (n,)
        shapes, wanted = (
            [x.shape for x in (lam, B, C)],
            [modes, modes if self.siso else (n, H), (*self.C.shape[:-2], n)],
        )
        if shapes != wanted or not all(torch.isfinite(torch.view_as_real(x)).all() for x in (lam, B, C)):
            raise ValueError(f"lam, B and C of a layer of width {H} must be finite, {wanted}, got {shapes}")
        for name, value in self._parameters_of(lam, B, C).items():
            old = getattr(self, name)
            setattr(self, name, nn.Parameter(value.to(old.device, old.dtype).contiguous(), old.requires_grad))
        if self.siso:
            there = self.present.new_ones(modes) if present is None else present.to(self.present.device).clone()
            self.present = there
            self.C.masked_fill_(~there[..., None], 0.0)

    def _parameters_of(self, lam: Tensor, B: Tensor, C: Tensor) -> dict[str, Tensor]:
        """Values of the parameters that make this system, in fp64."""
        raise NotImplementedError


class MIMOMixer(DiagonalMixer):
    """n modes that read all channels and are read by all."""

    B: nn.Parameter

    def __init__(self, config: Any, state_size: int):
        super().__init__(config, state_size)
        self.B = nn.Parameter(torch.empty(state_size, config.hidden_size, 2))

    def _run(self, lam: Tensor, B: Tensor, C: Tensor, u: Tensor, x0: Tensor | None) -> tuple[Tensor, Tensor | None]:
        scan = naive_scan if u.shape[1] <= SHORT else parallel_scan
        v = torch.view_as_complex((u @ torch.view_as_real(B.T).flatten(1)).unflatten(2, (-1, 2)))  # (B, L, n)
        if not self.bidirectional:
            x = scan(lam, v, x0)
            return _real_product(C, x), x[:, -1]
        return _real_product(C[0], scan(lam, v)) + _real_product(C[1], scan(lam, v.flip(1)).flip(1)), None


def _real_product(C: Tensor, x: Tensor) -> Tensor:
    """Re(C x) as one real product: (H, n) and (B, L, n) complex to (B, L, H) real."""
    parts = torch.view_as_real(x.resolve_conj().contiguous()).flatten(2)  # (B, L, 2n)
    return parts @ torch.view_as_real(C.conj_physical()).flatten(1).T


def inside_the_circle(lam: Tensor, bounded: bool = True) -> Tensor:
    """lam with |lam| moved into [1e-8, 1 - 1e-7]; if not `bounded`, only from below. Raises ValueError for |lam| > 1
    where it is bounded: that would be another system."""
    modulus = lam.abs()
    if bounded and (modulus > 1 + 1e-9).any():
        raise ValueError(f"|lam| must be at most 1 in this parameterization, got {float(modulus.max()):.6g}")
    clamped = modulus.clamp(LEAST_MODULUS, MOST_MODULUS if bounded else None)
    return torch.where(modulus > 0, lam * (clamped / modulus), clamped.to(lam.dtype))


class S5Mixer(MIMOMixer):
    """S5: continuous eigenvalues `Lambda` (n, 2), a step `log_step` (n,) for each, `B` (n, H, 2), `C` (H, n, 2)."""

    mode_dims: ClassVar = {"Lambda": 0, "log_step": 0, "B": 0, "C": -2}
    pole_names: ClassVar = ("Lambda", "log_step")

    def __init__(self, config: Any, state_size: int):
        super().__init__(config, state_size)
        self.Lambda = nn.Parameter(torch.empty(state_size, 2, dtype=torch.float32))
        self.log_step = nn.Parameter(torch.empty(state_size, dtype=torch.float32))

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
        self.nu_log = nn.Parameter(torch.empty(state_size, dtype=torch.float32))
        self.theta_log = nn.Parameter(torch.empty(state_size, dtype=torch.float32))
        self.gamma_log = nn.Parameter(torch.empty(state_size, dtype=torch.float32))

    def system(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        modulus = (-self.nu_log.to(dtype).exp()).exp()
        lam = torch.polar(modulus, self.theta_log.to(dtype).exp())
        gamma = self.gamma_log.to(dtype).exp()
        return lam, gamma[:, None] * as_complex(self.B, dtype), as_complex(self.C, dtype)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """|lam|^2 uniform in [r_min^2, r_max^2], phase uniform in (0, max_phase), B and C as published."""
        low, high = self.config.r_min**2, self.config.r_max**2
        # In fp32 whatever the weights are: bf16 would round many to 1.
        squares = torch.empty_like(self.nu_log, dtype=torch.float32).uniform_() * (high - low) + low
        squares = squares.clamp(LEAST_MODULUS**2, MOST_MODULUS**2)
        phases = torch.empty_like(self.theta_log).uniform_() * self.config.max_phase
        init.copy_(self.nu_log, (-0.5 * squares.log()).log())
        init.copy_(self.theta_log, phases.clamp(min=1e-8).log())
        init.copy_(self.gamma_log, 0.5 * torch.log1p(-squares))
        init.normal_(self.B, std=(2 * len(self.D)) ** -0.5)
        init.normal_(self.C, std=max(1, self.state_size) ** -0.5)
        init.normal_(self.D)

    def _parameters_of(self, lam: Tensor, B: Tensor, C: Tensor) -> dict[str, Tensor]:
        lam = inside_the_circle(lam)
        modulus, phase = lam.abs(), lam.angle().remainder(2 * math.pi).clamp(min=1e-30)
        gamma_log = 0.5 * torch.log1p(-(modulus**2))
        return {
            "nu_log": (-modulus.log()).log(),
            "theta_log": phase.log(),
            "gamma_log": gamma_log,
            "B": torch.view_as_real(B / gamma_log.exp()[:, None]),
            "C": torch.view_as_real(C),
        }


class S4DMixer(DiagonalMixer):
    """S4D: for each channel a step `log_dt` (H,), eigenvalues -exp(`log_A_real`) + i `A_imag` (H, n) and `C` (H, n, 2).

    B is one: only the product c b reaches the output. Channels may differ in how many of their modes are `present`, a
    bool buffer (H, n) that is False for padding: C counts as zero there, whatever is stored.
    """

    mode_dims: ClassVar = {"log_A_real": -1, "A_imag": -1, "C": -2, "present": -1}
    pole_names: ClassVar = ("log_A_real", "A_imag", "log_dt")
    siso: ClassVar[bool] = True

    def __init__(self, config: Any, state_size: int):
        super().__init__(config, state_size)
        self.register_buffer("present", torch.ones(config.hidden_size, state_size, dtype=torch.bool))
        self.log_dt = nn.Parameter(torch.empty(config.hidden_size, dtype=torch.float32))
        self.log_A_real = nn.Parameter(torch.empty(config.hidden_size, state_size, dtype=torch.float32))
        self.A_imag = nn.Parameter(torch.empty(config.hidden_size, state_size, dtype=torch.float32))

    def _run(self, lam: Tensor, B: Tensor, C: Tensor, u: Tensor, x0: Tensor | None) -> tuple[Tensor, Tensor | None]:
        scan = naive_of_channels if u.shape[1] <= SHORT_OF_CHANNELS else fft_of_channels
        if not self.bidirectional:
            return scan(lam, B, C, u, x0)
        return scan(lam, B, C[0], u)[0] + scan(lam, B, C[1], u.flip(1))[0].flip(1), None

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
        zero = A == 0  # where the quotient is dt
        return z.exp(), torch.where(zero, dt.to(A.dtype), expm1(z) / A.masked_fill(zero, 1))
    return (1 + z / 2) / (1 - z / 2), dt / (1 - z / 2)


def exponent(lam: Tensor, method: str) -> Tensor:
    """z = A dt of lam, its imaginary part in (-pi, pi] for zoh."""
    return lam.log() if method == "zoh" else 2 * (lam - 1) / (lam + 1)


def expm1(z: Tensor) -> Tensor:
    """exp(z) - 1 of complex z, accurate also near 0: steps are small, and fp32 would lose half of its digits."""
    a, b = z.real, z.imag
    return torch.complex(torch.expm1(a) * b.cos() - 2 * (b / 2).sin() ** 2, a.exp() * b.sin())


def as_complex(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """(.., 2) real and imaginary parts -> (..) complex with parts of `dtype`: a copy, as weights mapped from a file may
    lie where complex numbers cannot."""
    return torch.complex(*parameter.to(dtype).unbind(-1))


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
