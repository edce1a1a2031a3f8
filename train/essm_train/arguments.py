# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""How to train, as arguments that every training script shares, and where they are read from."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import yaml

# Arguments that TrainingArguments has too were called otherwise once.
RENAMED = MappingProxyType(
    {"per_device_batch_size": "per_device_train_batch_size", "validate_every": "eval_steps"}
    | {"checkpoint_every": "save_steps", "keep_checkpoints": "save_total_limit", "log_every": "logging_steps"}
    | {"log_with": "report_to", "deterministic": "full_determinism", "hub_private": "hub_private_repo"}
    | {"final_model": "load_best_model_at_end"}
)


def rename_recorded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as a run recorded them on disk, under the names and with the values of today."""
    values = dict(values)
    if "final_model" in values:
        values["final_model"] = values["final_model"] == "best"
    return {RENAMED.get(name, name): value for name, value in values.items()}


def refuse_renamed(names: Iterable[str]) -> None:
    """Raises ValueError, with today's name, if one of the names is none any more."""
    for name in names:
        if name in RENAMED:
            values = " ('best' is now true, 'last' is false)" if name == "final_model" else ""
            raise ValueError(f"{name} is called {RENAMED[name]} now{values}")


def arg(default: Any, help: str) -> Any:
    """A field of a dataclass of arguments, with what `--help` says of it."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


def check_at_least(arguments: Any, least: float, *names: str) -> None:
    """Raises ValueError if one of these fields, or a number of a list there, is less; None is not."""
    for name in names:
        value = getattr(arguments, name)
        for number in value if isinstance(value, list) else [value]:
            if number is not None and not number >= least:
                raise ValueError(f"{name} must be at least {least}, got {number}")


# Those of transformers.get_scheduler that are functions of the update alone.
_WITH_FLOOR = "cosine_with_min_lr"
SCHEDULES = (
    *("cosine", _WITH_FLOOR, "linear", "cosine_with_restarts", "polynomial", "inverse_sqrt"),
    *("constant", "constant_with_warmup"),
)


@dataclass
class RunArguments:
    """How to train. Precision, devices and processes are set through `accelerate launch`."""

    output_dir: str = arg("runs/essm", "Where everything goes; a run found there is continued.")
    overwrite_output_dir: bool = arg(False, "Delete the run found in output_dir and start afresh.")

    resume_from_checkpoint: str | None = arg(
        None,
        "A checkpoint of output_dir to go back to, such as runs/essm/checkpoint-00000100; later ones are renamed "
        "later-checkpoint-*. Without it a run goes on from its last checkpoint.",
    )

    budget_schedule: str = arg(
        "discrete",
        "Budgets of each update: 'discrete' (one of 2,3,4,6,..,32), 'uniform' (1..K), 'authors' (full at first and at "
        "every 8th update, else log-uniform), 'sandwich' (full, random and smallest in each update) or 'full'.",
    )
    full_budget_updates: int | None = arg(
        0,
        "With any schedule: updates at the full budget before all others.",
    )
    sandwich_random: int = arg(2, "With the 'sandwich' schedule: random budgets beside the largest and the smallest.")
    distillation_weight: float = arg(
        0.0, "With the 'sandwich' schedule: weight in [0, 1] of imitating the full budget instead of the labels."
    )

    max_steps: int = arg(600, "Updates.")
    num_train_epochs: float | None = arg(None, "Instead of max_steps: passes over the training samples.")
    extend: bool = arg(
        False,
        "Let the run in output_dir go on to a larger max_steps or num_train_epochs than it was started with; the "
        "learning rate rises again over warmup_steps, from where it stands, and takes its course to the new end.",
    )
    per_device_train_batch_size: int = arg(4, "Samples per process and forward pass.")
    gradient_accumulation_steps: int = arg(1, "Forward and backward passes per update.")
    learning_rate: float = arg(5e-3, "Peak of the learning rate.")
    lr_scheduler_type: str = arg(
        "cosine",
        f"Course of the learning rate after its peak, as of transformers.get_scheduler: {', '.join(SCHEDULES)}.",
    )
    min_lr_rate: float | None = arg(None, f"With '{_WITH_FLOOR}': where it ends, as a share of the peak.")
    warmup_steps: int = arg(50, "Updates of linear warm-up before the peak.")
    weight_decay: float = arg(0.1, "AdamW's, on matrices only: not on norms, biases and embeddings.")
    adam_beta2: float = arg(0.95, "AdamW's decay of squared gradients.")
    max_grad_norm: float = arg(1.0, "Gradients are clipped to this norm; inf clips none.")
    ema_decay: float = arg(0.0, "Decay of an exponential average of the weights; 0 keeps none.")
    seed: int = arg(0, "Seed of weights, data order, budgets and dropout.")
    gradient_checkpointing: bool = arg(False, "Recompute activations in the backward pass: less memory, more time.")
    context_parallel: int = arg(
        1,
        "Processes that share each sequence, of language models: each computes a part of its positions, so that "
        "sequences may be so many times longer; a divisor of the number of processes and of block_size.",
    )
    torch_compile: bool = arg(False, "Compile the model; each budget is compiled when it first runs.")
    full_determinism: bool = arg(False, "Only deterministic kernels, so that GPU runs repeat bit for bit; slower.")

    truncation_tau: float | None = arg(
        None,
        "Of a diagonal_ssm: balanced truncation during training, which in an attempt discards at most this share of "
        "the Hankel singular values of each layer. Shares compound.",
    )
    truncation_attempts: int = arg(4, "With truncation_tau: how often, at equal distances.")
    truncation_until: str = arg(
        "warmup", "With truncation_tau: the last attempt, 'warmup', an update, or with a point a share of all (0.5)."
    )

    eval_steps: int = arg(100, "Updates between validations.")
    eval_budgets: list[int] | None = arg(
        None, "Budgets to validate at; by default the smallest, a middle and the largest."
    )
    early_stopping_patience: int = arg(0, "Stop after so many validations without a new best; 0 never does.")
    early_stopping_threshold: float = arg(0.0, "A new best counts against that patience if it is better by more.")
    load_best_model_at_end: bool = arg(
        False, "The weights of the best validation become the saved model, not the last ones."
    )
    save_steps: int = arg(100, "Updates between checkpoints; the last update always has one.")
    save_total_limit: int = arg(2, "How many of the newest checkpoints to keep.")
    logging_steps: int = arg(10, "Updates between lines of log.jsonl and of the trackers.")
    report_to: list[str] | None = arg(None, "Trackers that Accelerate knows: tensorboard, wandb, mlflow, trackio, ...")
    cpu_threads: int | None = arg(
        None, "CPU threads per process (`accelerate launch` sets 1); by default the cores, at most 8."
    )

    push_to_hub: bool = arg(False, "Push the finished model, with its card, to hub_model_id.")
    hub_model_id: str | None = arg(None, "owner/name on the Hub.")
    hub_private_repo: bool = arg(False, "Create that repository as a private one.")

    # Values, by name, that runs had before these were arguments.
    EARLIER = MappingProxyType({})  # type: ignore[var-annotated]

    # What may differ when a run is resumed: no weight depends on it (on the number of threads only by rounding).
    RESUMABLE = frozenset(
        {"output_dir", "overwrite_output_dir", "save_steps", "save_total_limit", "logging_steps", "report_to"}
        | {"cpu_threads", "push_to_hub", "hub_model_id", "hub_private_repo", "load_best_model_at_end", "extend"}
        | {"resume_from_checkpoint"}
    )

    def __post_init__(self) -> None:
        check_at_least(self, 1, "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps")
        check_at_least(self, 1, "context_parallel", "eval_steps", "save_steps", "save_total_limit", "logging_steps")
        check_at_least(self, 0, "warmup_steps", "full_budget_updates", "sandwich_random", "early_stopping_patience")
        limits = {"ema_decay": 1, "adam_beta2": 1, "learning_rate": math.inf, "weight_decay": math.inf}
        limits |= {"early_stopping_threshold": math.inf}
        for name, limit in limits.items():
            if not 0 <= getattr(self, name) < limit:
                raise ValueError(f"{name} must be in [0, {limit}), got {getattr(self, name)}")
        if not 0 <= self.distillation_weight <= 1:
            raise ValueError(f"distillation_weight must be in [0, 1], got {self.distillation_weight}")
        if self.distillation_weight and self.budget_schedule != "sandwich":
            raise ValueError(
                f"distillation_weight needs budget_schedule 'sandwich', which runs the full budget in every update, "
                f"got {self.budget_schedule!r}"
            )
        if not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be in (0, inf], got {self.max_grad_norm}")
        if self.num_train_epochs is not None and not 0 < self.num_train_epochs < math.inf:
            raise ValueError(f"num_train_epochs must be positive and finite, got {self.num_train_epochs}")
        if self.lr_scheduler_type not in SCHEDULES:
            raise ValueError(f"lr_scheduler_type must be one of {', '.join(SCHEDULES)}, got {self.lr_scheduler_type!r}")
        if (self.min_lr_rate is not None) != (self.lr_scheduler_type == _WITH_FLOOR):
            raise ValueError(
                f"lr_scheduler_type {_WITH_FLOOR!r} and min_lr_rate need each other, got {self.lr_scheduler_type!r} "
                f"and {self.min_lr_rate}"
            )
        if self.min_lr_rate is not None and not 0 <= self.min_lr_rate <= 1:
            raise ValueError(f"min_lr_rate must be in [0, 1], got {self.min_lr_rate}")
        ways = ("extend", "overwrite_output_dir", "resume_from_checkpoint")
        if len(given := [name for name in ways if getattr(self, name)]) > 1:
            raise ValueError(f"give {' or '.join(given)}, not both")
        if self.context_parallel > 1 and self.torch_compile:
            raise ValueError(f"torch_compile needs context_parallel 1, got {self.context_parallel}")
        if self.truncation_tau is not None and not 0 < self.truncation_tau < 1:
            raise ValueError(f"truncation_tau must be in (0, 1), got {self.truncation_tau}")
        if self.truncation_until != "warmup":
            try:
                float(self.truncation_until)
            except ValueError:
                raise ValueError(
                    f"truncation_until must be 'warmup', an update or a share, got {self.truncation_until!r}"
                ) from None
        if self.push_to_hub and not self.hub_model_id:
            raise ValueError("push_to_hub needs hub_model_id, such as my-name/my-essm")

    def identity(self) -> dict[str, Any]:
        """What must be the same when a run is resumed."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in self.RESUMABLE}


Arguments = TypeVar("Arguments", bound=RunArguments)


def parse_arguments(cls: type[Arguments], argv: Sequence[str] | None = None) -> Arguments:
    """From the command line; a first argument that ends in .yaml, .yml or .json is a file of values, which later
    arguments override. (HfArgumentParser.parse_yaml_file overrides nothing, and neither converts nor checks values.)

    Raises:
        ValueError: a file that is not a table of known arguments, or a value that cannot work.
    """
    from transformers import HfArgumentParser  # which processes that make data do without

    argv = list(sys.argv[1:] if argv is None else argv)
    options = [text[2:].partition("=")[0].replace("-", "_") for text in argv if text.startswith("--")]
    refuse_renamed(options)  # before argparse takes one for an abbreviation
    parser = HfArgumentParser(cls)
    if argv and argv[0].endswith((".yaml", ".yml", ".json")):
        path = Path(argv.pop(0))
        values = yaml.safe_load(path.read_text())  # JSON is YAML
        known = {f.name: f for f in dataclasses.fields(cls)}
        if not isinstance(values, dict):
            raise ValueError(f"{path} must hold a table of arguments, got {type(values).__name__}")
        refuse_renamed(values)
        if unknown := sorted(set(values) - set(known)):
            raise ValueError(f"{path}: unknown arguments {unknown}; see --help")
        values = {name: value for name, value in values.items() if value is not None}  # null is the default
        for name, value in values.items():
            if "list" in str(known[name].type):
                values[name] = value if isinstance(value, list) else [value]
            else:  # as on the command line: the parser converts it and checks it (YAML reads 1e-3 as text)
                values[name] = str(value)
        parser.set_defaults(**values)
    return parser.parse_args_into_dataclasses(argv)[0]
