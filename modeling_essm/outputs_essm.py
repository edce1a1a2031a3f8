# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What models return. Letters: B batch, L sequence, D width."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast, SequenceClassifierOutput
from transformers.utils import ModelOutput


class _ElasticOutput(ModelOutput):
    """`items()` leaves spectral_budget out: Trainers gather and concatenate all items, which must be tensors then."""

    def items(self):
        return [(name, value) for name, value in super().items() if name != "spectral_budget"]

    def __getitem__(self, key):  # which the library reads from items()
        return self.spectral_budget if key == "spectral_budget" else super().__getitem__(key)


@dataclass
class ESSMModelOutput(_ElasticOutput, BaseModelOutputWithPast):
    """
    Args:
        last_hidden_state: (B, L, D).
        past_key_values: ESSMCache after the last position, if asked for.
        hidden_states: tuple of (B, L, D), embeddings first, if asked for.
        spectral_budget: the budget that ran, one int per layer, or (B,) when rows differ.
    """

    spectral_budget: Any = None


@dataclass
class ESSMCausalLMOutput(_ElasticOutput, CausalLMOutputWithPast):
    """
    Args:
        loss: () mean cross-entropy in nats, with labels.
        logits: (B, L or logits_to_keep, vocab_size).
        past_key_values, hidden_states, spectral_budget: as in `ESSMModelOutput`.
    """

    spectral_budget: Any = None


@dataclass
class ESSMSequenceClassifierOutput(_ElasticOutput, SequenceClassifierOutput):
    """
    Args:
        loss: () with labels. logits: (B, num_labels).
        hidden_states, spectral_budget: as in `ESSMModelOutput`.
    """

    spectral_budget: Any = None
