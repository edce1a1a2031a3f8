# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The training loop that the scripts share: budget dropout under Accelerate, exact resume, best and last model.

A run is defined by its arguments and its data. Everything an update does is a pure function of its index (budgets),
of the place in the data, or of state that a checkpoint holds: weights, their average, optimizer, learning rate and the
random states of every process. So a run that was killed at any moment ends with the bits it would have ended with, on
the same machine and number of threads, and on a GPU with `deterministic`. A checkpoint that was damaged on disk is set
aside, and the run goes on from the one before it: the same bits, some of them computed twice.

Selection rule: the best model is the one with the best mean of the validation metric over `eval_budgets`, the earlier
one of equals. With `ema_decay`, the averaged weights are what is validated and saved.

Left in `output_dir`: checkpoint-*, best (a loadable model with best.json), log.jsonl (a line per logged update), and
what the script adds. `.lock` keeps a second run out.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
import yaml
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.tracking import GeneralTracker, get_available_trackers, on_main_process
from accelerate.utils import DistributedType, InitProcessGroupKwargs, broadcast_object_list, set_seed
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from tqdm import tqdm
from transformers import HfArgumentParser, PreTrainedModel
from transformers.trainer_utils import enable_full_determinism

from essm_train.data.samples import SampleSource, share_of
from essm_train.run.checkpoints import (
    DAMAGED,
    complete_or_removed,
    delete_folder,
    delete_temporary_folders,
    list_checkpoints,
    load_checkpoint,
    newest_sound_checkpoint,
    prune_checkpoints,
    publish,
    read_run_state,
    save_checkpoint,
    temporary_folder,
)
from essm_train.run.finiteness import local, non_finite
from essm_train.run.identity import check_same_run, model_identity
from essm_train.run.learning_rate import apply_plan, make_scheduler
from essm_train.run.lock import alone_in
from modeling_essm.training.budget_dropout import BudgetSchedule, allow_compiled_budgets, budget_losses, budget_schedule


def _arg(default: Any, help: str) -> Any:
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


@dataclass
class RunArguments:
    """How to train. Precision, devices and processes are set through `accelerate launch`."""

    output_dir: str = _arg("runs/essm", "Where everything goes; a run found there is continued.")
    overwrite_output_dir: bool = _arg(False, "Delete the run found in output_dir and start afresh.")

    budget_schedule: str = _arg(
        "discrete",
        "Budgets of each update: 'discrete' (one of 2,3,4,6,..,32), 'uniform' (1..K), 'authors' (full at first and at "
        "every 8th update, else log-uniform), 'sandwich' (full, random and smallest in each update) or 'full'.",
    )
    full_budget_updates: int | None = _arg(
        0,
        "With any schedule: updates at the full budget before all others; null, in a file of arguments, is half.",
    )
    sandwich_random: int = _arg(2, "Of the 'sandwich' schedule: random budgets beside the largest and the smallest.")
    distillation_weight: float = _arg(
        0.0, "Of the 'sandwich' schedule: weight in [0, 1] of imitating the full budget instead of the labels."
    )

    max_steps: int = _arg(600, "Updates.")
    num_train_epochs: float | None = field(
        default=None, metadata={"help": "Instead of max_steps: passes over the training samples."}
    )
    extend: bool = _arg(
        False,
        "Let the run in output_dir go on to a larger max_steps or num_train_epochs than it was started with; the "
        "learning rate rises again over warmup_steps, from where it stands, and falls to 0 at the new end.",
    )
    per_device_batch_size: int = _arg(4, "Samples per process and forward pass.")
    gradient_accumulation_steps: int = _arg(1, "Forward and backward passes per update.")
    learning_rate: float = _arg(5e-3, "Peak of the learning rate, falling to 0 along a cosine.")
    warmup_steps: int = _arg(50, "Updates of linear warm-up before the peak.")
    weight_decay: float = _arg(0.1, "AdamW's, on matrices only: not on norms, biases and embeddings.")
    adam_beta2: float = _arg(0.95, "AdamW's decay of squared gradients.")
    max_grad_norm: float = _arg(1.0, "Gradients are clipped to this norm; inf clips none.")
    ema_decay: float = _arg(0.0, "Decay of an exponential average of the weights; 0 keeps none.")
    seed: int = _arg(0, "Of weights, data order, budgets and dropout.")
    gradient_checkpointing: bool = _arg(False, "Recompute activations in the backward pass: less memory, more time.")
    torch_compile: bool = _arg(False, "Compile the model; each budget is compiled when it first runs.")
    deterministic: bool = _arg(False, "Only deterministic kernels, so that GPU runs repeat bit for bit; slower.")

    validate_every: int = _arg(100, "Updates between validations.")
    eval_budgets: list[int] | None = field(
        default=None, metadata={"help": "Budgets to validate at; by default the smallest, a middle and the largest."}
    )
    early_stopping_patience: int = _arg(0, "Stop after so many validations without a new best; 0 never does.")
    final_model: str = _arg("last", "Which weights become the saved model: 'last' or 'best'.")
    checkpoint_every: int = _arg(100, "Updates between checkpoints; the last update always has one.")
    keep_checkpoints: int = _arg(2, "How many of the newest checkpoints to keep.")
    log_every: int = _arg(10, "Updates between lines of log.jsonl and of the trackers.")
    log_with: list[str] | None = field(
        default=None, metadata={"help": "Trackers that Accelerate knows: tensorboard, wandb, mlflow, trackio, ..."}
    )
    cpu_threads: int | None = field(
        default=None,
        metadata={"help": "CPU threads per process (`accelerate launch` sets 1); by default the cores, at most 8."},
    )

    push_to_hub: bool = _arg(False, "Push the finished model, with its card, to hub_model_id.")
    hub_model_id: str | None = _arg(None, "owner/name on the Hub.")
    hub_private: bool = _arg(False, "Create that repository as a private one.")

    # Values, by name, that runs had before these were arguments.
    EARLIER = MappingProxyType({})  # type: ignore[var-annotated]

    # What may differ when a run is resumed: no weight depends on it (on the number of threads only by rounding).
    RESUMABLE = frozenset(
        {"output_dir", "overwrite_output_dir", "checkpoint_every", "keep_checkpoints", "log_every", "log_with"}
        | {"cpu_threads", "push_to_hub", "hub_model_id", "hub_private", "final_model", "extend"}
    )

    def __post_init__(self) -> None:
        positive = "max_steps per_device_batch_size gradient_accumulation_steps validate_every checkpoint_every"
        for name in (*positive.split(), "keep_checkpoints", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("warmup_steps", "full_budget_updates", "sandwich_random", "early_stopping_patience"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if not 0 <= self.ema_decay < 1:
            raise ValueError(f"ema_decay must be in [0, 1), got {self.ema_decay}")
        if not 0 <= self.distillation_weight <= 1:
            raise ValueError(f"distillation_weight must be in [0, 1], got {self.distillation_weight}")
        if self.distillation_weight and self.budget_schedule != "sandwich":
            raise ValueError(
                f"distillation_weight needs budget_schedule 'sandwich', which runs the full budget in every update, "
                f"got {self.budget_schedule!r}"
            )
        for name in ("learning_rate", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be in [0, inf), got {getattr(self, name)}")
        if not 0 <= self.adam_beta2 < 1:
            raise ValueError(f"adam_beta2 must be in [0, 1), got {self.adam_beta2}")
        if not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be in (0, inf], got {self.max_grad_norm}")
        if self.num_train_epochs is not None and not 0 < self.num_train_epochs < math.inf:
            raise ValueError(f"num_train_epochs must be positive and finite, got {self.num_train_epochs}")
        if self.extend and self.overwrite_output_dir:
            raise ValueError("give extend or overwrite_output_dir, not both")
        if self.final_model not in ("last", "best"):
            raise ValueError(f"final_model must be 'last' or 'best', got {self.final_model!r}")
        if self.push_to_hub and not self.hub_model_id:
            raise ValueError("push_to_hub needs hub_model_id, such as my-name/my-essm")

    def identity(self) -> dict[str, Any]:
        """What must be the same when a run is resumed."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in self.RESUMABLE}


Arguments = TypeVar("Arguments", bound=RunArguments)


def parse_arguments(cls: type[Arguments], argv: Sequence[str] | None = None) -> Arguments:
    """From the command line; a first argument that ends in .yaml, .yml or .json is a file of values, which later
    arguments override.

    Raises:
        ValueError: a file that is not a table of known arguments, or a value that cannot work.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = HfArgumentParser(cls)
    if argv and argv[0].endswith((".yaml", ".yml", ".json")):
        path = Path(argv.pop(0))
        values = yaml.safe_load(path.read_text())  # JSON is YAML
        known = {f.name: f for f in dataclasses.fields(cls)}
        if not isinstance(values, dict):
            raise ValueError(f"{path} must hold a table of arguments, got {type(values).__name__}")
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


class Metric(NamedTuple):
    """What a task is judged by."""

    name: str
    higher_is_better: bool


@dataclass
class Task:
    """What a script trains.

    Attributes:
        model: on the CPU, initialised.
        source: training samples.
        collate: samples to keyword arguments of the model, labels among them, as CPU tensors.
        training_figure: (outputs, batch) to the metric on a training batch, a scalar tensor.
        evaluate: (accelerator, model, K) to the validation metric; every process calls it and gets the same value.
        metric: of both.
        tokens_per_sample: for the speed shown.
        save_companions: writes tokenizer and the like into the folder of a saved model.
        identity: what defines the data; a run found with another identity is not continued.
    """

    model: PreTrainedModel
    source: SampleSource
    collate: Callable[[list[Any]], dict[str, Tensor]]
    training_figure: Callable[[Any, dict[str, Tensor]], Tensor]
    evaluate: Callable[[Accelerator, nn.Module, int], float]
    metric: Metric
    tokens_per_sample: int
    save_companions: Callable[[Path], None]
    identity: dict[str, Any]


def capacity_of(model: nn.Module) -> int:
    """The largest budget of a model, wrapped for several processes or not; 1 for one that knows no budgets."""
    return getattr(getattr(model, "module", model).config, "num_spectral_channels", 1)


def run_at_budget(model: nn.Module, batch: Mapping[str, Tensor], budget: int) -> Any:
    """Outputs of a model, wrapped or not; one that knows no budgets runs as it is."""
    elastic = hasattr(getattr(model, "module", model).config, "num_spectral_channels")
    return model(**batch, use_cache=False, **({"spectral_budget": budget} if elastic else {}))


class JsonlTracker(GeneralTracker):
    """log.jsonl: one line per logged update. A resumed run drops the lines of updates it will do again.

    It also drops damaged lines, and says which.
    """

    name = "jsonl"
    requires_logging_directory = True

    def __init__(self, path: Path):
        super().__init__()
        self.path = path

    @property
    def tracker(self) -> Path:
        return self.path

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        last, kept = values.get("first_update", 0), []
        lines = self.path.read_bytes().split(b"\n")[:-1] if self.path.exists() else []  # the last may be half written
        for number, line in enumerate(lines, 1):
            update = _update_of(line)
            if update is None:
                tqdm.write(f"{self.path}: line {number} is damaged and was dropped: {line[:60]!r}")
            elif update <= last:
                kept.append(line + b"\n")
        temporary = self.path.with_name(".partial-" + self.path.name)
        temporary.write_bytes(b"".join(kept))
        os.replace(temporary, self.path)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"update": step, **values}) + "\n")


def _update_of(line: bytes) -> int | None:
    """The update that a line of log.jsonl is about; None if it is no such line."""
    try:
        update = json.loads(line)["update"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return update if type(update) is int else None


class WeightAverage:
    """Exponential moving average of the weights, in fp32 or better; shard by shard where they are sharded.

    Early averages are not biased to the initial weights: the decay of update n is min(decay, (1 + n) / (10 + n)).
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay, self.updates = decay, 0
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.average = [self._wide(p) for p in self.parameters]

    @staticmethod
    def _wide(parameter: Tensor) -> Tensor:
        return parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)

    @torch.no_grad()
    def update(self) -> None:
        """After an optimizer step."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        for average, parameter in zip(self.average, self.parameters):
            average.lerp_(parameter.to(average.dtype), 1 - decay)

    @contextmanager
    def applied(self):
        """The model with averaged weights; its own come back afterwards."""
        own = [p.detach().clone() for p in self.parameters]
        self._copy(self.average)
        try:
            yield
        finally:
            self._copy(own)

    @torch.no_grad()
    def _copy(self, values: Iterable[Tensor]) -> None:
        for parameter, value in zip(self.parameters, values):
            parameter.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """This process's part."""
        return {"updates": self.updates, "average": [local(t) for t in self.average]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From what `state_dict` gave on the process of the same rank."""
        self.updates = state["updates"]
        for average, saved in zip(self.average, state["average"], strict=True):
            local(average).copy_(saved)


class _Prefetch:
    """Draws and loads the batches of the next update while the current one computes."""

    def __init__(self, fetch: Callable[[], Any]):
        self._fetch, self._pool = fetch, ThreadPoolExecutor(1)
        self._next = self._pool.submit(fetch)

    def __call__(self) -> Any:
        result = self._next.result()
        self._next = self._pool.submit(self._fetch)
        return result

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def open_run(args: RunArguments) -> Iterator[Accelerator]:
    """The Accelerator of a run that has its output_dir for itself until the end.

    Raises:
        ValueError: as `make_accelerator`, or another run uses output_dir.
    """
    accelerator = make_accelerator(args)
    with alone_in(accelerator, Path(args.output_dir)):
        yield accelerator


def make_accelerator(args: RunArguments) -> Accelerator:
    """The Accelerator of a run, its CPU threads, its trackers and, if asked for, deterministic kernels.

    Raises:
        ValueError: output_dir cannot be written, is not the same folder for all processes, or an unknown tracker.
    """
    output_dir = Path(args.output_dir)
    check_writable(output_dir)
    if args.deterministic:
        enable_full_determinism(args.seed)
    for name in args.log_with or []:
        if name not in (known := [str(tracker) for tracker in get_available_trackers()]):
            raise ValueError(
                f"log_with must name installed trackers, {known or 'of which there are none'}, got {name!r}"
            )
    trackers = [JsonlTracker(output_dir / "log.jsonl"), *(args.log_with or [])]
    patience = InitProcessGroupKwargs(timeout=timedelta(hours=2))  # others wait while one reads data, sweeps or pushes
    accelerator = Accelerator(log_with=trackers, project_dir=args.output_dir, kwargs_handlers=[patience])
    accelerator.sync_gradients = True  # shared by all Accelerators: a Trainer before may have left it off
    if accelerator.distributed_type == DistributedType.MULTI_CPU and os.environ.get("ACCELERATE_USE_FSDP") == "true":
        _shard_on_cpu(accelerator)
    if accelerator.is_fsdp2:
        # Mixed precision is autocast's alone, as under DDP: Accelerate's policy would round residual stream, losses and
        # the gradients that micro-steps add up.
        accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy()
    _check_shared(accelerator, output_dir)
    torch.set_num_threads(args.cpu_threads or max(1, min(8, os.cpu_count() or 1) // accelerator.num_processes))
    return accelerator


def _shard_on_cpu(accelerator: Accelerator) -> None:
    """FSDP2 on CPU ranks: torch has it, Accelerate offers it for accelerators only and would fall back to DDP."""
    plugin = FullyShardedDataParallelPlugin()  # reads the FSDP_* variables of the launcher
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)  # as Accelerate does for accelerators
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin


def _check_shared(accelerator: Accelerator, output_dir: Path) -> None:
    """Raises ValueError on all processes if they do not see the same output_dir: checkpoints would miss parts."""
    token = [uuid.uuid4().hex]
    broadcast_object_list(token)
    proof = output_dir / f".seen-{token[0]}"
    if accelerator.is_main_process:
        proof.touch()
    accelerator.wait_for_everyone()
    seen = accelerator.reduce(torch.tensor(int(proof.exists()), device=accelerator.device), "sum")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        proof.unlink()
    if int(seen) != accelerator.num_processes:
        raise ValueError(
            f"output_dir {str(output_dir)!r} is one folder for {int(seen)} of {accelerator.num_processes} processes "
            "only: on several machines it must lie on a file system that they share"
        )


def check_writable(folder: Path) -> None:
    """Make the folder. Raises ValueError if it cannot be written, before any work is done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"output_dir {str(folder)!r} cannot be written: {error.strerror}") from error


def make_schedule(args: RunArguments, capacity: int) -> BudgetSchedule:
    """The schedule that the arguments name, for a model of that capacity. Raises ValueError as `budget_schedule`."""
    return budget_schedule(
        args.budget_schedule,
        capacity,
        args.seed,
        full_budget_updates=args.full_budget_updates or 0,
        sandwich_random=args.sandwich_random,
    )


def eval_budgets(args: RunArguments, schedule: BudgetSchedule, capacity: int) -> tuple[int, ...]:
    """Budgets to validate at, ascending. Raises ValueError for one outside [1, capacity]."""
    trained = schedule.budgets
    chosen = args.eval_budgets or (trained[0], trained[len(trained) // 2], trained[-1])
    for K in chosen:
        if not 1 <= K <= capacity:
            raise ValueError(f"eval_budgets must be integers in [1, {capacity}], got {K}")
    return tuple(sorted(set(chosen)))


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """AdamW's groups: matrices decay; norms, biases and embeddings (with the tied head) do not, nor what its author
    marked `_no_weight_decay`, as the state matrices of Mamba."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    parameters = [p for p in model.parameters() if p.requires_grad]
    exempt = [p.ndim < 2 or id(p) in embeddings or getattr(p, "_no_weight_decay", False) for p in parameters]
    decayed = [p for p, is_exempt in zip(parameters, exempt) if not is_exempt]
    others = [p for p, is_exempt in zip(parameters, exempt) if is_exempt]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def _find_run(
    accelerator: Accelerator, args: RunArguments, identity: dict[str, Any]
) -> tuple[Path | None, list[Any] | None]:
    """Make output_dir ready: the checkpoint to go on from, if any, and what `_saved_model` says of it.

    Raises:
        ValueError: (on all processes) only damaged checkpoints, those of another run, or none where `extend` needs one.
    """
    output_dir = Path(args.output_dir)
    found: list[Any] = [None, {}, None, ""]
    if accelerator.is_main_process:
        delete_temporary_folders(output_dir)
        if args.overwrite_output_dir:
            old_ones = (*list_checkpoints(output_dir), *output_dir.glob(f"{DAMAGED}checkpoint-*"))
            for old in (*old_ones, output_dir / "model", output_dir / "best"):
                if old.exists():
                    delete_folder(old)
            for name in ("training.json", "budget_sweep.json", "budget_sweep.png"):
                (output_dir / name).unlink(missing_ok=True)
        try:
            found = [*newest_sound_checkpoint(output_dir), _saved_model(output_dir), ""]
        except ValueError as error:
            found[3] = str(error)
    broadcast_object_list(found)
    checkpoint, damaged, saved_model, problem = found
    if checkpoint is None and args.extend:
        problem = problem or f"extend needs a run to go on with, and output_dir {args.output_dir!r} holds no checkpoint"
    if problem:
        raise ValueError(problem)
    if checkpoint is not None:
        check_same_run(checkpoint, identity, args)
    if accelerator.is_main_process:
        if checkpoint is None:
            (output_dir / "training.json").unlink(missing_ok=True)  # of a run whose checkpoints were deleted
        for path, damage in damaged.items():
            aside = path.with_name(DAMAGED + path.name)
            say(accelerator, f"{path} is damaged: {damage}; now {aside.name}, and the run goes on from {checkpoint}")
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(path, aside)
        prune_checkpoints(output_dir, args.keep_checkpoints)  # one more stays where a run was killed before it did
    accelerator.wait_for_everyone()
    return checkpoint, saved_model


def _saved_model(output_dir: Path) -> list[Any] | None:
    """Of which update and by which choice (`final_model`) the model in the folder is; None if that is not known."""
    try:
        record = json.loads((output_dir / "training.json").read_text())
        complete = any((output_dir / "model").glob("*.safetensors"))
        return [record["updates"], record["arguments"]["final_model"]] if complete else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _last_good(output_dir: Path, update: int) -> str:
    """For an error at that update."""
    before = [path for path in list_checkpoints(output_dir) if int(path.name.split("-")[1]) < update]
    return f"Last good checkpoint: {before[-1] if before else 'none'}"


def save_model(
    accelerator: Accelerator, model: nn.Module, task: Task, folder: Path, records: dict[str, dict] | None = None
) -> None:
    """Publish a loadable folder: weights gathered from all processes, code, and what the task adds. All must call it.

    Args:
        records: JSON files to put beside them, by name.
    """
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        config = task.model.config
        cls = next(c for c in type(task.model).__mro__ if not c.__module__.startswith("torch."))  # not FSDP2's own
        with torch.device("meta"):  # draws no random numbers
            copy = cls(config)
        copy.load_state_dict({name: value.cpu() for name, value in state.items()}, assign=True)
        copy.tie_weights()
        copy.generation_config = getattr(task.model, "generation_config", None)
        temporary = temporary_folder(folder)
        with complete_or_removed(folder, temporary):
            copy.save_pretrained(temporary)
            task.save_companions(temporary)
            for name, record in (records or {}).items():
                write_json(temporary / name, record)
            publish(temporary, folder)
    accelerator.wait_for_everyone()


def train(accelerator: Accelerator, args: RunArguments, task: Task, schedule: BudgetSchedule) -> dict[str, Any]:
    """Train, or go on with the run found in output_dir, and leave `output_dir/model`.

    Returns:
        What a model card should know: updates done, samples per update, best validation, seconds.
    Raises:
        ValueError: budgets, trackers or data that cannot work, or a run in output_dir with other arguments or data;
            all before the first update.
        FloatingPointError: the loss, its gradient, or what an update left to be saved is no longer finite.
        OSError: a checkpoint or model could not be written; ConnectionError if another process is gone. In all cases
            the last good checkpoint stays.
    """
    output_dir, ranks, batch_size = Path(args.output_dir), accelerator.num_processes, args.per_device_batch_size
    samples_per_update = batch_size * ranks * args.gradient_accumulation_steps
    validated = eval_budgets(args, schedule, capacity_of(task.model))
    max_steps = args.max_steps
    if args.num_train_epochs is not None:
        if task.source.num_samples is None:
            raise ValueError("num_train_epochs needs a data set of known length; for a stream give max_steps")
        max_steps = max(1, round(args.num_train_epochs * task.source.num_samples / samples_per_update))

    # 1. What defines the run, and the run already in output_dir, if any.
    identity = args.identity() | task.identity
    identity |= {"max_steps": max_steps, "eval_budgets": list(validated), "num_processes": ranks}
    identity |= {"mixed_precision": accelerator.mixed_precision, "distributed_type": str(accelerator.distributed_type)}
    identity |= {"device": accelerator.device.type}  # each kind has random states of its own
    identity |= {"model": model_identity(task.model)}
    checkpoint, saved_model = _find_run(accelerator, args, identity)

    # 2. Optimizer, learning rate, average, and the state of the run found.
    set_seed(args.seed, device_specific=True)  # equal weights exist already; other dropout masks on every process
    if args.gradient_checkpointing:
        enable = getattr(task.model, "activation_checkpointing_enable", None)  # its name since transformers 5.2x
        (enable or task.model.gradient_checkpointing_enable)({"use_reentrant": False})
    if args.torch_compile:
        allow_compiled_budgets(len(schedule.budgets))
        task.model.compile()
    optimizer = torch.optim.AdamW(
        parameter_groups(task.model, args.weight_decay),
        lr=args.learning_rate,
        betas=(0.9, args.adam_beta2),
        fused=accelerator.device.type in ("cpu", "cuda", "mps", "xpu"),
    )
    saved = read_run_state(checkpoint) if checkpoint is not None else {}
    plan = saved.get("plan", [[0, saved["identity"]["max_steps"] if saved else max_steps]])
    extended = max_steps > plan[-1][1]  # of which `check_same_run` has made sure that it was asked for
    if extended:
        plan = [*plan, [saved["update"], max_steps]]
    if args.full_budget_updates is None:
        schedule = dataclasses.replace(schedule, full_budget_updates=plan[0][1] // 2)
    scheduler = make_scheduler(optimizer, args.warmup_steps, plan)
    accelerator.register_for_checkpointing(scheduler)  # not prepared: it steps once per update, on any number of ranks
    model, optimizer = accelerator.prepare(task.model, optimizer)
    average = WeightAverage(model, args.ema_decay) if args.ema_decay else None
    progress = {
        "update": 0,
        "seconds": 0.0,
        "best": None,
        "best_update": 0,
        "validations_without_best": 0,
        "stopped_early": False,
    }

    def broken() -> str:
        return " and ".join(non_finite(accelerator, model, optimizer, average.average if average is not None else []))

    done = False
    if checkpoint is not None:
        progress = {name: saved[name] for name in progress}
        states = load_checkpoint(accelerator, checkpoint, *_state_names(accelerator, average))
        task.source.load_state_dict(states["data"])
        if average is not None:
            average.load_state_dict(states["average"])
        if found := broken():  # which earlier versions saved
            raise FloatingPointError(
                f"{checkpoint}: {found} hold NaN or infinite values; delete it to go on from the one before it. "
                + _last_good(output_dir, progress["update"])
            )
        if extended:
            apply_plan(scheduler)
            progress |= {"stopped_early": False, "validations_without_best": 0}
        done = progress["update"] == max_steps or progress["stopped_early"]
        what = "finished already" if done else f"extended to {max_steps} updates" if extended else "resuming"
        say(accelerator, f"{what}: {checkpoint} holds update {progress['update']}")
    accelerator.init_trackers("essm", {**_flat(identity), "first_update": progress["update"]})

    # 3. The loop.
    def fetch() -> tuple[list[dict[str, Tensor]], dict[str, Any]]:
        drawn = task.source.draw(samples_per_update)
        shares = [
            share_of(drawn, accelerator.process_index, ranks, micro_step, batch_size)
            for micro_step in range(args.gradient_accumulation_steps)
        ]
        return [task.collate(task.source.load(share)) for share in shares], task.source.state_dict()

    weights = average.applied if average is not None else nullcontext
    first_update = max_steps if progress["stopped_early"] else progress["update"]
    bar = tqdm(
        total=max_steps,
        initial=progress["update"],
        unit="update",
        disable=not accelerator.is_main_process,
        mininterval=0.5 if sys.stderr.isatty() else 10,  # seconds between lines in a log file
    )
    next_batches = _Prefetch(fetch) if first_update < max_steps else None
    model.train()
    for update in range(first_update, max_steps):
        started = time.perf_counter()
        budgets = schedule(update)
        assert next_batches is not None
        batches, data_state = next_batches()
        loss, figure = _accumulate(accelerator, model, task, batches, budgets, args.distillation_weight)
        norm = _full(accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm))
        means = accelerator.reduce(torch.stack([loss, figure]), "mean")
        loss, figure, grad_norm = torch.cat([means, norm.to(means).view(1)]).tolist()  # one wait for the device
        overflowed = accelerator.scaler is None and not math.isfinite(grad_norm)  # fp16's scaler skips such updates
        if not math.isfinite(loss) or overflowed:
            next_batches.close()
            raise FloatingPointError(
                f"update {update + 1}: loss is {loss}, gradient norm {grad_norm}; stopped. "
                f"{_last_good(output_dir, update + 1)}. Try a lower learning_rate or a longer warm-up"
            )
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if average is not None:
            average.update()
        speed = samples_per_update * task.tokens_per_sample / (time.perf_counter() - started)
        shown = "+".join(map(str, budgets))
        bar.set_postfix_str(f"K={shown}, {task.metric.name} {figure:.3f}, {speed:,.0f} tokens/s", refresh=False)
        bar.update()

        progress |= {"update": update + 1, "seconds": progress["seconds"] + time.perf_counter() - started}
        last = update + 1 == max_steps
        saves = last or not (update + 1) % args.validate_every or not (update + 1) % args.checkpoint_every
        if saves and (found := broken()):  # the loss above is that before the step
            next_batches.close()
            raise FloatingPointError(
                f"update {update + 1}: {found} hold NaN or infinite values, and are not saved; stopped. "
                f"{_last_good(output_dir, update + 1)}. Try a lower learning_rate or a longer warm-up"
            )
        values: dict[str, Any] = {}
        if (update + 1) % args.log_every == 0 or last:
            values = {"loss": loss, task.metric.name: figure, "budget": budgets[0], "gradient_norm": grad_norm}
            values |= {"learning_rate": scheduler.get_last_lr()[0], "tokens_per_second": speed}
        if (update + 1) % args.validate_every == 0 or last:
            with weights():
                figures = {K: task.evaluate(accelerator, model.eval(), K) for K in validated}
                if _is_new_best(progress, sum(figures.values()) / len(figures), task.metric):
                    record = {"update": update + 1, "metric": task.metric._asdict(), "validation": figures}
                    save_model(accelerator, model, task, output_dir / "best", {"best.json": record})
            model.train()
            values |= {f"validation {task.metric.name} K={K}": value for K, value in figures.items()}
            shown = ", ".join(f"{value:.4f} at K={K}" for K, value in figures.items())
            new = " (best mean so far)" if progress["best_update"] == update + 1 else ""
            say(accelerator, f"update {update + 1}: validation {task.metric.name} {shown}{new}")
            if 0 < args.early_stopping_patience <= progress["validations_without_best"] and not last:
                progress["stopped_early"] = last = True
                say(accelerator, f"stopped early: no new best since update {progress['best_update']}")
        if values:
            accelerator.log(values, step=update + 1)
        if (update + 1) % args.checkpoint_every == 0 or last:
            budget = {"schedule": args.budget_schedule, "trained": schedule.budgets, "last": budgets}
            run_state = {"identity": identity, "budget": budget, "samples_seen": (update + 1) * samples_per_update}
            run_state |= {"plan": plan}
            states = {"data": data_state, "average": average.state_dict() if average is not None else None}
            parts = [{name: states[name] for name in names} for names in _state_names(accelerator, average)]
            save_checkpoint(accelerator, output_dir, progress | run_state, args.keep_checkpoints, *parts)
        if last:
            break
    if next_batches is not None:
        next_batches.close()
    bar.close()

    # 4. The model to keep. That of a run that had finished stays, with what its user has added: card, budget profile.
    model_folder = output_dir / "model"
    averaged = ", averaged" if average is not None else ""
    what = f"saved {model_folder} ({args.final_model} weights{averaged})"
    if done and saved_model == [progress["update"], args.final_model]:
        what = f"kept {model_folder} as it is"
    elif args.final_model == "best":
        if accelerator.is_main_process:
            copy_model(output_dir / "best", model_folder)
        accelerator.wait_for_everyone()
    else:
        with weights():
            save_model(accelerator, model, task, model_folder)
    say(accelerator, what)
    return {
        "updates": progress["update"],
        "samples_per_update": samples_per_update,
        "tokens_per_update": samples_per_update * task.tokens_per_sample,
        "best_update": progress["best_update"],
        "best_validation": progress["best"],
        "stopped_early": progress["stopped_early"],
        "seconds": round(progress["seconds"], 1),
        "processes": ranks,
        "device": str(accelerator.device.type),
        "mixed_precision": accelerator.mixed_precision,
    }


def _accumulate(
    accelerator: Accelerator,
    model: nn.Module,
    task: Task,
    batches: list[dict[str, Tensor]],
    budgets: tuple[int, ...],
    distillation_weight: float,
) -> tuple[Tensor, Tensor]:
    """Gradients of one update. Returns its loss, and the metric on its batches at the first budget; both per process.

    Every budget's graph is gone before the next forward pass, and processes exchange gradients once, at the very end.
    """
    loss, figure = torch.zeros(2, device=accelerator.device)
    for micro_step, batch in enumerate(batches):
        batch = {name: value.to(accelerator.device, non_blocking=True) for name, value in batch.items()}
        first: list[Any] = []

        def forward(K: int, batch: dict[str, Tensor] = batch, first: list[Any] = first) -> Any:
            outputs = run_at_budget(model, batch, K)
            if not first:
                first.append(task.training_figure(outputs, batch).detach())
            return outputs

        losses = budget_losses(forward, budgets, labels=batch["labels"], distillation_weight=distillation_weight)
        for i in range(len(budgets)):
            is_last = i == len(budgets) - 1 and micro_step == len(batches) - 1
            with nullcontext() if is_last else accelerator.no_sync(model):
                part = next(losses) / len(batches)
                accelerator.backward(part)
            loss = loss + part.detach()
        figure = figure + first[0] / len(batches)
    return loss, figure


def _state_names(accelerator: Accelerator, average: WeightAverage | None) -> tuple[list[str], list[str]]:
    """States that are the same on all processes, and those that each has for itself."""
    names = ["average"] if average is not None else []
    sharded = accelerator.distributed_type == DistributedType.FSDP
    return (["data"], names) if sharded else (["data", *names], [])


def _full(norm: Tensor) -> Tensor:
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # type: ignore[operator]


def _is_new_best(progress: dict[str, Any], mean: float, metric: Metric) -> bool:
    """Record a validation; whether it is strictly better than all before."""
    best = progress["best"]
    better = best is None or math.isnan(best) or (mean > best if metric.higher_is_better else mean < best)
    if better:
        progress |= {"best": mean, "best_update": progress["update"], "validations_without_best": 0}
    else:
        progress["validations_without_best"] += 1
    return better


def copy_model(source: Path, target: Path) -> None:
    """Publish a copy of a saved model's folder."""
    temporary = temporary_folder(target)
    shutil.copytree(source, temporary, dirs_exist_ok=True)
    (temporary / "best.json").unlink(missing_ok=True)
    publish(temporary, target)


def say(accelerator: Accelerator, text: str) -> None:
    """One line, from one process, above the progress bar."""
    if accelerator.is_main_process:
        tqdm.write(text)


def train_and_record(
    accelerator: Accelerator, args: RunArguments, task: Task, schedule: BudgetSchedule, *, script: str, data: str
) -> None:
    """`train`, with a line about model and data before it, and `training.json`, which the model card reads, after it.

    Args:
        script: its file. data: what it trains on, for people.
    """
    parameters = sum(p.numel() for p in task.model.parameters())
    block = getattr(task.model.config, "block", None)
    kind = "" if block is None else f" ({block} block)"
    say(
        accelerator,
        f"{parameters:,} parameters{kind} on {accelerator.num_processes} x {accelerator.device.type}; {data}",
    )
    record = train(accelerator, args, task, schedule)
    record |= {"script": Path(script).name, "data": data, "schedule": args.budget_schedule, "parameters": parameters}
    record |= {"arguments": dataclasses.asdict(args), "hardware": hardware(accelerator)}
    if accelerator.is_main_process:
        write_json(Path(args.output_dir) / "training.json", record)


def hardware(accelerator: Accelerator) -> str:
    """The machine by its parts."""
    if accelerator.device.type == "cuda":
        kind = torch.cuda.get_device_name(accelerator.device)
    else:
        kind = f"{accelerator.device.type} ({platform.machine()}, {torch.get_num_threads()} threads)"
    precision = {"no": "fp32"}.get(accelerator.mixed_precision, accelerator.mixed_precision)
    return f"{accelerator.num_processes} x {kind}, torch {torch.__version__}, {precision}"


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write atomically."""
    temporary = path.with_name(".partial-" + path.name)
    temporary.write_text(json.dumps(record, indent=2) + "\n")
    os.replace(temporary, path)


def _flat(identity: dict[str, Any]) -> dict[str, Any]:
    """For trackers that take numbers and text only."""
    return {k: v if isinstance(v, (int, float, str, bool)) else str(v) for k, v in identity.items()}
