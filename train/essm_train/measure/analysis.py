# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What is inside a trained ES-SSM: which channels its gates use, how far it can amplify, and what a budget costs.

Gates: the mean of alpha_k(t) (Eq. 8) by layer and channel, and the mean entropy of alpha(t). Stability (the paper's
Appendix C): |u(t)| <= U at every step implies |y(t)| <= bound U for every mixer, with bound = |D| + max_k sigma_k^(1/4)
|M_k| |phi_k|_1 (spectral norms; without a gate the sum over k instead of the maximum; where heads choose channels of
their own, sum_t max_k sigma_k^(1/4) |M_k| |phi_k(t)|; and the short convolution before the mixer multiplies the bound
by its gain). Cost: multiply-adds of one layer per token, by each algorithm, beside measured times.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel

from essm_train.data.text import read_blocks
from essm_train.data.tokens import ByteEncoder
from essm_train.files import claim, write_figure, write_json
from essm_train.measure.timing import paired
from essm_train.models import load_model
from modeling_essm.loading_essm import spectral_mixers
from modeling_essm.mixer_essm import LayerCall
from modeling_essm.spectral_basis import spectral_basis
from modeling_essm.training.budget_dropout import BUDGETS, clip_budgets


def parts_of(model: nn.Module) -> list[Any]:
    """What a layer's cost is counted of: the paper's mixers, and whole gated blocks, which are nothing without theirs.

    Each computes (B, L, D) from (B, L, D) and a budget.
    """
    blocks = [module for module in model.modules() if type(module).__name__ == "ESSMGatedLayer"]
    return blocks or spectral_mixers(model)


@torch.no_grad()
def gate_statistics(model: PreTrainedModel, input_ids: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    """Run a model with gates on ids (B, L) and average over all positions.

    Returns:
        (layers, K) mean of alpha_k, zero for channels that a layer does not hold, and (layers,) mean entropy of
        alpha(t) in nats, at most log K; (layers, G, K) and (layers, G) of G > 1 heads.
    """
    means: list[Tensor] = []
    entropies: list[Tensor] = []

    def record(mixer: Any, args: tuple[Any, ...]) -> None:
        u, K = args[0], min(budget, len(mixer.channel_mixing))
        u = mixer.convolve(u, None, None)[0] if mixer.taps else u
        gates = mixer.gates(u, K).movedim(2, -1)  # (B, L, K), or (B, L, G, K)
        alpha = (gates / mixer.operator.sigma(K, mixer.scaling_exponent, u)).double()
        means.append(nn.functional.pad(alpha.mean((0, 1)).cpu(), (0, budget - K)))
        entropies.append(torch.special.entr(alpha).sum(-1).mean((0, 1)).cpu())

    hooks = [mixer.register_forward_pre_hook(record) for mixer in spectral_mixers(model)]
    try:
        model.eval()(input_ids, use_cache=False, spectral_budget=budget)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(means), torch.stack(entropies)


@torch.no_grad()
def stability_bounds(model: PreTrainedModel, budget: int) -> list[float]:
    """The bound of every layer's mixer at that budget."""
    bounds = []
    for mixer in spectral_mixers(model):
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


def layer_cost(part: Any, budget: int, length: int) -> dict[str, float]:
    """Multiply-adds of one spectral layer per token, forward, for L = length: Eq. (11) of the paper, term by term.

    `part` is one of `parts_of`. Any algorithm: the skip term, D D_g + D_g K + K for the gate, K D to weight the
    features and K D d to mix them in blocks of d (of D in the paper's). A gated block of G heads has G times as many
    gates, a convolution, and its projections and those of its feed-forward layer. The features themselves:

    chunked  K (C + N) D, and (n C + (s + 1) N) N D / L for the states before each of n = L/C chunks and after the last,
             which a scan of s < 2 n products by N x N matrices connects.
    fft      the paper's algorithm, O(K L log L D): a real FFT of u and K inverse ones of length n = 2 L, each counted
             as 1.25 n log2 n, and K complex products.
    step     N (N + 1) D for the recurrence.
    """
    mixer = getattr(part, "mixer", part)
    (capacity, D, d), operator = mixer.channel_mixing.shape, mixer.operator
    K, G = min(budget, capacity), mixer.num_heads
    C, N = operator.chunk_size, operator.num_states(K)
    gate = mixer.gate_in.out_features * (D + G * K) + G * K if mixer.gated else 0
    inside = {id(module) for module in mixer.modules()}
    linear = [x for x in part.modules() if isinstance(x, nn.Linear) and id(x) not in inside]
    fixed = mixer.skip.weight.numel() + mixer.taps * D + sum(x.weight.numel() for x in linear) + gate
    n = math.ceil(length / C)
    scan = sum((n >> level) - 1 for level in range(n.bit_length()))
    transform = 1.25 * 2 * math.log2(2 * length)
    features = {
        "chunked": K * (C + N) * D + (n * C + (scan + 1) * N) * N * D / length,
        "fft": (1 + K) * transform * D + 4 * K * D,
        "step": N * (N + 1) * D,
    }
    return {name: fixed + count + K * D + K * D * d for name, count in features.items()}


@torch.no_grad()
def measured_cost(part: Any, budgets: Sequence[int], length: int, rounds: int = 5) -> dict[str, list[float]]:
    """Median seconds of one layer's forward pass, batch 1, for `chunked` and `fft` at every budget, taking turns."""
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


def rows_of(means: Tensor, entropies: Tensor) -> list[tuple[str, Tensor, float]]:
    """A name, the mean gates (K,) and the entropy of each layer, or of each head of each layer."""
    return [
        (", head ".join(map(str, (f"layer {where[0]}", *where[1:]))), means[where], float(entropy))
        for where, entropy in np.ndenumerate(entropies.numpy())
    ]


def draw_gates(rows: Sequence[tuple[str, Tensor, float]]) -> Figure:
    """Mean gates by layer, or by head, and channel, on a log scale."""
    K = len(rows[0][1])
    figure = Figure(figsize=(8, 1.5 + 0.35 * len(rows)), layout="constrained")
    axes, log_K = figure.subplots(), math.log(max(2, K))
    gates = torch.stack([mean for _, mean, _ in rows]).clamp(min=1e-6).log10()
    image = axes.imshow(gates, aspect="auto", cmap="viridis")
    axes.set_xticks(range(K), [str(k + 1) for k in range(K)], fontsize=7)
    axes.set_yticks(range(len(rows)), [f"{name}: entropy {entropy / log_K:.2f}" for name, _, entropy in rows])
    axes.set_xlabel("spectral channel k")
    axes.set_title(f"mean gate at K = {K} (log10), and entropy as a part of log K")
    figure.colorbar(image, ax=axes)
    return figure


def draw_cost(budgets: Sequence[int], model: Mapping[str, list[float]], measured: Mapping[str, list[float]]) -> Figure:
    """Modelled against measured cost, each relative to its value at the largest budget."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for color, name in zip(("tab:blue", "tab:orange"), measured):
        for costs, style, what in ((measured[name], "o-", "measured time"), (model[name], "--", "multiply-adds")):
            axes.plot(budgets, [c / costs[-1] for c in costs], style, color=color, label=f"{name}, {what}")
    axes.plot(budgets, [K / budgets[-1] for K in budgets], ":", color="gray", label="proportional to K")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(budgets, [str(K) for K in budgets])
    axes.set_xlabel("spectral budget K")
    axes.set_ylabel("cost relative to the full budget")
    axes.legend()
    axes.grid(alpha=0.3)
    return figure


def analyze(args: Any) -> None:
    """Analyse a saved model; args are those of essm-analyze."""
    output_dir = Path(args.output_dir)
    claim(output_dir, ("analysis.json", "gates.png", "cost.png"), overwrite=args.overwrite)
    input_ids, _ = read_blocks(args.text_files, ByteEncoder(), args.block_size, args.max_blocks)
    model = load_model(AutoModel, args.model, trust_remote_code=args.trust_remote_code)
    config = model.config
    budgets = clip_budgets((*BUDGETS, config.num_spectral_channels), config.num_spectral_channels)
    _, largest = max(zip(spectral_mixers(model), parts_of(model)), key=lambda both: len(both[0].channel_mixing))
    modelled = [layer_cost(largest, K, args.block_size) for K in budgets]
    measured = measured_cost(largest, budgets, args.block_size)
    record: dict[str, Any] = {"model": args.model, "budgets": budgets}
    record["multiply_adds_per_token"] = {name: [cost[name] for cost in modelled] for name in modelled[0]}
    record["seconds_per_layer"] = measured
    write_figure(output_dir / "cost.png", draw_cost(budgets, record["multiply_adds_per_token"], measured))
    record["stability_bound_by_layer"] = {K: stability_bounds(model, K) for K in budgets}
    for K in (budgets[0], budgets[-1]):
        shown = ", ".join(f"{bound:.3g}" for bound in record["stability_bound_by_layer"][K])
        print(f"stability bound by layer at K={K}: {shown}")
    if config.gating == "softmax":
        means, entropies = gate_statistics(model, input_ids, budgets[-1])
        record["gates"] = {"budget": budgets[-1], "mean": means.tolist(), "entropy": entropies.tolist()}
        rows = rows_of(means, entropies)
        write_figure(output_dir / "gates.png", draw_gates(rows))
        for name, mean, entropy in rows:
            most = ", ".join(f"{int(k) + 1}: {float(mean[k]):.3f}" for k in mean.argsort(descending=True)[:4])
            print(f"{name}: largest mean gates {most}; entropy {entropy:.3f} of {math.log(budgets[-1]):.3f}")
    write_json(output_dir / "analysis.json", record)
    print(f"saved {output_dir / 'analysis.json'}, gates.png and cost.png")
