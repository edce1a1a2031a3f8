# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Baselines, and variants of the model itself, with as many parameters as the model that they are compared with.

First the width of the model gives way, with all other widths in proportion, then the inner width of its layers, between
half and twice its proportion to the model's.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from essm_train.baselines.config import BaselineConfig
from essm_train.baselines.models import BaselineForCausalLM, BaselinePreTrainedModel

# What an ES-SSM has and its variants lack or have more of.
_OF_ES_SSM: dict[str, Any] = {"gating": "softmax", "layer_types": None}
Model = Callable[[Any], nn.Module]


def count_parameters(config: PreTrainedConfig, model_class: Model) -> int:
    """Parameters of that model, a tied matrix counted once; allocates nothing and draws no random numbers."""
    with torch.device("meta"):
        return sum(p.numel() for p in model_class(config).parameters())


def _fit_inner(config: Any, model_class: Model, target: int, step: int) -> Any:
    """The config with the inner width, a multiple of `step`, whose model is nearest in size; it grows linearly."""
    published, parameters = config.intermediate_size, count_parameters(config, model_class)
    fields = config.to_dict()
    wider = type(config).from_dict(fields, intermediate_size=published + step)
    wanted = published + step * round((target - parameters) / (count_parameters(wider, model_class) - parameters))
    lowest, highest = step * math.ceil(published / 2 / step), 2 * published // step * step
    return type(config).from_dict(fields, intermediate_size=min(max(wanted, lowest), highest))


def _nearest(configs: list[Any], model_class: Model, target: int, tolerance: float) -> Any:
    """The first config within the tolerance. Raises ValueError, which names the closest, if there is none."""
    closest: tuple[float, int, Any] | None = None
    for config in configs:
        parameters = count_parameters(config, model_class)
        error = abs(parameters / target - 1)
        if error <= tolerance:
            return config
        if closest is None or error < closest[0]:
            closest = error, parameters, config
    assert closest is not None
    _, parameters, config = closest
    raise ValueError(
        f"no such model has {target:,} parameters within {tolerance:.1%}; the closest has {parameters:,}: hidden_size "
        f"{config.hidden_size}, intermediate_size {config.intermediate_size}"
    )


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
    """A config with that many parameters and layers: of the width asked for, or of the one that has them by itself.

    "tc_resnet" has one shape, and neither `hidden_size` nor `num_hidden_layers` matters to it.

    Args:
        target_parameters: of the model to compare with, all of them.
        model_class: what the parameters are counted of, a baseline with a head.
        tolerance: largest relative difference.
        fields: of its configuration.
    Raises:
        ValueError: no such model, with the closest one named; or `fields` that cannot be.
    """

    def make(width: int) -> BaselineConfig:
        sizes = {"hidden_size": width, "num_hidden_layers": num_hidden_layers}
        return model_class.config_class(architecture=architecture, **fields, **sizes)

    def count(width: int) -> int:
        return count_parameters(make(width), model_class)

    asked = make(hidden_size)
    if architecture == "tc_resnet":
        widths = range(2, 4096)
        i = bisect_left(widths, target_parameters, key=count)
        around = sorted(widths[max(0, i - 1) : i + 1], key=lambda width: abs(count(width) - target_parameters))
        return _nearest([make(width) for width in around], model_class, target_parameters, tolerance)
    fitted = _fit_inner(asked, model_class, target_parameters, asked.inner_step)
    spacing = max(8, hidden_size // 16 // 8 * 8)
    widths = range(max(spacing, hidden_size // 4 // spacing * spacing), 4 * hidden_size + 1, spacing)
    i = bisect_left(widths, target_parameters, key=count)
    nearby = sorted(widths[max(0, i - 1) : i + 1], key=lambda width: abs(count(width) - target_parameters))
    others = [_fit_inner(make(D), model_class, target_parameters, make(D).inner_step) for D in nearby]
    return _nearest([fitted, *others], model_class, target_parameters, tolerance)


def matched_variant(config: Any, model_class: type[nn.Module], block: str | None = None) -> Any:
    """That variant of ES-SSM with as many parameters, to 3%, as ES-SSM itself: of the config's sizes, with the gate and
    without attention layers.

    The heads of attention layers keep their width.

    Args:
        config: an `ESSMConfig` or `ARSTUConfig`.
        model_class: what the parameters are counted of, an ES-SSM or an AR-STU with its head.
        block: of the ES-SSM to match, "paper" or "gated", with what follows from it; by default that of the config.
    Raises:
        ValueError: no such model, with the closest one named.
    """
    D, fields = config.hidden_size, config.to_dict()
    own: Any = next(
        cls for cls in model_class.__mro__ if cls.__module__.startswith(("modeling_essm", "essm_train.pairs"))
    )
    matched = {name: value for name, value in fields.items() if not name.startswith(("ar_", "model_type"))}
    changes = _OF_ES_SSM | ({"block": block} if block else {})
    target = count_parameters(own.config_class.from_dict(matched, **changes), own)

    def make(width: int) -> Any:
        sizes = {name: getattr(config, name) for name in ("gate_hidden_size", "intermediate_size")}
        sizes = {name: size and max(1, round(size * width / D)) for name, size in sizes.items()}
        sizes["head_dim"] = config.head_dim
        if config.block == "gated":
            heads = config.num_heads
            sizes["inner_size"] = heads * max(1, round(config.inner_size * width / D / heads))
        return type(config).from_dict(fields, hidden_size=width, **sizes)

    def count(width: int) -> int:
        return count_parameters(make(width), model_class)

    widths = range(2, 4 * D + 1, 2)  # a gated block has a sixth of the parameters of the paper's at one width
    i = bisect_left(widths, target, key=count)
    best = make(min(widths[max(0, i - 1) : i + 1], key=lambda width: abs(count(width) - target)))
    if best.intermediate_size:
        best = _fit_inner(best, model_class, target, 1)
    return _nearest([best], model_class, target, 0.03)
