# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Which model a script trains: ES-SSM, the paper's variants of it, or a baseline with as many parameters.

An ES-SSM is new, from sizes or from a configuration that holds them, or starts from saved weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import PreTrainedModel

from essm_train.arguments import AR_STU, DIAGONAL, ModelArguments
from essm_train.pairs import ESSMPairConfig
from modeling_essm import ESSMConfig, ESSMForCausalLM
from modeling_essm.budgets.curve import PRESETS
from modeling_essm.training.budget_dropout import BUDGETS, Part, as_argument, clip_budgets

# Heads that weights of another class may lack, and the model_types of the classes that are saved with one.
_HEADS = {"ESSMForCausalLM": "lm_head.weight", "ESSMForSequenceClassification": "score.weight"}
_SAVED = {**dict.fromkeys(_HEADS, ESSMConfig.model_type), "ESSMForPairClassification": ESSMPairConfig.model_type}


def _counterpart(args: ModelArguments, cls: type) -> Any:
    """What AR-STU or a diagonal_ssm has for a class of ES-SSM. Raises ValueError if that has none."""
    if args.architecture == AR_STU:
        from essm_train.baselines import ar_stu as module

        return getattr(module, cls.__name__.replace("ESSM", "ARSTU"))
    if not args.is_diagonal:
        return cls
    from modeling_essm import companions

    found = getattr(companions, cls.__name__.replace("ESSM", "DiagonalSSM"), None)
    if found is None:
        raise ValueError(f"architecture {DIAGONAL!r} writes text or classifies sequences, it has no {cls.__name__}")
    return found


def make_config(args: ModelArguments, cls: type[ESSMConfig] = ESSMConfig, **fields: Any) -> Any:
    """The configuration that the arguments name, or make from sizes.

    Args:
        cls: ESSMConfig or ESSMPairConfig; a diagonal_ssm has its own.
        fields: of the configuration, that the data asks for.
    Raises:
        ValueError: sizes or rates that cannot be, or no such configuration where the arguments look for one.
    """
    made = _counterpart(args, cls)
    overrides = args.fields()
    for name in overrides.keys() & fields.keys():
        if (value := overrides.pop(name)) != fields[name]:
            raise ValueError(f"config_overrides: {name} must be {fields[name]!r} for this data, got {value!r}")
    try:
        if args.source is None:
            return made(**overrides, **fields)
        values = _read_config(args.source, cls) | fields
        if not args.model_name_or_path:  # new weights, whatever lies beside the configuration
            values["trained_budgets"] = None
        if values.get("budget_presets"):  # those of calibration were measured on the weights as they were
            values["budget_presets"] = {n: K for n, K in values["budget_presets"].items() if n not in PRESETS} or None
        if made is not cls:
            values = {name: value for name, value in values.items() if name not in ("model_type", "auto_map")}
        return made.from_dict(values, **overrides)  # which makes anew what follows from an override
    except StrictDataclassError as error:
        raise ValueError(f"{args.source or 'config_overrides'}: {error}") from error


def _read_config(source: str, cls: type[ESSMConfig]) -> dict[str, Any]:
    """The fields of a configuration of that class. Raises ValueError if there is none."""
    try:
        values, _ = cls.get_config_dict(source)
    except OSError as error:
        raise ValueError(f"cannot read the configuration of {source!r}: {error}") from error
    if values.get("model_type") != cls.model_type:
        raise ValueError(
            f"{source!r} must hold the config.json of an ES-SSM, model_type {cls.model_type!r}, "
            f"got model_type {values.get('model_type')!r}"
        )
    return values


def load_model(auto: Any, name: Any, *, trust_remote_code: bool = False, **options: Any) -> Any:
    """What was saved, through an Auto class: an ES-SSM by this package's classes, whatever code lies beside it.

    Args:
        auto: AutoModelForCausalLM or another. name: folder or Hub name. options: of its from_pretrained.
        trust_remote_code: run the model's own code where it has any.
    Raises:
        ValueError: the model needs its own code, and may not run it.
    """
    from essm_train.baselines import ar_stu, models  # noqa: F401, which the Auto classes then know

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
    if args.is_diagonal and (pooling := fields.pop("classifier_pooling", "mean")) != "mean":
        raise ValueError(f"classifier_pooling of architecture {DIAGONAL!r} must be 'mean', got {pooling!r}")
    made, config = _counterpart(args, cls), make_config(args, cls.config_class, **fields)
    if args.model_name_or_path:
        return _load_weights(args.model_name_or_path, cls, config)
    if args.is_baseline and not args.is_diagonal:
        made, config = _match_baseline(args, cls, config, fields)
    elif args.match_parameters:
        from essm_train.baselines.sizes import matched_variant

        config = matched_variant(config, made, args.match_block)
    return made(config).float()


def _match_baseline(args: ModelArguments, cls: Any, config: ESSMConfig, fields: dict[str, Any]) -> tuple[Any, Any]:
    """The class of a baseline that does what `cls` does, and a configuration with as many parameters."""
    from essm_train.baselines.models import BaselineForCausalLM, BaselineForSequenceClassification
    from essm_train.baselines.sizes import count_parameters, matched_baseline

    for name in ("activation_dropout", "stochastic_depth"):
        if rate := getattr(config, name):
            raise ValueError(f"{name} must be 0 with architecture {args.architecture!r}, which has none, got {rate}")
    if isinstance(config, ESSMPairConfig):
        fields |= {"head_hidden_size": config.head_hidden_size, "classifier_pooling": config.classifier_pooling}
    made: Any = BaselineForCausalLM if cls is ESSMForCausalLM else BaselineForSequenceClassification
    return made, matched_baseline(
        args.architecture,
        count_parameters(config, cls),
        model_class=made,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        max_position_embeddings=config.filter_length,
        dropout=config.dropout,
        embedding_dropout=config.embedding_dropout,
        **fields,
    )


def _load_weights(name: str, cls: type[PreTrainedModel], config: ESSMConfig) -> PreTrainedModel:
    """Saved weights in fp32. Raises ValueError if they cannot be read, or lack more than a head of another class."""
    may_lack = set() if holds_head(config, cls) else {_HEADS.get(cls.__name__)}
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


def budgets_to_measure(model: nn.Module, given: Iterable[int] | None = None) -> tuple[int, ...]:
    """Those given, by default BUDGETS and the smallest one of training, and always the capacity.

    Raises ValueError for a given one that the model does not have."""
    capacity, given = capacity_of(model), tuple(given or ())
    if bad := [K for K in given if not 1 <= K <= capacity]:
        raise ValueError(f"budgets must be in [1, {capacity}], got {bad[0]}")
    trained = getattr(model.config, "trained_budgets", None) or ()
    return clip_budgets((*(given or (*BUDGETS, *sorted(trained)[:1])), capacity), capacity)


def run_at_budget(model: nn.Module, batch: Mapping[str, Tensor], budget: int | Tensor) -> Any:
    """Outputs of a model, wrapped or not, at a budget or (B,) one a row; one that has a single one runs as it is."""
    return model(**batch, use_cache=False, **({"spectral_budget": budget} if capacity_of(model) > 1 else {}))


def run_part(model: nn.Module, batch: Mapping[str, Tensor], part: Part) -> Any:
    """Outputs of a part of an update, on its rows of the batch."""
    rows = {name: value[part.rows] for name, value in batch.items()}
    return run_at_budget(model, rows, as_argument(part.budget))


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
    legal = _SAVED if pairs else _HEADS
    found = (config.get("architectures") or [None])[0], config.get("model_type")
    if found not in [(name, _SAVED[name]) for name in legal]:
        raise ValueError(f"{path}: the architecture must be {' or '.join(legal)}, got {found[0]} of type {found[1]!r}")
    return config


def is_causal(config: dict[str, Any]) -> bool:
    """Whether such a configuration is that of a language model."""
    return config["architectures"][0] == "ESSMForCausalLM"
