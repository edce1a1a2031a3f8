# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""DiagonalSSMConfig: everything that defines a diagonal state space model besides its weights."""

from __future__ import annotations

import dataclasses
import math
import reprlib
from typing import Any, ClassVar

import numpy as np
from transformers import PreTrainedConfig

PARAMETERIZATIONS = ("s5", "lru", "s4d")
# Which class each Auto class loads, from the files beside the weights.
AUTO_MAP = {
    "AutoConfig": "configuration_diagonal_ssm.DiagonalSSMConfig",
    "AutoModel": "modeling_diagonal_ssm.DiagonalSSMModel",
    "AutoModelForCausalLM": "modeling_diagonal_ssm.DiagonalSSMForCausalLM",
    "AutoModelForSequenceClassification": "modeling_diagonal_ssm.DiagonalSSMForSequenceClassification",
}
_MOST = 2**24
_INTEGERS = {  # field: least value
    **dict.fromkeys(("vocab_size", "hidden_size", "num_hidden_layers", "hippo_blocks"), 1),
    "state_size": 0,
}
_CHOICES = {
    "parameterization": PARAMETERIZATIONS,
    "discretization": ("zoh", "bilinear"),
    "initialization": ("hippo", "linear", None),
    "norm": ("layer", "batch"),
    **dict.fromkeys(("bidirectional", "clip_eigs", "tie_word_embeddings", "use_cache"), (True, False)),
}
_DEFAULT_STATE_SIZE = {"s5": 64, "lru": 64, "s4d": 32}
_DEFAULT_INITIALIZATION = {"s5": "hippo", "lru": None, "s4d": "linear"}


class DiagonalSSMConfig(PreTrainedConfig):
    r"""
    Configuration of a stack of diagonal linear recurrences: S5, S4D or LRU, in the residual block of S5 and LRU.

    Args:
        vocab_size (`int`): number of token ids.
        num_input_features (`int`, *optional*): width of continuous inputs, which a linear encoder reads instead of
            token ids.
        hidden_size (`int`): model width H.
        num_hidden_layers (`int`): number of blocks.
        parameterization (`str`): "s5" (Smith et al. 2023) and "lru" (Orvieto et al. 2023) have n modes that read all
            channels, "s4d" (Gu et al. 2022) n modes for each channel.
        state_size (`int`, *optional*): n of a new layer: stored modes, one of each conjugate pair in "s5" and "s4d".
            64 by default, in "s4d" 32.
        state_sizes (`list[int]`, *optional*): n of each layer where layers differ, as after pruning; 0 is a layer
            without modes, y = D u. Of "s4d" the largest n of a layer's channels.
        bidirectional (`bool`): whether a second C reads the recurrence that runs backwards; for classification.
        discretization (`str`): "zoh" or "bilinear", of "s5" and "s4d".
        initialization (`str`, *optional*): eigenvalues of new layers, "hippo", those of HiPPO-N, by default in "s5", or
            "linear", -1/2 + i pi k, by default in "s4d". Not of "lru".
        hippo_blocks (`int`): J of S5, HiPPO-N matrices on the diagonal of a new layer.
        clip_eigs (`bool`): of "s5", whether real parts stay below -1e-4, and with that the layer stable. Its authors
            leave it off in most tasks.
        dt_min, dt_max (`float`): range of the steps of new layers, log-uniform, in "s5" and "s4d".
        r_min, r_max, max_phase (`float`): range of |lam|, and of its phase, in new layers of "lru".
        dropout (`float`): rate after GELU and after the gated linear unit of each block.
        norm (`str`): "layer", or "batch" without weights as LRU has it: in training its statistics are over all real
            positions of the batch, so that outputs depend on later ones.
        layer_norm_eps (`float`): of both kinds of norm.
        initializer_range (`float`): standard deviation of new linear layers and embeddings.

    Raises:
        ValueError: a field of another type or out of range, or one that the parameterization does not have.
    """

    model_type = "diagonal_ssm"
    auto_classes: ClassVar = AUTO_MAP
    keys_to_ignore_at_inference: ClassVar = ["past_key_values"]

    vocab_size: int = 259
    num_input_features: int | None = None
    hidden_size: int = 128
    num_hidden_layers: int = 4
    parameterization: str = "s5"
    state_size: int = None  # type: ignore[assignment]
    state_sizes: list[int] = None  # type: ignore[assignment]
    bidirectional: bool = False
    discretization: str = "zoh"
    initialization: str | None = None
    hippo_blocks: int = 1
    clip_eigs: bool = True
    dt_min: float = 0.001
    dt_max: float = 0.1
    r_min: float = 0.9
    r_max: float = 0.999
    max_phase: float = 6.28
    dropout: float = 0.0
    norm: str = "layer"
    layer_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    use_cache: bool = True
    pad_token_id: int | None = 256
    bos_token_id: int | None = 257
    eos_token_id: int | list[int] | None = 258

    def __post_init__(self, **kwargs: Any) -> None:
        for field in dataclasses.fields(self):
            if isinstance(value := getattr(self, field.name, None), np.generic):
                setattr(self, field.name, value.item())
        _check_choice("parameterization", self.parameterization)
        if self.state_size is None:
            self.state_size = _DEFAULT_STATE_SIZE[self.parameterization]
        if self.initialization is None:
            self.initialization = _DEFAULT_INITIALIZATION[self.parameterization]
        self._validate()
        if self.state_sizes is None:
            self.state_sizes = [self.state_size] * self.num_hidden_layers
        self._validate_state_sizes()
        given = kwargs.get("auto_map") or {}
        if not isinstance(given, dict):
            raise ValueError(f"auto_map must be a dict of Auto classes and the classes they load, got {given!r}")
        kwargs["auto_map"] = {**self.auto_classes, **given}  # every folder loads through every Auto class
        super().__post_init__(**kwargs)

    def _validate(self) -> None:
        for name, least in _INTEGERS.items():
            _check_integer(name, getattr(self, name), least)
        if self.num_input_features is not None:
            _check_integer("num_input_features", self.num_input_features, 1)
        for name in _CHOICES:
            _check_choice(name, getattr(self, name))
        _check_number("dropout", self.dropout, 0.0, 1.0, include_low=True)
        _check_number("dt_max", self.dt_max, 0.0, math.inf)
        _check_number("r_max", self.r_max, 0.0, 1.0)
        _check_number("max_phase", self.max_phase, 0.0, 2 * math.pi, include_high=True)
        for name in ("layer_norm_eps", "initializer_range"):
            _check_number(name, getattr(self, name), 0.0, math.inf)
        _check_number("dt_min", self.dt_min, 0.0, self.dt_max, include_high=True)
        _check_number("r_min", self.r_min, 0.0, self.r_max, include_low=True, include_high=True)
        if self.parameterization == "lru":
            for name, value in {"discretization": "zoh", "initialization": None, "hippo_blocks": 1}.items():
                if getattr(self, name) != value:
                    raise ValueError(
                        f'{name} must be {value!r} with parameterization "lru", got {getattr(self, name)!r}'
                    )

    def _validate_state_sizes(self) -> None:
        sizes, layers = self.state_sizes, self.num_hidden_layers
        sizes = list(sizes) if isinstance(sizes, (list, tuple)) else sizes
        plain = [n.item() if isinstance(n, np.generic) else n for n in sizes] if isinstance(sizes, list) else []
        if len(plain) != layers or not all(type(n) is int and 0 <= n <= _MOST for n in plain):
            raise ValueError(
                f"state_sizes must be a list of {layers} integers in [0, {_MOST}], one for each layer, "
                f"got {reprlib.repr(sizes)}"
            )
        self.state_sizes = plain

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any):
        """As in transformers; fields given beside the dictionary are checked as if they stood in it."""
        names = {field.name for field in dataclasses.fields(cls)} - {"dtype"}
        given = {name: kwargs.pop(name) for name in names & kwargs.keys()}
        fields = config_dict | given
        if {"state_size", "num_hidden_layers"} & given.keys() and "state_sizes" not in given:
            fields.pop("state_sizes", None)
        return super().from_dict(fields, **kwargs)


def _check_integer(name: str, value: Any, least: int) -> None:
    if type(value) is not int or not least <= value <= _MOST:
        raise ValueError(f"{name} must be an integer in [{least}, {_MOST}], got {value!r}")


def _check_choice(name: str, value: Any) -> None:
    if not any(type(value) is type(legal) and value == legal for legal in _CHOICES[name]):
        raise ValueError(f"{name} must be one of {_CHOICES[name]}, got {value!r}")


def _check_number(
    name: str, value: Any, low: float, high: float, include_low: bool = False, include_high: bool = False
) -> None:
    inside = type(value) in (int, float) and math.isfinite(value)
    inside = inside and (low < value < high or (include_low and value == low) or (include_high and value == high))
    if not inside:
        left, right = "[" if include_low else "(", "]" if include_high else ")"
        raise ValueError(f"{name} must be a number in {left}{low:g}, {high:g}{right}, got {value!r}")


__all__ = ["DiagonalSSMConfig"]
