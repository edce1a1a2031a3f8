# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Which model a script trains: ES-SSM, the paper's variants of it, or a baseline with as many parameters.

An ES-SSM is new, from sizes or from a configuration that holds them, or starts from saved weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from essm_train.arguments import RunArguments, arg
from essm_train.pairs import ESSMForPairClassification, ESSMPairConfig
from modeling_essm import (
    ESSMConfig,
    ESSMForCausalLM,
    ESSMForSequenceClassification,
)
from modeling_essm.spectral_budget import SPECTRAL_LAYER

# Fields of ESSMConfig that the arguments hold, as they are where neither a command nor a configuration names them.
_SIZES = MappingProxyType(
    {"hidden_size": 128, "num_hidden_layers": 8, "num_spectral_channels": 8, "filter_length": 1024}
    | {"scaling_exponent": 0.0, "gating": "softmax", "ar_order": 0, "block": "gated"}
    | dict.fromkeys(("inner_size", "num_heads", "mixing_size", "conv_kernel_size", "intermediate_size"))
    | {"embedding_initializer_range": None, "gate_hidden_size": None, "gate_bias": 1.0, "stochastic_depth_ramp": False}
    | {"ar_negative_filters": True, "ar_feature_shift": 0}
    | dict.fromkeys(("layer_types", "num_attention_heads", "num_key_value_heads", "head_dim", "sliding_window"))
)
# Sizes that runs of earlier versions do not name, and have as they are by default.
_LATER = (
    *("gate_bias", "stochastic_depth_ramp", "ar_negative_filters", "ar_feature_shift"),
    *("layer_types", "num_attention_heads", "num_key_value_heads", "head_dim", "sliding_window"),
)
# Other defaults of the paper's block.
_PAPER = MappingProxyType({"num_hidden_layers": 4, "num_spectral_channels": 32, "scaling_exponent": 0.25})
# What runs beside a configuration recorded before its sizes could be overridden: the defaults of that time.
_RECORDED = MappingProxyType(
    dict.fromkeys(_SIZES)
    | {"hidden_size": 128, "num_hidden_layers": 4, "num_spectral_channels": 32, "filter_length": 1024}
    | {"scaling_exponent": 0.25, "gating": "softmax", "ar_order": 0, "block": "paper"}
)
DIAGONAL = "diagonal_ssm"  # the companion's model_type
_DIAGONAL = ("parameterization", "state_size", "bidirectional")  # arguments of it alone
# Fields that are 0 by default, or as configured.
RATES = ("dropout", "embedding_dropout", "activation_dropout", "stochastic_depth")
TRUST_HELP = "Run code that lies beside the weights, which a model of another type than ours may need: read it first."
_HEADS = {ESSMForCausalLM: "lm_head.weight", ESSMForSequenceClassification: "score.weight"}
# Heads of saved models, by model_type; the last is what ESSMForPairClassification was called once.
_SAVED = MappingProxyType(
    {
        ESSMConfig.model_type: ("ESSMForCausalLM", "ESSMForSequenceClassification"),
        ESSMPairConfig.model_type: ("ESSMForPairClassification", "TwoTowerClassifier"),
    }
)


def _size(name: str, help: str) -> Any:
    """None says that it was not given; SizeArguments and a configuration then each have their own value."""
    default = "what ESSMConfig makes of the others" if _SIZES[name] is None else _SIZES[name]
    paper = f" ({_PAPER[name]} with the paper's block)" if name in _PAPER else ""
    return arg(None, f"{help} By default {default}{paper}, or as configured.")


def hybrid_layers(num_layers: int, attention_every: int, kind: str = "full_attention") -> list[str]:
    """`layer_types` of which the middle one of every so many attends.

    Raises:
        ValueError: that is no layer, or every one.
    """
    if not 2 <= attention_every <= num_layers:
        raise ValueError(f"attention_every must be in [2, num_hidden_layers = {num_layers}], got {attention_every}")
    return [kind if i % attention_every == attention_every // 2 else SPECTRAL_LAYER for i in range(num_layers)]


@dataclass
class SizeArguments(RunArguments):
    """A new ES-SSM's shape; how to train is in arguments.RunArguments."""

    hidden_size: int | None = _size("hidden_size", "Model width D.")
    num_hidden_layers: int | None = _size("num_hidden_layers", "Number of blocks.")
    num_spectral_channels: int | None = _size(
        "num_spectral_channels", "Capacity: the largest budget the model will be able to run."
    )
    filter_length: int | None = _size("filter_length", "Longest sequence the filters cover; longer costs nothing.")
    gating: str | None = _size("gating", "The gate: 'softmax' (Eq. 8), or 'none' (Eq. 6).")
    ar_order: int | None = _size("ar_order", "2 adds the autoregressive and negative-filter terms of AR-STU.")
    ar_negative_filters: bool | None = _size("ar_negative_filters", "With ar_order 2: filters of alternating sign too.")
    ar_feature_shift: int | None = _size("ar_feature_shift", "With ar_order 2: steps by which features lag, 0 or 2.")
    scaling_exponent: float | None = _size("scaling_exponent", "Power of sigma_k in Eq. (7).")
    block: str | None = _size(
        "block", "The residual block: 'gated', with convolution, heads and output gate, or 'paper'."
    )
    inner_size: int | None = _size("inner_size", "In the gated block: width of its mixer.")
    num_heads: int | None = _size("num_heads", "In the gated block: groups of that width with a gate of Eq. (8) each.")
    mixing_size: int | None = _size("mixing_size", "In the gated block: size of the blocks on the diagonal of M_k.")
    conv_kernel_size: int | None = _size("conv_kernel_size", "In the gated block: taps of its convolution; 0 for none.")
    intermediate_size: int | None = _size(
        "intermediate_size", "Width of the feed-forward layer; 0, for none, in the gated block only."
    )
    embedding_initializer_range: float | None = _size(
        "embedding_initializer_range", "Standard deviation of new embeddings."
    )
    gate_hidden_size: int | None = _size("gate_hidden_size", "Width inside the gate.")
    gate_bias: float | None = _size("gate_bias", "What the gate's output biases start at, not 0.")
    dropout: float | None = arg(None, "Dropout rate after each sub-layer; by default 0, or as configured.")
    embedding_dropout: float | None = arg(None, "Dropout rate on the embedding; by default 0, or as configured.")
    activation_dropout: float | None = arg(
        None, "Dropout rate inside feed-forward layers; by default 0, or as configured."
    )
    stochastic_depth: float | None = arg(None, "Rate of skipping a whole sub-layer; by default 0, or as configured.")
    stochastic_depth_ramp: bool | None = _size(
        "stochastic_depth_ramp", "Whether that rate rises linearly over the blocks, from 0 in the first."
    )

    attention_every: int | None = arg(
        None, "One in so many layers attends, in a window if sliding_window is given; else layer_types says which."
    )
    layer_types: list[str] | None = arg(
        None, "Of each layer: linear_attention (spectral, the default), sliding_attention or full_attention."
    )
    num_attention_heads: int | None = _size("num_attention_heads", "Heads of attention layers.")
    num_key_value_heads: int | None = _size("num_key_value_heads", "Heads of their keys and values.")
    head_dim: int | None = _size("head_dim", "Width of a head, even.")
    sliding_window: int | None = _size("sliding_window", "Positions that sliding_attention sees.")

    EARLIER = MappingProxyType({"block": "paper"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source is None:
            for name, default in (_SIZES | (_PAPER if self.block == "paper" else {})).items():
                setattr(self, name, default if getattr(self, name) is None else getattr(self, name))
        if self.attention_every is None:
            return
        if self.source is not None or self.layer_types is not None:
            raise ValueError(
                "attention_every is for a model of the sizes given here: beside a configuration give layer_types, and "
                f"not both, got attention_every={self.attention_every}"
            )
        hybrid_layers(self.num_hidden_layers or 0, self.attention_every)

    @property
    def source(self) -> str | None:
        """The folder or Hub name that holds the model's shape; None if the arguments do."""
        return None

    def identity(self) -> dict[str, Any]:
        """As of any run, without sizes that say nothing which a run of an earlier version did not mean."""
        values = super().identity()
        silent = {name for name in _LATER if values[name] in (None, _SIZES[name])}
        silent |= {"attention_every"} if self.attention_every is None else set()
        return {name: value for name, value in values.items() if name not in silent}

    def given(self) -> dict[str, Any]:
        """The fields of ESSMConfig that the arguments name."""
        values = {name: getattr(self, name) for name in (*_SIZES, *RATES)}
        if self.attention_every is not None and self.num_hidden_layers is not None:
            kind = "full_attention" if self.sliding_window is None else "sliding_attention"
            values["layer_types"] = hybrid_layers(self.num_hidden_layers, self.attention_every, kind)
        return {name: value for name, value in values.items() if value is not None}


@dataclass
class ModelArguments(SizeArguments):
    """The model: sizes, for ES-SSM or a baseline; or a configuration, which sizes override; or weights of ES-SSM."""

    architecture: str = arg(
        "essm",
        "'essm', or a baseline of baselines.py with as many parameters as an ES-SSM of these sizes: 'transformer', "
        "'mamba', 'mamba2', 's4', 's4d', and 'cnn' and 'tc_resnet' to classify features; or 'diagonal_ssm', the "
        "companion of width hidden_size with num_hidden_layers blocks. All but 'essm' have one budget, 1.",
    )
    parameterization: str | None = arg(None, "Of a diagonal_ssm: 's5' (the default), 'lru' or 's4d'.")
    state_size: int | None = arg(None, "Of a diagonal_ssm: stored modes of a layer, of 's4d' for each channel.")
    bidirectional: bool | None = arg(None, "Of a diagonal_ssm that classifies: read both ways; by default one.")
    config_name: str | None = arg(
        None, "Folder or Hub name of a configuration; sizes that are given beside it take the place of its own."
    )
    model_name_or_path: str | None = arg(None, "Weights to start from, instead of a new model.")
    match_parameters: bool = arg(
        False,
        "Choose the width: as many parameters, to 3 percent, as an ES-SSM of these sizes has, with its gate and "
        "without AR-STU's terms and attention layers. For variants that lack weights or have more; a baseline always "
        "has as many.",
    )
    match_block: str | None = arg(
        None, "With match_parameters: the block of that ES-SSM, 'paper' or 'gated', by default the model's own."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.is_diagonal:
            for name in _DIAGONAL:
                if (value := getattr(self, name)) is not None:
                    raise ValueError(f"{name} is of architecture 'diagonal_ssm': leave it out, got {value!r}")
        elif self.config_name or self.match_parameters:
            raise ValueError("architecture 'diagonal_ssm' has the sizes given: no config_name, no match_parameters")
        if self.is_baseline and (self.push_to_hub or self.model_name_or_path):
            raise ValueError(
                f"architecture {self.architecture!r} is there to compare with: it takes its size from an ES-SSM's, not "
                "from model_name_or_path, and cannot be pushed"
            )
        if self.match_parameters and (self.is_baseline or self.model_name_or_path):
            raise ValueError("match_parameters is for a new ES-SSM: leave it out with a baseline or model_name_or_path")
        if self.match_block is not None and not self.match_parameters:
            raise ValueError(f"match_block is for match_parameters, got match_block={self.match_block!r} without")
        if self.config_name and self.model_name_or_path:
            raise ValueError("give config_name or model_name_or_path, not both")
        if self.model_name_or_path:
            for name in _SIZES:
                if (value := getattr(self, name)) is not None:
                    raise ValueError(f"{name} is part of model_name_or_path: leave it out, got {value!r}")
        if self.source is None:
            for name in RATES:
                setattr(self, name, getattr(self, name) or 0.0)

    @property
    def is_baseline(self) -> bool:
        return self.architecture != "essm"

    @property
    def is_diagonal(self) -> bool:
        return self.architecture == DIAGONAL

    @property
    def source(self) -> str | None:
        return self.config_name or self.model_name_or_path

    def identity(self) -> dict[str, Any]:
        """Beside a configuration sizes stand in one entry: runs from before they could override it have none."""
        values = super().identity()
        if not self.is_diagonal:
            values = {name: value for name, value in values.items() if name not in _DIAGONAL}
        if self.match_block is None:
            del values["match_block"]  # runs of earlier versions do not name it
        if self.source is not None:
            overrides = {name: getattr(self, name) for name in _SIZES if getattr(self, name) is not None}
            recorded = {name: value for name, value in _RECORDED.items() if name not in _LATER}
            values |= recorded | {"config_overrides": overrides or None}
        return values


def make_config(args: ModelArguments, cls: type[ESSMConfig] = ESSMConfig, **fields: Any) -> ESSMConfig:
    """The configuration that the arguments name, or make from sizes.

    Args:
        cls: ESSMConfig or ESSMPairConfig.
        fields: of the configuration, which override it, as do the sizes and rates that the arguments name.
    Raises:
        ValueError: sizes or rates that cannot be, or no such configuration where the arguments look for one.
    """
    if args.source is None:
        return cls(**args.given(), **fields)
    try:
        values, _ = cls.get_config_dict(args.source)
    except OSError as error:
        raise ValueError(f"cannot read the configuration of {args.source!r}: {error}") from error
    if values.get("model_type") != cls.model_type:
        raise ValueError(
            f"{args.source!r} must hold the config.json of an ES-SSM, model_type {cls.model_type!r}, "
            f"got model_type {values.get('model_type')!r}"
        )
    return cls.from_dict(values | fields, **args.given())


def load_model(auto: Any, name: Any, *, trust_remote_code: bool = False, **options: Any) -> Any:
    """What was saved, through an Auto class: an ES-SSM by this package's classes, whatever code lies beside it.

    Args:
        auto: AutoModelForCausalLM or another. name: folder or Hub name. options: of its from_pretrained.
        trust_remote_code: run the model's own code where it has any.
    Raises:
        ValueError: the model needs its own code, and may not run it.
    """
    try:
        return auto.from_pretrained(name, trust_remote_code=trust_remote_code, **options)
    except ValueError as error:
        if trust_remote_code or "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"{str(name)!r} needs the code that lies beside its weights, and code of models is not run unasked: read "
            "it, and if you trust it, give --trust_remote_code"
        ) from error


def holds_head(config: ESSMConfig, cls: type[PreTrainedModel]) -> bool:
    """Whether the weights saved with that configuration are those of a `cls`, its head among them."""
    return cls.__name__ in (config.architectures or ())


def check_vocabulary(args: ModelArguments, config: ESSMConfig, name: str, vocab_size: int, is_bytes: bool) -> None:
    """Raises ValueError if the weights were not made for these tokens.

    Args:
        name: of the tokens, for people. vocab_size: how many ids they need.
    """
    # A tokenizer's model may have room to spare; bytes have one vocabulary.
    fits = config.vocab_size == vocab_size if is_bytes else config.vocab_size >= vocab_size
    if not fits:
        legal = vocab_size if is_bytes else f"at least {vocab_size}"
        raise ValueError(
            f"vocab_size of {args.model_name_or_path!r} must be {legal} for {name}, got {config.vocab_size}: give the "
            "tokenizer_name it was trained with, or none for that in its folder, or for bytes if there is none"
        )


def make_model(args: ModelArguments, cls: type[PreTrainedModel], **fields: Any) -> PreTrainedModel:
    """A new model in fp32, or one that starts from weights; their head is new if it is not that of `cls`.

    Args:
        cls: the class of an ES-SSM with a head, or which of them a baseline stands for.
        fields: of the config, that the data asks for.
    Raises:
        ValueError: as `make_config`; an unknown architecture; no model of as many parameters; or weights that cannot be
            read or are not all there.
    """
    config = make_config(args, cls.config_class, **fields)
    if args.model_name_or_path:
        return _load_weights(args.model_name_or_path, cls, config)
    if not args.is_baseline:
        if args.match_parameters:
            from essm_train.baselines.sizes import matched_variant

            config = matched_variant(config, cls, args.match_block)
        return cls(config).float()
    for name in ("activation_dropout", "stochastic_depth", *(["embedding_dropout"] if args.is_diagonal else [])):
        if rate := getattr(config, name):
            raise ValueError(f"{name} must be 0 with architecture {args.architecture!r}, which has none, got {rate}")
    if args.is_diagonal:
        return _make_diagonal(args, cls, fields)
    from essm_train.baselines.models import (
        BaselineForCausalLM,
        BaselineForPairClassification,
        BaselineForSequenceClassification,
    )
    from essm_train.baselines.sizes import count_parameters, matched_baseline

    if isinstance(config, ESSMPairConfig):
        fields |= {"head_hidden_size": config.head_hidden_size}
    baselines = {
        ESSMForCausalLM: BaselineForCausalLM,
        ESSMForPairClassification: BaselineForPairClassification,
        ESSMForSequenceClassification: BaselineForSequenceClassification,
    }
    baseline = baselines[cls]
    return baseline(
        matched_baseline(
            args.architecture,
            count_parameters(config, cls),
            model_class=baseline,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_hidden_layers,
            max_position_embeddings=config.filter_length,
            dropout=config.dropout,
            embedding_dropout=config.embedding_dropout,
            **fields,
        )
    ).float()


def _make_diagonal(args: ModelArguments, cls: type[PreTrainedModel], fields: dict[str, Any]) -> PreTrainedModel:
    """A new diagonal state space model. Raises ValueError for sizes or heads that it does not have."""
    from modeling_essm.companions import (
        DiagonalSSMConfig,
        DiagonalSSMForCausalLM,
        DiagonalSSMForSequenceClassification,
    )

    classes: dict[type, Any] = {
        ESSMForCausalLM: DiagonalSSMForCausalLM,
        ESSMForSequenceClassification: DiagonalSSMForSequenceClassification,
    }
    if cls not in classes:
        raise ValueError(f"architecture {DIAGONAL!r} writes text or classifies sequences, it has no {cls.__name__}")
    if (pooling := fields.pop("classifier_pooling", "mean")) != "mean":
        raise ValueError(f"classifier_pooling of architecture {DIAGONAL!r} must be 'mean', got {pooling!r}")
    own = {name: getattr(args, name) for name in (*_DIAGONAL, "hidden_size", "num_hidden_layers", "dropout")}
    config = DiagonalSSMConfig(**{name: value for name, value in own.items() if value is not None}, **fields)
    return classes[cls](config).float()


def _load_weights(name: str, cls: type[PreTrainedModel], config: ESSMConfig) -> PreTrainedModel:
    """Saved weights in fp32. Raises ValueError if they cannot be read, or lack more than a head of another class."""
    may_lack = set() if holds_head(config, cls) else {_HEADS.get(cls)}
    try:
        model, found = cls.from_pretrained(name, config=config, output_loading_info=True)
    except OSError as error:
        raise ValueError(f"cannot read the weights of {name!r}: {error}") from error
    if lacking := sorted(set(found["missing_keys"]) - may_lack):
        raise ValueError(f"the weights of {name!r} lack {', '.join(lacking)}: fetch or save them again")
    return model.float()


def capacity_of(model: nn.Module) -> int:
    """The largest budget of a model, wrapped for several processes or not; 1 for one that knows no budgets."""
    return getattr(getattr(model, "module", model).config, "num_spectral_channels", 1)


def run_at_budget(model: nn.Module, batch: Mapping[str, Tensor], budget: int) -> Any:
    """Outputs of a model, wrapped or not; one that knows no budgets runs as it is."""
    elastic = hasattr(getattr(model, "module", model).config, "num_spectral_channels")
    return model(**batch, use_cache=False, **({"spectral_budget": budget} if elastic else {}))


def read_saved_config(folder: Path, pairs: bool = False) -> dict[str, Any]:
    """config.json of a saved model. Raises ValueError if it is absent, damaged, or not an ES-SSM's with a head.

    Args:
        pairs: whether a classifier of pairs is welcome too.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"model must be the folder of a saved model, got {str(folder)!r}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    types = [*_SAVED] if pairs else [ESSMConfig.model_type]
    if (model_type := config.get("model_type")) not in types:
        legal = " or ".join(map(repr, types))
        raise ValueError(f"{path}: model_type must be {legal}, which has budgets, got {model_type!r}")
    architecture = (config.get("architectures") or [None])[0]
    if architecture not in _SAVED[model_type]:
        legal = " or ".join(_SAVED[model_type])
        raise ValueError(f"{path}: the architecture must be {legal}, got {architecture!r}")
    return config


def is_pairs(config: dict[str, Any]) -> bool:
    """Whether such a configuration is that of a classifier of pairs."""
    return config["model_type"] == ESSMPairConfig.model_type


def is_causal(config: dict[str, Any]) -> bool:
    """Whether such a configuration is that of a language model."""
    return config["architectures"][0] == "ESSMForCausalLM"
