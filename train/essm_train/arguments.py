# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What to train and how, as arguments that the training scripts share, and where they are read from.

Nothing here imports torch, so that a wrong argument is refused at once.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import importlib.util
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn, TypeVar

import yaml

FILES = (".yaml", ".yml", ".json")
# What others call an argument, where it is not the most similar of ours.
_SYNONYMS = {"lr": "learning_rate", "epochs": "num_train_epochs", "model": "model_name_or_path"}
_SYNONYMS |= dict.fromkeys(("batch_size", "train_batch_size"), "per_device_train_batch_size")
# Those of transformers.get_scheduler that are functions of the update alone.
_WITH_FLOOR, _STABLE = "cosine_with_min_lr", "warmup_stable_decay"
SCHEDULES = ["cosine", _WITH_FLOOR, _STABLE, "linear", "cosine_with_restarts", "polynomial", "inverse_sqrt", "constant"]
SCHEDULES += ["constant_with_warmup"]


def arg(default: Any, help: str) -> Any:
    """A field of a dataclass of arguments, with what `--help` says of it."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


def refuse(rules: Mapping[str, object]) -> None:
    """Raises ValueError with the first message whose condition holds."""
    for message, broken in rules.items():
        if broken:
            raise ValueError(message)


def check_within(arguments: Any, interval: str, *names: str) -> None:
    """Raises ValueError if one of these fields, or a number of a list there, is outside of "[0, 1)" or the like.

    None is legal."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    ends = [end for end, closed in ((low, interval[0] == "["), (high, interval[-1] == "]")) if closed]
    for name in names:
        value = getattr(arguments, name)
        for number in value if isinstance(value, list) else [value]:
            if number is not None and not (low < number < high or number in ends):
                legal = f"at least {low:g}" if interval.endswith(" inf)") and low in ends else f"in {interval}"
                raise ValueError(f"{name} must be {legal}, got {number}")


def check_at_least(arguments: Any, least: float, *names: str) -> None:
    """As `check_within`, without an upper end."""
    check_within(arguments, f"[{least}, inf)", *names)


def check_needed(arguments: Any, **needed: str) -> None:
    """Raises ValueError if a field is not as by default, and the one that gives it a meaning is not set."""
    for name, other in needed.items():
        if getattr(arguments, name) != getattr(type(arguments), name) and not getattr(arguments, other):
            raise ValueError(f"{name} needs {other}")


@dataclass
class RunArguments:
    """How to train. Precision, devices and processes are set through `accelerate launch`."""

    output_dir: str = arg("runs/essm", "Where everything goes; a run found there is continued.")
    overwrite_output_dir: bool = arg(False, "Delete the run, or model, found in output_dir and start afresh.")
    resume_from_checkpoint: str | None = arg(
        None, "A checkpoint of output_dir to go back to, instead of the last; later ones are renamed."
    )

    budget_schedule: str | None = arg(
        "discrete",
        "Budgets of each update: 'discrete' (one of 2,3,4,6,..,32), 'uniform' (1..K), 'authors' (full at first and at "
        "every 8th update, else log-uniform), 'sandwich' (full, random and smallest in each update), 'rows' (one of "
        "1,2,3,4,6,.. for each sample), 'family' (all of these in each update) or 'full'.",
    )
    full_budget_updates: int | None = arg(0, "With any schedule: updates at the full budget before all others.")
    sandwich_random: int = arg(2, "With the 'sandwich' schedule: random budgets beside the largest and the smallest.")
    distillation_weight: float | None = arg(
        None, "Weight in [0, 1] of imitating the full budget, by default 0.5 with 'family' and 0 with 'sandwich'."
    )

    max_steps: int = arg(600, "Updates.")
    num_train_epochs: float | None = arg(None, "Instead of max_steps: passes over the training samples.")
    extend: bool = arg(False, "Let the run in output_dir go on to a larger max_steps or num_train_epochs.")
    per_device_train_batch_size: int = arg(4, "Samples per process and forward pass.")
    gradient_accumulation_steps: int = arg(1, "Forward and backward passes per update.")
    learning_rate: float = arg(5e-3, "Peak of the learning rate.")
    lr_scheduler_type: str = arg("cosine", f"Learning rate after its peak, as in transformers: {', '.join(SCHEDULES)}.")
    min_lr_rate: float | None = arg(None, f"With '{_WITH_FLOOR}': where it ends, as a share of the peak.")
    decay_steps: int | None = arg(None, f"With '{_STABLE}': the last updates, over which it falls to 0.")
    warmup_steps: int = arg(50, "Updates of linear warm-up before the peak.")
    optimizer: Literal["adamw", "muon"] | None = arg("adamw", "'muon': matrices of linear layers, AdamW for all else.")
    weight_decay: float = arg(0.1, "On matrices only: not on norms, biases and embeddings.")
    adam_beta2: float = arg(0.95, "AdamW's decay of squared gradients.")
    max_grad_norm: float = arg(1.0, "Gradients are clipped to this norm; inf clips none.")
    ema_decay: float = arg(0.0, "Decay of an exponential average of the weights; 0 keeps none.")
    seed: int = arg(0, "Seed of weights, data order, budgets and dropout.")
    gradient_checkpointing: bool = arg(False, "Recompute activations in the backward pass: less memory, more time.")
    torch_compile: bool = arg(False, "Compile the model; each budget is compiled when it first runs.")
    full_determinism: bool = arg(False, "Only deterministic kernels, so that GPU runs repeat bit for bit; slower.")

    truncation_tau: float | None = arg(
        None, "For a diagonal_ssm: the share of a layer's Hankel singular values that an attempt may discard."
    )
    truncation_attempts: int = arg(4, "With truncation_tau: how often, at equal distances.")
    truncation_until: str = arg("warmup", "The last attempt: 'warmup', an update, or with a point a share of all.")

    eval_steps: int = arg(100, "Updates between validations.")
    eval_budgets: list[int] | None = arg(None, "Budgets to validate at; by default smallest, middle and largest.")
    early_stopping_patience: int = arg(0, "Stop after so many validations without a new best; 0 never does.")
    early_stopping_threshold: float = arg(0.0, "A new best counts against that patience if it is better by more.")
    load_best_model_at_end: bool = arg(False, "Save the weights of the best validation instead of the last ones.")
    save_steps: int = arg(100, "Updates between checkpoints; the last update always has one.")
    save_total_limit: int = arg(2, "How many of the newest checkpoints to keep.")
    logging_steps: int = arg(10, "Updates between lines of log.jsonl and of the trackers.")
    report_to: list[str] | None = arg(None, "Trackers that Accelerate knows: tensorboard, wandb, mlflow, trackio, ...")
    cpu_threads: int | None = arg(
        None, "CPU threads per process; by default the machine's cores, at most 8, shared out."
    )

    push_to_hub: bool = arg(False, "Push the finished model, with its card, to hub_model_id.")
    hub_model_id: str | None = arg(None, "owner/name on the Hub.")
    hub_private_repo: bool = arg(False, "Create that repository as a private one.")

    # What may differ when a run is resumed: no weight depends on it (on the number of threads only by rounding).
    RESUMABLE = frozenset(
        {"output_dir", "overwrite_output_dir", "save_steps", "save_total_limit", "logging_steps", "report_to"}
        | {"cpu_threads", "push_to_hub", "hub_model_id", "hub_private_repo", "load_best_model_at_end", "extend"}
        | {"resume_from_checkpoint"}
    )

    def __post_init__(self) -> None:
        check_at_least(self, 1, "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "eval_steps")
        check_at_least(self, 1, "save_steps", "save_total_limit", "logging_steps", "cpu_threads", "truncation_attempts")
        check_at_least(self, 1, "decay_steps")
        check_at_least(self, 0, "warmup_steps", "full_budget_updates", "sandwich_random", "early_stopping_patience")
        check_within(self, f"[0, {2**31 - 1}]", "seed")  # each process adds its number
        check_at_least(self, 0, "learning_rate", "weight_decay", "early_stopping_threshold")
        check_within(self, "[0, 1)", "ema_decay", "adam_beta2")
        check_within(self, "[0, 1]", "distillation_weight", "min_lr_rate")
        check_within(self, "(0, inf]", "max_grad_norm")
        check_within(self, "(0, inf)", "num_train_epochs")
        check_within(self, "(0, 1)", "truncation_tau")
        check_needed(self, truncation_attempts="truncation_tau", truncation_until="truncation_tau")
        check_needed(self, early_stopping_threshold="early_stopping_patience")
        if self.distillation_weight is None:
            self.distillation_weight = 0.5 if self.budget_schedule == "family" else 0.0
        schedule, course, until = self.budget_schedule, self.lr_scheduler_type, self.truncation_until
        given = [n for n in ("extend", "resume_from_checkpoint") if getattr(self, n)]
        refuse(
            {
                f"distillation_weight needs budget_schedule 'sandwich' or 'family', got {schedule!r}": (
                    self.distillation_weight and schedule not in ("sandwich", "family")
                ),
                f"lr_scheduler_type must be one of {', '.join(SCHEDULES)}, got {course!r}": course not in SCHEDULES,
                f"lr_scheduler_type {_WITH_FLOOR!r} and min_lr_rate need each other, got {course!r} and "
                f"{self.min_lr_rate}": (self.min_lr_rate is not None) != (course == _WITH_FLOOR),
                f"lr_scheduler_type {_STABLE!r} and decay_steps need each other, got {course!r} and "
                f"{self.decay_steps}": (self.decay_steps is not None) != (course == _STABLE),
                f"give overwrite_output_dir or {' and '.join(given)}, not both": self.overwrite_output_dir and given,
                f"truncation_until must be 'warmup', an update or a share, got {until!r}": (
                    until != "warmup" and not until.replace(".", "", 1).isdigit()
                ),
                "push_to_hub needs hub_model_id, such as my-name/my-essm": self.push_to_hub and not self.hub_model_id,
            }
        )

    @property
    def lr_scheduler_kwargs(self) -> dict[str, Any]:
        """What `get_scheduler` takes for this schedule alone."""
        own = {"min_lr_rate": self.min_lr_rate, "num_decay_steps": self.decay_steps}
        return {name: value for name, value in own.items() if value is not None}

    def identity(self) -> dict[str, Any]:
        """What must be the same when a run is resumed, beside its model and data."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in self.RESUMABLE}


# A new model of the scripts' own size, by its block; all else is as its configuration has it.
_NEW = {"hidden_size": 128, "filter_length": 1024}
NEW_MODEL: Mapping[str, Mapping[str, Any]] = {
    "elastic": _NEW | {"num_hidden_layers": 8, "num_spectral_channels": 8},
    "paper": _NEW | {"num_hidden_layers": 4, "num_spectral_channels": 32},
}
DIAGONAL, AR_STU = "diagonal_ssm", "ar_stu"  # model_types beside ES-SSM's
RATES = ("dropout", "embedding_dropout", "activation_dropout", "stochastic_depth")  # may be set beside saved weights
DATA_HELP = "Folders of the tasks' data, separated as in PATH; by default $ESSM_DATA, or data."
OVERWRITE_HELP = "Replace what another run has left where this one writes."
TRUST_HELP = "Run code that lies beside the weights, which a model of another type than ours may need: read it first."
# Where configurations stand, so that their fields are known before torch and transformers are imported.
_CONFIGURATIONS = {
    "essm": "modeling_essm/configuration_essm.py",
    "pairs": "essm_train/pairs.py",
    AR_STU: "essm_train/baselines/ar_stu.py",
    DIAGONAL: "modeling_essm/companions/models/configuration_diagonal_ssm.py",
}


@functools.cache
def config_fields(kind: str) -> Mapping[str, str]:
    """The fields of a configuration and their annotations, from its source.

    Args:
        kind: "essm"; "pairs" and "ar_stu", what these have more; or "diagonal_ssm".
    """
    package, _, path = _CONFIGURATIONS[kind].partition("/")
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations is not None
    tree = ast.parse(Path(next(iter(spec.submodule_search_locations)), path).read_text(encoding="utf-8"))
    return {
        line.target.id: annotation
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config")
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
        if not (annotation := ast.unparse(line.annotation)).startswith("ClassVar")
    }


def read_overrides(given: Mapping[str, Any] | str) -> dict[str, Any]:
    """A table, its JSON, or `a=1,b=2`, as `ConfigClass.update_from_string` of transformers takes it."""
    if isinstance(given, Mapping):
        return {str(name): value for name, value in given.items()}
    if not isinstance(given, str):
        raise ValueError(f"config_overrides must be a table, or like hidden_size=256, got {given!r}")
    if given.lstrip().startswith("{"):
        return read_overrides(parse_yaml(given, "config_overrides"))
    pairs = [part.partition("=") for part in given.split(",")]
    if bad := [part for part in pairs if not (part[0].strip() and part[1])]:
        raise ValueError(f"config_overrides must be like hidden_size=256,num_hidden_layers=8, got {''.join(bad[0])!r}")
    return {name.strip(): parse_yaml(value, f"config_overrides: {name.strip()}") for name, _, value in pairs}


def parse_yaml(text: str | bytes, where: object) -> Any:
    """What YAML of plain values, in UTF-8, holds. Raises ValueError, opened by `where`, for anything else."""
    try:
        return yaml.safe_load(text.decode("utf-8") if isinstance(text, bytes) else text)
    except Exception as error:  # of a tagged value, such as `!!bool perhaps`, whatever its constructor raises
        raise ValueError(f"{where} is not YAML: {error or type(error).__name__}") from error


def nearest(name: str, legal: Iterable[str]) -> str:
    """The legal name that is most like another one; "" if none is."""
    legal = list(legal)
    if (meant := _SYNONYMS.get(name)) in legal:
        return str(meant)
    return next(iter(difflib.get_close_matches(name, legal, 1, 0.5)), "")


@dataclass
class ModelArguments(RunArguments):
    """The model: a new ES-SSM or baseline, of the script's own size or a configuration's; or weights of an ES-SSM."""

    architecture: str = arg(
        "essm",
        "'essm' or 'ar_stu'; 'matmamba', of nested sizes; or with one budget 'diagonal_ssm' or a baseline: "
        "'transformer', 'mamba', 'mamba2', 's4', 's4d', and 'cnn' and 'tc_resnet' to classify features. Baselines have "
        "as many parameters as the ES-SSM would have.",
    )
    config_name: str | None = arg(None, "Folder or Hub name of a configuration, instead of the script's own sizes.")
    config_overrides: dict[str, Any] | str | None = arg(
        None,
        "Fields of the configuration, such as hidden_size=256,num_hidden_layers=8. Without config_name a new model has "
        + "; with block=paper ".join(",".join(f"{k}={v}" for k, v in new.items()) for new in NEW_MODEL.values()),
    )
    attention_every: int | None = arg(None, "One in so many layers attends; else layer_types says which.")
    model_name_or_path: str | None = arg(None, "Weights to start from, instead of a new model.")
    match_parameters: bool = arg(
        False, "Choose the width at which a variant has as many parameters as an ES-SSM of these sizes."
    )
    match_block: str | None = arg(
        None, "With match_parameters: the block of that ES-SSM, at its usual capacity; by default the model's own."
    )

    # Fields that this script's new models have otherwise, and the configuration they are fields of.
    NEW: ClassVar[Mapping[str, Any]] = {}
    CONFIGURATION: ClassVar[tuple[str, ...]] = ("essm",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.config_overrides = self._checked(self.config_overrides or {})
        name, weights, every = self.architecture, self.model_name_or_path, self.attention_every
        kept = sorted(set(self.config_overrides) - set(RATES))
        refuse(
            {
                "architecture 'diagonal_ssm' has no config_name, no match_parameters and no attention_every": (
                    self.is_diagonal and (self.config_name or self.match_parameters or every is not None)
                ),
                f"architecture {name!r} is there to compare with: it takes its size from an ES-SSM's, not from "
                "model_name_or_path, and cannot be pushed": name != "essm" and (self.push_to_hub or weights),
                "match_parameters is for a new ES-SSM: leave it out with a baseline or model_name_or_path": (
                    self.match_parameters and (self.is_baseline or weights)
                ),
                f"match_block is for match_parameters, and one of {', '.join(NEW_MODEL)}, got {self.match_block!r}": (
                    self.match_block and not (self.match_parameters and self.match_block in NEW_MODEL)
                ),
                "give config_name or model_name_or_path, not both": self.config_name and weights,
                f"{', '.join(kept)} is part of model_name_or_path: leave it out of config_overrides": weights and kept,
                f"beside a configuration give layer_types, and not attention_every, got attention_every={every}": (
                    every is not None and (self.source is not None or "layer_types" in self.config_overrides)
                ),
            }
        )
        self.fields()  # raises

    def _checked(self, overrides: dict[str, Any] | str) -> dict[str, Any]:
        """Overrides as a table. Raises ValueError for what is no field of the configuration."""
        values, kinds = read_overrides(overrides), self.kinds_of(self.architecture)
        for name, value in values.items():
            if name not in kinds:
                meant = nearest(name, kinds)
                raise ValueError(f"config_overrides: {name} is no field of the configuration" + _hint(meant))
            if kinds[name] == "int" and type(value) is not int:
                raise ValueError(f"config_overrides: {name} must be an integer, got {value!r}")
            if "float" in kinds[name] and isinstance(value, (int, str)) and not isinstance(value, bool):
                try:
                    values[name] = float(value)  # YAML reads 1e-3 as text
                except ValueError:
                    raise ValueError(f"config_overrides: {name} must be a number, got {value!r}") from None
        return values

    @classmethod
    def kinds_of(cls, architecture: str) -> Mapping[str, str]:
        """Fields of the configuration of an architecture, with their annotations."""
        kinds = (DIAGONAL,) if architecture == DIAGONAL else cls.CONFIGURATION
        kinds += (AR_STU,) if architecture == AR_STU else ()
        return {name: kind for each in kinds for name, kind in config_fields(each).items()}

    @property
    def is_baseline(self) -> bool:
        """Whether the model is another one, to compare with."""
        return self.architecture not in ("essm", AR_STU)

    @property
    def is_diagonal(self) -> bool:
        return self.architecture == DIAGONAL

    @property
    def source(self) -> str | None:
        """The folder or Hub name that holds the model's shape; None if the arguments do."""
        return self.config_name or self.model_name_or_path

    def fields(self) -> dict[str, Any]:
        """The fields of the configuration that the arguments name: beside a source overrides, else a new model's."""
        overrides = self.config_overrides
        assert isinstance(overrides, dict)
        if self.source is not None:
            return dict(overrides)
        block = overrides.get("block", "paper" if self.architecture == AR_STU else "elastic")
        new = {"block": block, **NEW_MODEL.get(str(block), {}), **self.NEW, **overrides}
        if self.attention_every is not None and block in NEW_MODEL:
            kind = "full_attention" if new.get("sliding_window") is None else "sliding_attention"
            new["layer_types"] = hybrid_layers(new["num_hidden_layers"], self.attention_every, kind)
        return {name: value for name, value in new.items() if name in self.kinds_of(self.architecture)}

    def identity(self) -> dict[str, Any]:
        """As of any run; what the model's configuration is made of stands in that."""
        own = {f.name for f in dataclasses.fields(ModelArguments)} - {f.name for f in dataclasses.fields(RunArguments)}
        shape = own - {"model_name_or_path"}
        return {name: value for name, value in super().identity().items() if name not in shape}


def hybrid_layers(num_layers: int, attention_every: int, kind: str) -> list[str]:
    """`layer_types` in which the middle layer of every so many attends.

    Raises:
        ValueError: that is no layer, or every one.
    """
    if not 2 <= attention_every <= num_layers:
        raise ValueError(f"attention_every must be in [2, num_hidden_layers = {num_layers}], got {attention_every}")
    return [kind if i % attention_every == attention_every // 2 else "linear_attention" for i in range(num_layers)]


Arguments = TypeVar("Arguments")


def _names(cls: type) -> list[str]:
    return [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]


def _hint(meant: str) -> str:
    return f"; nearest: {meant}" if meant else "; see --help"


def sort_values(cls: type, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A flat table of values as the arguments of a dataclass: fields of the configuration go to `config_overrides`.

    Raises:
        ValueError, opened by `where`: a name that is neither; the nearest legal one is named.
    """
    names = _names(cls)
    architecture = str(values.get("architecture", "essm"))
    fields = cls.kinds_of(architecture) if issubclass(cls, ModelArguments) else {}
    for name in values:
        if name not in names and name not in fields:
            raise ValueError(f"{where}: unknown argument {name}{_hint(nearest(str(name), [*names, *fields]))}")
    found = {name: value for name, value in values.items() if name in names}
    overrides = read_overrides(found.get("config_overrides") or {})
    overrides |= {name: value for name, value in values.items() if name not in names}
    return found | ({"config_overrides": overrides} if overrides else {})


def as_words(cls: type, values: Mapping[str, Any]) -> list[str]:
    """A flat table of values as words of the command line. Raises ValueError as `sort_values`."""
    words: list[str] = []
    for name, value in sort_values(cls, values, "arguments").items():
        value = json.dumps(value, default=str) if isinstance(value, dict) else value
        words += [f"--{name}", *map(str, value)] if isinstance(value, list) else [f"--{name}={value}"]  # "-x" too
    return words


def _read_file(cls: type, path: Path) -> dict[str, Any]:
    """`sort_values` of a YAML or JSON file, in which null is the default. Raises ValueError also if it is no table."""
    values = parse_yaml(path.read_bytes(), path)  # JSON is YAML
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a table of arguments, got {type(values).__name__}")
    return sort_values(cls, {name: value for name, value in values.items() if value is not None}, str(path))


def parse_arguments(cls: type[Arguments], argv: Sequence[str] | None = None, positional: str = "") -> Arguments:
    """From the command line; a first argument that ends in .yaml, .yml or .json is a file of values, which later
    arguments override, and `config_overrides` name by name.

    Args:
        positional: an argument that a first word without dashes gives, instead of such a file.
    Raises:
        ValueError: a file that is not a table of known arguments, an unknown argument, or a value that cannot work.
    """
    from transformers import HfArgumentParser  # which processes that make data do without

    class Parser(HfArgumentParser):
        def error(self, message: str) -> NoReturn:
            for word in argv or ():  # a typing error explains what is missing
                if word.startswith("--") and _name_of(word) not in _names(cls):
                    _refuse(cls, word)
            raise ValueError(message)

    argv = list(sys.argv[1:] if argv is None else argv)
    if positional and argv and not argv[0].startswith("-"):
        argv = [f"--{positional}", *argv]
    parser = Parser(cls, allow_abbrev=False, description=" ".join((cls.__doc__ or "").split()))  # type: ignore[arg-type]
    overrides: dict[str, Any] = {}
    if argv and argv[0].endswith(FILES):
        values = _read_file(cls, Path(argv[0]))
        overrides = values.pop("config_overrides", {})
        argv[:1] = as_words(cls, values)
    namespace, unknown = parser.parse_known_args(argv)
    if unknown:
        _refuse(cls, unknown[0])
    given = vars(namespace)
    if overrides:
        given["config_overrides"] = overrides | read_overrides(given["config_overrides"] or {})
    return cls(**given)


def _name_of(word: str) -> str:
    return word.lstrip("-").partition("=")[0].replace("-", "_")


def _refuse(cls: type, word: str) -> NoReturn:
    """Raises ValueError for a word of the command line that is no argument, and names the one that may be meant."""
    name = _name_of(word)
    if not word.startswith("--"):
        raise ValueError(f"unexpected {word!r}; arguments are like --name value")
    if issubclass(cls, ModelArguments) and name in {**cls.kinds_of(AR_STU), **config_fields(DIAGONAL)}:
        raise ValueError(f"unknown argument --{name}, a field of the configuration: --config_overrides {name}=...")
    meant = nearest(name, _names(cls))
    raise ValueError(f"unknown argument --{name}" + _hint(meant and f"--{meant}"))
