# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The operator and the mixer on one process's part of a batch of sequences.

Letters: R processes, S segments of m positions on each, L = S m; B batch, N states, D width, K budget, p taps - 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..packing import Packing
from ..spectral_constants import Realization, state_matmul
from ..spectral_ops import SpectralOperator
from .segments import (
    Carry,
    EndState,
    Order,
    Segments,
    find_order,
    gather,
    group_of,
    segments_in_order,
    transition,
)

_REFUSED = -1  # in place of B


def refuse(num_facts: int, group: Any, device: torch.device) -> None:
    """In place of a `SequenceShard` with so many integers to `agree` on: the other processes raise, and do not wait."""
    gather(torch.full((2 + num_facts,), _REFUSED, device=device), group_of(group))


class SequenceShard:
    """Where this process's positions lie in their sequences; takes the place of a `Packing` in the model.

    Each collective is called by all processes of the group, whatever their parts hold: two small ones here, then one
    of states a layer and direction, and one of the last p inputs where there is a short convolution. (These must be
    there before the state that the convolution's outputs leave behind can be computed, so they travel by themselves.)

    Args:
        position_ids: (B, L), this process's. A document begins where they do not go on by one, in the order
            of the whole sequence.
        group: ProcessGroup, or DeviceMesh of one dimension.
        order: "plain" (process r holds the r-th part), "head_tail" (parts r and 2 R - 1 - r of 2 R), or None to read
            it from position_ids; documents that these begin at 0 are what tells it.
        agree: integers that must be the same on all processes, beside the shape; `what` says what they are.
        rows: (B,) budgets of the rows, which must be the same too, or None.
    Raises:
        ValueError: on all processes, if shapes, those integers or rows differ, one has called `refuse` in place of
            this, or position_ids fit no single order.
    Attributes:
        longest: positions of the longest document, which `position_ids` count from 0.
    """

    def __init__(
        self,
        position_ids: Tensor,
        group: Any,
        order: Order | None = None,
        agree: Sequence[int] = (),
        what: str = "",
        rows: Tensor | None = None,
    ):
        group = group_of(group)
        B, L = position_ids.shape
        seen = gather(torch.tensor([B, L, *agree], device=position_ids.device), group).tolist()
        if refused := [rank for rank, row in enumerate(seen) if row[0] == _REFUSED]:
            raise ValueError(f"processes {refused} of those that share sequences refuse their arguments, and say why")
        if any(row != seen[0] for row in seen):
            raise ValueError(f"processes that share sequences must agree on shape{what}, got {seen}")
        halves = position_ids.reshape(B, 2 if L % 2 == 0 else 1, -1)
        broken = (halves[..., 1:] != halves[..., :-1] + 1).any(2)
        of_rows = position_ids.new_zeros(B) if rows is None else rows.to(position_ids)
        facts = [halves[..., 0], halves[..., -1], broken.long(), halves.amax(2), of_rows[:, None].expand(broken.shape)]
        first, last, inside, top, budgets = gather(torch.stack(facts, 2), group).cpu().unbind(3)  # (R, B, h) each
        if bool((budgets != budgets[0]).any()):
            seen = budgets[..., 0].tolist()
            raise ValueError(f"processes that share sequences must agree on budgets of rows, got {seen}")
        self.longest = int(top.max()) + 1
        order = find_order(first, last, order)
        if order == "plain":  # the halves are one segment
            inside = inside.bool().any(2, keepdim=True) | (first[..., 1:] != last[..., :-1] + 1).any(2, keepdim=True)
            first, last = first[..., :1], last[..., -1:]
        places = segments_in_order(order, group.size(), halves=1)
        first, last, inside = (torch.stack([fact[r, :, i] for r, i in places]) for fact in (first, last, inside))
        goes_on, whole = first[1:] == last[:-1] + 1, inside == 0  # (Q - 1, B) and (Q, B)
        masks = [None if bool(mask.all()) else mask.to(position_ids.device) for mask in (goes_on, whole)]
        self.segments = Segments(group, tuple(places), *masks)
        self.S, self.packing, self.current = len(places) // group.size(), None, None
        if not bool(whole[self.segments.own].all()):
            starts = position_ids.reshape(B * self.S, -1)
            starts = F.pad(starts[:, 1:] != starts[:, :-1] + 1, (1, 0))
            self.packing = Packing(starts)
            later = starts.long().flip(1).cumsum(1).flip(1) - starts.long()
            self.current = (later == 0)[..., None]  # (B S, m, 1), where the segment's last document lies

    def apply(self, mixer: Any, u: Tensor, budget: int, rows: Tensor | None) -> Tensor:
        """mixer(u, budget, rows) of every document, wherever it lies: (B, L, D) -> (B, L, D); rows (B,) or None."""
        u = self.convolve(mixer, u) if mixer.taps > 1 else mixer.operator_inputs(u)
        gates = mixer.gates(u, budget, rows)
        M = mixer.mixing_matrices(budget, u.dtype)
        return self.operate(mixer.operator, u, gates, M, algorithm=mixer.algorithm) + mixer.skip(u)

    def convolve(self, mixer: Any, u: Tensor) -> Tensor:
        """The mixer's short convolution, (B, L, D) -> (B, L, D). Raises ValueError if it reaches beyond a segment."""
        p, segments = mixer.taps - 1, self._fold(u)
        if segments.shape[1] < p:
            raise ValueError(f"a segment must hold at least the {p} positions before a step, got {segments.shape[1]}")
        ends = self._current(segments)[:, segments.shape[1] - p :]
        before = Carry.apply(ends.unflatten(0, (-1, self.S)), self.segments, None).flatten(0, 1)
        y = self._by_document(lambda past, v: mixer.convolve(v, past, None)[0], before, segments)
        return y.reshape(u.shape)

    def operate(
        self,
        operator: SpectralOperator,
        u: Tensor,
        gates: Tensor,
        channel_mixing: Tensor,
        initial_state: Tensor | None = None,
        algorithm: str = "chunked",
    ) -> Tensor:
        """Eq. (7), of which every process computes its positions; see `SpectralOperator.__call__`.

        Args:
            u: (B, L, D). gates: (B, L, K[, G]). channel_mixing: whole, on every process.
            initial_state: (B, >= N, D) before the first position of all, equal on all processes, or None for zero. Its
                gradient is that of the first segment's process, and zero on others.
        Returns:
            (B, L, E) in u's dtype.
        """
        N = operator.num_states(gates.shape[2])
        x0 = self.states_before(Realization(operator.filter_length, N, operator.chunk_size), u, initial_state)

        def run(x: Tensor, u: Tensor, gates: Tensor) -> Tensor:
            return operator(u, gates, channel_mixing, x, algorithm=algorithm)[0]

        y = self._by_document(run, x0.flatten(0, 1), self._fold(u), self._fold(gates))
        return y.reshape(*u.shape[:2], -1)

    def states_before(self, basis: Realization, u: Tensor, initial_state: Tensor | None = None) -> Tensor:
        """The state before each segment of this process: (B, S, N, D) in the state's dtype, from inputs u (B, L, D)."""
        segments = self._fold(u)
        ends = EndState.apply(self._current(segments), basis).unflatten(0, (-1, self.S))
        P = transition(basis, segments.shape[1], u)
        if initial_state is None:
            return Carry.apply(ends, self.segments, P)
        x = initial_state[:, None, : basis.N].to(ends.dtype) * float(self.segments.own[0] == 0)
        x = F.pad(x, (0, 0, 0, 0, 0, self.S - 1))  # the first segment is the first on its process
        with torch.autocast(u.device.type, enabled=False):
            carried = state_matmul(P, x)
        if self.segments.whole is not None:
            carried = carried.masked_fill(~self.segments.whole[0, :, None, None, None], 0.0)
        return Carry.apply(ends + carried, self.segments, P) + x

    def _fold(self, x: Tensor) -> Tensor:
        """(B, L, ..) -> (B S, m, ..)."""
        return x.reshape(x.shape[0] * self.S, x.shape[1] // self.S, *x.shape[2:])

    def _current(self, segments: Tensor) -> Tensor:
        """(B S, m, D) with zeros before the last document of each segment."""
        return segments if self.current is None else segments.masked_fill(~self.current, 0.0)

    def _by_document(self, function: Callable[..., Tensor], before: Tensor, *inputs: Tensor) -> Tensor:
        """function(before, *inputs) of each document's part of a segment by itself.

        Args:
            before: (B S, n, D), for the document that goes on from the segment before; zero for others. inputs:
                (B S, m, ..), which `function` takes as (b, t, ..) with silence after shorter parts, and answers with
                (b, t, E).
        Returns:
            (B S, m, E).
        """
        if self.packing is None:
            return function(before, *inputs)
        m = inputs[0].shape[1]
        flat = [F.pad(x.flatten(0, 1), (0, 0) * (x.ndim - 2) + (0, 1)) for x in inputs]  # the last row is silence
        outputs = []
        for index, row in self.packing.groups:
            goes_on = (index[:, 0] % m == 0)[:, None, None]
            parts = [x.index_select(0, index.flatten()).view(*index.shape, *x.shape[1:]) for x in flat]
            outputs.append(function(torch.where(goes_on, before[row], 0.0), *parts).flatten(0, 1))
        return torch.cat(outputs).index_select(0, self.packing.place).unflatten(0, (-1, m))
