# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What is told of an elastic state model: what its depths have to do with difficulty, controls, and what it costs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from .elastic_tasks import Depths, Measured, always, gate

AROUND = 10  # positions on each side of one where a difficult stretch begins
SHIFTS = (-4.0, -2.0, -1.0, 1.0, 2.0)  # of the gate's thresholds, in units of the logarithm of the objective
STREAMS = 16  # test streams that costs are the means of


def ranks_of(values: Tensor) -> Tensor:
    """From 1, ties at their mean rank."""
    order = values.double().unique(return_inverse=True)[1]
    counts = torch.bincount(order).double()
    return (counts.cumsum(0) - (counts - 1) / 2)[order]


def auroc(scores: Tensor, positive: Tensor) -> float:
    """The chance that a positive has a larger score than a negative, ties counting half; NaN without both."""
    P, N = int(positive.sum()), int((~positive).sum())
    return float((ranks_of(scores)[positive].sum() - P * (P + 1) / 2) / (P * N)) if P and N else math.nan


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's; NaN where one is constant."""
    return float(torch.corrcoef(torch.stack([ranks_of(a), ranks_of(b)]))[0, 1])


def around_events(measured: Measured) -> list[float | None]:
    """Mean depth from 10 positions before a stretch of difficult ones begins to 10 after it, where they exist."""
    hard = measured.difficult & measured.real
    begins = (hard & ~F.pad(hard[:, :-1], (1, 0), value=False)).nonzero().tolist()
    found: list[float | None] = []
    for offset in range(-AROUND, AROUND + 1):
        places = [(i, at + offset) for i, at in begins if 0 <= at + offset < measured.real.shape[1]]
        depths = [float(measured.depths[place]) for place in places if measured.real[place]]
        found.append(float(np.mean(depths)) if depths else None)
    return found


def told(measured: Measured) -> dict[str, Any]:
    fields = (measured.depths, measured.losses, measured.refined, measured.errors, measured.difficult)
    depths, losses, refined, errors, hard = (x[measured.real] for x in fields)
    result = {"values": measured.values, "mean_depth": float(depths.double().mean())}
    result |= {"proposal_objective": float(losses.mean()), "objective": float(refined.mean())}
    if result["mean_depth"]:
        result |= {"auroc": auroc(depths, hard), "rank_correlation": rank_correlation(depths, losses)}
        result |= {"error_correlation": rank_correlation(depths, errors)}
        result |= {"error_correlation_difficult": rank_correlation(depths[hard], errors[hard])}
        result |= {"depth_difficult": float(depths[hard].double().mean())}
        result |= {"depth_easy": float(depths[~hard].double().mean())}
        result["around_events"] = around_events(measured)
    return result


def dithered(mean: Tensor, generator: torch.Generator) -> Tensor:
    """Integers whose means are these, each one of the two next to it."""
    return (mean + torch.rand(mean.shape, generator=generator)).floor().long()


def controls(task: Any, model: Any, own: Measured, most: int, seed: int) -> dict[str, Any]:
    """The same weights with depths that are not the gate's, of which three spend on average what it does; and with its
    thresholds shifted, so that models can be compared at equal depth or at equal quality."""
    there = own.depths[own.real]
    mean, share = float(there.double().mean()), float(own.difficult[own.real].double().mean())
    there_first = min(float(most), mean / share) if share else 0.0
    elsewhere = max(0.0, mean - share * there_first) / (1 - share) if share < 1 else 0.0
    generator = torch.Generator()
    depths: dict[str, Depths] = {
        "none": lambda difficult: 0,
        "all": lambda difficult: most,
        "mean everywhere": lambda difficult: dithered(torch.full(difficult.shape, mean), generator),
        "by chance": lambda difficult: there[torch.randint(len(there), difficult.shape, generator=generator)],
        "where difficult": lambda difficult: dithered(torch.where(difficult, there_first, elsewhere), generator),
    }
    found = {}
    for name, depth in depths.items():
        generator.manual_seed(seed)
        found[name] = told(task.measure(model, depth))
    for shift in SHIFTS:
        found[f"thresholds {shift:+g}"] = told(task.measure(model, gate, gate_threshold_shift=shift))
    return found


FORMULAS: dict[Any, Any] = {  # what torch has none for, of shapes
    torch.ops.aten.cholesky_solve: lambda B, L: 2 * math.prod(B) * L[-1],  # two triangular ones, (.., d, k), (.., d, d)
    torch.ops.aten.linalg_cholesky_ex: lambda A: math.prod(A) * A[-1] // 3,
    # Scores and their sum, (.., L, d) and (.., S, d).
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v: 4 * math.prod(q) * k[-2],
}


class Flops(TorchDispatchMode):
    """Counts those of matrix products, solves and attention while it is entered, of inner gradients too.

    torch's own FlopCounterMode follows modules with hooks that autograd.grad refuses.
    """

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (own := FORMULAS.get(func._overloadpacket)) is not None:
            self.total += own(*(x.shape for x in args if isinstance(x, Tensor)))
        elif (formula := flop_registry.get(func._overloadpacket)) is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=out)
        return out


def flops_of(task: Any, model: Any, depth: int | None = None, streams: int = STREAMS) -> float:
    """FLOPs of a position of test streams, batch 1, as they come. Every row looks at the objective once a position,
    also one that never refines."""
    with Flops() as flops:
        positions = sum(task.stream(model, i, always(depth)) for i in range(streams))
    return flops.total / positions
