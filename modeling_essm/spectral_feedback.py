# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What AR-STU (Agarwal et al. 2023, "Spectral State Space Models") adds to Eq. (7).

    y(t) = sum_{i=1..2} M^y_i y(t-i)  +  sum_{i=1..3} M^u_i u(t+1-i)                                   feedback, direct
         + sum_k M^{phi+}_k sigma_k^{1/4} U+_k(t-s)  +  sum_k M^{phi-}_k sigma_k^{1/4} U-_k(t-s)       features

with U+_k(t) = sum_j phi_k(j) u(t-j) and U-_k(t) = sum_j (-1)^j phi_k(j) u(t-j), the negative filters. M^u_1 is the
skip term of Eq. (7). Their STU has s = 2, which leaves u(t) and u(t-1) to the direct terms, and M^y = (0, I); AR-STU
learns M^y. The released code (google-deepmind/spectral_ssm) learns M^y too, shifts by two, and has no negative filters.

Letters: B batch, L sequence, D width, p = 2 the order, s = 0 or 2 the shift of the features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor


def autoregression(
    u: Tensor,
    y: Tensor,
    input_mixing: Tensor,
    output_mixing: Tensor,
    past: Mapping[str, Tensor],
    lengths: Tensor | None,
    longest: int,
) -> tuple[Tensor, dict[str, Tensor]]:
    """y(t) + sum_i u(t-i) input_mixing[i-1] + sum_i y(t-i) output_mixing[i-1].

    Args:
        u, y: (B, L, D) inputs, and outputs of the filters, with the skip term.
        input_mixing, output_mixing: (p, D, D) weights, M^u_2, M^u_3 and M^y, as they multiply rows from the right.
        past: states "inputs" and "outputs", (B, p, D) each, zeros where absent.
        lengths: (B,) steps after which each row's state is taken, or None. longest: bound of a symbolic L.
    Returns:
        outputs (B, L, D), and the states "inputs" and "outputs".
    """
    L, p = u.shape[1], len(input_mixing)
    u_past = past.get("inputs", u.new_zeros(u.shape[0], p, u.shape[2]))
    u_all = torch.cat([u_past, u], 1)  # u(t - i) stands at index t + p - i
    for i in range(1, p + 1):
        y = y + u_all[:, p - i : p - i + L] @ input_mixing[i - 1]
    y_past = past.get("outputs", y.new_zeros(y.shape[0], p, y.shape[2]))
    # A symbolic length cannot bound a loop; an export covers every length up to the longest instead.
    symbolic = torch.compiler.is_exporting() and not isinstance(L, int)
    y_all = linear_feedback(y, y_past, output_mixing, longest if symbolic else L)
    return y_all[:, p:], {"inputs": last_steps(u_all, p, lengths), "outputs": last_steps(y_all, p, lengths)}


def negative_filters(
    x: Tensor, filtered: Callable[[Tensor], tuple[Tensor, Tensor]], lengths: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Outputs (B, L, D) and features (B, N, D) of the filters (-1)^j phi_k: phi_k on an input modulated by (-1)^t.

    Args:
        x: (B, L, D). lengths: as in `autoregression`.
        filtered: `SpectralOperator` with everything given but its input: to outputs (B, L, D) and features (B, N, D).
    """
    L = x.shape[1]
    sign = 1.0 - 2.0 * (torch.arange(1, L + 1, device=x.device, dtype=x.dtype)[:, None] % 2)  # (-1)^{t+1}, (L, 1)
    outputs, features = filtered(x * sign)
    last = torch.full((x.shape[0],), L, device=x.device) if lengths is None else lengths
    return outputs * sign, features * torch.where(last % 2 == 1, -1.0, 1.0).to(features.dtype)[:, None, None]


def delayed(u: Tensor, past: Tensor | None, steps: int) -> Tensor:
    """u(t - steps), (B, L, D), where `past` (B, steps, D) came before u, or silence did.

    The features of a delayed input are U_k(t - steps), also in the state, so that a shift of them needs no other.
    """
    past = u.new_zeros(u.shape[0], steps, u.shape[2]) if past is None else past.to(u.dtype)
    return torch.cat([past, u], 1)[:, : u.shape[1]]


def linear_feedback(v: Tensor, past: Tensor, mixing: Tensor, reach: int) -> Tensor:
    """y(t) = v(t) + y(t-1) mixing[0] + y(t-2) mixing[1], all t in log2(L) matrix products.

    Args:
        v: (B, L, D). past: (B, 2, D), y(-2), y(-1). mixing: (2, D, D). reach: at least L.
    Returns:
        (B, 2 + L, D): past followed by y.
    """
    D = v.shape[-1]
    identity = torch.eye(D, dtype=v.dtype, device=v.device)
    # z(t) = [y(t), y(t-1)] = z(t-1) P + [v(t), 0]
    P = torch.cat([torch.cat([mixing[0], identity], 1), torch.cat([mixing[1], torch.zeros_like(identity)], 1)], 0)
    z = torch.cat([torch.cat([past[:, 1:], past[:, :1]], 2), F.pad(v, (0, D))], 1)  # z(-1), then inputs
    for j in range(reach.bit_length()):
        z = z + F.pad(z @ P, (0, 0, 1 << j, 0))[:, : z.shape[1]]
        P = P @ P
    return torch.cat([past[:, :1], z[:, :, :D]], 1)


def last_steps(x: Tensor, p: int, lengths: Tensor | None) -> Tensor:
    """The p positions up to each row's last step: (B, p + L, D) that begins p positions before step 0 -> (B, p, D)."""
    if lengths is None:
        return x[:, x.shape[1] - p :].clone(memory_format=torch.contiguous_format)  # or the state would hold all of x
    recent = lengths[:, None] + torch.arange(p, device=x.device)
    return x.gather(1, recent[..., None].expand(-1, -1, x.shape[2]))
