# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""ESSMConfig: everything that defines an ES-SSM besides its weights."""

import dataclasses
import math
import os
import sys
from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict, validated_field
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from .spectral_basis import max_spectral_channels
from .spectral_budget import SPECTRAL_LAYER, ResolvedBudget, is_hybrid, of_each_layer, resolve_budget, spectral_layers

# Which class each Auto class loads, from the files beside the weights.
AUTO_MAP = {
    "AutoConfig": "configuration_essm.ESSMConfig",
    "AutoModel": "modeling_essm.ESSMModel",
    "AutoModelForCausalLM": "modeling_essm.ESSMForCausalLM",
    "AutoModelForSequenceClassification": "modeling_essm.ESSMForSequenceClassification",
}

# Fields that only attention layers read.
_ATTENTION_FIELDS = (
    *("num_attention_heads", "num_key_value_heads", "head_dim", "sliding_window", "rope_parameters"),
    *("attention_dropout", "attention_intermediate_size"),
)
# Types of rotary embedding whose rotation of a position never changes, as cached keys need.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_WIDTH = 2**24  # generous, and small enough that whatever is made from a legal value is made at once


def _integer(low: int, high: int, default: Any = None) -> Any:
    """A field that holds an integer in [low, high], or a list of such; None passes where its type lets it."""

    def check(value: Any) -> None:
        for number in value if isinstance(value, list) else [value]:
            if number is not None and (type(number) is not int or not low <= number <= high):
                raise ValueError(f"must be an integer in [{low}, {high}], got {number!r}")

    return validated_field(check, default=default)


def _number(bound: float, default: Any = None) -> Any:
    """A field that holds a finite number in [0, bound); None passes where its type lets it."""

    def check(value: Any) -> None:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        number = number and 0 <= value < bound and value <= sys.float_info.max
        if value is not None and not number:
            raise ValueError(f"must be a number in [0, {bound:g}), got {value!r}")

    return validated_field(check, default=default)


def _check_bias(value: float) -> None:
    if not 0 < abs(value) <= sys.float_info.max:
        raise ValueError(f"must be a finite number other than 0, got {value!r}")


def _check_activation(value: str) -> None:
    if value not in ACT2FN:
        raise ValueError(f"must be one of {sorted(ACT2FN)}, got {value!r}")


@strict
class ESSMConfig(PreTrainedConfig):
    r"""
    Configuration of an Elastic Spectral State Space Model (Song, Yin, Hu and Wang, arXiv 2601.22488v2). The defaults
    are the language model of the paper's version 1 (about 21M parameters) over the 259 symbols of the byte-level
    tokenizer.

    Args:
        vocab_size (`int`): number of token ids.
        hidden_size (`int`): model width D.
        num_hidden_layers (`int`): number of blocks.
        block (`str`): "paper", a pre-norm mixer and a feed-forward layer; or "elastic", where each channel has a head
            of the mixer and a slice of every layer of its own, so that a budget shrinks them all.
        head_size (`int`, *optional*): width d of a channel's head in the elastic block, 2 D / channels by default.
        memory_key_size, memory_value_size (`int`): keys that each channel of the elastic block adds to its layer's
            memory, and how many of its head's units are the memory's values; 0 for no memory.
        conv_kernel_size (`int`, *optional*): taps of the elastic block's short convolution, 4 by default.
        intermediate_size (`int`, *optional*): width of the feed-forward layer, 4 D by default; in the elastic block a
            multiple of the channels, or 0, the default, for none.
        hidden_act (`str`): activation of the gate and the paper's feed-forward layer; "gelu" is the paper's exact GELU.
        num_spectral_channels (`int`): channel capacity, the largest budget that the weights can run.
        spectral_capacities (`list[int]`, *optional*): capacity of each spectral layer where they differ; the largest is
            `num_spectral_channels`.
        filter_length (`int`): H, size of the Hankel matrix and the longest sequence on which the recurrence equals the
            convolution. It costs nothing, so choose it at least as long as any sequence you will see;
            H = training length reproduces the paper.
        state_margin (`int`): states kept beyond K so that the first K filters are reproduced, see `num_states`; with
            few of them, steps and later parts of a sequence are only near the convolution.
        scaling_exponent (`float`, *optional*): power of sigma_k in Eq. (7), 1/4 in the paper, 0 in the elastic block.
        chunk_size (`int`, *optional*): C, steps that one matrix product of the chunked algorithm covers, by default 64,
            32 in the elastic block; at most `filter_length` and 512 are used.
        spectral_algorithm (`str`): "chunked" or "step", and with the package installed "fft" (the paper's) or "naive":
            one meaning, different cost.
        gate_hidden_size (`int`, *optional*): width D_g inside the gate, about D / 4 by default; in the elastic block a
            multiple of the channels.
        gating (`str`, *optional*): "softmax" for Eq. (8) over all channels that run; "nested", the elastic block's
            default, for Eq. (8) over channels 1 to j in head j; or, in the paper's block, "none" for Eq. (6).
        spectral_budget (`int`, `list[int]` or `str`, *optional*): default budget K of every call; None is the capacity.
        trained_budgets (`list[int]`, *optional*): budgets seen in training; others warn once.
        budget_presets (`dict[str, int | list[int]]`, *optional*): names that `spectral_budget` accepts.
        initializer_range (`float`): standard deviation of new linear layers; in the elastic block only of those that
            write to the residual stream and of heads, others start at 1 / sqrt(their inputs).
        embedding_initializer_range (`float`, *optional*): standard deviation of new token embeddings,
            `initializer_range` by default, 0.1 in the elastic block.
        layer_types (`list[str]`, *optional*): "linear_attention", spectral, for each layer by default; a hybrid also
            has "sliding_attention" or "full_attention" layers, with the norms and the feed-forward layer of the block.
            At least one layer is spectral.
        num_attention_heads, num_key_value_heads, head_dim (`int`, *optional*): sizes of attention layers. By default
            heads of about 64, keys and values for each, and the largest even `head_dim` so that all heads fit D.
        attention_intermediate_size (`int`, *optional*): width of the feed-forward layer beside attention, which no
            budget shrinks; `intermediate_size` by default.
        sliding_window (`int`, *optional*): positions, its own included, that one sees in "sliding_attention".
        rope_parameters (`dict`, *optional*): rotary embedding of attention layers as in transformers, by default
            "rope_type" "default" with "rope_theta" 10,000; "linear", "llama3" and "yarn" are the others.
        attention_dropout (`float`): rate on attention weights.
        gate_bias (`float`): start of the gate's output biases; any value but 0 starts the gate at equal weights, and a
            larger one changes them more slowly.
        dropout, embedding_dropout, activation_dropout (`float`): rates after each sub-layer, on the embedding, and
            inside feed-forward layers, after their activation.
        stochastic_depth (`float`): rate of skipping a whole sub-layer of a sample.
        stochastic_depth_ramp (`bool`): whether that rate rises linearly over the blocks, from 0 in the first.
        classifier_pooling (`str`): "mean" over real positions or "last" real position.
        layer_norm_eps (`float`): epsilon of the norms. tie_word_embeddings (`bool`): the head is the embedding.
        use_cache (`bool`): whether calls outside of training return a cache.
        pad_token_id, bos_token_id, eos_token_id (`int`, *optional*): 256, 257 and 258, those of bytes, by default; None
            where the vocabulary has no such ids.
        num_input_features (`int`, *optional*): width of continuous inputs (audio frames, pixels), which a linear
            encoder reads instead of token ids.

    Raises:
        StrictDataclassError: a field of another type or out of range, fields that do not fit each other, or a capacity
            that `filter_length` cannot resolve in fp64; it names the field, the value and the legal range.
    """

    model_type = "essm"
    auto_classes: ClassVar = AUTO_MAP
    attribute_map: ClassVar = {"max_position_embeddings": "filter_length"}
    keys_to_ignore_at_inference: ClassVar = ["past_key_values", "cache", "spectral_budget"]

    vocab_size: int = _integer(1, 2**31 - 1, 259)
    hidden_size: int = _integer(1, _WIDTH, 256)
    num_hidden_layers: int = _integer(1, 10_000, 8)
    block: Literal["paper", "elastic"] = "paper"
    head_size: int | None = _integer(1, _WIDTH)
    memory_key_size: int = _integer(0, _WIDTH, 0)
    memory_value_size: int = _integer(0, _WIDTH, 0)
    conv_kernel_size: int | None = _integer(1, 64)
    intermediate_size: int | None = _integer(0, _WIDTH)
    hidden_act: str = validated_field(_check_activation, default="gelu")
    num_spectral_channels: int = _integer(1, 64, 32)
    spectral_capacities: list[int] | None = _integer(1, 64)
    filter_length: int = _integer(1, _WIDTH, 4096)
    state_margin: int = _integer(0, _WIDTH, 16)
    scaling_exponent: float | int | None = _number(math.inf)
    chunk_size: int | None = _integer(1, _WIDTH)
    spectral_algorithm: Literal["chunked", "step", "fft", "naive"] = "chunked"
    gate_hidden_size: int | None = _integer(1, _WIDTH)
    gating: Literal["softmax", "nested", "none"] | None = None
    spectral_budget: int | list[int] | str | None = None
    trained_budgets: list[int] | None = _integer(1, 64)
    budget_presets: dict[str, int | list[int]] | None = None
    layer_types: list[Literal["linear_attention", "sliding_attention", "full_attention"]] | None = None
    num_attention_heads: int | None = _integer(1, _WIDTH)
    num_key_value_heads: int | None = _integer(1, _WIDTH)
    head_dim: int | None = _integer(2, _WIDTH)
    attention_intermediate_size: int | None = _integer(0, _WIDTH)
    sliding_window: int | None = _integer(2, _WIDTH)
    rope_parameters: dict[str, Any] | None = dataclasses.field(default_factory=lambda: None)
    attention_dropout: float | int = _number(1, 0.0)
    gate_bias: float | int = validated_field(_check_bias, default=1.0)
    dropout: float | int = _number(1, 0.0)
    embedding_dropout: float | int = _number(1, 0.0)
    activation_dropout: float | int = _number(1, 0.0)
    stochastic_depth: float | int = _number(1, 0.0)
    stochastic_depth_ramp: bool = False
    initializer_range: float | int = _number(math.inf, 0.02)
    embedding_initializer_range: float | int | None = _number(math.inf)
    layer_norm_eps: float | int = _number(math.inf, 1e-5)
    tie_word_embeddings: bool = True
    use_cache: bool = True
    classifier_pooling: Literal["mean", "last"] = "mean"
    num_input_features: int | None = _integer(1, _WIDTH)
    pad_token_id: int | None = 256
    bos_token_id: int | None = 257
    eos_token_id: int | list[int] | None = 258

    def __post_init__(self, **kwargs: Any) -> None:
        for name in self.attribute_map.keys() & kwargs.keys():
            setattr(self, name, kwargs.pop(name))
        if self.layer_types is None:
            self.layer_types = [SPECTRAL_LAYER] * self.num_hidden_layers  # caches of transformers read it
        for name, value in self._defaults().items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            if self.vocab_size <= getattr(type(self), name) == getattr(self, name):
                setattr(self, name, None)  # those of bytes, in a smaller vocabulary
        # save_pretrained would name only the saved class; every folder should load through every Auto class.
        kwargs["auto_map"] = self.auto_classes | (kwargs.get("auto_map") or {})
        super().__post_init__(**kwargs)
        if not is_hybrid(self):
            self.rope_parameters = None  # which transformers fills in

    def _defaults(self) -> dict[str, Any]:
        """Values of fields that follow from others when they are None."""
        D, K, paper = self.hidden_size, self.num_spectral_channels, self.block == "paper"
        defaults = {
            "intermediate_size": 4 * D if paper else 0,
            "scaling_exponent": 0.25 if paper else 0.0,
            "chunk_size": 64 if paper else 32,
            "gate_hidden_size": max(1, D // 4) if paper else _gate_size(D, K),
            "gating": "softmax" if paper else "nested",
        }
        if not paper:
            defaults |= {"head_size": _head_size(D, K), "conv_kernel_size": 4, "embedding_initializer_range": 0.1}
        if is_hybrid(self):
            heads = self.num_attention_heads or max(1, D // 64)
            defaults |= {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": _head_dim(D, heads)}
            width = defaults["intermediate_size"] if self.intermediate_size is None else self.intermediate_size
            defaults["attention_intermediate_size"] = width
        return defaults

    def validate_sizes(self) -> None:
        """Sizes that have to fit each other, or the block."""
        if not self.id2label:
            raise ValueError("num_labels must be an integer of at least 1, got 0")
        config: Any = self  # whose sizes are all filled in
        K, m, e = self.num_spectral_channels, self.memory_key_size, self.memory_value_size
        legal = ("softmax", "none") if self.block == "paper" else ("softmax", "nested")
        if self.gating not in legal:
            raise ValueError(f"gating must be one of {legal} with block={self.block!r}, got {self.gating!r}")
        if self.block == "paper":
            if config.intermediate_size < 1:
                raise ValueError("intermediate_size of the paper's block must be at least 1, got 0")
            names = ("head_size", "conv_kernel_size", "memory_key_size", "memory_value_size")
            if given := {name: getattr(self, name) for name in names if getattr(self, name)}:
                raise ValueError(f'{", ".join(names)} belong to block="elastic", got block="paper" with {given}')
        else:
            for name in ("intermediate_size", "gate_hidden_size"):
                if getattr(config, name) % K:
                    raise ValueError(f"{name} must be a multiple of the {K} channels, got {getattr(config, name)}")
            if (m > 0) != (e > 0) or e >= config.head_size:
                raise ValueError(
                    "memory_key_size and memory_value_size must both be 0 or both be positive, and values fewer than "
                    f"head_size {config.head_size}, got {m} and {e}"
                )
        if self.num_spectral_channels > (most := max_spectral_channels(self.filter_length)):
            raise ValueError(
                f"filter_length {self.filter_length} resolves at most {most} spectral channels, "
                f"got num_spectral_channels={self.num_spectral_channels}; use a longer filter (512 resolves 32)"
            )

    def validate_layers(self) -> None:
        """Layer types, and the sizes of attention layers."""
        if not spectral_layers(self):
            raise ValueError(f"layer_types must hold {SPECTRAL_LAYER!r}: budgets act on spectral layers")
        if not is_hybrid(self):
            return
        config: Any = self
        if config.head_dim % 2:
            raise ValueError(f"head_dim must be even, as rotary positions need, got {config.head_dim}")
        if config.num_attention_heads % config.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads must divide num_attention_heads {config.num_attention_heads}, "
                f"got {config.num_key_value_heads}"
            )
        if "sliding_attention" in config.layer_types and config.sliding_window is None:
            raise ValueError('sliding_window must be an integer of at least 2 for "sliding_attention", got None')
        rope = self.rope_parameters or {}
        theta, factor, share = (rope.get(name, 1.0) for name in ("rope_theta", "factor", "partial_rotary_factor"))
        numbers = all(type(x) in (int, float) for x in (theta, factor, share))
        legal = numbers and 0 < theta < math.inf and 1 <= factor < math.inf and share == 1
        if rope.get("rope_type") not in ROPE_TYPES or not legal:
            raise ValueError(
                f"rope_parameters must have a rope_type of {ROPE_TYPES}, a positive rope_theta, a factor of at least 1 "
                f"and no partial_rotary_factor, got {rope}"
            )

    def validate_rope(self) -> None:
        """As in transformers, whose KeyError for a missing entry tells no more of the configuration than its name."""
        try:
            if is_hybrid(self):
                super().validate_rope()
        except KeyError as error:
            raise ValueError(f"rope_parameters: {error.args[0]}, got {self.rope_parameters}") from None

    def validate_budgets(self) -> None:
        """Capacities, and budgets that are stored in the configuration."""
        channels, layers = self.num_spectral_channels, len(spectral_layers(self))
        held = self.spectral_capacities
        if held is not None and (len(held) != layers or max(held) != channels):
            raise ValueError(
                f"spectral_capacities must be {layers} integers in [1, num_spectral_channels = {channels}], "
                f"the largest of them {channels}, got {held}"
            )
        if any(channels < K for K in self.trained_budgets or ()):
            raise ValueError(f"trained_budgets must be integers in [1, {channels}], got {self.trained_budgets}")
        for name, value in (self.budget_presets or {}).items():
            try:
                of_each_layer(value, self.capacities)
            except ValueError as error:
                raise ValueError(f"budget_presets[{name!r}]: {error}") from None
        self.resolve_budget()

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any):
        """As in transformers; fields given beside the dictionary are checked as if they stood in it.

        What follows from another block, depth, or in the elastic block width or number of channels is derived anew, and
        head_dim from another width. Other sizes stay as the dictionary has them.
        """
        names = {field.name: field.name for field in dataclasses.fields(cls)} | cls.attribute_map
        del names["dtype"]  # which may be "auto" there
        given = {names[name]: kwargs.pop(name) for name in names.keys() & kwargs.keys()}
        fields, derived = dict(config_dict), set()
        if "num_hidden_layers" in given and set(fields.get("layer_types") or ()) <= {SPECTRAL_LAYER}:
            derived.add("layer_types")
        before = fields.get("block", "paper")
        if given.get("block", before) != before:
            derived |= {"head_size", "conv_kernel_size", "intermediate_size", "gate_hidden_size", "chunk_size"}
            derived |= {"memory_key_size", "memory_value_size", "scaling_exponent", "embedding_initializer_range"}
            derived |= {"gating"}
        D, K = fields.get("hidden_size"), fields.get("num_spectral_channels", 32)
        if D and before == "elastic" and given.keys() & {"hidden_size", "num_spectral_channels"}:
            of_channels = {"head_size": _head_size(D, K), "gate_hidden_size": _gate_size(D, K)}
            derived |= {name for name, value in of_channels.items() if fields.get(name) == value}
        heads = fields.get("num_attention_heads")
        if D and "hidden_size" in given and heads and fields.get("head_dim") == _head_dim(D, heads):
            derived.add("head_dim")
        return super().from_dict({k: v for k, v in fields.items() if k not in derived} | given, **kwargs)

    def to_json_file(self, json_file_path: Any, use_diff: bool = True) -> None:
        """As in transformers; the file names only code that lies beside it, as a model saves it."""
        folder, auto_map = os.path.dirname(json_file_path), getattr(self, "auto_map", {})

        def is_there(place: Any) -> bool:  # or in another repository
            return "--" in place or os.path.isfile(os.path.join(folder, f"{place.split('.')[0]}.py"))

        try:
            self.auto_map = {n: place for n, place in auto_map.items() if not isinstance(place, str) or is_there(place)}
            super().to_json_file(json_file_path, use_diff)
        finally:
            self.auto_map = auto_map

    def to_dict(self) -> dict[str, Any]:
        """As in transformers, without the fields of attention layers where there are none."""
        fields = super().to_dict()
        return fields if is_hybrid(self) else {k: v for k, v in fields.items() if k not in _ATTENTION_FIELDS}

    @property
    def capacities(self) -> tuple[int, ...]:
        """Channels that each spectral layer holds."""
        layers: Any = self.layer_types
        return tuple(self.spectral_capacities or [self.num_spectral_channels] * layers.count(SPECTRAL_LAYER))

    def resolve_budget(self, value: Any = None, batch_size: int | None = None) -> ResolvedBudget:
        """What `value` means for this model, or itself where it is one; see `spectral_budget.resolve_budget`."""
        if isinstance(value, ResolvedBudget):
            return value
        return resolve_budget(
            value,
            capacities=self.capacities,
            presets=self.budget_presets,
            default=self.spectral_budget,
            batch_size=batch_size,
        )


def _head_size(hidden_size: int, channels: int) -> int:
    """The width of a channel's head, so that all heads are twice as wide as the model."""
    return max(1, 2 * hidden_size // channels)


def _gate_size(hidden_size: int, channels: int) -> int:
    """A multiple of the channels near a quarter of the width."""
    return max(1, hidden_size // (4 * channels)) * channels


def _head_dim(hidden_size: int, heads: int) -> int:
    """The largest even width of a head, of which so many fit."""
    return hidden_size // heads // 2 * 2


__all__ = ["ESSMConfig"]
