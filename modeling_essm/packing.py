# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Where sequences lie in a batch: packed ones one after another in a row, and masked positions anywhere among them.

A packed sequence must not see the one before it. Only the mixers look along the sequence. The spectral one runs on the
sequences apart, those of similar length side by side, padded by less than their own length. Everything else of a layer
runs on the packed row as it is.

Masked positions are skipped. Zeros as inputs are not enough for that: they let a state decay. So the model runs on rows
whose real positions have been closed up.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .spectral_constants import is_transformed

# Names under which collators say where sequences begin. Lengths and key offsets add nothing to them.
PACKING_ARGUMENTS = (
    *("position_ids", "seq_idx", "cu_seqlens", "cu_seq_lens_q"),
    *("cu_seq_lens_k", "max_length_q", "max_length_k"),
)
_OFFSETS = ("cu_seqlens", "cu_seq_lens_q")


def pool(hidden_states: Tensor, real: Tensor | None, how: str) -> Tensor:
    """(B, L, D) -> (B, D): the "mean" of the positions where `real` (B, L) is not 0, or the "last" of them."""
    if real is None:
        return hidden_states.mean(1) if how == "mean" else hidden_states[:, -1]
    real = real.to(hidden_states.device).bool()
    if how == "mean":
        wide = torch.promote_types(hidden_states.dtype, torch.float32)  # fp16 ends at 65504, as a sum and as a count
        total = hidden_states.masked_fill(~real[..., None], 0.0).sum(1, dtype=wide)
        return (total / real.sum(1, keepdim=True).clamp(min=1)).to(hidden_states.dtype)
    last = (real * torch.arange(real.shape[1], device=real.device)).amax(1)
    return hidden_states[torch.arange(real.shape[0], device=real.device), last]


class Packing:
    """Where the sequences of a packed (B, L) batch lie.

    Args:
        starts: (B, L) bool, true at the first position of every sequence; column 0 is taken to be.
    Attributes:
        longest: positions of the longest sequence. first: (n,) int64 on the CPU, the first position of each among B L.
    """

    def __init__(self, starts: Tensor):
        B, L = starts.shape
        starts = starts.clone()
        starts[:, 0] = True
        self.first = first = starts.flatten().nonzero().flatten().cpu()
        length = torch.diff(first, append=first.new_tensor([B * L]))
        self.longest = int(length.max())
        size_class = length.double().log2().floor()  # 1, 2-3, 4-7, ..: less than half is padding
        self.groups: list[tuple[Tensor, Tensor]] = []  # (n, longest) positions, B L where there is none; (n,) rows
        for k in size_class.unique():
            begins, lengths = first[size_class == k], length[size_class == k]
            steps = torch.arange(int(lengths.max()), device=first.device)
            index = torch.where(steps < lengths[:, None], begins[:, None] + steps, B * L)
            self.groups.append((index.to(starts.device), begins.div(L, rounding_mode="floor").to(starts.device)))
        found = torch.cat([index.flatten() for index, _ in self.groups])
        place = found.new_empty(B * L + 1)  # the last is that of no position
        place[found] = torch.arange(len(found), device=found.device)
        self.place = place[:-1]

    def sequences(self, B: int, L: int) -> Tensor:
        """(B, L) int64 on the CPU: which sequence each position belongs to."""
        return torch.searchsorted(self.first, torch.arange(B * L, device="cpu"), right=True).view(B, L) - 1

    def positions(self, B: int, L: int) -> Tensor:
        """(B, L) int64 on the CPU: of each position its place in its sequence."""
        return torch.arange(B * L, device="cpu").view(B, L) - self.first[self.sequences(B, L)]

    def apply(self, mixer: Callable[..., Tensor], u: Tensor, call: Any) -> Tensor:
        """mixer(u, call) of every sequence by itself, with a `LayerCall` for its row: (B, L, D) -> (B, L, D)."""
        B, L, D = u.shape
        flat = F.pad(u.reshape(B * L, D), (0, 0, 0, 1))  # the last row is silence
        outputs = []
        for index, row in ((index.to(u.device), row.to(u.device)) for index, row in self.groups):
            sequences = flat.index_select(0, index.flatten()).view(*index.shape, D)
            rows = None if call.rows is None else call.rows[row]
            outputs.append(
                mixer(sequences, dataclasses.replace(call, rows=rows, padding=None, packing=None)).reshape(-1, D)
            )
        return torch.cat(outputs).index_select(0, self.place.to(u.device)).view(B, L, D)


def close_up(real: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """How to move real positions of each row together, before the masked ones; None where no position is masked, but on
    an accelerator, in a compiled graph and under torch.func, where no value is read.

    Args:
        real: (B, L) bool.
    Returns:
        order (B, L), the position that comes to stand at each place; place (B, L), where the output for each position
        is then found, for a masked one that of the last position before it; lengths (B,), places before the masked.
    """
    readable = real.device.type == "cpu" and not torch.compiler.is_compiling() and not is_transformed()
    if readable and bool(real.all()):
        return None
    rank, lengths = real.long().cumsum(1), real.long().sum(1)
    target = torch.where(real, rank, lengths[:, None] + (~real).long().cumsum(1)) - 1
    positions = torch.arange(real.shape[1], device=real.device).expand_as(target)
    return torch.zeros_like(target).scatter(1, target, positions), (rank - 1).clamp(min=0), lengths


def reorder(x: Tensor, order: Tensor) -> Tensor:
    """(B, L, D): in each row the positions (B, L) in this order; x may lie on another device of a spread model."""
    return x.gather(1, order.to(x.device).unsqueeze(-1).expand(-1, -1, x.shape[2]))


def read_packing(
    arguments: Mapping[str, Any],
    B: int,
    L: int,
    mask: Tensor | None = None,
    closed: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Packing | None:
    """The packing that a collator's arguments describe; None where every row is one sequence.

    Args:
        arguments: any of PACKING_ARGUMENTS: position_ids (B, L) or (1, L), a sequence begins where they do not go on
            by one; seq_idx (B, L), where they change; cu_seqlens or cu_seq_lens_q (n + 1,), offsets in the one row.
        mask: (B, L) bool, true at real positions, or None. Between real positions with masked ones in between, a
            sequence begins where position_ids do not rise; next to other padding they mean nothing.
        closed: of `close_up`.
    Returns:
        Where sequences begin once real positions have moved together.
    Raises:
        ValueError: a bad shape, offsets that are not ascending from 0 to L, or descriptions that disagree.
    """
    found: dict[str, Tensor] = {}
    for name, step in (("position_ids", 1), ("seq_idx", 0)):
        value = arguments.get(name)
        if value is None:
            continue
        if tuple(value.shape) not in ((B, L), (1, L)):
            raise ValueError(f"{name} must have shape ({B}, {L}), got {tuple(value.shape)}")
        if mask is not None and name == "position_ids":
            found[name] = _starts_beside_padding(value.expand(B, L).to(mask.device), mask, closed)
            continue
        changes = value[:, 1:] != value[:, :-1] + step
        found[name] = _moved(F.pad(changes, (1, 0)).expand(B, L), closed)
    for name in _OFFSETS:
        value = arguments.get(name)
        if value is None:
            continue
        offsets = value.tolist()
        ascending = all(a < b for a, b in itertools.pairwise(offsets)) and not value.is_floating_point()
        if B != 1 or value.ndim != 1 or len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != L or not ascending:
            raise ValueError(f"{name} must be ascending integers from 0 to {L}, of one row, got {offsets} for {B} rows")
        starts = torch.zeros(1, L, dtype=torch.bool, device=value.device)
        starts[0, offsets[1:-1]] = True
        found[name] = _moved(starts, closed)
    if not found:
        return None
    (name, starts), *others = found.items()
    for other, also in others:
        if not torch.equal(starts.cpu(), also.cpu()):
            raise ValueError(f"{name} and {other} describe different sequences")
    return Packing(starts) if bool(starts.any()) else None


def _moved(starts: Tensor, closed: tuple[Tensor, Tensor, Tensor] | None) -> Tensor:
    """(B, L) starts of sequences among closed-up positions; a sequence of masked positions only is gone."""
    if closed is None:
        return starts
    order, _, lengths = closed
    sequence = starts.to(order.device).long().cumsum(1).gather(1, order)
    changes = F.pad(sequence[:, 1:] != sequence[:, :-1], (1, 0))
    return changes & (torch.arange(starts.shape[1], device=order.device) < lengths[:, None])


def _starts_beside_padding(position_ids: Tensor, mask: Tensor, closed: tuple[Tensor, Tensor, Tensor] | None) -> Tensor:
    """(B, L) starts of sequences among closed-up positions, as position_ids (B, L) tell them."""
    B, L = position_ids.shape
    order = torch.arange(L, device=mask.device).expand(B, L) if closed is None else closed[0]
    ids, real = position_ids.gather(1, order), mask.gather(1, order)
    adjacent = order[:, 1:] == order[:, :-1] + 1
    changes = torch.where(adjacent, ids[:, 1:] != ids[:, :-1] + 1, ids[:, 1:] <= ids[:, :-1])
    return F.pad(changes & real[:, 1:] & real[:, :-1], (1, 0))
