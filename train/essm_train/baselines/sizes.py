# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Baselines, and variants of the model itself, with as many parameters as the model that they are compared with.

First the inner width of the layers gives way, between half and twice its proportion to the model's; then the width of
the model, with all other widths in proportion.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from essm_train.arguments import NEW_MODEL
from essm_train.baselines.config import BaselineConfig
from essm_train.baselines.models import BaselineForCausalLM, BaselinePreTrainedModel

Model = Callable[[Any], nn.Module]


def count_parameters(config: PreTrainedConfig, model_class: Model) -> int:
    """Parameters of that model, a tied matrix counted once; allocates nothing and draws no random numbers."""
    with torch.device("meta"):
        return sum(p.numel() for p in model_class(config).parameters())


def _nearest_widths(widths: Sequence[int], make: Callable[[int], Any], model_class: Model, target: int) -> list[int]:
    """The two widths on both sides of the target, the nearer one first."""

    def count(width: int) -> int:
        return count_parameters(make(width), model_class)

    i = bisect_left(widths, target, key=count)
    return sorted(widths[max(0, i - 1) : i + 1], key=lambda width: abs(count(width) - target))


def _fit_inner(config: Any, model_class: Model, target: int, step: int) -> Any:
    """The config with the inner width, a multiple of `step`, whose model is nearest in size; it grows linearly."""
    published, parameters, fields = config.intermediate_size, count_parameters(config, model_class), config.to_dict()
    wider = type(config).from_dict(fields, intermediate_size=published + step)
    wanted = published + step * round((target - parameters) / (count_parameters(wider, model_class) - parameters))
    lowest, highest = step * math.ceil(published / 2 / step), 2 * published // step * step
    return type(config).from_dict(fields, intermediate_size=min(max(wanted, lowest), highest))


def _first_within(configs: Iterable[Any], model_class: Model, target: int, tolerance: float) -> Any:
    """The first config within the tolerance. Raises ValueError, which names the closest, if there is none."""
    tried = []
    for config in configs:
        parameters = count_parameters(config, model_class)
        if abs(parameters / target - 1) <= tolerance:
            return config
        tried.append((abs(parameters / target - 1), parameters, config.hidden_size, config.intermediate_size))
    _, parameters, width, inner = min(tried)
    raise ValueError(
        f"no such model has {target:,} parameters within {tolerance:.1%}; the closest has {parameters:,}: hidden_size "
        f"{width}, intermediate_size {inner}"
    )


def matched_baseline(
    architecture: str,
    target_parameters: int,
    *,
    hidden_size: int = 256,
    num_hidden_layers: int = 8,
    model_class: type[BaselinePreTrainedModel] = BaselineForCausalLM,
    **fields: Any,
) -> BaselineConfig:
    """A config with that many parameters, to 5%, and layers: of the width asked for, or of one near that has them.

    "tc_resnet" has one shape, and neither `hidden_size` nor `num_hidden_layers` matters to it.

    Args:
        target_parameters: of the model to compare with. model_class: a baseline with a head. fields: of its config.
    Raises:
        ValueError: no such model, with the closest one named; or `fields` that cannot be.
    """

    def make(width: int) -> BaselineConfig:
        sizes = {"hidden_size": width, "num_hidden_layers": num_hidden_layers}
        return BaselineConfig(architecture=architecture, **fields, **sizes)

    def fitted(width: int) -> BaselineConfig:
        config = make(width)
        return _fit_inner(config, model_class, target_parameters, config.inner_step)

    if architecture == "tc_resnet":
        configs = map(make, _nearest_widths(range(2, 4096), make, model_class, target_parameters))
    else:
        spacing = max(8, hidden_size // 16 // 8 * 8)
        widths = range(max(spacing, hidden_size // 4 // spacing * spacing), 4 * hidden_size + 1, spacing)
        others = _nearest_widths(widths, make, model_class, target_parameters)
        configs = map(fitted, (hidden_size, *others))
    return _first_within(configs, model_class, target_parameters, 0.05)


def matched_variant(config: Any, model_class: type[nn.Module], block: str | None = None) -> Any:
    """That variant of ES-SSM with as many parameters, to 3%, as ES-SSM itself of the config's sizes, with the gate and
    without attention layers. The heads of attention layers keep their width.

    Args:
        config: an `ESSMConfig` or `ARSTUConfig`. model_class: an ES-SSM or an AR-STU with its head.
        block: of the ES-SSM to match, "paper" or "elastic", at a new model's capacity; by default the config's own.
    Raises:
        ValueError: no such model, with the closest one named.
    """
    D, K, fields = config.hidden_size, config.num_spectral_channels, config.to_dict()
    own: Any = next(c for c in model_class.__mro__ if c.__module__.startswith(("modeling_essm", "essm_train.pairs")))
    matched = {name: value for name, value in fields.items() if not name.startswith(("ar_", "model_type"))}
    changes: dict[str, Any] = {"gating": None, "layer_types": None}
    if block:
        changes |= {"block": block, "num_spectral_channels": NEW_MODEL[block]["num_spectral_channels"]}
    target = count_parameters(own.config_class.from_dict(matched, **changes), own)
    elastic = config.block == "elastic"
    # Widths in proportion to the model's, and what they are multiples of.
    steps = dict.fromkeys(("gate_hidden_size", "intermediate_size"), K if elastic else 1)
    steps |= {"attention_intermediate_size": 1} if "attention_intermediate_size" in fields else {}

    def make(width: int, inner: int | None = None) -> Any:
        share = (width if inner is None else inner) / D
        sizes = {
            name: fields[name] and step * max(1, round(fields[name] * share / step)) for name, step in steps.items()
        }
        if elastic:
            sizes["head_size"] = max(config.memory_value_size + 1, round(config.head_size * share))
        return type(config).from_dict(fields, hidden_size=width, head_dim=config.head_dim, **sizes)

    widths = range(2, 4 * D + 1, 2)  # an elastic block has a sixth of the parameters of the paper's at one width
    inner = _nearest_widths(widths, make, model_class, target)[0]
    if elastic:  # where a unit more in every channel is a large step
        best = make(_nearest_widths(widths, lambda width: make(width, inner), model_class, target)[0], inner)
    else:
        best = _fit_inner(make(inner), model_class, target, 1)
    return _first_within([best], model_class, target, 0.03)
