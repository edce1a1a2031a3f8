# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""ESSMConfig: everything that defines an ES-SSM besides its weights."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from .spectral_basis import max_spectral_channels
from .spectral_budget import resolve_budget
from .spectral_ops import ALGORITHMS

# Which class each Auto class loads, from the files beside the weights.
AUTO_MAP = {
    "AutoConfig": "configuration_essm.ESSMConfig",
    "AutoModel": "modeling_essm.ESSMModel",
    "AutoModelForCausalLM": "modeling_essm.ESSMForCausalLM",
    "AutoModelForSequenceClassification": "modeling_essm.ESSMForSequenceClassification",
}


class ESSMConfig(PreTrainedConfig):
    r"""
    Configuration of an Elastic Spectral State Space Model (Song and Wang, arXiv 2601.22488). The defaults are the
    paper's language model (about 21M parameters) over the 259 symbols of the byte-level tokenizer.

    Args:
        vocab_size (`int`): number of token ids.
        hidden_size (`int`): model width D.
        num_hidden_layers (`int`): number of blocks.
        intermediate_size (`int`, *optional*): width of the feed-forward layer, 4 D by default.
        hidden_act (`str`): activation of feed-forward layer and gate; "gelu" is the exact GELU of the paper.
        num_spectral_channels (`int`): channel capacity, the largest budget that the weights can run.
        spectral_capacities (`list[int]`, *optional*): capacity of each layer where they differ; the largest is
            `num_spectral_channels`.
        filter_length (`int`): H, size of the Hankel matrix and the longest sequence on which the recurrence equals the
            convolution. It costs nothing, so choose it at least as long as any sequence you will see;
            H = training length reproduces the paper.
        state_margin (`int`): states kept beyond K so that the first K filters are reproduced, see `num_states`.
        scaling_exponent (`float`): power of sigma_k in Eq. (7), 1/4 in the paper.
        chunk_size (`int`): C, steps that one matrix product of the chunked algorithm covers.
        spectral_algorithm (`str`): "chunked", "fft" (the paper's), "step" or "naive": one meaning, different cost.
        gate_hidden_size (`int`, *optional*): width D_g inside the gate, D // 4 by default.
        gating (`str`): "softmax" for Eq. (8) or "none" for Eq. (6).
        ar_order (`int`): 0, or 2 for the autoregressive and negative-filter terms of AR-STU (Agarwal et al. 2023).
        spectral_budget (`int`, `list[int]` or `str`, *optional*): default budget K of every call; None is the capacity.
        trained_budgets (`list[int]`, *optional*): budgets seen in training; others warn once.
        budget_presets (`dict[str, int | list[int]]`, *optional*): names that `spectral_budget` accepts.
        dropout, stochastic_depth (`float`): rates after each sub-layer and for skipping a whole sub-layer.
        classifier_pooling (`str`): "mean" over real positions or "last" real position.
        num_input_features (`int`, *optional*): width of continuous inputs (audio frames, pixels), which a linear
            encoder reads instead of token ids.

    Raises:
        ValueError: a field out of range, or a capacity that `filter_length` cannot resolve in fp64.
    """

    model_type = "essm"
    attribute_map: ClassVar = {"max_position_embeddings": "filter_length"}
    keys_to_ignore_at_inference: ClassVar = ["past_key_values", "spectral_budget"]

    vocab_size: int = 259
    hidden_size: int = 256
    num_hidden_layers: int = 8
    intermediate_size: int = None  # type: ignore[assignment]
    hidden_act: str = "gelu"
    num_spectral_channels: int = 32
    spectral_capacities: list[int] | None = None
    filter_length: int = 4096
    state_margin: int = 16
    scaling_exponent: float = 0.25
    chunk_size: int = 64
    spectral_algorithm: str = "chunked"
    gate_hidden_size: int = None  # type: ignore[assignment]
    gating: str = "softmax"
    ar_order: int = 0
    spectral_budget: int | list[int] | str | None = None
    trained_budgets: list[int] | None = None
    budget_presets: dict[str, Any] | None = None
    layer_types: list[str] | None = None
    dropout: float = 0.0
    stochastic_depth: float = 0.0
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    use_cache: bool = True
    classifier_pooling: str = "mean"
    num_input_features: int | None = None
    pad_token_id: int | None = 256
    bos_token_id: int | None = 257
    eos_token_id: int | list[int] | None = 258

    def __post_init__(self, **kwargs: Any) -> None:
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        if self.gate_hidden_size is None:
            self.gate_hidden_size = max(1, self.hidden_size // 4)
        if self.layer_types is None:
            self.layer_types = ["linear_attention"] * self.num_hidden_layers  # a state of constant size
        # save_pretrained would name only the saved class; every folder should load through every Auto class. What a
        # folder says of its own classes holds.
        given = kwargs.get("auto_map") or {}
        if not isinstance(given, dict):
            raise ValueError(f"auto_map must be a dict of Auto classes and the classes they load, got {given!r}")
        kwargs["auto_map"] = {**AUTO_MAP, **given}
        super().__post_init__(**kwargs)
        self._validate()

    def _validate(self) -> None:
        minimum = {name: 1 for name in ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size")}
        minimum |= {"num_spectral_channels": 1, "chunk_size": 1, "gate_hidden_size": 1, "state_margin": 0}
        for name, least in minimum.items():
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
        choices = {"spectral_algorithm": ALGORITHMS, "gating": ("softmax", "none"), "ar_order": (0, 2)}
        choices |= {"classifier_pooling": ("mean", "last"), "hidden_act": tuple(ACT2FN)}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")
        for name, highest in {
            "dropout": 1.0,
            "stochastic_depth": 1.0,
            "initializer_range": math.inf,
            "layer_norm_eps": math.inf,
            "scaling_exponent": math.inf,
        }.items():
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not 0.0 <= value < highest:
                raise ValueError(f"{name} must be a number in [0, {highest:g}), got {value!r}")
        features = self.num_input_features
        if features is not None and (type(features) is not int or features < 1):
            raise ValueError(f"num_input_features must be None or an integer >= 1, got {features!r}")
        resolved = max_spectral_channels(self.filter_length)
        if self.num_spectral_channels > resolved:
            raise ValueError(
                f"filter_length {self.filter_length} resolves at most {resolved} spectral channels, "
                f"got num_spectral_channels={self.num_spectral_channels}; use a longer filter (512 resolves 32)"
            )
        self._validate_capacities()
        if not isinstance(self.budget_presets, (dict, type(None))):
            raise ValueError(f"budget_presets must be a dict of names and budgets, got {self.budget_presets!r}")
        if not isinstance(self.trained_budgets, (list, tuple, type(None))):
            raise ValueError(f"trained_budgets must be a list of integers, got {self.trained_budgets!r}")
        budgets = [self.spectral_budget, *(self.budget_presets or {}).values(), *(self.trained_budgets or [])]
        for budget in budgets:
            self.resolve_budget(budget)

    def _validate_capacities(self) -> None:
        value, highest, layers = self.spectral_capacities, self.num_spectral_channels, self.num_hidden_layers
        if value is None:
            return
        if (
            not isinstance(value, (list, tuple))
            or len(value) != layers
            or any(type(held) is not int or not 1 <= held <= highest for held in value)
            or max(value) != highest
        ):
            raise ValueError(
                f"spectral_capacities must be {layers} integers in [1, num_spectral_channels = {highest}], the largest "
                f"of them {highest}, got {value!r}"
            )

    @property
    def capacities(self) -> tuple[int, ...]:
        """Channels that each layer holds."""
        return tuple(self.spectral_capacities or (self.num_spectral_channels,) * self.num_hidden_layers)

    def resolve_budget(self, value: Any = None, batch_size: int | None = None):
        """The `ResolvedBudget` that `value` means for this model; see `spectral_budget.resolve_budget`."""
        return resolve_budget(
            value,
            capacities=self.capacities,
            presets=self.budget_presets,
            default=self.spectral_budget,
            batch_size=batch_size,
        )


__all__ = ["ESSMConfig"]
