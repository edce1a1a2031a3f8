# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""ESSMConfig: everything that defines an ES-SSM besides its weights."""

from __future__ import annotations

import dataclasses
import math
import reprlib
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from .spectral_basis import max_spectral_channels
from .spectral_budget import SPECTRAL_LAYER, is_hybrid, resolve_budget, spectral_layers, stored_budget
from .spectral_ops import ALGORITHMS

# Which class each Auto class loads, from the files beside the weights.
AUTO_MAP = {
    "AutoConfig": "configuration_essm.ESSMConfig",
    "AutoModel": "modeling_essm.ESSMModel",
    "AutoModelForCausalLM": "modeling_essm.ESSMForCausalLM",
    "AutoModelForSequenceClassification": "modeling_essm.ESSMForSequenceClassification",
}

# Generous, and small enough that whatever is made from a legal value is made at once.
_MOST_LAYERS, _MOST_WIDTH, _MOST_IDS, _MOST_LABELS, _MOST_BUDGETS = 10_000, 2**24, 2**31 - 1, 1_000_000, 1024

# Fields whose default depends on the block.
_BLOCK_FIELDS = (
    *("inner_size", "num_heads", "mixing_size", "conv_kernel_size", "intermediate_size", "scaling_exponent"),
    *("embedding_initializer_range", "chunk_size"),
)

# Fields that only attention layers read.
_ATTENTION_FIELDS = (
    *("num_attention_heads", "num_key_value_heads", "head_dim", "sliding_window", "rope_parameters"),
    "attention_dropout",
)
LAYER_TYPES = (SPECTRAL_LAYER, "sliding_attention", "full_attention")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # whose rotation of a position never changes, as cached keys need

_Rule = tuple[str, Callable[[Any], bool]]  # what is legal, in words and as a test of what `_plain` gives


def _plain(value: Any) -> Any:
    """The value as a JSON file would give it back: no scalars of NumPy, no tuples."""

    def scalar(x: Any) -> Any:
        return x.item() if isinstance(x, np.generic) else x

    if isinstance(value, (list, tuple)):
        return [scalar(entry) for entry in value]
    return {scalar(k): scalar(v) for k, v in value.items()} if isinstance(value, dict) else scalar(value)


def _integer(least: int, most: int) -> _Rule:
    return f"an integer in [{least}, {most}]", lambda x: type(x) is int and least <= x <= most


def _number(bound: float) -> _Rule:
    largest = sys.float_info.max
    return f"a number in [0, {bound:g})", lambda x: type(x) in (int, float) and 0 <= x < bound and x <= largest


def _one_of(*allowed: Any) -> _Rule:
    return f"one of {allowed}", lambda x: any(type(x) is type(legal) and x == legal for legal in allowed)


def _optional(rule: _Rule) -> _Rule:
    return f"None or {rule[0]}", lambda x: x is None or rule[1](x)


def _list(rule: _Rule, most: int) -> _Rule:
    text = f"a list, at most {most} long, each {rule[0]}"
    return text, lambda x: isinstance(x, list) and len(x) <= most and all(map(rule[1], x))


def _or_list(rule: _Rule, most: int) -> _Rule:
    text, is_list = _list(rule, most)
    return f"{rule[0]}, or {text}", lambda x: rule[1](x) or is_list(x)


def _labels(what: str, is_key: Callable[[Any], bool]) -> _Rule:
    def is_legal(x: Any) -> bool:
        if not isinstance(x, dict) or not 1 <= len(x) <= _MOST_LABELS:
            return False
        return all(type(each) in (int, str) for item in x.items() for each in item) and all(map(is_key, x))

    return f"a dict of 1 to {_MOST_LABELS} {what}", is_legal


def _are_presets(x: Any) -> bool:
    return isinstance(x, dict) and len(x) <= _MOST_BUDGETS and all(isinstance(name, str) for name in x)


def _is_nonzero(x: Any) -> bool:
    return type(x) in (int, float) and x != 0 and abs(x) <= sys.float_info.max


def _is_rope(x: Any) -> bool:
    if not isinstance(x, dict) or x.keys().isdisjoint({"rope_type", "rope_theta"}):
        return False
    theta, factor, share = (x.get(name, 1) for name in ("rope_theta", "factor", "partial_rotary_factor"))
    legal = _is_nonzero(theta) and _is_nonzero(factor) and theta > 0 and factor >= 1 and share == 1
    return legal and x.get("rope_type", "default") in ROPE_TYPES


def _is_dtype(x: Any) -> bool:
    return isinstance(getattr(torch, x, None) if isinstance(x, str) else x, torch.dtype)


_WIDTH, _FLAG = _integer(1, _MOST_WIDTH), _one_of(True, False)
_TEXT: _Rule = ("text", lambda x: isinstance(x, str))
_TOKEN_ID = _integer(-_MOST_IDS, _MOST_IDS)  # transformers warns of one outside the vocabulary
_POSITIVE = _number(float("inf"))
_ROPE = f"a dict whose rope_type is one of {ROPE_TYPES}, rope_theta positive, factor at least 1, and which rotates all"
_PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")
_RULES: dict[str, _Rule] = {
    "vocab_size": _integer(1, _MOST_IDS),
    "num_hidden_layers": _integer(1, _MOST_LAYERS),
    **dict.fromkeys(("hidden_size", "num_spectral_channels", "filter_length"), _WIDTH),
    **dict.fromkeys(("chunk_size", "gate_hidden_size", "num_input_features"), _optional(_WIDTH)),
    **dict.fromkeys(("inner_size", "num_heads", "mixing_size", "head_hidden_size"), _optional(_WIDTH)),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), _optional(_WIDTH)),
    **dict.fromkeys(("head_dim", "sliding_window"), _optional(_integer(2, _MOST_WIDTH))),
    "rope_parameters": _optional((_ROPE, _is_rope)),
    "intermediate_size": _optional(_integer(0, _MOST_WIDTH)),
    "block": _one_of("paper", "gated"),
    "conv_kernel_size": _optional(_integer(0, 64)),
    **dict.fromkeys(("state_margin", "chunk_size_feed_forward"), _integer(0, _MOST_WIDTH)),
    **dict.fromkeys(("ar_order", "ar_feature_shift"), _one_of(0, 2)),
    "hidden_act": _one_of(*ACT2FN),
    "spectral_algorithm": _one_of(*ALGORITHMS),
    "gating": _one_of("softmax", "none"),
    "classifier_pooling": _one_of("mean", "last"),
    **dict.fromkeys(("dropout", "embedding_dropout", "activation_dropout", "stochastic_depth"), _number(1.0)),
    "attention_dropout": _number(1.0),
    "gate_bias": ("a finite number other than 0", _is_nonzero),
    **dict.fromkeys(("initializer_range", "layer_norm_eps"), _POSITIVE),
    **dict.fromkeys(("scaling_exponent", "embedding_initializer_range"), _optional(_POSITIVE)),
    **dict.fromkeys(("tie_word_embeddings", "use_cache", "is_encoder_decoder", "stochastic_depth_ramp"), _FLAG),
    "ar_negative_filters": _FLAG,
    **dict.fromkeys(("output_hidden_states", "return_dict"), _optional(_FLAG)),
    **dict.fromkeys(("pad_token_id", "bos_token_id"), _optional(_TOKEN_ID)),
    "eos_token_id": _optional(_or_list(_TOKEN_ID, _MOST_BUDGETS)),
    "layer_types": _optional(_list(_one_of(*LAYER_TYPES), _MOST_LAYERS)),
    "budget_presets": _optional((f"a dict of at most {_MOST_BUDGETS} names and budgets", _are_presets)),
    "architectures": _optional(_list(_TEXT, _MOST_BUDGETS)),
    "transformers_version": _optional(_TEXT),
    "problem_type": _optional(_one_of(*_PROBLEMS)),
    "dtype": _optional(("a torch.dtype or its name", _is_dtype)),
    "num_labels": _integer(1, _MOST_LABELS),
    "id2label": _optional(_labels("numbers and their names", lambda key: type(key) is int or key.isdecimal())),
    "label2id": _optional(_labels("names and numbers", lambda key: True)),
}


def _head_dim(hidden_size: int, heads: int) -> int:
    """The largest even width of a head, of which so many fit."""
    return hidden_size // heads // 2 * 2


def _checked(name: str, value: Any, rule: _Rule) -> Any:
    text, is_legal = rule
    plain = _plain(value)
    if not is_legal(plain):
        raise ValueError(f"{name} must be {text}, got {reprlib.repr(value)}")
    return plain


class ESSMConfig(PreTrainedConfig):
    r"""
    Configuration of an Elastic Spectral State Space Model (Song and Wang, arXiv 2601.22488). The defaults are the
    paper's language model (about 21M parameters) over the 259 symbols of the byte-level tokenizer.

    Args:
        vocab_size (`int`): number of token ids.
        hidden_size (`int`): model width D.
        num_hidden_layers (`int`): number of blocks.
        block (`str`): "paper", a pre-norm mixer and a feed-forward layer, or "gated": projection, short convolution,
            mixer, normalisation, output gate, projection.
        inner_size (`int`, *optional*): of the gated block, width of its mixer, 2 D by default.
        num_heads (`int`, *optional*): of the gated block, groups of the inner width with a gate of Eq. (8) each.
        mixing_size (`int`, *optional*): of the gated block, d, size of the blocks on the diagonal of M_k: by default 1,
            a diagonal M_k, at most the width of a head.
        conv_kernel_size (`int`, *optional*): of the gated block, taps of the convolution before the mixer; 0 for none.
        intermediate_size (`int`, *optional*): width of the feed-forward layer, 4 D by default; 0, the default of the
            gated block, for none.
        hidden_act (`str`): activation of feed-forward layer and gate; "gelu" is the exact GELU of the paper.
        num_spectral_channels (`int`): channel capacity, the largest budget that the weights can run.
        spectral_capacities (`list[int]`, *optional*): capacity of each spectral layer where they differ; the largest is
            `num_spectral_channels`.
        filter_length (`int`): H, size of the Hankel matrix and the longest sequence on which the recurrence equals the
            convolution. It costs nothing, so choose it at least as long as any sequence you will see;
            H = training length reproduces the paper.
        state_margin (`int`): states kept beyond K so that the first K filters are reproduced, see `num_states`.
        scaling_exponent (`float`, *optional*): power of sigma_k in Eq. (7), 1/4 in the paper, 0 in the gated block.
        chunk_size (`int`, *optional*): C, steps that one matrix product of the chunked algorithm covers, by default 64,
            32 in the gated block; more than `filter_length` or 512 means the smaller of these.
        spectral_algorithm (`str`): "chunked", "fft" (the paper's), "step" or "naive": one meaning, different cost.
        gate_hidden_size (`int`, *optional*): width D_g inside the gate, D // 4 by default.
        gating (`str`): "softmax" for Eq. (8) or "none" for Eq. (6).
        ar_order (`int`): 0, or 2 for the autoregressive and negative-filter terms of AR-STU (Agarwal et al. 2023).
        ar_negative_filters (`bool`): with `ar_order=2`, whether there are negative filters (-1)^tau phi_k, with M_k of
            their own; the code that its authors released has none.
        ar_feature_shift (`int`): with `ar_order=2`, steps by which the features lag: 0, or 2 as in paper and code.
        spectral_budget (`int`, `list[int]` or `str`, *optional*): default budget K of every call; None is the capacity.
        trained_budgets (`list[int]`, *optional*): budgets seen in training; others warn once.
        budget_presets (`dict[str, int | list[int]]`, *optional*): names that `spectral_budget` accepts.
        initializer_range (`float`): standard deviation of new linear layers; in the gated block only of those that
            write to the residual stream, others start at 1 / sqrt(their inputs).
        embedding_initializer_range (`float`, *optional*): that of new embeddings of token ids, `initializer_range` by
            default, 0.1 in the gated block.
        layer_types (`list[str]`, *optional*): for each layer "linear_attention", spectral, which all are by default, or
            "sliding_attention" or "full_attention" in a hybrid. One at least is spectral; an attention layer has the
            norms and the feed-forward layer of the block.
        num_attention_heads, num_key_value_heads, head_dim (`int`, *optional*): of attention layers. By default heads of
            about 64 and keys and values for each; `head_dim` is even, and about D / heads where it is not given.
        sliding_window (`int`, *optional*): positions, its own included, that one sees in "sliding_attention".
        rope_parameters (`dict`, *optional*): of their rotary embedding as in transformers, by default "rope_type"
            "default" with "rope_theta" 10,000; "linear", "llama3" and "yarn" are the others. No partial_rotary_factor.
        attention_dropout (`float`): rate on attention weights.
        gate_bias (`float`): what the gate's output biases start at; any but 0 starts the gate at equal weights, and a
            larger one changes them more slowly.
        dropout, embedding_dropout, activation_dropout (`float`): rates after each sub-layer, on the embedding, and
            inside feed-forward layers, after their activation.
        stochastic_depth (`float`): rate of skipping a whole sub-layer of a sample.
        stochastic_depth_ramp (`bool`): whether that rate rises linearly over the blocks, from 0 in the first.
        classifier_pooling (`str`): "mean" over real positions or "last" real position.
        num_input_features (`int`, *optional*): width of continuous inputs (audio frames, pixels), which a linear
            encoder reads instead of token ids.

    Raises:
        ValueError: a field of another type or out of range, or a capacity that `filter_length` cannot resolve in fp64.
            Widths may be up to 2^24, layers 10,000, `num_labels` 1,000,000, and entries of a list of budgets 1,024.
    """

    model_type = "essm"
    auto_classes: ClassVar = AUTO_MAP
    attribute_map: ClassVar = {"max_position_embeddings": "filter_length"}
    keys_to_ignore_at_inference: ClassVar = ["past_key_values", "spectral_budget"]

    vocab_size: int = 259
    hidden_size: int = 256
    num_hidden_layers: int = 8
    block: str = "paper"
    inner_size: int = None  # type: ignore[assignment]
    num_heads: int = None  # type: ignore[assignment]
    mixing_size: int = None  # type: ignore[assignment]
    conv_kernel_size: int = None  # type: ignore[assignment]
    intermediate_size: int = None  # type: ignore[assignment]
    hidden_act: str = "gelu"
    num_spectral_channels: int = 32
    spectral_capacities: list[int] | None = None
    filter_length: int = 4096
    state_margin: int = 16
    scaling_exponent: float = None  # type: ignore[assignment]
    chunk_size: int = None  # type: ignore[assignment]
    spectral_algorithm: str = "chunked"
    gate_hidden_size: int = None  # type: ignore[assignment]
    gating: str = "softmax"
    ar_order: int = 0
    ar_negative_filters: bool = True
    ar_feature_shift: int = 0
    spectral_budget: int | list[int] | str | None = None
    trained_budgets: list[int] | None = None
    budget_presets: dict[str, Any] | None = None
    layer_types: list[str] | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    sliding_window: int | None = None
    rope_parameters: dict[str, Any] | None = None
    attention_dropout: float = 0.0
    gate_bias: float = 1.0
    dropout: float = 0.0
    embedding_dropout: float = 0.0
    activation_dropout: float = 0.0
    stochastic_depth: float = 0.0
    stochastic_depth_ramp: bool = False
    initializer_range: float = 0.02
    embedding_initializer_range: float | None = None
    layer_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    use_cache: bool = True
    classifier_pooling: str = "mean"
    num_input_features: int | None = None
    pad_token_id: int | None = 256
    bos_token_id: int | None = 257
    eos_token_id: int | list[int] | None = 258

    def __post_init__(self, **kwargs: Any) -> None:
        for name in self.attribute_map.keys() & kwargs.keys():
            setattr(self, name, kwargs.pop(name))
        if (labels := kwargs.pop("num_labels", None)) is not None:  # transformers would name them all before we look
            kwargs["num_labels"] = _checked("num_labels", labels, _RULES["num_labels"])
        _checked("dtype", kwargs.get("torch_dtype"), _RULES["dtype"])
        self._validate()
        for name, value in self._block_defaults().items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        self._validate_block()
        if self.gate_hidden_size is None:
            self.gate_hidden_size = max(1, self.hidden_size // 4)
        if self.layer_types is None:
            self.layer_types = [SPECTRAL_LAYER] * self.num_hidden_layers  # caches of transformers read it
        if is_hybrid(self):
            self._set_attention()
        # save_pretrained would name only the saved class; every folder should load through every Auto class. What a
        # folder says of its own classes holds.
        given = kwargs.get("auto_map") or {}
        if not isinstance(given, dict):
            raise ValueError(f"auto_map must be a dict of Auto classes and the classes they load, got {given!r}")
        kwargs["auto_map"] = {**self.auto_classes, **given}
        super().__post_init__(**kwargs)
        if not is_hybrid(self):
            self.rope_parameters = None  # transformers fills it in
            return
        try:
            self.validate_rope()
        except KeyError as error:
            raise ValueError(f"rope_parameters: {error.args[0]}, got {self.rope_parameters}") from None

    def _set_attention(self) -> None:
        """Fill in the fields of attention layers. Raises ValueError for sizes that do not fit each other."""
        self.num_attention_heads = self.num_attention_heads or max(1, self.hidden_size // 64)
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        self.head_dim = self.head_dim or _head_dim(self.hidden_size, self.num_attention_heads)
        if self.head_dim < 2 or self.head_dim % 2:
            given = f"{self.head_dim} (hidden_size {self.hidden_size}, num_attention_heads {self.num_attention_heads})"
            raise ValueError(f"head_dim must be even and at least 2, as rotary positions need, got {given}")
        if self.num_attention_heads % self.num_key_value_heads:
            legal = f"num_key_value_heads must divide num_attention_heads {self.num_attention_heads}"
            raise ValueError(f"{legal}, got {self.num_key_value_heads}")
        if "sliding_attention" in (self.layer_types or ()) and self.sliding_window is None:
            raise ValueError('sliding_window must be an integer of at least 2 for "sliding_attention", got None')

    def _block_defaults(self) -> dict[str, Any]:
        """Fields that a block gives a value when they are None."""
        if self.block == "paper":
            inner, heads, mixing = self.hidden_size, 1, self.hidden_size
            defaults = {"conv_kernel_size": 0, "intermediate_size": 4 * self.hidden_size, "scaling_exponent": 0.25}
        else:
            inner = self.inner_size or 2 * self.hidden_size
            heads, mixing = math.gcd(4, inner), 1
            defaults = {"conv_kernel_size": 4, "intermediate_size": 0, "scaling_exponent": 0.0}
            defaults |= {"embedding_initializer_range": 0.1, "chunk_size": 32}
        return {"chunk_size": 64} | defaults | {"inner_size": inner, "num_heads": heads, "mixing_size": mixing}

    def _validate_block(self) -> None:
        """Raises ValueError for sizes that do not fit each other, or the block."""
        if self.block == "paper":
            fixed = {"inner_size": self.hidden_size, "num_heads": 1, "mixing_size": self.hidden_size}
            for name, value in (fixed | {"conv_kernel_size": 0}).items():
                if getattr(self, name) != value:
                    raise ValueError(
                        f'{name} belongs to block="gated"; here it must be {value}, got {getattr(self, name)}'
                    )
            if self.intermediate_size < 1:
                raise ValueError(
                    f"intermediate_size of the paper's block must be at least 1, got {self.intermediate_size}"
                )
        elif self.ar_order:
            raise ValueError(f'ar_order must be 0 with block="gated", got {self.ar_order}')
        if not self.ar_order:
            for name, value in {"ar_negative_filters": True, "ar_feature_shift": 0}.items():
                if getattr(self, name) != value:
                    raise ValueError(f"{name} must be {value} with ar_order=0, got {getattr(self, name)}")
        if self.inner_size % self.num_heads or (self.inner_size // self.num_heads) % self.mixing_size:
            raise ValueError(
                f"num_heads must divide inner_size {self.inner_size}, and mixing_size the width of a head, "
                f"got {self.num_heads} and {self.mixing_size}"
            )

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any):
        """As in transformers; fields given beside the dictionary are checked as if they stood in it."""
        names = {field.name: field.name for field in dataclasses.fields(cls)} | cls.attribute_map
        names.pop("dtype", None)  # which may be "auto" there
        given = {names[name]: kwargs.pop(name) for name in names.keys() & kwargs.keys()}
        if "num_hidden_layers" in given and set(config_dict.get("layer_types") or ()) <= {SPECTRAL_LAYER}:
            given.setdefault("layer_types", None)
        stale = cls._derived_otherwise(config_dict, given)
        return super().from_dict({k: v for k, v in config_dict.items() if k not in stale} | given, **kwargs)

    @staticmethod
    def _derived_otherwise(fields: dict[str, Any], given: dict[str, Any]) -> set[str]:
        """Sizes that stand in a dictionary only because its block follows from other sizes, which are given anew."""
        block = fields.get("block", "paper")
        if _checked("block", given.get("block", block), _RULES["block"]) != block:
            return {*_BLOCK_FIELDS}
        hidden, inner = fields.get("hidden_size"), fields.get("inner_size")
        if "hidden_size" not in given or type(hidden) is not int:
            return set()
        heads, head_dim = fields.get("num_attention_heads"), fields.get("head_dim")
        stale = {"head_dim"} if type(heads) is int and heads > 0 and head_dim == _head_dim(hidden, heads) else set()
        if block == "paper":
            return stale | {"inner_size", "mixing_size"}
        return stale | ({"inner_size"} if inner == 2 * hidden else set())

    def save_pretrained(self, save_directory: Any, push_to_hub: bool = False, **kwargs: Any) -> None:
        """As in transformers; ValueError for a field that was set to what could not be loaded again."""
        self._validate()
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """As in transformers, without the fields of attention layers where there are none."""
        fields = super().to_dict()
        return fields if is_hybrid(self) else {k: v for k, v in fields.items() if k not in _ATTENTION_FIELDS}

    def _validate(self) -> None:
        """Check every field, and turn integers of NumPy, tuples and the like into what a JSON file holds."""
        for name, rule in _RULES.items():
            if name in self.__dict__:
                value = self.__dict__[name]
                if (kept := _checked(name, value, rule)) is not value:
                    setattr(self, name, kept)
        channels, layers = self.num_spectral_channels, self.num_hidden_layers
        resolved = max_spectral_channels(self.filter_length)
        if channels > resolved:
            raise ValueError(
                f"filter_length {self.filter_length} resolves at most {resolved} spectral channels, "
                f"got num_spectral_channels={channels}; use a longer filter (512 resolves 32)"
            )
        if self.layer_types is not None and len(self.layer_types) != layers:
            raise ValueError(
                f"layer_types must name one of {LAYER_TYPES} for each of the {layers} layers, "
                f"got {len(self.layer_types)}"
            )
        if not (spectral := len(spectral_layers(self))):
            raise ValueError(
                f"layer_types must hold {SPECTRAL_LAYER!r}: budgets act on spectral layers, and there are none"
            )
        text = f"{spectral} integers in [1, num_spectral_channels = {channels}], the largest of them {channels}"
        _, is_list = _list(_integer(1, channels), spectral)
        capacities: _Rule = (text, lambda x: x is None or (is_list(x) and len(x) == spectral and max(x) == channels))
        self.spectral_capacities = _checked("spectral_capacities", self.spectral_capacities, capacities)
        self._validate_budgets()

    def _validate_budgets(self) -> None:
        presets = self.budget_presets or {}
        for name, value in presets.items():
            presets[name] = self._stored_budget(f"budget_presets[{name!r}]", value)
        if not isinstance(self.spectral_budget, str):
            self.spectral_budget = self._stored_budget("spectral_budget", self.spectral_budget)
        trained = _list(_integer(1, self.num_spectral_channels), _MOST_BUDGETS)
        self.trained_budgets = _checked("trained_budgets", self.trained_budgets, _optional(trained))
        self.resolve_budget()

    def _stored_budget(self, name: str, value: Any) -> int | list[int] | None:
        try:
            return stored_budget(value, self.capacities)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    @property
    def capacities(self) -> tuple[int, ...]:
        """Channels that each spectral layer holds."""
        return tuple(self.spectral_capacities or (self.num_spectral_channels,) * len(spectral_layers(self)))

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
