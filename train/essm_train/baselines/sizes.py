# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Baselines, and variants of the model itself, with as many parameters as the model that they are compared with."""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig

from essm_train.baselines.config import BaselineConfig
from essm_train.baselines.models import BaselineForCausalLM, BaselinePreTrainedModel
from modeling_essm import ESSMConfig

# What an ES-SSM has and its variants lack or have more of.
_OF_ES_SSM: dict[str, Any] = {"gating": "softmax", "ar_order": 0, "ar_negative_filters": True, "ar_feature_shift": 0}
_OF_ES_SSM |= {"layer_types": None}


def count_parameters(config: PreTrainedConfig, model_class: Callable[[Any], nn.Module]) -> int:
    """Parameters of that model, a tied matrix counted once; allocates nothing and draws no random numbers."""
    with torch.device("meta"):
        return sum(p.numel() for p in model_class(config).parameters())


class _Sizes(NamedTuple):
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int | None = None


def matched_baseline(
    architecture: str,
    target_parameters: int,
    *,
    hidden_size: int = 256,
    num_hidden_layers: int = 8,
    model_class: type[BaselinePreTrainedModel] = BaselineForCausalLM,
    tolerance: float = 0.05,
    **fields: Any,
) -> BaselineConfig:
    """A config with that many parameters, of the shape nearest to the one asked for.

    First the inner width gives way, between half and twice its published proportion to D. Where that is not enough,
    width, depth and inner width do together, width and depth by a factor of 4 at most: the nearest in log distance.
    "tc_resnet" has one size, and neither of `hidden_size` and `num_hidden_layers` matters to it.

    Args:
        target_parameters: of the model to compare with, all of them.
        model_class: what the parameters are counted of, a baseline with a head.
        tolerance: largest relative difference.
        fields: of its configuration.
    Raises:
        ValueError: no such model, with the closest one named; or `fields` that cannot be.
    """
    if "intermediate_size" in fields:
        raise ValueError(f"intermediate_size is what is searched for, got {fields['intermediate_size']}")
    if target_parameters < 1 or not tolerance >= 0:
        raise ValueError(
            f"target_parameters must be at least 1 and tolerance at least 0, got {target_parameters} and {tolerance}"
        )

    def make(sizes: _Sizes) -> BaselineConfig:
        return model_class.config_class(architecture=architecture, **fields, **sizes._asdict())

    def count(sizes: _Sizes) -> int:
        return count_parameters(make(sizes), model_class)

    def error(parameters: int) -> float:
        return abs(parameters / target_parameters - 1)

    asked = _Sizes(hidden_size, num_hidden_layers)
    make(asked)  # raises for fields that cannot be
    if architecture == "tc_resnet":
        candidates = _one_size(count, target_parameters)
    else:
        candidates = _three_sizes(make, count, target_parameters, asked)
    best: tuple[float, _Sizes] | None = None  # distance from what was asked for
    closest: tuple[int, _Sizes] | None = None  # parameters
    for parameters, sizes in candidates:
        if best is not None and _distance(sizes, asked) >= best[0]:
            break  # and so are all that follow
        if closest is None or error(parameters) < error(closest[0]):
            closest = parameters, sizes
        if error(parameters) <= tolerance:
            if architecture == "tc_resnet" or sizes[:2] == asked[:2]:
                return make(sizes)
            published = make(sizes._replace(intermediate_size=None)).intermediate_size
            distance = _distance(sizes, asked) + math.log((sizes.intermediate_size or 1) / published) ** 2
            if best is None or distance < best[0]:
                best = distance, sizes
    if best is not None:
        return make(best[1])
    assert closest is not None
    raise ValueError(
        f"no {architecture!r} near hidden_size {hidden_size} and num_hidden_layers {num_hidden_layers} has "
        f"{target_parameters:,} parameters within {tolerance:.1%}; the closest has {closest[0]:,}: "
        f"{closest[1]._asdict()}"
    )


def _distance(sizes: _Sizes, asked: _Sizes) -> float:
    """Squared log distance of width and depth."""
    return sum(math.log(size / wanted) ** 2 for size, wanted in zip(sizes[:2], asked[:2]))


def _one_size(count: Callable[[_Sizes], int], target: int) -> Iterator[tuple[int, _Sizes]]:
    """Parameters and size of the two TC-ResNets around the target, the closer one first."""
    widths = range(2, 4096)
    i = bisect_left(widths, target, key=lambda width: count(_Sizes(width, 3)))
    around = [(count(sizes), sizes) for sizes in (_Sizes(width, 3) for width in widths[max(0, i - 1) : i + 1])]
    yield from sorted(around, key=lambda found: abs(found[0] - target))


def _three_sizes(
    make: Callable[[_Sizes], BaselineConfig], count: Callable[[_Sizes], int], target: int, asked: _Sizes
) -> Iterator[tuple[int, _Sizes]]:
    """Parameters and sizes of every width and depth, those asked for first, each at its best inner width.

    Parameters are fixed + layers (per_layer + per_inner inner), which three models of a width determine.
    """
    hidden_size, num_layers, _ = asked
    spacing = max(8, hidden_size // 16 // 8 * 8)
    widths = {hidden_size} | set(range(spacing, 4 * hidden_size + 1, spacing))
    widths = {D for D in widths if hidden_size <= 4 * D}
    depths = range(math.ceil(num_layers / 4), 4 * num_layers + 1)

    @functools.cache
    def law(D: int) -> tuple[int, int, int]:
        inner = make(_Sizes(D, 1)).intermediate_size
        one, two, wide = (count(_Sizes(D, *sizes)) for sizes in ((1, inner), (2, inner), (1, 2 * inner)))
        per_inner = (wide - one) // inner
        return 2 * one - two, two - one - per_inner * inner, per_inner

    shapes = (_Sizes(D, layers) for D in widths for layers in depths)
    for D, layers, _ in sorted(shapes, key=lambda sizes: _distance(sizes, asked)):
        config = make(_Sizes(D, layers))
        step, published = config.inner_step, config.intermediate_size
        fixed, per_layer, per_inner = law(D)
        wanted = ((target - fixed) / layers - per_layer) / per_inner
        lowest, highest = math.ceil(published / 2 / step), 2 * published // step
        inner = step * min(max(round(wanted / step), lowest), highest)
        yield fixed + layers * (per_layer + per_inner * inner), _Sizes(D, layers, inner)


def matched_variant(
    config: ESSMConfig, model_class: Callable[[Any], nn.Module], block: str | None = None, tolerance: float = 0.03
) -> ESSMConfig:
    """That variant of ES-SSM with as many parameters as ES-SSM itself, of the config's sizes with gate, not AR-STU, and
    without attention layers, whose heads keep their width.

    The model width becomes the even number whose model is nearest in size, with all other widths in proportion; the
    feed-forward layer, if there is one, then takes up the difference, between half and twice its proportion to D.

    Args:
        model_class: what the parameters are counted of, an ES-SSM with its head.
        block: of the ES-SSM to match, "paper" or "gated", with what follows from it; by default that of the config.
        tolerance: largest relative difference.
    Raises:
        ValueError: no such model, with the closest one named.
    """
    sizes_of: Any = config
    D, fields = config.hidden_size, config.to_dict()
    matched = _OF_ES_SSM | ({"block": block} if block else {})
    target = count_parameters(type(config).from_dict(fields, **matched), model_class)

    def make(width: int) -> ESSMConfig:
        sizes = {name: getattr(config, name) for name in ("gate_hidden_size", "intermediate_size")}
        sizes = {name: size and max(1, round(size * width / D)) for name, size in sizes.items()}
        sizes["head_dim"] = config.head_dim
        if config.block == "gated":
            step = sizes_of.num_heads
            sizes["inner_size"] = step * max(1, round(sizes_of.inner_size * width / D / step))
        return type(config).from_dict(fields, hidden_size=width, **sizes)

    def count(candidate: ESSMConfig) -> int:
        return count_parameters(candidate, model_class)

    widths = range(2, 4 * D + 1, 2)  # a gated block has a sixth of the parameters of the paper's at one width
    i = bisect_left(widths, target, key=lambda width: count(make(width)))
    best = min(map(make, widths[max(0, i - 1) : i + 1]), key=lambda candidate: abs(count(candidate) - target))
    if published := best.intermediate_size:
        parameters = count(best)
        wider = type(config).from_dict(best.to_dict(), intermediate_size=published + 1)
        wanted = published + round((target - parameters) / (count(wider) - parameters))
        inner = min(max(wanted, math.ceil(published / 2)), 2 * published)
        best = type(config).from_dict(best.to_dict(), intermediate_size=inner)
    if abs(count(best) / target - 1) > tolerance:
        raise ValueError(
            f"no such model has {target:,} parameters within {tolerance:.1%}; the closest has {count(best):,}: "
            f"hidden_size {best.hidden_size}, intermediate_size {best.intermediate_size}"
        )
    return best
