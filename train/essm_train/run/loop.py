# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The training loop that the scripts share: budget dropout under Accelerate, exact resume, best and last model.

A run is defined by its arguments and its data. Everything an update does is a pure function of its index (budgets),
of the place in the data, or of state that a checkpoint holds: weights, their average, optimizer, learning rate and the
random states of every process. So a run that was killed at any moment ends with the bits it would have ended with, on
the same machine and number of threads, and on a GPU with `full_determinism`. A checkpoint that was damaged on disk is
set aside, and the run goes on from the one before it: the same bits, some of them computed twice.

Selection rule: the best model is the one with the best mean of the validation metric over `eval_budgets`, the earlier
one of equals. With `ema_decay`, the averaged weights are what is validated and saved.

Left in `output_dir`: checkpoint-*, best (a loadable model with best.json), log.jsonl (a line per logged update), and
what the script adds. `.lock` keeps a second run out.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, set_seed
from torch import Tensor
from tqdm import tqdm

from essm_train.arguments import RunArguments
from essm_train.data.samples import Prefetch, share_of
from essm_train.files import write_json
from essm_train.measure.metric import Metric
from essm_train.models import capacity_of, run_at_budget
from essm_train.run.accelerator import hardware, say
from essm_train.run.average import WeightAverage
from essm_train.run.checkpoints import last_good, load_checkpoint, read_run_state, save_checkpoint
from essm_train.run.finiteness import non_finite
from essm_train.run.identity import find_run, model_identity
from essm_train.run.learning_rate import apply_plan, make_scheduler
from essm_train.run.saving import copy_model, save_model
from essm_train.run.steps import adamw, update
from essm_train.run.task import Task
from essm_train.run.truncation import make_truncation
from modeling_essm.companions.truncation.models import resize_states
from modeling_essm.training.budget_dropout import BudgetSchedule, allow_compiled_budgets, budget_losses, budget_schedule


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
    """Budgets to validate at, ascending: of a model that has only one, such as a baseline, that one. Raises ValueError
    for one outside [1, capacity]."""
    if capacity == 1:
        return (1,)
    trained = schedule.budgets
    chosen = args.eval_budgets or (trained[0], trained[len(trained) // 2], trained[-1])
    for K in chosen:
        if not 1 <= K <= capacity:
            raise ValueError(f"eval_budgets must be integers in [1, {capacity}], got {K}")
    return tuple(sorted(set(chosen)))


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
    run = _Run(accelerator, args, task, schedule)
    finished_before = run.resume()
    accelerator.init_trackers("essm", {**_flat(run.identity), "first_update": run.progress.update})
    run.perform_updates()
    run.keep_model(finished_before)
    progress, shrunk = run.progress, task.truncation
    return {
        "updates": progress.update,
        "samples_per_update": run.samples_per_update,
        "tokens_per_update": run.samples_per_update * task.tokens_per_sample,
        "best_update": progress.best_update,
        "best_validation": progress.best,
        "stopped_early": progress.stopped_early,
        "seconds": round(progress.seconds, 1),
        "processes": accelerator.num_processes,
        "device": str(accelerator.device.type),
        "mixed_precision": accelerator.mixed_precision,
        **({} if shrunk is None else {"state_sizes": task.model.config.state_sizes, "truncations": shrunk.history}),
    }


@dataclass
class Progress:
    """How far a run has come, as checkpoints record it; `best` is a mean over the budgets of validation."""

    update: int = 0
    seconds: float = 0.0
    best: float | None = None
    best_update: int = 0
    validations_without_best: int = 0
    stopped_early: bool = False

    def record_validation(self, mean: float, metric: Metric, threshold: float = 0.0) -> bool:
        """Whether it is strictly better than all before. One that is better by at most the threshold does not end the
        count of validations without a new best (as in transformers' EarlyStoppingCallback)."""
        gain = math.inf
        if self.best is not None and not math.isnan(self.best):
            gain = (mean - self.best) if metric.higher_is_better else (self.best - mean)
        self.validations_without_best = 0 if gain > threshold else self.validations_without_best + 1
        if not gain > 0:
            return False
        self.best, self.best_update = mean, self.update
        return True


class _Run:
    """One run: what its updates change and its checkpoints hold.

    Making it finds the run in output_dir, if any, and raises ValueError as `train`; `resume` takes its state over.
    """

    def __init__(self, accelerator: Accelerator, args: RunArguments, task: Task, schedule: BudgetSchedule):
        self.accelerator, self.args, self.task, self.schedule = accelerator, args, task, schedule
        self.output_dir, self.progress = Path(args.output_dir), Progress()
        self.samples_per_update = (
            args.per_device_train_batch_size * accelerator.num_processes * args.gradient_accumulation_steps
        )
        self.validated = eval_budgets(args, schedule, capacity_of(task.model))
        self.max_steps = self._num_updates()
        if args.truncation_tau is not None:
            task.truncation = make_truncation(args, task.model, self.max_steps)
        self.identity = self._identity()
        self.checkpoint, self.saved_model = find_run(accelerator, args, self.identity)
        self.saved = read_run_state(self.checkpoint) if self.checkpoint is not None else {}
        self._prepare()

    def _num_updates(self) -> int:
        args, num_samples = self.args, self.task.source.num_samples
        if args.num_train_epochs is None:
            return args.max_steps
        if num_samples is None:
            raise ValueError("num_train_epochs needs a data set of known length; for a stream give max_steps")
        return max(1, round(args.num_train_epochs * num_samples / self.samples_per_update))

    def _identity(self) -> dict[str, Any]:
        """What defines the run."""
        accelerator = self.accelerator
        return (
            self.args.identity()
            | self.task.identity
            | {"max_steps": self.max_steps, "eval_budgets": list(self.validated)}
            | {"num_processes": accelerator.num_processes, "mixed_precision": accelerator.mixed_precision}
            | {"distributed_type": str(accelerator.distributed_type)}
            | {"device": accelerator.device.type}  # each kind has random states of its own
            | {"model": model_identity(self.task.model)}
            | ({} if self.task.truncation is None else {"truncation": self.task.truncation.settings()})
        )

    def _prepare(self) -> None:
        """Model, optimizer, learning rate and average, as they are before the first update."""
        accelerator, args, network = self.accelerator, self.args, self.task.model
        if sizes := self.saved.get("state_sizes"):
            resize_states(network, sizes)
        set_seed(args.seed, device_specific=True)  # equal weights exist already; other dropout masks on every process
        if args.gradient_checkpointing:
            enable = getattr(network, "activation_checkpointing_enable", None)  # its name since transformers 5.2x
            (enable or network.gradient_checkpointing_enable)({"use_reentrant": False})
        if args.torch_compile:
            allow_compiled_budgets(len(self.schedule.budgets))
            network.compile()
        optimizer = adamw(network, args.learning_rate, args.weight_decay, (0.9, args.adam_beta2))
        saved = self.saved
        plan = saved.get("plan", [[0, saved["identity"]["max_steps"] if saved else self.max_steps]])
        self.extended = self.max_steps > plan[-1][1]  # which `check_same_run` allows only if it was asked for
        self.plan = [*plan, [saved["update"], self.max_steps]] if self.extended else plan
        if args.full_budget_updates is None:
            self.schedule = dataclasses.replace(self.schedule, full_budget_updates=plan[0][1] // 2)
        self.scheduler = make_scheduler(
            optimizer, args.warmup_steps, self.plan, args.lr_scheduler_type, args.min_lr_rate
        )
        # Not prepared: it steps once per update, on any number of ranks.
        accelerator.register_for_checkpointing(self.scheduler)
        self.model, self.optimizer = accelerator.prepare(network, optimizer)
        self.average = WeightAverage(self.model, args.ema_decay) if args.ema_decay else None

    def resume(self) -> bool:
        """Take over the state of the checkpoint, if any; whether the run was finished with it."""
        if self.checkpoint is None:
            return False
        self.progress = Progress(**{f.name: self.saved[f.name] for f in dataclasses.fields(Progress)})
        states = load_checkpoint(self.accelerator, self.checkpoint, *self._state_names())
        self.task.source.load_state_dict(states["data"])
        if self.task.truncation is not None:
            self.task.truncation.history = self.saved["truncations"]
        if self.average is not None:
            self.average.load_state_dict(states["average"])
        if self.extended:
            apply_plan(self.scheduler)
            self.progress.stopped_early, self.progress.validations_without_best = False, 0
        done = self.progress.update == self.max_steps or self.progress.stopped_early
        extended = f"extended to {self.max_steps} updates" if self.extended else "resuming"
        what = "finished already" if done else extended
        say(self.accelerator, f"{what}: {self.checkpoint} holds update {self.progress.update}")
        return done

    def perform_updates(self) -> None:
        """All that are left, with validations, log and checkpoints. Raises as `train`."""
        args, progress = self.args, self.progress
        bar = tqdm(
            total=self.max_steps,
            initial=progress.update,
            unit="update",
            disable=not self.accelerator.is_main_process,
            mininterval=0.5 if sys.stderr.isatty() else 10,  # seconds between lines in a log file
        )
        self.model.train()
        with bar, closing(Prefetch(self._fetch)) as next_batches:
            for done in range(self.max_steps if progress.stopped_early else progress.update, self.max_steps):
                started = time.perf_counter()
                budgets = self.schedule(done)
                batches, data_state = next_batches()
                values = self._update(batches, budgets)
                speed = self.samples_per_update * self.task.tokens_per_sample / (time.perf_counter() - started)
                figure, name = values[self.task.metric.name], self.task.metric.name
                shown = f"K={'+'.join(map(str, budgets))}, {name} {figure:.3f}, {speed:,.0f} tokens/s"
                bar.set_postfix_str(shown, refresh=False)
                bar.update()

                progress.update, progress.seconds = done + 1, progress.seconds + time.perf_counter() - started
                if self._is_due(args.eval_steps) or self._is_due(args.save_steps):
                    self._check_finite()
                rate = {"learning_rate": self.scheduler.get_last_lr()[0], "tokens_per_second": speed}
                values = values | rate if self._is_due(args.logging_steps) else {}
                if self._is_due(args.eval_steps):
                    values |= self._validate()
                if values:
                    self.accelerator.log(values, step=progress.update)
                if self._is_due(args.save_steps):
                    self._save_checkpoint(budgets, data_state)
                if progress.stopped_early:
                    break

    def _is_due(self, every: int) -> bool:
        """Whether the update just done is one to do something after: each so many, and always the last one."""
        update = self.progress.update
        return update % every == 0 or update == self.max_steps or self.progress.stopped_early

    def _fetch(self) -> tuple[list[dict[str, Tensor]], dict[str, Any]]:
        """This process's batches of the next update, and the place in the data after it."""
        args, source = self.args, self.task.source
        drawn = source.draw(self.samples_per_update)
        place = self.accelerator.process_index, self.accelerator.num_processes
        shares = [
            share_of(drawn, *place, micro_step, args.per_device_train_batch_size)
            for micro_step in range(args.gradient_accumulation_steps)
        ]
        batches = [self.task.collate(source.load(share)) for share in shares]
        return batches, source.state_dict()

    def _update(self, batches: list[dict[str, Tensor]], budgets: tuple[int, ...]) -> dict[str, Any]:
        """One step of the optimizer; what log.jsonl says of it. Raises FloatingPointError, before the step."""
        accelerator, args, number = self.accelerator, self.args, self.progress.update + 1
        figures: list[Tensor] = []  # of every batch
        means: list[float] = []

        def check(loss: Tensor, norm: Tensor) -> None:
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # sharded under FSDP2
            local = torch.stack([loss, torch.stack(figures).mean()])
            means.extend(torch.cat([accelerator.reduce(local, "mean"), norm.to(local).view(1)]).tolist())  # waits once
            overflowed = accelerator.scaler is None and not math.isfinite(means[2])  # fp16's scaler skips such updates
            if not math.isfinite(means[0]) or overflowed:
                raise FloatingPointError(
                    f"update {number}: loss is {means[0]}, gradient norm {means[2]}; stopped. "
                    f"{last_good(self.output_dir, number)}. Try a lower learning_rate or a longer warm-up"
                )

        update(
            self.optimizer,
            self._losses(batches, budgets, figures),
            self.model.parameters(),
            self.scheduler,
            args.max_grad_norm,
            backward=accelerator.backward,
            clip=accelerator.clip_grad_norm_,
            check=check,
        )
        self._truncate(number)
        if self.average is not None:
            self.average.update()
        return {"loss": means[0], self.task.metric.name: means[1], "budget": budgets[0], "gradient_norm": means[2]}

    def _losses(
        self, batches: list[dict[str, Tensor]], budgets: tuple[int, ...], figures: list[Tensor]
    ) -> Iterator[Tensor]:
        """The parts of an update's loss, whose graphs do not live together; processes exchange gradients in the last.

        Args:
            figures: gets the metric on every batch, at the first budget.
        """
        accelerator, model, task = self.accelerator, self.model, self.task
        for micro_step, batch in enumerate(batches):
            batch = {name: value.to(accelerator.device, non_blocking=True) for name, value in batch.items()}

            def forward(K: int, batch: dict[str, Tensor] = batch, micro_step: int = micro_step) -> Any:
                outputs = run_at_budget(model, batch, K)
                if len(figures) == micro_step:
                    figures.append(task.training_figure(outputs, batch).detach())
                return outputs

            losses = budget_losses(
                forward, budgets, labels=batch["labels"], distillation_weight=self.args.distillation_weight
            )
            for i in range(len(budgets)):
                is_last = i == len(budgets) - 1 and micro_step == len(batches) - 1
                with nullcontext() if is_last else accelerator.no_sync(model):
                    yield next(losses) / len(batches)

    def _truncate(self, update: int) -> None:
        """Where the task has its model shrink; a smaller model's validations are not compared with those before it."""
        truncation, progress = self.task.truncation, self.progress
        report = None if truncation is None else truncation.after_step(self.model, self.optimizer, update)
        if truncation is None or report is None:
            return
        if report.replaced:
            progress.best, progress.best_update, progress.validations_without_best = None, 0, 0
            if self.average is not None:
                self.average.replace(report.replaced)
        say(self.accelerator, truncation.line())

    def _non_finite(self) -> str:
        average = self.average.average if self.average is not None else []
        return " and ".join(non_finite(self.accelerator, self.model, self.optimizer, average))

    def _check_finite(self) -> None:
        """Raises FloatingPointError: the loss of an update, which is finite, is that before its step."""
        update = self.progress.update
        if found := self._non_finite():
            raise FloatingPointError(
                f"update {update}: {found} hold NaN or infinite values, and are not saved; stopped. "
                f"{last_good(self.output_dir, update)}. Try a lower learning_rate or a longer warm-up"
            )

    def _validate(self) -> dict[str, float]:
        """The metric at every budget of validation, for log.jsonl; saves the best model, and may stop the run."""
        progress, metric, patience = self.progress, self.task.metric, self.args.early_stopping_patience
        with self._weights():
            figures = {K: self.task.evaluate(self.accelerator, self.model.eval(), K) for K in self.validated}
            is_best = progress.record_validation(
                sum(figures.values()) / len(figures), metric, self.args.early_stopping_threshold
            )
            if is_best:
                record = {"update": progress.update, "metric": metric._asdict(), "validation": figures}
                save_model(self.accelerator, self.model, self.task, self.output_dir / "best", {"best.json": record})
        self.model.train()
        shown = ", ".join(f"{value:.4f} at K={K}" for K, value in figures.items())
        new = " (best mean so far)" if is_best else ""
        say(self.accelerator, f"update {progress.update}: validation {metric.name} {shown}{new}")
        if 0 < patience <= progress.validations_without_best and progress.update < self.max_steps:
            progress.stopped_early = True
            say(self.accelerator, f"stopped early: no new best since update {progress.best_update}")
        return {f"validation {metric.name} K={K}": value for K, value in figures.items()}

    def _weights(self) -> Any:
        """A context in which the model has the weights that count."""
        return self.average.applied() if self.average is not None else nullcontext()

    def _state_names(self) -> tuple[list[str], list[str]]:
        """States that are the same on all processes, and those that each has for itself."""
        names = ["average"] if self.average is not None else []
        sharded = self.accelerator.distributed_type == DistributedType.FSDP
        return (["data"], names) if sharded else (["data", *names], [])

    def _save_checkpoint(self, budgets: tuple[int, ...], data_state: dict[str, Any]) -> None:
        run_state = dataclasses.asdict(self.progress) | {
            "identity": self.identity,
            "budget": {"schedule": self.args.budget_schedule, "trained": self.schedule.budgets, "last": budgets},
            "samples_seen": self.progress.update * self.samples_per_update,
            "plan": self.plan,
        }
        if self.task.truncation is not None:
            sizes = list(self.task.model.config.state_sizes)
            run_state |= {"state_sizes": sizes, "truncations": self.task.truncation.history}
        states = {"data": data_state, "average": self.average.state_dict() if self.average is not None else None}
        shared, by_process = ({name: states[name] for name in names} for names in self._state_names())
        save_checkpoint(self.accelerator, self.output_dir, run_state, self.args.save_total_limit, shared, by_process)

    def keep_model(self, finished_before: bool) -> None:
        """Leave `model`. That of a run that had finished stays, with what its user has added: card, budget profile."""
        folder, best = self.output_dir / "model", self.args.load_best_model_at_end
        averaged = ", averaged" if self.average is not None else ""
        what = f"saved {folder} ({'best' if best else 'last'} weights{averaged})"
        if finished_before and self.saved_model == [self.progress.update, best]:
            what = f"kept {folder} as it is"
        elif best:
            found = json.loads((self.output_dir / "best" / "best.json").read_text())["update"]
            if found != self.progress.best_update:  # the run went back behind it, and has found none that is better
                what += f", of update {found} before the run went back; its best since: {self.progress.best_update}"
            if self.accelerator.is_main_process:
                copy_model(self.output_dir / "best", folder)
            self.accelerator.wait_for_everyone()
        else:
            with self._weights():
                save_model(self.accelerator, self.model, self.task, folder)
        say(self.accelerator, what)


def train_and_record(
    accelerator: Accelerator, args: RunArguments, task: Task, schedule: BudgetSchedule, *, script: str, data: str
) -> None:
    """`train`, with a line about model and data before it, and `training.json`, which the model card reads, after it.

    Args:
        script: the command. data: what it trains on, for people.
    """
    parameters = sum(p.numel() for p in task.model.parameters())
    block = getattr(task.model.config, "block", None)
    kind = "" if block is None else f" ({block} block)"
    say(
        accelerator,
        f"{parameters:,} parameters{kind} on {accelerator.num_processes} x {accelerator.device.type}; {data}",
    )
    record = train(accelerator, args, task, schedule)
    record |= {"script": script, "data": data, "schedule": args.budget_schedule, "parameters": parameters}
    record |= {"arguments": dataclasses.asdict(args), "hardware": hardware(accelerator)}
    if accelerator.is_main_process:
        write_json(Path(args.output_dir) / "training.json", record)


def _flat(identity: dict[str, Any]) -> dict[str, Any]:
    """For trackers that take numbers and text only."""
    return {k: v if isinstance(v, (int, float, str, bool)) else str(v) for k, v in identity.items()}
