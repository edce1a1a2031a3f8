# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""How the segments of a sequence lie on processes, and what each leaves to the next, forwards and backwards.

Letters: R processes, S segments on each, Q = R S of them, m positions in one; B batch, N states, D width.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..spectral_basis import spectral_basis
from ..spectral_constants import Realization, chunk_constants, state_dtype, state_matmul

Order = Literal["plain", "head_tail"]
ORDERS: tuple[Order, ...] = ("plain", "head_tail")


def group_of(group: Any) -> dist.ProcessGroup:
    """A process group, also that of a DeviceMesh of one dimension."""
    return group.get_group() if hasattr(group, "get_group") else group


def gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The tensors of all processes: (R, *x.shape)."""
    gathered = x.new_empty(group.size(), *x.shape)
    dist.all_gather(list(gathered), x.contiguous(), group=group)
    return gathered


def segments_in_order(order: Order, R: int, halves: int = 2) -> list[tuple[int, int]]:
    """(process, place on it) of every segment; process r has neighbours, in "head_tail" order r and 2 R - 1 - r."""
    if order == "plain":
        return [(r, i) for r in range(R) for i in range(halves)]
    return [(r, 0) for r in range(R)] + [(r, 1) for r in reversed(range(R))]


@dataclass(frozen=True)
class Segments:
    """The segments of a batch.

    Attributes:
        group: the processes.
        order: (process, place) of every segment along the sequence.
        goes_on: (Q - 1, B) bool, whether a document goes on from segment q to q + 1; None if all do.
        whole: (Q, B) bool, whether no document begins inside segment q; None if none does.
    """

    group: dist.ProcessGroup
    order: tuple[tuple[int, int], ...]
    goes_on: Tensor | None = None
    whole: Tensor | None = None

    @property
    def own(self) -> list[int]:
        """Which segments are this process's, by their places."""
        rank = self.group.rank()
        return [self.order.index((rank, i)) for i in range(len(self.order) // self.group.size())]

    def carry(self, ends: Tensor, P: Tensor | None, reverse: bool = False) -> Tensor:
        """x_{q+1} = ends_q + P x_q along the sequence from x_0 = 0, not across where a document begins.

        Args:
            ends: (B, S, n, D), of this process's segments. P: (n, n), or None for 0.
            reverse: from the last segment to the first.
        Returns:
            (B, S, n, D), the x before (reverse: after) this process's segments. All processes must call it.
        """
        gathered = gather(ends, self.group)
        parts = [gathered[rank, :, place] for rank, place in self.order]
        goes_on, whole = self.goes_on, self.whole
        if reverse:
            parts.reverse()
            goes_on, whole = (None if mask is None else mask.flip(0) for mask in (goes_on, whole))
        x = [torch.zeros_like(parts[0])]
        for q, part in enumerate(parts[:-1]):
            if P is not None and q:
                part = part + _masked(state_matmul(P, x[q]), whole, q)
            x.append(_masked(part, goes_on, q))
        if reverse:
            x.reverse()
        return torch.stack([x[q] for q in self.own], 1)


def _masked(x: Tensor, kept: Tensor | None, q: int) -> Tensor:
    return x if kept is None else x.masked_fill(~kept[q, :, None, None], 0.0)


class Carry(torch.autograd.Function):
    """`Segments.carry`; its gradient carries with P^T from the last segment to the first. One all_gather each way."""

    @staticmethod
    def forward(ctx: Any, ends: Tensor, segments: Segments, P: Tensor | None) -> Tensor:
        ctx.segments, ctx.P = segments, P
        with torch.autocast(ends.device.type, enabled=False):
            return segments.carry(ends, P)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        with torch.autocast(dx.device.type, enabled=False):
            return ctx.segments.carry(dx, None if ctx.P is None else ctx.P.T, reverse=True), None, None


class EndState(torch.autograd.Function):
    """s = sum_t (A^(m-1-t))^T phi(0)^T u(t), the state that inputs leave behind from zero: (B, m, D) -> (B, N, D).

    A tree over chunks, pairs of neighbours first. It makes no features, and is linear, so that nothing is saved.
    """

    @staticmethod
    def forward(ctx: Any, u: Tensor, basis: Realization) -> Tensor:
        ctx.basis, ctx.shape, ctx.dtype = basis, u.shape, u.dtype
        (B, m, D), C = u.shape, basis.C
        inject, powers = _inject_and_powers(basis, u)
        chunks = F.pad(u, (0, 0, -m % C, 0)).view(B, -1, C, D)  # zeros before a sequence leave its state as it is
        with torch.autocast(u.device.type, enabled=False):
            x = state_matmul(inject, chunks.to(inject.dtype))
            for power in powers:
                if x.shape[1] == 1:
                    break
                x = F.pad(x, (0, 0, 0, 0, x.shape[1] % 2, 0))
                x = x[:, 1::2] + state_matmul(power, x[:, ::2])
        return x[:, 0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, ds: Tensor) -> tuple[Tensor, None]:
        inject, powers = _inject_and_powers(ctx.basis, ds)
        m = ctx.shape[1]
        counts = [-(-m // ctx.basis.C)]
        while counts[-1] > 1:
            counts.append(-(-counts[-1] // 2))
        dx = ds[:, None]
        with torch.autocast(ds.device.type, enabled=False):
            for count, power in reversed(list(zip(counts[:-1], powers))):
                dx = torch.stack([state_matmul(power.T, dx), dx], 2).flatten(1, 2)[:, -count:]
            du = state_matmul(inject.T, dx).flatten(1, 2)[:, -m:]
        return du.to(ctx.dtype), None


def _inject_and_powers(basis: Realization, like: Tensor) -> tuple[Tensor, Tensor]:
    """(N, C), which puts a chunk's inputs into the state after it, and carry^(2^j) (24, N, N)."""
    readout, powers = chunk_constants(basis, like)
    return readout[-1, :, : basis.C], powers


def transition(basis: Realization, m: int, like: Tensor) -> Tensor:
    """P = (A^m)^T (N, N), computed in fp64, in the state's dtype; where `like` is."""
    return _transition(basis.H, basis.N, m, str(like.device), state_dtype(like.dtype))


@functools.lru_cache(maxsize=256)
def _transition(H: int, N: int, m: int, device: str, dtype: torch.dtype) -> Tensor:
    power = np.linalg.matrix_power(spectral_basis(H).A[:N, :N], m)
    with torch.inference_mode(False):  # or training could not use what an evaluation has put into the cache
        return torch.tensor(power.T, dtype=dtype, device=device)


def find_order(first: Tensor, last: Tensor, order: Order | None) -> Order:
    """The order in which processes hold the halves of a sequence, as positions tell it.

    A half that does not begin at the first position of a document must follow the half that ends just before it.

    Args:
        first, last: (R, B, h) positions at the ends of each half, h = 1 where shards have an odd length.
        order: the answer if it is known.
    Raises:
        ValueError: an unknown order, one that needs an even length, or positions that fit both orders differently.
    """
    R, B, halves = first.shape
    if order not in (*ORDERS, None):
        raise ValueError(f"order must be one of {ORDERS} or None, got {order!r}")
    if halves == 1:
        if order == "head_tail":
            raise ValueError("head-tail order needs an even number of positions on each process")
        return "plain"
    if order is not None:
        return order
    followed = {
        candidate: {
            (a, b, row)
            for a, b in itertools.pairwise(segments_in_order(candidate, R))
            for row in range(B)
            if first[b[0], row, b[1]] == last[a[0], row, a[1]] + 1
        }
        for candidate in ORDERS
    }
    plain, head_tail = followed["plain"], followed["head_tail"]
    if len(plain) == len(head_tail) and plain != head_tail:
        raise ValueError(f"position_ids fit more than one order of the shards: name it, order must be one of {ORDERS}")
    return "plain" if len(plain) >= len(head_tail) else "head_tail"
