# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Which model is this? A few of its sizes and weights, which a cast, a truncation or quantisation leaves recognisable.

What was measured on a model, or computed by it, remembers its fingerprint, and is refused by another model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_SAME_RTOL, _SAME_ATOL = 1e-2, 1e-6  # rounding to bf16 moves a weight by at most 0.4%, training by more


@dataclass(frozen=True)
class Fingerprint:
    """Which model: its sizes and a few of its weights.

    Attributes:
        hidden_size: D. capacities: channels of each spectral layer, which may be fewer in a model truncated later.
        samples: values of the norms, of the first spectral channel and of the embedding, by these names. Truncation to
            fewer channels leaves them all as they are, a cast moves them by less than training does.
    """

    hidden_size: int
    capacities: tuple[int, ...]
    samples: Mapping[str, tuple[float, ...]]

    def difference(self, other: Fingerprint) -> str | None:
        """In what the other model differs, in words; None if it is the same. Only what both have sampled counts."""
        if self.hidden_size != other.hidden_size:
            return f"hidden_size {other.hidden_size} instead of {self.hidden_size}"
        if len(self.capacities) != len(other.capacities):
            return f"{len(other.capacities)} layers instead of {len(self.capacities)}"
        for name in (name for name in self.samples if name in other.samples):
            mine, others = self.samples[name], other.samples[name]
            if len(mine) != len(others):
                return f"{len(others)} instead of {len(mine)} samples of {name}"
            for a, b in zip(mine, others):
                if abs(a - b) > _SAME_ATOL + _SAME_RTOL * abs(a):
                    return f"other weights: a value of {name} is {b:.6g} instead of {a:.6g}"
        return None


@torch.no_grad()
def fingerprint(model: Any) -> Fingerprint:
    """The fingerprint of an ES-SSM with or without a head, on any device, in any dtype, truncated or quantised."""
    base, config = model.base_model, model.config
    names = ("input_norm", "mixer_norm", "ffn_norm")
    norms = [getattr(layer, name) for layer in base.layers for name in names if hasattr(layer, name)] + [base.norm]
    mixers = [layer.mixer for layer in base.layers if hasattr(layer, "mixer")]
    mixers = [mixers[i] for i in sorted({0, len(mixers) // 2, len(mixers) - 1})]
    mixings = [getattr(mixer, "channel_mixing", None) for mixer in mixers]
    embedding = getattr(base, "embed_tokens", None) or getattr(base, "embed_features", None)
    parts = {
        "the norms": ([tensor for norm in norms for tensor in norm.parameters()], 32),
        "channel_mixing[0]": ([None if mixing is None else mixing[:1] for mixing in mixings], 12),
        "the embedding": ([getattr(embedding, "weight", None)], 8),
    }
    samples = {name: _spread(tensors, count) for name, (tensors, count) in parts.items() if all(map(_plain, tensors))}
    # Code of before layers could differ has one capacity.
    capacities = getattr(config, "capacities", (config.num_spectral_channels,) * config.num_hidden_layers)
    return Fingerprint(config.hidden_size, tuple(capacities), samples)


def _plain(tensor: Any) -> bool:
    """Whether its values are at hand and as they were trained: not quantised, sharded or offloaded."""
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        return False
    return tensor.is_floating_point() and tensor.element_size() > 1 and not tensor.is_meta


def _spread(tensors: Sequence[Tensor], count: int) -> tuple[float, ...]:
    """At most `count` values at even distances."""
    values = torch.cat([tensor.detach().flatten().float().cpu() for tensor in tensors])
    chosen = torch.linspace(0, len(values) - 1, min(count, len(values)), dtype=torch.float64).round().long()
    return tuple(float(f"{value:.7g}") for value in values[chosen].tolist())
