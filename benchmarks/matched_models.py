# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Models of a table, of equal size: the row that describes one, and the shape that has as many parameters."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import itertools
import json
import math
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

from essm_train.baselines.config import BaselineConfig
from essm_train.baselines.models import BaselineForCausalLM
from essm_train.baselines.sizes import count_parameters
from modeling_essm import ESSMConfig, ESSMForCausalLM
from modeling_essm.loading_essm import truncated_config
from modeling_essm.spectral_budget import spectral_layers

TOLERANCE = 0.03  # of the number of parameters
WIDEST = 1 << 14


@dataclass(frozen=True)
class Row:
    """A model of a table.

    Attributes:
        layers: blocks to begin with. fields: of ESSMConfig, or of BaselineConfig.
        expansion: width of all heads of the elastic block over D. feed_forward: of its feed-forward layer.
        memory: share of a head's units that are values of its memory; the channel has as many keys.
        peer: architecture of essm_train/baselines/models.py instead. hidden_size: of a peer, to begin with.
        rates: learning rates. updates: over those of the table, for models compared at equal time.
        full_share: of the updates, the first ones, that are at the full budget; 1 is no budget dropout.
        schedule: of the budgets of the others. optimizer: of RunArguments.
        channels: that the model has of those of the shape, as a separate model of a smaller size has.
        rereads: whether it reads no more text than the others, pass after pass, where it has more updates.
    """

    layers: int
    fields: dict[str, Any] = field(default_factory=dict)
    expansion: float = 1.0
    feed_forward: float = 0.0
    memory: float = 0.0
    peer: str | None = None
    hidden_size: int = 0
    rates: tuple[float, ...] = (3e-3, 6e-3, 1.2e-2)
    updates: float = 1.0
    full_share: float = 0.0
    schedule: str = "discrete"
    optimizer: str = "adamw"
    channels: int | None = None
    rereads: bool = False

    def with_fields(self, **fields: Any) -> Row:
        return dataclasses.replace(self, fields=self.fields | fields)

    def definition(self, config: Any) -> dict[str, Any]:
        """The row, and a hash of all fields of its configuration, so of today's defaults too."""
        fields = {k: v for k, v in config.to_dict().items() if k != "transformers_version"}
        digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
        return {k: v for k, v in dataclasses.asdict(self).items() if k != "rates"} | {"config": digest}


_found: dict[str, Any] = {}


def matched_config(row: Row, target: int, model_class: Any = None) -> Any:
    """The configuration with that many parameters, to 3%, whose shape is nearest to the row's in log distance.

    The width D of an ES-SSM is even; it and the head size give way first, then the depth. Of a peer the inner width
    gives way first, between half and twice its published proportion, then width and depth by a factor of up to 4.

    Args:
        model_class: what the parameters are counted of, called with a configuration; by default the language model.
    Raises:
        ValueError: there is none.
    """
    key = repr((row, target, model_class))
    if key not in _found:
        search, default = (_search, ESSMForCausalLM) if row.peer is None else (_search_peer, BaselineForCausalLM)
        if (config := search(row, target, model_class or default)) is None:
            raise ValueError(f"no model of this shape has {target:,} parameters to {TOLERANCE:.0%}: {row}")
        if row.channels is not None:
            config = truncated_config(config, [row.channels] * len(spectral_layers(config)))
        _found[key] = config
    return copy.deepcopy(_found[key])


def _search(row: Row, target: int, model_class: Any) -> ESSMConfig | None:
    """Parameters are fixed + layers each, which two models of a shape determine."""
    elastic = row.fields.get("block") == "elastic"
    step = row.fields["num_spectral_channels"] if elastic else 2

    def make(hidden: int, inner: int, layers: int) -> ESSMConfig:
        sizes: dict[str, Any] = {"hidden_size": hidden, "num_hidden_layers": layers}
        if elastic:
            head, units = inner // step, round(row.feed_forward * hidden / step)
            remembered = int(row.memory * head)
            sizes |= {"head_size": head, "memory_key_size": remembered, "memory_value_size": remembered}
            sizes["intermediate_size"] = units * step
        return ESSMConfig(**row.fields | sizes)

    @functools.cache
    def law(hidden: int, inner: int) -> tuple[int, int]:
        one, two = (count_parameters(make(hidden, inner, layers), model_class) for layers in (1, 2))
        return 2 * one - two, two - one

    def count(hidden: int, inner: int, layers: int) -> int:
        fixed, each = law(hidden, inner)
        return fixed + layers * each

    def follows(hidden: int) -> int:
        return max(step, round(row.expansion * hidden / step) * step) if elastic else hidden

    def width_of(layers: int, inner: int = 0) -> int:
        """The first even width that reaches the target; the inner width follows it unless given."""
        widths = range(4, WIDEST, 2)
        return widths[bisect_left(widths, target, key=lambda D: count(D, inner or follows(D), layers))]

    found: list[tuple[float, int, int, int]] = []  # distance, then sizes
    for layers in sorted(range(1, 2 * row.layers + 1), key=lambda n: abs(math.log(n / row.layers))):
        depth = math.log(layers / row.layers) ** 2
        if found and depth >= min(found)[0]:
            break
        middle = follows(width_of(layers))
        for inner in [n for n in (middle - step, middle, middle + step) if n > 0] if elastic else [0]:
            hidden = width_of(layers, inner)
            for D in (hidden - 2, hidden):
                if abs(count(D, inner or D, layers) / target - 1) <= TOLERANCE:
                    ratio = math.log((inner or D) / (row.expansion * D))
                    found.append((ratio**2 + depth, D, inner or D, layers))
    return make(*min(found)[1:]) if found else None


def _search_peer(row: Row, target: int, model_class: Any) -> BaselineConfig | None:
    """Parameters are fixed + layers (per_layer + per_inner inner), which three models of a width determine: of a nested
    Mamba-2 nearly, as the width of its heads is not a constant."""

    def make(hidden: int, layers: int, inner: int | None = None) -> BaselineConfig:
        sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": inner}
        return BaselineConfig(architecture=row.peer, **row.fields, **sizes)

    @functools.cache
    def law(hidden: int) -> tuple[int, int, int]:
        inner = make(hidden, 1).intermediate_size
        shapes = ((1, inner), (2, inner), (1, 2 * inner))
        one, two, wide = (count_parameters(make(hidden, *shape), model_class) for shape in shapes)
        per_inner = (wide - one) // inner
        return 2 * one - two, two - one - per_inner * inner, per_inner

    def distance(shape: tuple[int, int]) -> float:
        return math.log(shape[0] / row.hidden_size) ** 2 + math.log(shape[1] / row.layers) ** 2

    spacing, best = max(8, row.hidden_size // 16 // 8 * 8), (math.inf, 0, 0, 0)
    widths = {D for D in range(spacing, 4 * row.hidden_size + 1, spacing) if row.hidden_size <= 4 * D}
    depths = range(math.ceil(row.layers / 4), 4 * row.layers + 1)
    for hidden, layers in sorted(itertools.product(widths | {row.hidden_size}, depths), key=distance):
        if distance((hidden, layers)) >= best[0]:
            break  # and so are all that follow
        config, (fixed, per_layer, per_inner) = make(hidden, layers), law(hidden)
        step, published = config.inner_step, config.intermediate_size
        wanted = round(((target - fixed) / layers - per_layer) / per_inner / step)
        inner = step * min(max(wanted, math.ceil(published / 2 / step)), 2 * published // step)
        close = abs((fixed + layers * (per_layer + per_inner * inner)) / target - 1) <= 2 * TOLERANCE
        if close and abs(count_parameters(make(hidden, layers, inner), model_class) / target - 1) <= TOLERANCE:
            as_asked = (hidden, layers) == (row.hidden_size, row.layers)
            apart = 0.0 if as_asked else distance((hidden, layers)) + math.log(inner / published) ** 2
            best = min(best, (apart, hidden, layers, inner))
    return make(*best[1:]) if best[1] else None
