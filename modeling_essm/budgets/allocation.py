# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Which layer gets how many channels: a list of spectral budgets, one per layer, with a given total.

"loss" and "distortion" give every layer a curve D_l(K), what is lost if only that layer runs at K, and minimise the sum
of the curves by an exact dynamic program. "loss" measures the curves on calibration data; "distortion" has them in
closed form. "aire" (AIRE-Prune's prefix rule, for channels) needs no data: one threshold on the scores of all channels.

Closed form: the filters are orthonormal, so for white input u and gates independent of it the powers of channels add
up, with e_k = sigma_k^(2p) ||M_k||_F^2, p = scaling_exponent. A budget does not only drop channels, it renormalises the
gates of those that stay (Eq. 8). With a = alpha at the capacity and b = alpha at K, zero beyond K:

    D(K)  = sum_k E[(a_k - b_k)^2] e_k                                                                           (B1)
    D'(K) = min_c E||y_a - c y_b||^2 = sum_k E[a_k^2] e_k - (sum_k E[a_k b_k] e_k)^2 / sum_k E[b_k^2] e_k           (B2)

(B2) leaves out the pure gain, which the layers above absorb. Without a gate a = b = 1, and both are the plain tail.
With heads each has gates of its own and its own part of the outputs, so the sums run over heads as well as channels.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..channels import spectral_mixers
from ..quantized_weights import dequantize, is_quantized
from ..spectral_basis import spectral_basis
from ..spectral_constants import state_dtype

METHODS = ("loss", "distortion", "aire")
GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # budgets at which "loss" measures a curve
_TIE = 1e-13  # weight of sum K^2 relative to the curves: among equal sums the most even list wins
_TINY = torch.finfo(torch.float64).tiny


def allocate_spectral_budget(
    model: nn.Module,
    total: int,
    method: str | None = None,
    calibration: Iterable[Mapping[str, Tensor]] | None = None,
    min_budget: int = 2,
) -> list[int]:
    """Distribute `total` channels over the layers of an ES-SSM; the model and its config stay as they are.

    Args:
        model: any model with spectral mixers; it runs in evaluation mode.
        total: sum of the list, in [n_layers * min_budget, sum of the layers' capacities].
        method: by default "loss" with calibration and "aire" without.
            "loss": n_layers * |grid| passes over the calibration data with one layer reduced, isotonic regression,
            dynamic program; from its list or the most even one, whichever loses less, at most 2 * n_layers exchanges
            of one channel between two layers are tried and kept where the loss of the whole list falls.
            "distortion": (B2) with the gates and channel energies of the calibration inputs, from one pass. Layers are
            weighted by E||dloss/dy_l||^2 / D where there are labels (one backward pass), else by 1 / E||y_l||^2.
            "aire": channel energies in their order under one threshold; with calibration they are measured.
        calibration: batches of keyword arguments of the model. "loss" needs labels; those of a language model are its
            input_ids where none are given.
        min_budget: the least K of any layer.
    Returns:
        One int per layer, in the layers' order.
    Raises:
        ValueError: anything out of range, unknown or missing, before any compute; a calibration loss that is not
            finite; ar_order = 2 with another method than "loss": feedback voids (B1) and (B2).
    """
    mixers = spectral_mixers(model)
    capacities = [len(mixer.channel_mixing) for mixer in mixers]
    _check_range("min_budget", min_budget, 1, min(capacities), "the smallest capacity of any layer")
    low, high = len(mixers) * min_budget, sum(capacities)
    _check_range("total", total, low, high, f"{len(mixers)} layers of at least {min_budget} channels, {high} in all")
    total, min_budget = int(total), int(min_budget)
    if method is None:
        method = "aire" if calibration is None else "loss"
    if method not in METHODS:
        raise ValueError(f"method must be one of {METHODS}, got {method!r}")
    if method != "loss" and any(mixer.ar_order for mixer in mixers):
        raise ValueError(f"method must be 'loss' for ar_order = 2, whose feedback (B1) leaves out; got {method!r}")
    if calibration is None and method != "aire":
        raise ValueError(f"method {method!r} needs calibration, an iterable of dicts of model inputs, got None")
    if calibration is None:
        return aire_budgets([by_channel(channel_energies(mixer)) for mixer in mixers], total, min_budget)
    batches = read_calibration(model, calibration, need_labels=method == "loss")
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        if method == "loss":
            return _allocate_by_loss(model, batches, capacities, total, min_budget)
        statistics = layer_statistics(model, batches)
    finally:
        for module, training in modes:
            module.training = training
    if method == "aire":
        return aire_budgets([by_channel(s.square[-1] * s.energies) for s in statistics], total, min_budget)
    curves = [s.weight * non_increasing(distortions(s)[min_budget - 1 :]) for s in statistics]
    return minimise(curves, total, min_budget)


# ---------------------------------------------------------------------------------------------------------------------
# From curves or energies to a list.


def minimise(curves: Sequence[np.ndarray], total: int, min_budget: int) -> list[int]:
    """argmin of sum_l D_l(K_l) over all lists with sum K_l = total, by dynamic programming; ties go to even lists.

    Args:
        curves: one per layer, fp64, D_l at K = min_budget, .., capacity.
    """
    spare = total - min_budget * len(curves)
    tie = _TIE * max(float(np.ptp(curve)) for curve in curves)
    best = np.where(np.arange(spare + 1) == 0, 0.0, np.inf)  # least cost of the layers so far, by channels spent
    choices: list[np.ndarray] = []
    for curve in curves:
        costs = np.full((min(len(curve), spare + 1), spare + 1), np.inf)
        for x in range(len(costs)):
            costs[x, x:] = best[: spare + 1 - x] + curve[x] + tie * x**2
        choices.append(costs.argmin(0))
        best = costs.min(0)
    budgets: list[int] = []
    for choice in reversed(choices):
        budgets.append(min_budget + int(choice[spare]))
        spare -= int(choice[spare])
    return budgets[::-1]


def aire_budgets(energies: Sequence[Tensor], total: int, min_budget: int) -> list[int]:
    """The prefix rule: keep the `total` channels of largest score max_{j>=k} E_j / (E_1 + .. + E_j).

    The maximum keeps a weak channel that stands before a strong one, so that what is kept of a layer is a prefix. Of
    equal scores the lower channel comes first, then the lower layer.

    Args:
        energies: one (capacity,) per layer, E_k >= 0; only ratios within a layer matter.
    """
    ranked: list[tuple[float, int, int]] = []
    for layer, E in enumerate(energies):
        scores = E.double() / E.double().cumsum(0).clamp(min=_TINY)
        envelope = scores.flip(0).cummax(0).values.flip(0).tolist()
        ranked += [(-score, k, layer) for k, score in enumerate(envelope) if k >= min_budget]
    budgets = [min_budget] * len(energies)
    for *_, layer in sorted(ranked)[: total - sum(budgets)]:
        budgets[layer] += 1
    return budgets


def even_budgets(total: int, capacities: Sequence[int], min_budget: int) -> list[int]:
    """The most even list: every layer gets the same K as far as total and capacities allow."""
    return minimise([np.arange(min_budget, capacity + 1) ** 2.0 for capacity in capacities], total, min_budget)


def non_increasing(values: Sequence[float] | Tensor) -> np.ndarray:
    """Isotonic regression: the non-increasing fp64 sequence closest to `values` in least squares."""
    blocks: list[tuple[float, int]] = []  # mean and length
    for value in values:
        blocks.append((float(value), 1))
        while len(blocks) > 1 and blocks[-2][0] < blocks[-1][0]:
            (b, n), (a, m) = blocks.pop(), blocks.pop()
            blocks.append(((a * m + b * n) / (m + n), m + n))
    return np.repeat([mean for mean, _ in blocks], [length for _, length in blocks])


# ---------------------------------------------------------------------------------------------------------------------
# Closed forms.


@dataclass(frozen=True)
class LayerStatistics:
    """Of one mixer with capacity C over all real calibration positions; fp64 on the CPU.

    Attributes:
        energies: (C,) e_k of the inputs seen, or (C, G) where G heads have gates of their own.
        square, cross: (C, C) or (C, C, G), row K - 1 holds E[b_k^2] and E[a_k b_k] of the gates at budget K, zero
            beyond K.
        weight: of the layer's distortion, as in `allocate_spectral_budget`.
    """

    energies: Tensor
    square: Tensor
    cross: Tensor
    weight: float = 1.0


def distortions(statistics: LayerStatistics, gain_free: bool = True) -> Tensor:
    """(B2), or (B1) with gain_free=False, for K = 1, .., C: (C,) fp64."""
    e, square, cross = statistics.energies.flatten(), statistics.square.flatten(1), statistics.cross.flatten(1)
    full, power, cross = square[-1] @ e, square @ e, cross @ e
    D = full - cross**2 / power.clamp(min=_TINY) if gain_free else full - 2 * cross + power
    return D.clamp(min=0.0)


def by_channel(values: Tensor) -> Tensor:
    """(C,) or (C, G) -> (C,): the sum over heads."""
    return values.reshape(len(values), -1).sum(1)


def _num_gates(mixer: Any) -> int:
    """G, gates that a channel has; code of before there were heads has one."""
    return getattr(mixer, "num_heads", 1) if mixer.gated else 1


@torch.no_grad()
def channel_energies(mixer: Any, u: Tensor | None = None, real: Tensor | None = None) -> Tensor:
    """e_k = sigma_k^(2p) tr(M_k^T R_k M_k), the power of channel k at alpha = 1; rows as in y = f M.

    Args:
        u: (B, L, D) inputs of the operator, real: (B, L) bool, the positions to average over: R_k = E[f_k^T f_k] of the
            features f_k = phi_k * u. Without them u is white with unit variance, and R_k is the identity.
    Returns:
        (C,), or (C, G) for the outputs of each of G > 1 gates, fp64 on the CPU.
    """
    M, basis, G = mixer.channel_mixing, spectral_basis(mixer.operator.filter_length), _num_gates(mixer)
    M = dequantize(M) if is_quantized(M) else M
    M = M.unflatten(1, (-1, M.shape[2]))  # (C, h, d, d), of one head the whole M_k
    power = M.double().square().sum((2, 3)).unflatten(1, (G, -1)).sum(2)
    if u is not None:
        L, dtype = u.shape[1], state_dtype(u.dtype)
        phi = torch.from_numpy(basis.filters(len(M), np.arange(min(L, basis.filter_length)))).to(u.device)
        phi_f = torch.fft.rfft(phi.T, 2 * L).to(torch.complex128 if dtype == torch.float64 else torch.complex64)
        u_f = torch.fft.rfft(u.to(dtype).mT, 2 * L)  # (B, D, L + 1)
        for k in range(len(M)):
            f = torch.fft.irfft(u_f * phi_f[k], 2 * L)[..., :L].mT[real]  # (n, D)
            y = torch.einsum("nhd,hde->nhe", f.unflatten(1, M.shape[1:3]), M[k].to(dtype)).double()
            power[k] = y.square().mean(0).view(G, -1).sum(1)
    sigma = torch.from_numpy(basis.sigma[: len(M)] ** (2 * mixer.scaling_exponent))
    return (sigma[:, None] * power.cpu()).squeeze(1)


@torch.no_grad()
def gate_moments(mixer: Any, u: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """E[b_k^2] and E[a_k b_k] at every budget, as in `LayerStatistics`; arguments as in `channel_energies`."""
    C = len(mixer.channel_mixing)
    u = u[real][None]  # gates look at one position at a time
    scale = mixer.operator.sigma(C, mixer.scaling_exponent, u).double().clamp(min=_TINY)
    heads = (_num_gates(mixer),) if _num_gates(mixer) > 1 else ()
    scale = scale.view(C, *(1 for _ in heads))
    alpha = [mixer.gates(u, K)[0].double() / scale[:K] for K in range(1, C + 1)]  # (n, K) or (n, K, G), Eq. (8)
    square, cross = scale.new_zeros(C, C, *heads), scale.new_zeros(C, C, *heads)
    for K, b in enumerate(alpha, 1):
        square[K - 1, :K] = (b * b).mean(0)
        cross[K - 1, :K] = (alpha[-1][:, :K] * b).mean(0)
    return square.cpu(), cross.cpu()


def layer_statistics(model: nn.Module, batches: Sequence[Batch]) -> list[LayerStatistics]:
    """Statistics of every layer at full budget, one pass over the batches; backwards too if all have labels."""
    mixers = spectral_mixers(model)
    labelled = all(batch.labels is not None for batch in batches)
    num_positions = sum(int(batch.real.sum()) for batch in batches)
    sums: list[list[Any]] = [[0.0, 0.0, 0.0, 0.0] for _ in mixers]
    seen: list[tuple[Tensor, Tensor]] = []  # u and y of every mixer

    def see(mixer: Any, args: tuple[Any, ...], y: Tensor) -> None:
        with torch.no_grad():
            u = mixer.operator_inputs(args[0]) if getattr(mixer, "taps", 0) else args[0].detach()
        seen.append((u, y if y.requires_grad else y.requires_grad_(labelled)))  # weights may be frozen

    for batch in batches:
        seen.clear()
        with torch.set_grad_enabled(labelled), ExitStack() as hooks:
            for mixer in mixers:
                hooks.enter_context(mixer.register_forward_hook(see))
            outputs = _run(model, batch, [len(mixer.channel_mixing) for mixer in mixers], labelled)
            vectors: Any = [y for _, y in seen]
            if labelled:  # of the loss summed over targets, so that batches of all sizes weigh alike
                vectors = torch.autograd.grad(batch.num_targets * outputs.loss, vectors)
        share = int(batch.real.sum()) / num_positions
        for layer, (mixer, (u, _), v) in enumerate(zip(mixers, seen, vectors)):
            real = batch.real.to(u.device)
            power = float(v.detach()[real].double().square().sum(-1).mean())
            parts: list[Any] = [channel_energies(mixer, u, real), *gate_moments(mixer, u, real), power]
            sums[layer] = [total + share * part for total, part in zip(sums[layer], parts)]
    D = mixers[0].skip.weight.shape[0]
    return [LayerStatistics(e, s, c, p / D if labelled else 1 / max(p, _TINY)) for e, s, c, p in sums]


# ---------------------------------------------------------------------------------------------------------------------
# Measured curves.


def _allocate_by_loss(
    model: nn.Module, batches: Sequence[Batch], capacities: list[int], total: int, min_budget: int
) -> list[int]:
    loss = functools.partial(calibration_loss, model, batches)
    full = loss(capacities)
    curves: list[np.ndarray] = []
    for layer, capacity in enumerate(capacities):
        grid = sorted({min_budget, *(K for K in GRID if min_budget < K < capacity), capacity})
        reduced = [[*capacities[:layer], K, *capacities[layer + 1 :]] for K in grid[:-1]]
        values = non_increasing([*(loss(budgets) - full for budgets in reduced), 0.0])
        curves.append(np.interp(range(min_budget, capacity + 1), grid, values))
    starts = (minimise(curves, total, min_budget), even_budgets(total, capacities, min_budget))
    return exchange(loss, min(starts, key=loss), curves, min_budget)


def exchange(
    loss: Callable[[list[int]], float], budgets: list[int], curves: Sequence[np.ndarray], min_budget: int
) -> list[int]:
    """Move single channels between layers where the loss of the list falls, the most promising by the curves first.

    At most 2 * n_layers exchanges are tried. Arguments as in `minimise`; the result loses no more than `budgets`.
    """
    best, tried = loss(budgets), {tuple(budgets)}
    for _ in range(2 * len(budgets)):
        moves = [
            tuple(K - (layer == giver) + (layer == taker) for layer, K in enumerate(budgets))
            for giver, taker in itertools.permutations(range(len(budgets)), 2)
            if budgets[giver] > min_budget and budgets[taker] < min_budget + len(curves[taker]) - 1
        ]
        moves = [move for move in moves if move not in tried]
        if not moves:
            break
        move = min(moves, key=lambda move: sum(curve[K - min_budget] for curve, K in zip(curves, move)))
        tried.add(move)
        value = loss([*move])
        if value < best:
            budgets, best = [*move], value
    return budgets


@torch.no_grad()
def calibration_loss(model: nn.Module, batches: Sequence[Batch], budgets: Sequence[int]) -> float:
    """Mean loss over all targets with these budgets. Raises ValueError if it is not finite."""
    total = sum(batch.num_targets * float(_run(model, batch, budgets, True).loss) for batch in batches)
    if not np.isfinite(total):
        raise ValueError(f"the calibration loss at spectral_budget {[*budgets]} must be finite, got {total}")
    return total / sum(batch.num_targets for batch in batches)


# ---------------------------------------------------------------------------------------------------------------------
# Model and data.


@dataclass(frozen=True)
class Batch:
    """Keyword arguments of the model and labels apart; (B, L) bool real positions; how many terms the loss averages."""

    inputs: dict[str, Any]
    labels: Tensor | None
    real: Tensor
    num_targets: int


def read_calibration(
    model: nn.Module, calibration: Iterable[Mapping[str, Tensor]], need_labels: bool = False
) -> list[Batch]:
    """The batches, checked; raises ValueError as `allocate_spectral_budget`."""
    generates = bool(getattr(model, "can_generate", bool)())
    has_loss = "labels" in inspect.signature(model.forward).parameters
    if need_labels and not has_loss:
        raise ValueError(f"method 'loss' needs a model with a loss, got a {type(model).__name__}")
    batches: list[Batch] = []
    for given in calibration:
        if not isinstance(given, Mapping):
            kind = f"{type(calibration).__name__} of {type(given).__name__}"
            raise ValueError(f"calibration must be an iterable of dicts of model inputs, got a {kind}")
        inputs = {key: given[key] for key in given if key not in ("labels", "use_cache", "spectral_budget")}
        data = next((inputs[key] for key in ("input_ids", "input_features", "inputs_embeds") if key in inputs), None)
        if data is None:
            raise ValueError(f"calibration must hold input_ids, input_features or inputs_embeds, got only {[*given]}")
        mask = inputs.get("attention_mask")
        shape = data.shape if "input_ids" in inputs else data.shape[:-1]
        mask = torch.ones(shape, device="cpu") if mask is None else mask
        real = mask.bool().flatten(0, -2).cpu()  # pairs become rows
        labels = given.get("labels") if has_loss else None
        if labels is None and generates and "input_ids" in inputs:
            predicted = real & real.roll(1, 1)  # not from padding
            labels = data.masked_fill(~predicted.to(data.device), -100)
        if labels is None and need_labels:
            raise ValueError(f"method 'loss' needs labels in every batch of calibration, got only {[*given]}")
        num_targets = 0 if labels is None else int((labels[:, 1:] != -100).sum()) if generates else len(labels)
        if real.any() and (labels is None or num_targets):
            batches.append(Batch(inputs, labels, real, num_targets))
    if not batches:
        raise ValueError("calibration must hold a batch with a real position and, with labels, a target; got none")
    return batches


def _check_range(name: str, value: Any, low: int, high: int, why: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not low <= value <= high:
        raise ValueError(f"{name} must be an integer in [{low}, {high}] ({why}), got {value!r}")


def _run(model: nn.Module, batch: Batch, budgets: Sequence[int], labelled: bool = False) -> Any:
    """The model's outputs with a budget for each layer."""
    device = next(model.parameters()).device
    inputs = batch.inputs | ({"labels": batch.labels} if labelled else {})
    inputs = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
    return model(**inputs, use_cache=False, spectral_budget=[*budgets])
