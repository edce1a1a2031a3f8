# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What is inside a trained ES-SSM: which channels its gates use, how far it can amplify, and what a budget costs.

Gates: the mean of alpha_k(t) (Eq. 8) over all positions, by layer and channel, and the mean entropy of alpha(t), at a
budget. Stability (the paper's Appendix C): |u(t)| <= U at every step implies |y(t)| <= bound U for every mixer, with
bound = |D| + max_k sigma_k^(1/4) |M_k| |phi_k|_1 (spectral norms; without a gate the sum over k instead of the
maximum; where heads choose channels of their own, sum_t max_k sigma_k^(1/4) |M_k| |phi_k(t)|; and the short convolution
before the mixer multiplies the bound by its gain). Cost: multiply-adds of one layer per token, by each algorithm,
beside measured times.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from transformers import PreTrainedModel

from essm_train.measure.timing import paired
from modeling_essm.loading_essm import spectral_mixers
from modeling_essm.mixer_essm import LayerCall
from modeling_essm.spectral_basis import spectral_basis


@dataclass(frozen=True)
class GateStatistics:
    """What was measured at one budget K.

    Attributes:
        mean: (layers, K) mean of alpha_k, zero for channels that a layer does not hold; (layers, G, K) of G > 1 heads.
        entropy: (layers,) or (layers, G), mean entropy of alpha(t) in nats, at most log K.
    """

    budget: int
    mean: Tensor
    entropy: Tensor


def parts_of(model: nn.Module) -> list[Any]:
    """What a layer's cost is counted of: the paper's mixers, and whole gated blocks, which are nothing without theirs.

    Each computes (B, L, D) from (B, L, D) and a budget.
    """
    blocks = [module for module in model.modules() if type(module).__name__ == "ESSMGatedLayer"]
    return blocks or spectral_mixers(model)


@torch.no_grad()
def gate_statistics(model: PreTrainedModel, batch: Mapping[str, Tensor], budget: int) -> GateStatistics:
    """Run the model on a batch of its inputs (no labels) and average its gates over real positions.

    Raises:
        ValueError: a model without gates.
    """
    mixers = spectral_mixers(model)
    if not mixers or not mixers[0].gated:
        raise ValueError("gate statistics need a model with gating='softmax'")
    mask = batch.get("attention_mask")
    means: list[Tensor] = []
    entropies: list[Tensor] = []

    def record(mixer: Any, args: tuple[Any, ...]) -> None:
        u, K = args[0], min(budget, len(mixer.channel_mixing))
        u = mixer.convolve(u, None, None)[0] if mixer.taps else u
        gates = mixer.gates(u, K).movedim(2, -1)  # (B, L, K), or (B, L, G, K)
        alpha = (gates / mixer.operator.sigma(K, mixer.scaling_exponent, u)).double()
        weight = torch.ones(u.shape[:2], dtype=torch.float64, device=u.device) if mask is None else mask.double()
        weight = weight / weight.sum()
        mean = torch.einsum("bl...k,bl->...k", alpha, weight).cpu()
        means.append(torch.nn.functional.pad(mean, (0, budget - K)))
        entropy = -(alpha * alpha.clamp(min=1e-300).log()).sum(-1)
        entropies.append(torch.einsum("bl...,bl->...", entropy, weight).cpu())

    hooks = [mixer.register_forward_pre_hook(record) for mixer in mixers]
    try:
        model.eval()(**batch, use_cache=False, spectral_budget=budget)
    finally:
        for hook in hooks:
            hook.remove()
    return GateStatistics(budget, torch.stack(means), torch.stack(entropies))


@torch.no_grad()
def stability_bounds(model: PreTrainedModel, budget: int) -> list[float]:
    """The bound of every layer's mixer at that budget. Raises ValueError for AR-STU's feedback, which it leaves out."""
    bounds = []
    for mixer in spectral_mixers(model):
        if _has_feedback(mixer):
            raise ValueError("the bound of Appendix C does not cover the feedback of AR-STU")
        basis, K = spectral_basis(mixer.operator.filter_length), min(budget, len(mixer.channel_mixing))
        phi = torch.from_numpy(abs(basis.filters(K)))  # (H, K)
        sigma = torch.from_numpy(basis.sigma[:K] ** mixer.scaling_exponent)
        M, skip = mixer.channel_mixing[:K].double().cpu(), mixer.skip.weight.double().cpu()
        M_norm = torch.linalg.matrix_norm(M.unflatten(1, (-1, M.shape[2])), 2).amax(1)  # the largest of its blocks
        gains = phi * sigma * M_norm
        if not mixer.gated:
            spectral = gains.sum()
        elif mixer.num_heads == 1:
            spectral = gains.sum(0).max()
        else:
            spectral = gains.amax(1).sum()
        bound = spectral + (skip.abs().max() if skip.ndim == 1 else torch.linalg.matrix_norm(skip, 2))
        if mixer.taps:  # |SiLU(v)| <= |v|
            bound = bound * mixer.convolution.double().cpu().abs().amax(1).sum()
        bounds.append(float(bound))
    return bounds


def _has_feedback(mixer: Any) -> bool:
    """Whether it is one of AR-STU."""
    return hasattr(mixer, "output_mixing")


def layer_cost(part: Any, budget: int, length: int) -> dict[str, float]:
    """Multiply-adds of one spectral layer per token, forward, for L = length: Eq. (11) of the paper, term by term.

    Of a mixer, or of a whole gated block, as `parts_of` gives them. Any algorithm: D^2 for the skip term; with a gate
    D D_g + D_g K for its two layers and K for softmax and scaling; K D to weight the features and K D^2 to mix them.
    A gated block of inner width D and G heads has D for the skip term and D for each tap of its convolution, G times as
    many gates, K D d to mix the features in blocks of size d, and its projections in and out and those of its
    feed-forward layer, if any. The features themselves:

    chunked  K (C + N) D, and (n C + (s + 1) N) N D / L for the states before each of n = L/C chunks and after the last,
             which a scan of s < 2 n products by N x N matrices connects.
    fft      the paper's algorithm, O(K L log L D): a real FFT of u and K inverse ones of length n = 2 L, each counted
             as 1.25 n log2 n, and K complex products.
    step     N (N + 1) D for the recurrence.

    AR-STU has 2 D^2 for past inputs, log2(L) + 1 products by 2D x 2D matrices for the feedback, which
    are squared as often, and with negative filters features, weights and mixing twice. A shift of the features is free.
    """
    mixer = getattr(part, "mixer", part)
    (capacity, D, d), operator = mixer.channel_mixing.shape, mixer.operator
    K, G = min(budget, capacity), mixer.num_heads
    C, N = operator.chunk_size, operator.num_states(K)
    gate = mixer.gate_in.out_features * (D + G * K) + G * K if mixer.gated else 0
    order = 2 if _has_feedback(mixer) else 0
    feedback = length.bit_length() * ((2 * D) ** 2 * (length + 1) + (2 * D) ** 3) / length if order else 0
    skip = mixer.skip.weight.numel() + mixer.taps * D
    inside = {id(module) for module in mixer.modules()}
    linear = [x for x in part.modules() if isinstance(x, nn.Linear) and id(x) not in inside]
    fixed = skip + sum(x.weight.numel() for x in linear) + gate + order * D * D + feedback
    n = math.ceil(length / C)
    scan = sum((n >> level) - 1 for level in range(n.bit_length()))
    transform = 1.25 * 2 * math.log2(2 * length)
    features = {
        "chunked": K * (C + N) * D + (n * C + (scan + 1) * N) * N * D / length,
        "fft": (1 + K) * transform * D + 4 * K * D,
        "step": N * (N + 1) * D,
    }
    operators = 2 if hasattr(mixer, "channel_mixing_negative") else 1
    return {name: fixed + operators * (count + K * D + K * D * d) for name, count in features.items()}


@torch.no_grad()
def measured_cost(part: Any, budgets: Sequence[int], length: int, rounds: int = 5) -> dict[str, list[float]]:
    """Median seconds of one layer's forward pass, batch 1, for `chunked` and `fft` at every budget, taking turns.

    Args:
        part: as in `layer_cost`.
    """
    mixer = getattr(part, "mixer", part)
    weight, configured = mixer.skip.weight, mixer.algorithm
    width = weight.shape[-1] if part is mixer else part.in_proj.in_features
    u = torch.randn(1, length, width, dtype=weight.dtype, device=weight.device)
    algorithms = ("chunked", "fft")

    def run(algorithm: str, K: int) -> None:
        mixer.algorithm = algorithm
        part(u, LayerCall(min(K, len(mixer.channel_mixing))))

    try:
        calls = {(name, K): functools.partial(run, name, K) for K in budgets for name in algorithms}
        seconds = paired(calls, u.device, rounds, warmup=1, sample_seconds=0.0, limit_seconds=math.inf)
    finally:
        mixer.algorithm = configured
    return {name: [statistics.median(seconds[name, K]) for K in budgets] for name in algorithms}


def rows_of(statistics_: GateStatistics) -> list[tuple[str, Tensor, float]]:
    """A name, the mean gates (K,) and the entropy of each layer, or of each head of each layer."""
    return [
        (f"layer {where[0]}" + "".join(f", head {head}" for head in where[1:]), statistics_.mean[where], float(entropy))
        for where, entropy in np.ndenumerate(statistics_.entropy.numpy())
    ]


def draw_gates(statistics_: GateStatistics) -> Figure:
    """Mean gates by layer, or by head, and channel, on a log scale."""
    rows, log_K = rows_of(statistics_), math.log(max(2, statistics_.budget))
    figure = Figure(figsize=(8, 1.5 + 0.35 * len(rows)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(
        torch.stack([mean for _, mean, _ in rows]).clamp(min=1e-6).log10(), aspect="auto", cmap="viridis"
    )
    axes.set_xticks(range(statistics_.budget), [str(k + 1) for k in range(statistics_.budget)], fontsize=7)
    axes.set_yticks(range(len(rows)), [f"{name}: entropy {entropy / log_K:.2f}" for name, _, entropy in rows])
    axes.set_xlabel("spectral channel k")
    axes.set_title(f"mean gate at K = {statistics_.budget} (log10), and entropy as a part of log K")
    figure.colorbar(image, ax=axes)
    return figure


def draw_cost(budgets: Sequence[int], model: Mapping[str, list[float]], measured: Mapping[str, list[float]]) -> Figure:
    """Modelled against measured cost, each relative to its value at the largest budget."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for color, (name, seconds) in zip(("tab:blue", "tab:orange"), measured.items()):
        axes.plot(budgets, [s / seconds[-1] for s in seconds], "o-", color=color, label=f"{name}, measured time")
        axes.plot(
            budgets, [c / model[name][-1] for c in model[name]], "--", color=color, label=f"{name}, multiply-adds"
        )
    axes.plot(budgets, [K / budgets[-1] for K in budgets], ":", color="gray", label="proportional to K")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(budgets, [str(K) for K in budgets])
    axes.set_xlabel("spectral budget K")
    axes.set_ylabel("cost relative to the full budget")
    axes.legend()
    axes.grid(alpha=0.3)
    return figure
