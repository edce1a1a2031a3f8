# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What is inside a trained ES-SSM: which channels its gates use, how far it can amplify, and what a budget costs.

    python train/analyze.py --model runs/train_clm/model --text_files some.txt --output_dir runs/analysis

Gates: the mean of alpha_k(t) (Eq. 8) over all positions, by layer and channel, and the mean entropy of alpha(t), at a
budget. Stability (the paper's Appendix C): |u(t)| <= U at every step implies |y(t)| <= bound U for every layer, with
bound = |D| + max_k sigma_k^(1/4) |M_k| |phi_k|_1 (spectral norms; without a gate the sum over k instead of the
maximum). Cost: multiply-adds of one layer per token, by each algorithm, beside measured times.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from budget_dropout import BUDGETS, clip_budgets
from command import run_script
from engine import check_writable, write_json
from matplotlib.figure import Figure
from models import TRUST_HELP, load_model
from text_data import ByteEncoder, evaluation_blocks, read_files, to_stream
from torch import Tensor
from transformers import AutoModel, HfArgumentParser, PreTrainedModel

from modeling_essm.spectral_basis import spectral_basis


@dataclass(frozen=True)
class GateStatistics:
    """Of one budget K.

    Attributes:
        mean: (layers, K) mean of alpha_k, zero for channels that a layer does not hold.
        entropy: (layers,) mean entropy of alpha(t) in nats, at most log K.
    """

    budget: int
    mean: Tensor
    entropy: Tensor


def mixers_of(model: PreTrainedModel) -> list[Any]:
    """The spectral mixers of any ES-SSM model, in order of their layers (its code may be a remote copy)."""
    return [module for module in model.modules() if type(module).__name__ == "ESSMSpectralMixer"]


@torch.no_grad()
def gate_statistics(model: PreTrainedModel, batch: Mapping[str, Tensor], budget: int) -> GateStatistics:
    """Run the model on a batch of its inputs (no labels) and average its gates over real positions.

    Raises:
        ValueError: a model without gates.
    """
    mixers = mixers_of(model)
    if not mixers or not mixers[0].gated:
        raise ValueError("gate statistics need a model with gating='softmax'")
    mask = batch.get("attention_mask")
    means: list[Tensor] = []
    entropies: list[Tensor] = []

    def record(mixer: Any, args: tuple[Any, ...]) -> None:
        u, K = args[0], min(budget, len(mixer.channel_mixing))
        alpha = (mixer.gates(u, K) / mixer.operator.sigma(K, mixer.scaling_exponent, u)).double()
        weight = torch.ones(u.shape[:2], dtype=torch.float64, device=u.device) if mask is None else mask.double()
        weight = weight / weight.sum()
        mean = torch.einsum("blk,bl->k", alpha, weight).cpu()
        means.append(torch.nn.functional.pad(mean, (0, budget - K)))
        entropy = -(alpha * alpha.clamp(min=1e-300).log()).sum(-1)
        entropies.append((entropy * weight).sum().cpu())

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
    for mixer in mixers_of(model):
        if mixer.ar_order:
            raise ValueError("the bound of Appendix C does not cover the feedback of ar_order = 2")
        basis, K = spectral_basis(mixer.operator.filter_length), min(budget, len(mixer.channel_mixing))
        phi_1 = torch.from_numpy(abs(basis.filters(K)).sum(0))
        sigma = torch.from_numpy(basis.sigma[:K] ** mixer.scaling_exponent)
        gains = phi_1 * sigma * torch.linalg.matrix_norm(mixer.channel_mixing[:K].double().cpu(), 2)
        skip = torch.linalg.matrix_norm(mixer.skip.weight.double().cpu(), 2)
        bounds.append(float(skip + (gains.max() if mixer.gated else gains.sum())))
    return bounds


def layer_cost(mixer: Any, budget: int, length: int) -> dict[str, float]:
    """Multiply-adds of one spectral layer per token, forward, for L = length: Eq. (11) of the paper, term by term.

    Any algorithm: D^2 for the skip term; with a gate D D_g + D_g K for its two layers and K for softmax and scaling;
    K D to weight the features and K D^2 to mix them. The features themselves:

    chunked  K (C + N) D, and (N + (N^2/C) log2(L/C)) D for the states.
    fft      the paper's algorithm, O(K L log L D): a real FFT of u and K inverse ones of length n = 2 L, each counted
             as 1.25 n log2 n, and K complex products.
    step     N (N + 1) D for the recurrence.

    AR-STU (`ar_order=2`) has features, weights and mixing twice, 2 D^2 for past inputs, and about
    log2(L) products by 2D x 2D matrices for the feedback.
    """
    D, K, operator = mixer.skip.in_features, min(budget, len(mixer.channel_mixing)), mixer.operator
    C, N = operator.chunk_size, operator.num_states(K)
    gate = mixer.gate_in.out_features * (D + K) + K if mixer.gated else 0
    feedback = length.bit_length() * ((2 * D) ** 2 * (length + 1) + (2 * D) ** 3) / length if mixer.ar_order else 0
    fixed = D * D + gate + mixer.ar_order * D * D + feedback
    levels = max(0, math.ceil(math.log2(max(1, length / C))))
    transform = 1.25 * 2 * math.log2(2 * length)
    features = {
        "chunked": K * (C + N) * D + (N + N * N / C * levels) * D,
        "fft": (1 + K) * transform * D + 4 * K * D,
        "step": N * (N + 1) * D,
    }
    operators = 2 if mixer.ar_order else 1
    return {name: fixed + operators * (count + K * D + K * D * D) for name, count in features.items()}


@torch.no_grad()
def measured_cost(mixer: Any, budgets: Sequence[int], length: int, rounds: int = 5) -> dict[str, list[float]]:
    """Median seconds of one layer's forward pass, batch 1, for `chunked` and `fft` at every budget, taking turns."""
    weight, configured = mixer.skip.weight, mixer.algorithm
    u = torch.randn(1, length, weight.shape[1], dtype=weight.dtype, device=weight.device)
    seconds: dict[tuple[str, int], list[float]] = {}
    try:
        for _ in range(1 + rounds):
            for K in budgets:
                for mixer.algorithm in ("chunked", "fft"):
                    start = time.perf_counter()
                    mixer(u, min(K, len(mixer.channel_mixing)))
                    seconds.setdefault((mixer.algorithm, K), []).append(time.perf_counter() - start)
    finally:
        mixer.algorithm = configured
    return {
        algorithm: [statistics.median(seconds[algorithm, K][1:]) for K in budgets] for algorithm in ("chunked", "fft")
    }


def draw_gates(statistics_: GateStatistics) -> Figure:
    """Mean gates by layer and channel, on a log scale."""
    figure = Figure(figsize=(8, 1.5 + 0.35 * len(statistics_.mean)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(statistics_.mean.clamp(min=1e-6).log10(), aspect="auto", cmap="viridis")
    axes.set_xticks(range(statistics_.budget), [str(k + 1) for k in range(statistics_.budget)], fontsize=7)
    axes.set_yticks(
        range(len(statistics_.mean)),
        [
            f"layer {i}: entropy {h / math.log(max(2, statistics_.budget)):.2f}"
            for i, h in enumerate(statistics_.entropy)
        ],
    )
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


@dataclass
class AnalyzeArguments:
    """Arguments of the script."""

    model: str = field(metadata={"help": "Folder or Hub name of a byte-level ES-SSM language model."})
    text_files: list[str] = field(metadata={"help": "Text to run it on, read as bytes."})
    output_dir: str = field(metadata={"help": "Where analysis.json, gates.png and cost.png go."})
    block_size: int = field(default=512, metadata={"help": "Tokens per block."})
    max_blocks: int = field(default=32, metadata={"help": "Blocks to run, spread evenly over the text."})
    trust_remote_code: bool = field(default=False, metadata={"help": TRUST_HELP})


def main() -> None:
    """Analyse a saved model from the command line."""
    (args,) = HfArgumentParser(AnalyzeArguments).parse_args_into_dataclasses()
    output_dir = Path(args.output_dir)
    check_writable(output_dir)
    stream, _ = to_stream(read_files(args.text_files), ByteEncoder())
    input_ids = evaluation_blocks(stream, args.block_size, args.max_blocks)
    model = load_model(AutoModel, args.model, trust_remote_code=args.trust_remote_code)
    config = model.config
    budgets = clip_budgets((*BUDGETS, config.num_spectral_channels), config.num_spectral_channels)
    largest = max(mixers_of(model), key=lambda mixer: len(mixer.channel_mixing))
    modelled = [layer_cost(largest, K, args.block_size) for K in budgets]
    measured = measured_cost(largest, budgets, args.block_size)
    record: dict[str, Any] = {"model": args.model, "budgets": budgets}
    record["multiply_adds_per_token"] = {name: [cost[name] for cost in modelled] for name in modelled[0]}
    record["seconds_per_layer"] = measured
    draw_cost(budgets, record["multiply_adds_per_token"], measured).savefig(output_dir / "cost.png", dpi=150)
    if config.ar_order == 0:
        record["stability_bound_by_layer"] = {K: stability_bounds(model, K) for K in budgets}
        for K in (budgets[0], budgets[-1]):
            shown = ", ".join(f"{bound:.3g}" for bound in record["stability_bound_by_layer"][K])
            print(f"stability bound by layer at K={K}: {shown}")
    if config.gating == "softmax":
        full = gate_statistics(model, {"input_ids": input_ids}, budgets[-1])
        record["gates"] = {"budget": full.budget, "mean": full.mean.tolist(), "entropy": full.entropy.tolist()}
        draw_gates(full).savefig(output_dir / "gates.png", dpi=150)
        for layer, (mean, entropy) in enumerate(zip(full.mean, full.entropy)):
            largest = ", ".join(f"{int(k) + 1}: {float(mean[k]):.3f}" for k in mean.argsort(descending=True)[:4])
            print(f"layer {layer}: largest mean gates {largest}; entropy {entropy:.3f} of {math.log(full.budget):.3f}")
    write_json(output_dir / "analysis.json", record)
    print(f"saved {output_dir / 'analysis.json'}, gates.png and cost.png")


if __name__ == "__main__":
    run_script(main)
