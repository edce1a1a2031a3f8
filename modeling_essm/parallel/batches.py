# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""A batch of whole sequences cut into the parts of processes, and outputs put together again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .segments import ORDERS, Order, gather, group_of

# What has a position along dimension 1.
_ALONG_SEQUENCE = ("input_ids", "inputs_embeds", "labels", "shift_labels", "position_ids")


def shard_positions(length: int, rank: int, size: int, order: Order = "plain") -> Tensor:
    """Which positions of a sequence process `rank` of `size` holds: (length / size,) int64.

    Raises:
        ValueError: an unknown order, or a length that is no multiple of size (head-tail: of 2 size).
    """
    if order not in ORDERS:
        raise ValueError(f"order must be one of {ORDERS}, got {order!r}")
    count = size if order == "plain" else 2 * size
    if length % count:
        raise ValueError(f"sequences must have a multiple of {count} positions for {size} processes, got {length}")
    parts = torch.arange(length).view(count, -1)
    return parts[rank] if order == "plain" else torch.cat([parts[rank], parts[count - 1 - rank]])


def shard_batch(batch: Mapping[str, Any], group: Any, order: Order = "plain") -> dict[str, Any]:
    """This process's part of a language model's batch. No communication.

    Labels are shifted before they are cut, since a shard's last position predicts the next one's first. The loss of
    each process is its sum over scored positions divided by a common number, chosen so that the mean over the group is
    the loss of the whole batch, as losses and gradients averaged by DDP and FSDP are.

    Args:
        batch: keyword arguments of the model, the same on all processes of the group: input_ids (B, L) or
            inputs_embeds (B, L, D), labels (B, L) before shifting, position_ids (B, L) or (1, L) where documents are
            packed; attention_mask of ones is left out; anything else is passed on.
        group: ProcessGroup, or DeviceMesh of one dimension. order: as in `SequenceShard`.
    Returns:
        The same arguments of L / R positions, always with position_ids; of labels also shift_labels (B, L / R) and
        num_items_in_batch (), the number of scored positions in the batch divided by R.
    Raises:
        ValueError: as `shard_positions`, or padding.
    """
    group, batch = group_of(group), dict(batch)
    mask = batch.pop("attention_mask", None)
    if mask is not None and not bool(mask.all()):
        raise ValueError("padding has no place in sequences spread over processes: pack them, with position_ids")
    inputs: Tensor = batch["input_ids"] if batch.get("input_ids") is not None else batch["inputs_embeds"]
    L = inputs.shape[1]
    positions = shard_positions(L, group.rank(), group.size(), order).to(inputs.device)
    if batch.get("position_ids") is None:
        batch["position_ids"] = torch.arange(L, device=inputs.device)[None]
    if batch.get("labels") is not None:
        if batch.get("shift_labels") is None:
            batch["shift_labels"] = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        batch["num_items_in_batch"] = (batch["shift_labels"] != -100).sum() / group.size()
    for name in _ALONG_SEQUENCE:
        if batch.get(name) is not None:
            batch[name] = batch[name][:, positions]
    return batch


@torch.no_grad()
def gather_sequence(x: Tensor, group: Any, order: Order = "plain") -> Tensor:
    """Whole sequences from every process's part: (B, L / R, ..) -> (B, L, ..), on all. No gradient flows through."""
    group = group_of(group)
    R, L = group.size(), x.shape[1] * group.size()
    positions = torch.cat([shard_positions(L, rank, R, order) for rank in range(R)])
    return gather(x, group).transpose(0, 1).flatten(1, 2)[:, positions.argsort().to(x.device)]
