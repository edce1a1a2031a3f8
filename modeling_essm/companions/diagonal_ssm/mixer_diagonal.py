# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The layer around the recurrence, in three parameterizations, and what tools that compress it read and write.

    x_t = lam x_{t-1} + B u_t,    y_t = 2 Re(C x_t) + D u_t                             (LRU: Re(C x_t) + D u_t)

`S5Mixer` and `LRUMixer` have H inputs, H outputs and n modes, `S4DMixer` one recurrence of n modes per channel; of a
conjugate pair one mode is stored. Two directions share lam and B: y = C_1 x-> + C_2 x<- + D u. Complex weights are real
tensors whose last dimension holds real and imaginary part. The recurrence runs in complex64, in complex128 of weights
or inputs in fp64, whatever else their dtype.
Letters: B batch, L steps, H width, n modes.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from .diagonal_scan import SCANS, SISO_SCANS, choose, power_of_rows

LEAST_MODULUS, MOST_MODULUS = 1e-8, 1 - 1e-7  # where |lam| is kept when it is written: its logarithms stay finite


class DiagonalLTI(NamedTuple):
    """The fields of `modeling_essm.companions.systems.DiagonalSystem`, in its order, without the import of the package:
    `DiagonalSystem(*mixer.lti())`. Tensors are complex128; see there for shapes."""

    lam: Tensor
    B: Tensor
    C: Tensor
    output: str
    present: Tensor | None = None


class DiagonalMixer(nn.Module):
    """What the parameterizations share. Their weights are made by `reset_parameters`.

    Attributes:
        mode_dims: for each parameter that has modes the dimension that counts them.
        output_names: the parameters that are C: modes whose C is zero do not reach the output.
        pole_names: the parameters that make lam; a few bits less of them move every later state, so models keep them
            in fp32. As published, neither they nor B decay.
        output: "twice_real" or "real", as of `DiagonalSystem`.
        algorithm: "auto", "naive", "parallel" or "fft", see `diagonal_scan`: one meaning, different cost.
    """

    mode_dims: ClassVar[dict[str, int]]
    output_names: ClassVar[tuple[str, ...]] = ("C",)
    pole_names: ClassVar[tuple[str, ...]]
    output: ClassVar[str] = "twice_real"
    algorithm: str = "auto"
    C: nn.Parameter
    D: nn.Parameter

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
        """New weights; those that were loaded stay."""
        raise NotImplementedError

    def forward(
        self, u: Tensor, state: Tensor | None = None, real: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """
        Args:
            u: (B, L, H) inputs, L >= 1. state: (B, n), in S4D (B, H, n), complex, before them; None for zero.
            real: (B, L) bool, for each row False first and True from some step on, or False throughout: steps that are
                not real neither read nor move the state, and their outputs mean nothing. None: all are real.
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
                return skip.to(u.dtype), None if self.bidirectional else self._no_state(len(u), skip)
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

    def _no_state(self, batch_size: int, like: Tensor) -> Tensor:
        return torch.empty(batch_size, 0, dtype=like.dtype.to_complex(), device=like.device)

    # --- What tools that compress the layer read and write

    @torch.no_grad()
    def lti(self) -> DiagonalLTI:
        """The modes, discrete and with step or normalisation inside B, in complex128; D is not part of them."""
        return DiagonalLTI(*self.system(torch.float64), self.output, None)

    @torch.no_grad()
    def set_lti(self, lam: Tensor, B: Tensor, C: Tensor, present: Tensor | None = None) -> None:
        """Become the layer of these modes, whose number may differ: parameters are new objects of fitting shape.

        |lam| is moved into [1e-8, 1 - 1e-7], where its logarithms are finite; else `lti()` gives back the same system.

        Args:
            lam, B, C, present: as of `lti()`; present only for S4D.
        Raises:
            ValueError: shapes that do not fit the layer, values that are not finite, |lam| > 1.
        """
        if present is not None:
            raise ValueError("present is of layers with one recurrence per channel: here it must be None")
        self._set_modes(lam, B, C)

    def _set_modes(self, lam: Tensor, B: Tensor, C: Tensor) -> None:
        lam, B, C = (x.to(self.D.device, torch.complex128) for x in (lam, B, C))
        n, H = lam.shape[-1], len(self.D)
        wanted = {"lam": self._lam_shape(n), "B": self._B_shape(n), "C": (*self.C.shape[:-2], n)}
        for name, tensor in (("lam", lam), ("B", B), ("C", C)):
            if tuple(tensor.shape) != wanted[name]:
                raise ValueError(
                    f"{name} of {n} modes in a layer of width {H} must be {wanted[name]}, got {tuple(tensor.shape)}"
                )
            if not torch.isfinite(torch.view_as_real(tensor)).all():
                raise ValueError(f"{name} must be finite, got NaN or infinity")
        for name, value in self._parameters_of(lam, B, C).items():
            self._replace(name, value)

    @torch.no_grad()
    def select_modes(self, keep: Tensor, present: Tensor | None = None) -> None:
        """Keep these modes alone, with the exact weights they have: parameters are new, smaller objects.

        Args:
            keep: (m,) int64 modes in [0, n), in any order; of S4D (H, m), for each channel its own, and `present`
                (H, m) bool, False where a channel has fewer than m.
        """
        if keep.ndim != 1 or present is not None:
            raise ValueError(f"keep must be (m,), without present, got {tuple(keep.shape)}")
        for name, dim in self.mode_dims.items():
            tensor = getattr(self, name)
            self._replace(name, tensor.index_select(dim, keep.to(tensor.device)))

    def _lam_shape(self, n: int) -> tuple[int, ...]:
        return (n,)

    def _B_shape(self, n: int) -> tuple[int, ...]:
        return (n, len(self.D))

    def _parameters_of(self, lam: Tensor, B: Tensor, C: Tensor) -> dict[str, Tensor]:
        """Values of the parameters that make this system, in fp64."""
        raise NotImplementedError

    def _replace(self, name: str, value: Tensor) -> None:
        old = getattr(self, name)
        setattr(self, name, nn.Parameter(value.to(old.device, old.dtype).contiguous(), old.requires_grad))


class MIMOMixer(DiagonalMixer):
    """n modes that read all channels and are read by all."""

    B: nn.Parameter

    def __init__(self, config: Any, state_size: int):
        super().__init__(config, state_size)
        self.B = nn.Parameter(torch.empty(state_size, config.hidden_size, 2))

    def _run(self, lam: Tensor, B: Tensor, C: Tensor, u: Tensor, x0: Tensor | None) -> tuple[Tensor, Tensor | None]:
        scan = SCANS[choose(self.algorithm, u.shape[1], siso=False)]
        v = torch.view_as_complex((u @ torch.view_as_real(B.T).flatten(1)).unflatten(2, (-1, 2)))  # (B, L, n)
        if not self.bidirectional:
            x = scan(lam, v, x0)
            return _real_product(C, x), x[:, -1]
        return _real_product(C[0], scan(lam, v)) + _real_product(C[1], scan(lam, v.flip(1)).flip(1)), None


class SISOMixer(DiagonalMixer):
    """A recurrence of n modes for every channel. Channels may differ in how many of them are modes, and not padding.

    Attributes:
        present: (H, n) bool buffer, False for padding: its C counts as zero, whatever is stored.
    """

    present: Tensor

    def __init__(self, config: Any, state_size: int):
        super().__init__(config, state_size)
        self.register_buffer("present", torch.ones(config.hidden_size, state_size, dtype=torch.bool))

    def _run(self, lam: Tensor, B: Tensor, C: Tensor, u: Tensor, x0: Tensor | None) -> tuple[Tensor, Tensor | None]:
        scan = SISO_SCANS[choose(self.algorithm, u.shape[1], siso=True)]
        if not self.bidirectional:
            return scan(lam, B, C, u, x0)
        return scan(lam, B, C[0], u)[0] + scan(lam, B, C[1], u.flip(1))[0].flip(1), None

    def _no_state(self, batch_size: int, like: Tensor) -> Tensor:
        return super()._no_state(batch_size, like)[:, None].expand(-1, len(self.D), -1)

    def lti(self) -> DiagonalLTI:
        return super().lti()._replace(present=None if bool(self.present.all()) else self.present.clone())

    @torch.no_grad()
    def set_lti(self, lam: Tensor, B: Tensor, C: Tensor, present: Tensor | None = None) -> None:
        self._check_present(present, lam.shape)
        self._set_modes(lam, B, C)
        self._set_present(present)

    @torch.no_grad()
    def select_modes(self, keep: Tensor, present: Tensor | None = None) -> None:
        H, held = len(self.D), self.present
        if keep.ndim != 2 or len(keep) != H:
            raise ValueError(f"keep must be (H, m) with H = {H}, got {tuple(keep.shape)}")
        self._check_present(present, keep.shape)
        keep = keep.to(held.device)
        for name, dim in self.mode_dims.items():
            tensor = getattr(self, name)
            index = keep.reshape(*keep.shape, *(1,) * (-1 - dim))
            shape = list(tensor.shape)
            shape[dim] = keep.shape[1]
            self._replace(name, tensor.gather(dim, index.expand(shape)))
        kept = held.gather(1, keep)
        self._set_present(kept if present is None else kept & present.to(held.device))

    @staticmethod
    def _check_present(present: Tensor | None, shape: torch.Size) -> None:
        if present is not None and (present.shape != shape or present.dtype != torch.bool):
            raise ValueError(
                f"present must be bool of shape {tuple(shape)}, got {present.dtype} of {tuple(present.shape)}"
            )

    def _set_present(self, present: Tensor | None) -> None:
        old = self.present
        kept = old.new_ones(len(self.D), self.state_size) if present is None else present.to(old.device).clone()
        self.present = kept
        self.C.masked_fill_(~kept[..., None], 0.0)

    def _lam_shape(self, n: int) -> tuple[int, ...]:
        return (len(self.D), n)

    _B_shape = _lam_shape


def _real_product(C: Tensor, x: Tensor) -> Tensor:
    """Re(C x) as one real product: (H, n) and (B, L, n) complex to (B, L, H) real."""
    parts = torch.view_as_real(x.resolve_conj().contiguous()).flatten(2)  # (B, L, 2n)
    return parts @ torch.view_as_real(C.conj_physical()).flatten(1).T


def inside_the_circle(lam: Tensor, bounded: bool = True) -> Tensor:
    """lam with |lam| moved into [1e-8, 1 - 1e-7]; if not `bounded`, only from below.

    Raises:
        ValueError: |lam| > 1 where it is bounded: that would be another system.
    """
    modulus = lam.abs()
    if bounded and (modulus > 1 + 1e-9).any():
        raise ValueError(f"|lam| must be at most 1 in this parameterization, got {float(modulus.max()):.6g}")
    clamped = modulus.clamp(LEAST_MODULUS, MOST_MODULUS if bounded else None)
    return torch.where(modulus > 0, lam * (clamped / modulus), clamped.to(lam.dtype))


__all__ = ["DiagonalLTI", "DiagonalMixer", "MIMOMixer", "SISOMixer"]
