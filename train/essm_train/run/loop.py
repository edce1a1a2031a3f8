# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The training loop that the scripts share: budget dropout under Accelerate, exact resume, best and last model, sweep.

Everything an update does is a function of its index (budgets), of the place in the data, or of state that a checkpoint
holds: weights, their average, optimizer, learning rate and the random states of every process. So a run that was killed
at any moment ends with the bits it would have ended with, on the same machine and number of threads, and on a GPU with
`full_determinism`.

The best model has the best mean of the validation metric over `eval_budgets`; the earlier one of equals counts. With
`ema_decay`, the averaged weights are validated and saved.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, get_mixed_precision_context_manager, set_seed
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from essm_train.arguments import ModelArguments, RunArguments
from essm_train.baselines.config import BaselineConfig
from essm_train.data.samples import SampleSource, prefetched, share_of
from essm_train.files import recorded, set_aside, write_json
from essm_train.measure.budget_sweep import save_sweep, sweep_budgets
from essm_train.measure.scoring import HeldOut, Metric
from essm_train.models import capacity_of, run_part
from essm_train.publish.hub import check_can_push
from essm_train.publish.run_card import write_card_and_push
from essm_train.run.accelerator import RunLog, hardware, say, start_trackers
from essm_train.run.checkpoints import (
    BEST,
    RESULTS,
    delete_run,
    find_run,
    last_good,
    load_checkpoint,
    model_identity,
    publishing,
    read_run_state,
    save_checkpoint,
)
from essm_train.run.steps import make_optimizer, make_scheduler, update
from essm_train.run.weights import WeightAverage, non_finite, save_model
from modeling_essm.budgets.curve import BudgetCurve
from modeling_essm.budgets.profile import device_name
from modeling_essm.companions.truncation.models import resize_states
from modeling_essm.companions.truncation.training import InTrainingTruncation, attempt_steps, truncatable
from modeling_essm.training.budget_dropout import (
    BudgetSchedule,
    Part,
    allow_compiled_budgets,
    budget_losses,
    budget_schedule,
)


@dataclass
class Task:
    """What a script trains."""

    script: str  # the command
    description: str  # of the data, for people
    model: PreTrainedModel  # on the CPU, initialised
    source: SampleSource  # training samples
    collate: Callable[[list[Any]], dict[str, Tensor]]  # samples to arguments of the model, with labels, on the CPU
    figure: Callable[[Any, dict[str, Tensor]], Tensor]  # (outputs, batch) to the metric on a training batch, ()
    metric: Metric  # of training batches and validation
    validation: HeldOut  # what selects
    held_out: HeldOut  # what the final sweep scores
    tokens_per_sample: int  # for the speed shown
    save_beside: Callable[[Path], None]  # writes tokenizer and the like into the folder of a saved model
    identity: dict[str, str]  # of the data; a run found with another one is not continued
    swept: dict[str, Any] = field(default_factory=dict)  # stands in budget_sweep.json beside the figures
    heading: str = ""  # above the table of the sweep
    show: Callable[[PreTrainedModel], object] = lambda model: None  # called on one process with the saved model


def make_schedule(args: RunArguments, model: nn.Module) -> BudgetSchedule:
    """The schedule that the arguments name, over the sizes of a MatMamba if it is one. Raises ValueError as
    `budget_schedule`."""
    options = {"full_budget_updates": args.full_budget_updates or 0, "sandwich_random": args.sandwich_random}
    name = args.budget_schedule or ("rows" if getattr(model.config, "block", None) == "elastic" else "discrete")
    schedule = budget_schedule(name, capacity_of(model), args.seed, updates=args.max_steps, **options)
    sizes = model.config.trained_budgets if isinstance(model.config, BaselineConfig) else None
    return dataclasses.replace(schedule, budgets=tuple(sizes)) if sizes else schedule


def eval_budgets(args: RunArguments, schedule: BudgetSchedule, capacity: int) -> tuple[int, ...]:
    """Budgets to validate at, ascending: of a model that has only one, such as a baseline, that one. Raises ValueError
    for one outside [1, capacity]."""
    if capacity == 1:
        return (1,)
    trained = schedule.budgets
    chosen = sorted({*(args.eval_budgets or (trained[0], trained[len(trained) // 2], trained[-1]))})
    if not 1 <= chosen[0] <= chosen[-1] <= capacity:
        raise ValueError(f"eval_budgets must be integers in [1, {capacity}], got {chosen}")
    return tuple(chosen)


def train_and_sweep(accelerator: Accelerator, args: ModelArguments, task: Task) -> BudgetCurve:
    """Train, or go on with the run found in output_dir, and leave `model`; measure it at every budget, and push it.

    training.json is what the model card reads. From there on only what was saved counts.

    Raises:
        ValueError: budgets, trackers or data that cannot work, or a run in output_dir with other arguments or data;
            all before the first update.
        FloatingPointError: the loss, its gradient, or what an update left to be saved is no longer finite.
        OSError: a checkpoint or model could not be written; ConnectionError if another process is gone. In all cases
            the last good checkpoint stays.
    """
    output_dir, config = Path(args.output_dir), task.model.config
    parameters = sum(p.numel() for p in task.model.parameters())
    kind = f" ({config.block} block)" if hasattr(config, "block") else ""
    machine = f"{accelerator.num_processes} x {accelerator.device.type}"
    say(accelerator, f"{parameters:,} parameters{kind} on {machine}; {task.description}")
    run = _Run(accelerator, args, task)
    finished_before = run.resume()
    ran_on = hardware(accelerator)
    if finished_before:  # on another machine, maybe
        ran_on = recorded(output_dir / "training.json").get("hardware", ran_on)
    run.perform_updates()
    run.keep_model(finished_before)
    if accelerator.is_main_process:
        record = run.record() | {"script": task.script, "data": task.description, "parameters": parameters}
        record |= {"schedule": run.schedule.name, "digests": task.identity, "arguments": dataclasses.asdict(args)}
        write_json(output_dir / "training.json", record | {"hardware": ran_on})

    folder = output_dir / "model"
    with accelerator.local_main_process_first():
        saved = task.held_out.auto_class.from_pretrained(folder, trust_remote_code=False)
    saved.to(accelerator.device).eval()
    sweep = sweep_budgets(saved, task.held_out, progress=lambda K: say(accelerator, f"sweep: K={K}"))
    if accelerator.is_main_process:
        say(accelerator, task.heading + sweep.table())
        ran_on = f"{device_name(saved.device)}, {str(saved.dtype).removeprefix('torch.')}"
        save_sweep(sweep, output_dir, model=str(folder), data=task.description, hardware=ran_on, **task.swept)
        say(accelerator, f"saved {output_dir / 'budget_sweep.json'} and budget_sweep.png")
        if args.architecture == "essm" and any(folder.glob("*.py")):  # others have no card
            write_card_and_push(args)
        task.show(saved)
    return sweep


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
    """One run: what its updates change and its checkpoints hold. Making it finds the run in output_dir, if any."""

    def __init__(self, accelerator: Accelerator, args: ModelArguments, task: Task):
        self.accelerator, self.args, self.task = accelerator, args, task
        self.output_dir, self.progress = Path(args.output_dir), Progress()
        per_process = args.per_device_train_batch_size * args.gradient_accumulation_steps
        self.samples_per_update = per_process * accelerator.num_processes
        capacity = capacity_of(task.model)
        self.schedule = make_schedule(args, task.model)
        if not args.is_baseline:
            task.model.config.trained_budgets = list(self.schedule.budgets)
        self.validated, self.max_steps = eval_budgets(args, self.schedule, capacity), args.max_steps
        if args.num_train_epochs is not None:
            if task.source.num_samples is None:
                raise ValueError("num_train_epochs needs a data set of known length; for a stream give max_steps")
            self.max_steps = max(1, round(args.num_train_epochs * task.source.num_samples / self.samples_per_update))
        self.identity = (
            args.identity()
            | task.identity
            | {"max_steps": self.max_steps, "eval_budgets": list(self.validated)}
            | {"num_processes": accelerator.num_processes, "mixed_precision": accelerator.mixed_precision}
            | {"distributed_type": str(accelerator.distributed_type)}
            | {"device": accelerator.device.type}  # each kind has random states of its own
            | {"model": model_identity(task.model)}
        )
        self._check_what_comes()
        self.checkpoint = find_run(accelerator, args, self.identity)
        start_trackers(accelerator, self.identity)
        if args.push_to_hub and accelerator.is_main_process:
            check_can_push(str(args.hub_model_id), private=args.hub_private_repo)
        if args.overwrite_output_dir:  # now that nothing is left that could be wrong
            delete_run(accelerator, args)
        self.saved = read_run_state(self.checkpoint) if self.checkpoint is not None else {}
        self.first_plan = self.saved["plan"][0][1] if self.saved else self.max_steps  # shares are of it
        self.truncation = self._make_truncation(self.first_plan)
        self._prepare()

    def _check_what_comes(self) -> None:
        """Raises ValueError for what could not be prepared."""
        args, network = self.args, self.task.model
        if args.gradient_checkpointing and not network.supports_gradient_checkpointing:
            raise ValueError(f"gradient_checkpointing is not supported by {type(network).__name__}")
        optimizer = make_optimizer(network, args)
        plan = [[0, self.max_steps]]
        make_scheduler(optimizer, args.warmup_steps, plan, args.lr_scheduler_type, args.lr_scheduler_kwargs)
        self._make_truncation(self.max_steps)

    def _make_truncation(self, updates: int) -> InTrainingTruncation | None:
        args, until = self.args, self.args.truncation_until
        if args.truncation_tau is None:
            return None
        truncatable(self.task.model)
        end: str | int | float = until if until == "warmup" else float(until) if "." in until else int(until)
        steps = attempt_steps(args.truncation_attempts, end, max_steps=updates, warmup_steps=args.warmup_steps)
        return InTrainingTruncation(steps, tau=args.truncation_tau)

    def _prepare(self) -> None:
        """Model, optimizer, learning rate and average, as they are before the first update."""
        accelerator, args, network, saved = self.accelerator, self.args, self.task.model, self.saved
        if sizes := saved.get("state_sizes"):
            resize_states(network, sizes)
        set_seed(args.seed, device_specific=True)  # equal weights exist already; other dropout masks on every process
        if args.gradient_checkpointing:
            enable = getattr(network, "activation_checkpointing_enable", None)  # its name since transformers 5.2x
            (enable or network.gradient_checkpointing_enable)({"use_reentrant": False})
        if args.torch_compile:
            layers = [module for module in network.modules() if isinstance(module, GradientCheckpointingLayer)]
            kinds = {(getattr(each, "stochastic_depth", 0.0), *(p.shape for p in each.parameters())) for each in layers}
            allow_compiled_budgets(len(self.schedule.budgets) * max(1, len(kinds)))
            if layers and hasattr(network, "lm_head"):  # which reads blocks of one length
                for layer in layers:  # one graph of a budget serves all that are alike
                    layer.compile(dynamic=False)
            else:
                network.compile()
        optimizer = make_optimizer(network, args)
        plan = saved.get("plan", [[0, self.max_steps]])
        self.extended = self.max_steps > plan[-1][1]  # which `find_run` allows only if it was asked for
        self.plan = [*plan, [saved["update"], self.max_steps]] if self.extended else plan
        self.schedule = dataclasses.replace(self.schedule, updates=self.max_steps)
        if args.full_budget_updates is None:
            self.schedule = dataclasses.replace(self.schedule, full_budget_updates=self.first_plan // 2)
        course = args.lr_scheduler_type, args.lr_scheduler_kwargs
        self.scheduler = make_scheduler(optimizer, args.warmup_steps, self.plan, *course)
        accelerator.register_for_checkpointing(self.scheduler)  # not prepared: it steps once per update on any ranks
        if accelerator.is_fsdp2 and accelerator.native_amp:  # which Accelerate does in every other case
            autocast = get_mixed_precision_context_manager(True, accelerator.autocast_handler)
            network.forward = autocast(network.forward)
        accelerator.gradient_accumulation_steps = 1  # the loop counts its own, whatever the environment says
        self.model, self.optimizer = accelerator.prepare(network, optimizer)
        self.average = WeightAverage(self.model, args.ema_decay) if args.ema_decay else None

    def resume(self) -> bool:
        """Take over the state of the checkpoint, if any, and open the log; whether the run was finished with it."""
        done = False
        if self.checkpoint is not None:
            self.progress = Progress(**{f.name: self.saved[f.name] for f in dataclasses.fields(Progress)})
            names = ["data.pt", *([self._average_file] if self.average is not None else [])]
            data, *average = load_checkpoint(self.accelerator, self.checkpoint, names)
            self.task.source.load_state_dict(data)
            if self.truncation is not None:
                self.truncation.history = self.saved["truncations"]
            if self.average is not None:
                self.average.load_state_dict(average[0])
            if self.extended:
                self.scheduler.last_epoch -= 1
                self.scheduler.step()  # to the rate of its own plan; that of another was loaded
                self.progress.stopped_early, self.progress.validations_without_best = False, 0
            done = self.progress.update == self.max_steps or self.progress.stopped_early
            what = f"extended to {self.max_steps} updates" if self.extended else "resuming"
            what = "finished already" if done else what
            say(self.accelerator, f"{what}: {self.checkpoint} holds update {self.progress.update}")
            waits = self.args.load_best_model_at_end and not done and self.progress.best is not None
            if waits and (reason := self._lost_best()):
                say(self.accelerator, f"{reason}. Without a better validation to come, the end of the run will fail")
        self.log = RunLog(self.accelerator, self.output_dir / "log.jsonl", self.progress.update)
        return done

    def perform_updates(self) -> None:
        """All that are left, with validations, log and checkpoints. Raises as `train_and_sweep`."""
        args, progress = self.args, self.progress
        silent = not self.accelerator.is_main_process
        seconds = 0.5 if sys.stderr.isatty() else 10  # between lines in a log file
        bar = tqdm(total=self.max_steps, initial=progress.update, unit="update", disable=silent, mininterval=seconds)
        self.model.train()
        left = range(self.max_steps if progress.stopped_early else progress.update, self.max_steps)
        with bar, closing(prefetched(self._fetch, len(left))) as coming:
            for done in left:
                started = time.perf_counter()
                budgets = self.schedule(done)
                batches, data_state = next(coming)
                values = self._update(batches, budgets)
                speed = self.samples_per_update * self.task.tokens_per_sample / (time.perf_counter() - started)
                name, trained = self.task.metric.name, "+".join(map(str, budgets))
                shown = f"K={trained}, {name} {values[name]:.3f}, {speed:,.0f} tokens/s"
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
                    self.log(values, progress.update)
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
        micro_steps = range(args.gradient_accumulation_steps)
        shares = [share_of(drawn, *place, i, args.per_device_train_batch_size) for i in micro_steps]
        return [self.task.collate(source.load(share)) for share in shares], source.state_dict()

    def _update(self, batches: list[dict[str, Tensor]], budgets: tuple[int, ...]) -> dict[str, Any]:
        """One step of the optimizer; what log.jsonl says of it. Raises FloatingPointError, before the step."""
        accelerator, args, number = self.accelerator, self.args, self.progress.update + 1
        figures: list[Tensor] = []  # of every batch
        means: list[float] = []

        def check(loss: Tensor, norm: Tensor) -> None:
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # sharded under FSDP2
            local = torch.stack([loss, torch.stack(figures).sum() / len(batches)])
            means.extend(torch.cat([accelerator.reduce(local, "mean"), norm.to(local).view(1)]).tolist())  # waits once
            overflowed = accelerator.scaler is None and not math.isfinite(means[2])  # fp16's scaler skips such updates
            if not math.isfinite(means[0]) or overflowed:
                self._stop(number, f"loss is {means[0]}, gradient norm {means[2]}")

        update(
            self.optimizer,
            self._losses(batches, self.progress.update, figures),
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

    def _losses(self, batches: list[dict[str, Tensor]], update: int, figures: list[Tensor]) -> Iterator[Tensor]:
        """The parts of an update's loss, whose graphs do not live together; processes exchange gradients in the last.
        `figures` gets what adds up to the metric of every batch, each row at the first of its budgets."""
        accelerator, model, task = self.accelerator, self.model, self.task
        for micro_step, batch in enumerate(batches):
            batch = {name: value.to(accelerator.device, non_blocking=True) for name, value in batch.items()}

            shares: list[float] = []

            def forward(part: Part, batch: dict[str, Tensor] = batch, shares: list[float] = shares) -> Any:
                outputs = run_part(model, batch, part)
                if sum(shares) < 0.999:  # until every row has been read
                    rows = {name: value[part.rows] for name, value in batch.items()}
                    figures.append(task.figure(outputs, rows).detach() * part.share)
                    shares.append(part.share)
                return outputs

            count = len(batch["labels"])
            first = (micro_step * accelerator.num_processes + accelerator.process_index) * count
            one_budget = isinstance(task.model.config, BaselineConfig) or self.args.torch_compile  # in a pass
            together = accelerator.device.type != "cpu" and not one_budget
            parts = self.schedule.parts(update, count, first, together)
            weight = self.args.distillation_weight or 0.0
            losses = budget_losses(forward, parts, labels=batch["labels"], distillation_weight=weight)
            for i in range(len(parts)):
                is_last = i == len(parts) - 1 and micro_step == len(batches) - 1
                with nullcontext() if is_last else accelerator.no_sync(model):
                    yield next(losses) / len(batches)

    def _truncate(self, update: int) -> None:
        """Shrink the model where it is due; a smaller one's validations are not compared with those before it."""
        if self.truncation is None:
            return
        report = self.truncation.after_step(self.model, self.optimizer, update)
        if report is None:
            return
        if report.replaced:
            self.progress.best, self.progress.best_update, self.progress.validations_without_best = None, 0, 0
            if self.average is not None:
                self.average.replace(report.replaced)
        say(self.accelerator, self.truncation.line())

    def _check_finite(self) -> None:
        """Raises FloatingPointError: the loss of an update, which is finite, is that before its step."""
        average = self.average.average if self.average is not None else []
        if broken := " and ".join(non_finite(self.accelerator, self.model, self.optimizer, average)):
            self._stop(self.progress.update, f"{broken} hold NaN or infinite values, and are not saved")

    def _stop(self, update: int, reason: str) -> None:
        advice = f"{last_good(self.output_dir, update)}. Try a lower learning_rate or a longer warm-up"
        raise FloatingPointError(f"update {update}: {reason}; stopped. {advice}")

    def _validate(self) -> dict[str, float]:
        """The metric at every budget of validation, for log.jsonl; saves the best model, and may stop the run."""
        progress, metric, patience = self.progress, self.task.metric, self.args.early_stopping_patience
        with self._weights():
            module = self.accelerator.unwrap_model(self.model.eval())
            found = [self.task.validation.value(module, K, finite=False) for K in self.validated]  # NaN ends no run
            values = torch.tensor(found, dtype=torch.float64)
            if self.accelerator.num_processes > 1:  # all go on alike; MPS, which has no fp64, is never one of several
                values = self.accelerator.reduce(values.to(self.accelerator.device), "mean")
            figures = dict(zip(self.validated, values.tolist()))
            mean = sum(figures.values()) / len(figures)
            if is_best := progress.record_validation(mean, metric, self.args.early_stopping_threshold):
                record = {"update": progress.update, "metric": metric._asdict(), "validation": figures}
                self._save_model(BEST, record | {"identity": self.identity})
        self.model.train()
        shown = ", ".join(f"{value:.4f} at K={K}" for K, value in figures.items())
        new = " (best mean so far)" if is_best else ""
        say(self.accelerator, f"update {progress.update}: validation {metric.name} {shown}{new}")
        if 0 < patience <= progress.validations_without_best and progress.update < self.max_steps:
            progress.stopped_early = True
            by = f" by more than {least:g}" if (least := self.args.early_stopping_threshold) else ""
            say(self.accelerator, f"stopped early: no new best{by} in {patience} validations")
        return {f"validation {metric.name} K={K}": value for K, value in figures.items()}

    def _weights(self) -> Any:
        """A context in which the model has the weights that count."""
        return self.average.applied() if self.average is not None else nullcontext()

    def _save_model(self, name: str, record: dict[str, Any] | None = None) -> None:
        def beside(folder: Path) -> None:
            self.task.save_beside(folder)
            if record is not None:
                write_json(folder / f"{name}.json", record)

        save_model(self.accelerator, self.model, self.task.model, self.output_dir / name, beside)

    @property
    def _is_sharded(self) -> bool:
        return self.accelerator.distributed_type == DistributedType.FSDP

    @property
    def _average_file(self) -> str:
        return f"average_{self.accelerator.process_index}.pt" if self._is_sharded else "average.pt"

    def _save_checkpoint(self, budgets: tuple[int, ...], data_state: dict[str, Any]) -> None:
        run_state = dataclasses.asdict(self.progress) | {
            "identity": self.identity,
            "budget": {"schedule": self.schedule.name, "trained": self.schedule.budgets, "last": budgets},
            "samples_seen": self.progress.update * self.samples_per_update,
            "plan": self.plan,
            **self._truncated(),
        }
        is_main = self.accelerator.is_main_process
        states: dict[str, Any] = {"data.pt": data_state} if is_main else {}
        if self.average is not None and (is_main or self._is_sharded):
            states[self._average_file] = self.average.state_dict()
        save_checkpoint(self.accelerator, self.output_dir, run_state, self.args.save_total_limit, states)

    def _truncated(self) -> dict[str, Any]:
        if self.truncation is None:
            return {}
        return {"state_sizes": list(self.task.model.config.state_sizes), "truncations": self.truncation.history}

    def keep_model(self, finished_before: bool) -> None:
        """Leave `model`. That of a run that had finished stays, with what its user has added: card, budget profile; or
        gets another name, if this run has another one now."""
        folder, is_best = self.output_dir / "model", self.args.load_best_model_at_end
        averaged = ", averaged" if self.average is not None else ""
        what = f"saved {folder} ({'best' if is_best else 'last'} weights{averaged})"
        if finished_before and self._is_saved(folder):
            say(self.accelerator, f"kept {folder} as it is")
            return
        if is_best and (reason := self._lost_best()):
            raise ValueError(f"{reason}: leave out load_best_model_at_end, or train anew")
        if self.accelerator.is_main_process:
            self._set_earlier_aside(folder)
        if is_best:
            best, own = self.output_dir / BEST, shutil.ignore_patterns(f"{BEST}.json")
            with publishing(self.accelerator, folder) as temporary:
                if self.accelerator.is_main_process:
                    shutil.copytree(best, temporary, ignore=own, dirs_exist_ok=True)
        else:
            with self._weights():
                self._save_model("model")
        say(self.accelerator, what)

    def _lost_best(self) -> str:
        """Why this run's best weights are not in `best`, "" if they are. They may be deleted, or replaced by those of
        later updates, from before the run went back to an earlier checkpoint."""
        folder, best = self.output_dir / BEST, self.progress.best_update
        if (found := recorded(folder / f"{BEST}.json").get("update")) == best:
            return ""
        held = f"holds the weights of update {found}" if found else "is not there"
        return f"{folder} {held}, and the best ones of this run, of update {best}, are gone"

    def _set_earlier_aside(self, folder: Path) -> None:
        """The model of a run that had ended, to which its user may have added; one that was killed left no record."""
        if (self.output_dir / "training.json").exists() and folder.exists():
            say(self.accelerator, f"{folder} as it was is now {set_aside(folder, f'earlier-{folder.name}')}")
        for name in RESULTS[1:]:  # which a card would tell of the new model
            (self.output_dir / name).unlink(missing_ok=True)

    def _is_saved(self, folder: Path) -> bool:
        """Whether the model there has seen this update, and is the best or the last one as asked for."""
        record = recorded(self.output_dir / "training.json")
        found = record.get("updates"), record.get("arguments", {}).get("load_best_model_at_end")
        wanted = self.progress.update, self.args.load_best_model_at_end
        return found == wanted and any(folder.glob("*.safetensors"))

    def record(self) -> dict[str, Any]:
        """What a model card should know of the training."""
        progress = self.progress
        return {
            "updates": progress.update,
            "samples_per_update": self.samples_per_update,
            "tokens_per_update": self.samples_per_update * self.task.tokens_per_sample,
            "best_update": progress.best_update,
            "best_validation": progress.best,
            "stopped_early": progress.stopped_early,
            "seconds": round(progress.seconds, 1),
            **self._truncated(),
        }
