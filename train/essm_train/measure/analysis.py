# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What is inside a trained ES-SSM: which channels its gates use, how far it can amplify, and what a budget costs.

Gates: the mean of alpha_k(t) (Eq. 8) by layer and channel, and the mean entropy of alpha(t); in the elastic block for
each head. Stability (the paper's Appendix C): |u(t)| <= U at every step implies |y(t)| <= bound U for every mixer. In
the paper's block, bound = |D| + max_k sigma_k^(1/4) |M_k| |phi_k|_1 (spectral norms; without a gate the sum over k
instead of the maximum). In the elastic block the norm of a head bounds whatever filters and memory give, and the bound
is |out| (sum_j d max norm_j^2 max |z_j|^2)^(1/2), with the largest row of each head's z.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel

from essm_train.data.text import read_blocks
from essm_train.data.tokens import encoder_beside
from essm_train.files import claim, write_figure, write_json
from essm_train.measure.budget_sweep import time_passes
from essm_train.models import budgets_to_measure, load_model
from modeling_essm.spectral_basis import spectral_basis
from modeling_essm.spectral_budget import spectral_layers


def spectral_mixers(model: nn.Module) -> list[Any]:
    """The spectral mixers in order of their layers, by name: the model may be a remote copy of this code."""
    names = {"ESSMSpectralMixer", "ESSMElasticMixer"}
    mixers = [m for m in model.modules() if names & {c.__name__ for c in type(m).__mro__}]
    if not mixers:
        raise ValueError(f"model must hold ESSMSpectralMixer layers, got a {type(model).__name__} without any")
    return mixers


@torch.no_grad()
def gate_statistics(
    model: PreTrainedModel, input_ids: Tensor, budget: int, counted: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run a model with gates on ids (B, L) and average over positions: all, or those that are True in (B, L) `counted`.

    Returns:
        (layers, K) mean of alpha_k, zero for channels that a layer does not hold, and (layers,) mean entropy of
        alpha(t) in nats, at most log K; (layers, K, K) and (layers, K) of the elastic block, a row for each head.
    """
    means: list[Tensor] = []
    entropies: list[Tensor] = []

    def record(mixer: Any, args: tuple[Any, ...]) -> None:
        u, K = args[0], min(budget, len(mixer.channel_mixing))
        gates = mixer.gates(u, K, None).movedim(2, -1)  # (B, L, K), or (B, L, heads, K)
        alpha = (gates / mixer.operator.sigma(K, mixer.scaling_exponent, u)).double()
        alpha = nn.functional.pad(alpha, (0, budget - K) * (alpha.ndim - 2))
        alpha = alpha.flatten(0, 1) if counted is None else alpha[counted]
        means.append(alpha.mean(0).cpu())
        entropies.append(torch.special.entr(alpha).sum(-1).mean(0).cpu())

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
    return [
        float(_elastic_bound(mixer, K) if hasattr(mixer, "in_proj") else _paper_bound(mixer, K))
        for mixer in spectral_mixers(model)
        for K in [min(budget, len(mixer.channel_mixing))]
    ]


def _paper_bound(mixer: Any, K: int) -> Tensor:
    basis = spectral_basis(mixer.operator.filter_length)
    phi_norm = torch.from_numpy(abs(basis.filters(K)).sum(0))
    sigma = torch.from_numpy(basis.sigma[:K] ** mixer.scaling_exponent)
    gains = sigma * phi_norm * torch.linalg.matrix_norm(mixer.channel_mixing[:K].double().cpu(), 2)
    skip = torch.linalg.matrix_norm(mixer.skip.weight.double().cpu(), 2)
    return skip + (gains.max() if mixer.gated else gains.sum())


def _elastic_bound(mixer: Any, K: int) -> Tensor:
    d, n = mixer.head_size, mixer.convolved
    z = mixer.in_proj.weight[: K * (d + n)].double().cpu().view(K, d + n, -1)[:, :d]
    weight = mixer.norm[: K * d].double().cpu().view(K, d)
    # A normalised head has norm sqrt(d) at most, and |SiLU(z)| <= |z| <= |row of z| |u|.
    heads = d * weight.square().amax(1) * z.square().sum(2).amax(1)
    return torch.linalg.matrix_norm(mixer.out_proj.weight[:, : K * d].double().cpu(), 2) * heads.sum().sqrt()


def rows_of(means: Tensor, entropies: Tensor, layers: Sequence[int]) -> list[tuple[str, Tensor, float]]:
    """A name, the mean gates (K,) and the entropy of each of `layers`, or of each head that one holds."""
    rows = []
    for where, entropy in np.ndenumerate(entropies.numpy()):
        name = ", head ".join([f"layer {layers[where[0]]}", *(str(head + 1) for head in where[1:])])
        rows += [(name, means[where], float(entropy))] if means[where].any() else []
    return rows


def draw_gates(rows: Sequence[tuple[str, Tensor, float]]) -> Figure:
    """Mean gates by layer, or by head, and channel, on a log scale."""
    K = len(rows[0][1])
    figure = Figure(figsize=(8, 1.5 + 0.35 * len(rows)), layout="constrained")
    axes = figure.subplots()
    gates = torch.stack([mean for _, mean, _ in rows]).clamp(min=1e-6).log10()
    image = axes.imshow(gates, aspect="auto", cmap="viridis")
    axes.set_xticks(range(K), [str(k + 1) for k in range(K)], fontsize=7)
    axes.set_yticks(range(len(rows)), [f"{name}: entropy {entropy:.2f}" for name, _, entropy in rows])
    axes.set_xlabel("spectral channel k")
    axes.set_title(f"mean gate at K = {K} (log10), and entropy in nats")
    figure.colorbar(image, ax=axes)
    return figure


def draw_cost(budgets: Sequence[int], seconds: Sequence[float]) -> Figure:
    """Seconds of a forward pass relative to those at the largest budget."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(budgets, [s / seconds[-1] for s in seconds], "o-", label="measured")
    axes.plot(budgets, [K / budgets[-1] for K in budgets], ":", color="gray", label="proportional to K")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(budgets, [str(K) for K in budgets])
    axes.set_xlabel("spectral budget K")
    axes.set_ylabel("time of a forward pass relative to the full budget")
    axes.legend()
    axes.grid(alpha=0.3)
    return figure


def analyze(args: Any) -> None:
    """Analyse a saved model; args are those of essm-analyze."""
    output_dir = Path(args.output_dir)
    claim(output_dir, ("analysis.json", "gates.png", "cost.png"), overwrite=args.overwrite)
    model = load_model(AutoModel, args.model, trust_remote_code=args.trust_remote_code)
    config, longest = model.config, getattr(model.config, "filter_length", 512)
    block_size = args.block_size or min(512, longest)
    texts, encoder = args.text_files, encoder_beside(args.model)
    input_ids, _ = read_blocks(texts, encoder, block_size, args.max_blocks, args.text_column)
    budgets = budgets_to_measure(model)
    record: dict[str, Any] = {"model": args.model, "budgets": budgets}
    record["stability_bound_by_layer"] = {K: stability_bounds(model, K) for K in budgets}
    _, times = time_passes(model, {"input_ids": input_ids[:1]}, budgets)
    record["seconds_per_pass"] = [times[K][0] for K in budgets]
    write_figure(output_dir / "cost.png", draw_cost(budgets, record["seconds_per_pass"]))
    for K in (budgets[0], budgets[-1]):
        shown = ", ".join(f"{bound:.3g}" for bound in record["stability_bound_by_layer"][K])
        print(f"stability bound by layer at K={K}: {shown}")
    drawn = ["cost.png"]
    if config.gating != "none":
        means, entropies = gate_statistics(model, input_ids, budgets[-1], input_ids != encoder.pad_id)
        record["gates"] = {"budget": budgets[-1], "mean": means.tolist(), "entropy": entropies.tolist()}
        rows = rows_of(means, entropies, spectral_layers(config))
        write_figure(output_dir / "gates.png", draw_gates(rows))
        drawn = ["gates.png", "cost.png"]
        for name, mean, entropy in rows:
            mixed = int(mean.count_nonzero())  # head j may mix filters 1 to j only
            most = ", ".join(f"{int(k) + 1}: {float(mean[k]):.3f}" for k in mean.argsort(descending=True)[:4])
            print(f"{name}: largest mean gates {most}; entropy {entropy:.3f} of {math.log(mixed):.3f}")
    else:
        (output_dir / "gates.png").unlink(missing_ok=True)  # of a model that had gates, which was to be overwritten
    write_json(output_dir / "analysis.json", record)
    print(f"saved {', '.join([str(output_dir / 'analysis.json'), *drawn])}")
