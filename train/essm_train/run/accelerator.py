# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The Accelerator of a run that has its folder for itself: processes, threads, trackers, sharding, log.jsonl."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.tracking import get_available_trackers
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    InitProcessGroupKwargs,
    broadcast_object_list,
)
from torch.distributed.fsdp import MixedPrecisionPolicy
from tqdm import tqdm
from transformers.trainer_utils import enable_full_determinism

from essm_train.arguments import RunArguments
from essm_train.files import alone_in, check_writable, naming, set_aside, write_text
from modeling_essm.budgets.profile import cpu_cores, device_name


@contextmanager
def open_run(args: RunArguments) -> Iterator[Accelerator]:
    """The Accelerator of a run that has its output_dir for itself until the end.

    Raises:
        ValueError: as `make_accelerator`, or another run uses output_dir.
    """
    accelerator = make_accelerator(args)
    with _alone_in(accelerator, Path(args.output_dir)):
        yield accelerator
        accelerator.wait_for_everyone()
        accelerator.end_training()


def make_accelerator(args: RunArguments) -> Accelerator:
    """The Accelerator of a run, its CPU threads, its trackers and, if asked for, deterministic kernels.

    Raises:
        ValueError: output_dir cannot be written, is not the same folder for all processes, or an unknown tracker.
    """
    output_dir = Path(args.output_dir)
    check_writable(output_dir)
    if args.full_determinism:
        enable_full_determinism(args.seed)
    for name in args.report_to or []:
        if name not in (known := [str(tracker) for tracker in get_available_trackers()]):
            raise ValueError(f"report_to must name installed trackers, {known or 'there are none'}, got {name!r}")
    patience = InitProcessGroupKwargs(timeout=timedelta(hours=2))  # others wait while one reads data or pushes
    once = DistributedDataParallelKwargs(gradient_as_bucket_view=True)  # gradients, instead of a copy for the exchange
    accelerator = Accelerator(log_with=args.report_to, project_dir=args.output_dir, kwargs_handlers=[patience, once])
    accelerator.sync_gradients = True  # shared by all Accelerators: a Trainer before may have left it off
    if accelerator.distributed_type == DistributedType.MULTI_CPU and os.environ.get("ACCELERATE_USE_FSDP") == "true":
        _shard_on_cpu(accelerator)
    if accelerator.is_fsdp2:
        # Mixed precision is autocast's alone, as under DDP: Accelerate's policy would round residual stream, losses and
        # the gradients that micro-steps add up.
        accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy()
    _check_shared(accelerator, output_dir)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes))  # processes of this machine
    torch.set_num_threads(args.cpu_threads or max(1, min(8, cpu_cores() or 1) // here))
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
    (token,) = broadcast_object_list([uuid.uuid4().hex])
    proof = output_dir / f".seen-{token}"
    if accelerator.is_main_process:
        proof.touch()
    accelerator.wait_for_everyone()
    seen = int(accelerator.reduce(torch.tensor(int(proof.exists()), device=accelerator.device), "sum"))
    if accelerator.is_main_process:
        proof.unlink()
    if seen != accelerator.num_processes:
        raise ValueError(
            f"output_dir {str(output_dir)!r} is one folder for {seen} of {accelerator.num_processes} processes only: "
            "on several machines it must lie on a file system that they share"
        )


@contextmanager
def _alone_in(accelerator: Accelerator, folder: Path) -> Iterator[None]:
    """`alone_in` of the main process. Raises its ValueError on all."""
    with ExitStack() as held:
        problem = [""]
        if accelerator.is_main_process:
            try:
                held.enter_context(alone_in(folder))
            except ValueError as error:
                problem = [str(error)]
        if problem := broadcast_object_list(problem)[0]:
            raise ValueError(problem)
        yield


def start_trackers(accelerator: Accelerator, settings: dict[str, Any]) -> None:
    """Those of the run. Raises what one raises that cannot start."""
    plain = {k: v if isinstance(v, (int, float, str)) else str(v) for k, v in settings.items()}
    accelerator.init_trackers("essm", plain)


class RunLog:
    """log.jsonl, one line per logged update, beside the trackers of a run; one process writes.

    Args:
        last: the update that a run goes on from. Lines after it are dropped, and so are damaged ones. With 0, what lies
            there is of an earlier run and becomes earlier-log.jsonl.
    """

    def __init__(self, accelerator: Accelerator, path: Path, last: int):
        self.accelerator, self.path = accelerator, path
        if accelerator.is_main_process:
            if last == 0 and path.exists():
                say(accelerator, f"{path} of an earlier run is now {set_aside(path, f'earlier-{path.name}')}")
            text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
            lines = text.split("\n")[:-1]  # the last may be a half
            write_text(path, "".join(f"{line}\n" for line in lines if 0 < _update_of(line) <= last))

    def __call__(self, values: dict[str, Any], update: int) -> None:
        self.accelerator.log({name.replace("=", " "): value for name, value in values.items()}, step=update)  # MLflow
        if self.accelerator.is_main_process:
            with naming(self.path), self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"update": update, **values}) + "\n")


def _update_of(line: str) -> int:
    """The update that a line of log.jsonl is about; 0 if it is damaged."""
    try:
        return int(json.loads(line)["update"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return 0


def say(accelerator: Accelerator, text: str) -> None:
    """One line, from one process, above the progress bar."""
    if accelerator.is_main_process:
        tqdm.write(text)


def hardware(accelerator: Accelerator) -> str:
    """The machine by its parts."""
    kind = device_name(accelerator.device)
    kind += f", {torch.get_num_threads()} threads" if accelerator.device.type == "cpu" else ""
    precision = {"no": "fp32"}.get(accelerator.mixed_precision, accelerator.mixed_precision)
    return f"{accelerator.num_processes} x {kind}, torch {torch.__version__}, {precision}"
