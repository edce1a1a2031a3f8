# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""How far does the elastic model get in a few minutes of a GPU, beside Llama and Mamba-2 of its size?

    python -m benchmarks.gpu_train --train_file novels-train.parquet --text_file novels-validation.parquet \\
        --seconds 60 [--configs hub_configs/essm-elastic-21m] [--alone 4 2] [--save runs/gpu_train]

Byte-level language models read the same windows of one text in the same order: the elastic one of each configuration,
trained at all its sizes, that configuration cut to K channels and trained at this size alone, and Llama and Mamba-2 of
as many parameters. Muon, bf16 autocast over fp32 weights; the learning rate rises, then falls along a cosine to zero.
At the end held-out bits per byte are measured, of the elastic models at every size.

Small models leave a GPU waiting for its next call. So a whole update is captured as a CUDA graph and replayed, several
times as fast: data, budgets, rates and losses lie on the device, in tables that the graph walks through. A CPU makes
the same updates one by one. A model that fails is noted with its error, and the next one begins. With the --out of an
earlier run of the same settings only those models run that it lacks.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from essm_train.baselines.models import BaselineForCausalLM
from essm_train.baselines.sizes import count_parameters, matched_baseline
from essm_train.data.blocks import to_stream
from essm_train.data.documents import read_files
from essm_train.data.tokens import ByteEncoder
from essm_train.files import claim, filling, write_json
from essm_train.measure.evaluation import open_text
from essm_train.run.steps import Muon, make_scheduler, update
from modeling_essm import ESSMConfig, ESSMForCausalLM
from modeling_essm.loading_essm import truncated_config
from modeling_essm.spectral_budget import ResolvedBudget, of_each_layer
from modeling_essm.training.budget_dropout import BudgetSchedule, Part, budget_losses, budget_schedule

from . import common

WARMUP = 100  # updates
DISTILLATION = 0.5  # as train_clm has it for "family"
AT_ONCE = 50  # updates between two looks at the device
TIMED = 10  # updates
CONFIGS = [Path(__file__).parent.parent / "hub_configs" / name for name in ("essm-elastic-21m", "essm-elastic-130m")]
# Architecture of the peers, and their layers for one of the ES-SSM: Mamba-2 has no feed-forward layers.
PEERS = {"llama": ("transformer", 1), "mamba2": ("mamba2", 2), "matmamba": ("matmamba", 2)}
ALONE = "alone"


class Task(NamedTuple):
    """What is trained: "elastic", ALONE or a key of PEERS; the configuration, of a peer that whose size it has."""

    label: str
    kind: str
    config: ESSMConfig


def tasks_of(args: argparse.Namespace) -> list[Task]:
    """In the order in which they run. Raises ValueError for a size that a configuration does not have."""
    small = {"hidden_size": 32, "num_hidden_layers": 2, "filter_length": 512} if args.quick else {}
    found = []
    for folder in args.configs:
        config = common.configuration(folder, **small)
        config.budget_presets = config.spectral_budget = None  # those of other weights
        found += [Task(folder.name, "elastic", config)] if "elastic" in args.models else []
        for K in args.alone:
            cut = truncated_config(config, of_each_layer(K, config.capacities, "--alone"))
            found.append(Task(f"{folder.name}-{ALONE}-{K}", ALONE, cut))
        found += [Task(f"{folder.name}-{name}", name, config) for name in PEERS if name in args.models]
    return found


def make_model(task: Task) -> Any:
    torch.manual_seed(0)
    if task.kind not in PEERS:
        return ESSMForCausalLM(task.config)
    (architecture, times), own = PEERS[task.kind], task.config
    target, layers = count_parameters(own, ESSMForCausalLM), times * own.num_hidden_layers
    config = matched_baseline(architecture, target, hidden_size=own.hidden_size, num_hidden_layers=layers)
    model: Any = BaselineForCausalLM(config)
    if architecture == "transformer":  # inside a graph the library would write out the mask, which takes other kernels
        AttentionInterface.register("sdpa_without_mask", sdpa_attention_forward)
        model.model.backbone.set_attn_implementation("sdpa_without_mask")
    return model


class Windows:
    """Which parts of a text the updates read: random ones, or its blocks once each, but for an incomplete last batch.

    Blocks are those of `essm_train.data.blocks`: the last token of one is the first of the next, where it is context.
    """

    def __init__(self, stream: Tensor, length: int, batch: int, one_pass: bool):
        self.stream, self.length, self.batch, self.updates = stream, length, batch, 0
        if one_pass:
            count = (len(stream) - 1) // (length - 1)
            self.order, self.updates = torch.randperm(count, generator=torch.Generator().manual_seed(0)), count // batch

    def starts(self, updates: range) -> Tensor:
        """(n, B) int64 for these updates, which are consecutive."""
        if self.updates:
            chosen = self.order[updates.start * self.batch : updates.stop * self.batch]
            return chosen.view(-1, self.batch) * (self.length - 1)
        drawn = torch.Generator().manual_seed(updates.start)
        return torch.randint(len(self.stream) - self.length + 1, (len(updates), self.batch), generator=drawn)


class Run:
    """A model in training. `step` makes the next update of the tables, which `fill` writes.

    Attributes:
        schedule: of the budgets of a model that has any, else None.
        parts: those of every update, but for their weights and the budgets of rows.
        counter: (1,) int64, the row of the tables that is next.
        starts, budgets, weights, rates, losses: the tables, of AT_ONCE rows: (.., B) int64 of windows, (.., B) int64 of
            the part with a budget for each row, (.., parts), (..,), and (..,) mean nats at the full budget.
    """

    def __init__(self, task: Task, windows: Windows, learning_rate: float, device: torch.device):
        self.windows, self.learning_rate, self.device = windows, learning_rate, device
        self.schedule: BudgetSchedule | None = None
        if task.kind not in PEERS:
            name = "full" if task.kind == ALONE else "family"
            self.schedule = budget_schedule(name, task.config.num_spectral_channels, 0)
            task.config.trained_budgets = [*self.schedule.budgets]
        elif task.kind == "matmamba":  # every size in every update, on labels alone
            self.schedule = dataclasses.replace(budget_schedule("sandwich", 8, 0), budgets=(1, 2, 4, 8))
        self.parts = self.parts_of(0, 1)
        self.model = make_model(task).to(device).train()
        self.parameters = [*self.model.parameters()]
        self.stream = windows.stream.to(device)
        self.within = torch.arange(windows.length, device=device)
        self.counter = torch.zeros(1, dtype=torch.int64, device=device)
        self.starts = torch.zeros(AT_ONCE, windows.batch, dtype=torch.int64, device=device)
        self.budgets = torch.ones_like(self.starts)
        self.weights = torch.zeros(AT_ONCE, len(self.parts), device=device)
        self.rates, self.losses = torch.zeros(2, AT_ONCE, device=device)
        rate_now = torch.zeros((), device=device)
        self.optimizer = Muon(self.model, rate_now, capturable=device.type == "cuda")
        self.step: Callable[[], object] = self.update

    def parts_of(self, number: int, of: int) -> tuple[Part, ...]:
        """Of an update, always as many; those of one budget in any order, since they weigh the same."""
        if self.schedule is None:
            return (Part(0, slice(None), 1.0, 1.0),)
        return dataclasses.replace(self.schedule, updates=of).parts(number, self.windows.batch, together=True)

    def fill(self, updates: range, of: int) -> None:
        """The tables of at most AT_ONCE consecutive updates, of so many in all."""
        self.counter.zero_()
        parts = [self.parts_of(n, of) for n in updates]
        tables = {self.starts: self.windows.starts(updates)}
        # Of an optimizer that stands in: a scheduler wraps the step of its own, which a graph must not see.
        factor = make_scheduler(torch.optim.SGD([torch.zeros(1)], 1.0), WARMUP, [(0, of)]).lr_lambdas[0]
        tables[self.rates] = torch.tensor([self.learning_rate * factor(n) for n in updates])
        tables[self.weights] = torch.tensor([[part.weight for part in some] for some in parts])
        if isinstance(parts[0][-1].budget, tuple):
            tables[self.budgets] = torch.tensor([some[-1].budget for some in parts])
        for table, rows in tables.items():
            table[: len(updates)] = rows.to(self.device)

    def row(self, table: Tensor) -> Tensor:
        return table.index_select(0, self.counter)[0]

    def update(self) -> None:
        """The next update of the tables. Nothing in it waits for the device, or depends on a value there."""
        ids = self.stream[self.row(self.starts)[:, None] + self.within].long()
        for group in self.optimizer.param_groups:
            group["lr"].copy_(self.row(self.rates))

        parts = [part._replace(weight=weight) for part, weight in zip(self.parts, self.row(self.weights))]

        def forward(part: Part) -> Any:
            output = outputs_of(self.model, ids, self.resolved(part))
            if part is parts[0]:
                self.losses.index_copy_(0, self.counter, output.loss.detach()[None])
            return output

        is_family = self.schedule is not None and self.schedule.name == "family"
        weight = DISTILLATION if is_family else 0.0
        losses = budget_losses(forward, parts, labels=ids, distillation_weight=weight)
        update(self.optimizer, losses, self.parameters, check=lambda *_: None)
        self.counter.add_(1)

    def resolved(self, part: Part) -> int | ResolvedBudget | None:
        """What the model is told of a part."""
        if self.schedule is None:
            return None
        if not isinstance(part.budget, tuple):
            return part.budget
        largest = self.schedule.budgets[-2]  # of any row in any update: a graph has one shape
        layers = tuple(min(largest, held) for held in self.model.config.capacities)
        return ResolvedBudget(layers, self.row(self.budgets), (*part.budget, largest))

    def capture(self) -> float:
        """Make `step` a replay, on a GPU, and leave the model as new; the seconds that an update takes."""
        new = [p.detach().clone() for p in self.parameters]
        self.fill(range(1), 1)
        if self.device.type == "cuda":
            self.side = torch.cuda.Stream()
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side):  # constants are made, kernels chosen and moments laid out
                for _ in range(2):
                    self.update()
            self.wait()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=self.side):
                self.update()
            self.step = self.graph.replay
        self.step()
        self.wait()
        begun = time.monotonic()
        for _ in range(TIMED):
            self.step()
        self.wait()
        seconds = (time.monotonic() - begun) / TIMED
        with torch.no_grad():
            for p, value in zip(self.parameters, new):
                p.copy_(value)
            for state in self.optimizer.state.values():
                for value in state.values():
                    value.zero_()
        return seconds

    def train(self, updates: int | None, seconds: float | None, tell: Callable[[str], None]) -> dict[str, Any]:
        """So many updates, but no more than one pass has and those seconds allow, which is settled before the first.

        Raises:
            FloatingPointError: a loss is not finite.
        """
        started = told = time.monotonic()
        one = self.capture()
        begun = time.monotonic()
        of = max(1, int(min(updates or math.inf, self.windows.updates or math.inf, (seconds or math.inf) / one)))
        tell(f"{of} updates of about {1e3 * one:.1f} ms, after {begun - started:.1f} s")
        curve = []
        for first in range(0, of, AT_ONCE):
            some = range(first, min(of, first + AT_ONCE))
            self.fill(some, of)
            for _ in some:
                self.step()
            loss = float(self.losses[: len(some)].mean()) / math.log(2)  # waits for the device
            if not math.isfinite(loss):
                raise FloatingPointError(f"loss is {loss} in updates {first} to {some.stop - 1}")
            curve.append([some.stop, loss])
            if time.monotonic() - told > 10:
                told = time.monotonic()
                tell(f"{some.stop} updates, {1e3 * (told - begun) / some.stop:.1f} ms each, {loss:.3f} bits")
        taken, tokens = time.monotonic() - begun, of * self.windows.batch * self.windows.length
        record = {"parameters": sum(p.numel() for p in self.parameters), "updates": of, "tokens": tokens}
        record |= {"seconds": taken, "ms_per_update": 1e3 * taken / of, "capture_seconds": begun - started}
        if self.device.type == "cuda":
            record["peak_bytes"] = torch.cuda.max_memory_allocated(self.device)
        return record | {"losses": curve}

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def save(self, folder: Path) -> None:
        """The weights of an ES-SSM, in bf16, as those of hub_configs."""
        weights = {name: value.to("cpu", torch.bfloat16) for name, value in self.model.state_dict().items()}
        with torch.device("meta"):
            rounded = ESSMForCausalLM(self.model.config)
        rounded.load_state_dict(weights, assign=True)
        rounded.tie_weights()
        with filling(folder) as whole:
            rounded.save_pretrained(whole)
            for code in whole.glob("*.py"):  # the installed package runs them
                code.unlink()


def is_done(task: Task, results: dict[str, Any], saved: Path | None) -> bool:
    """Whether an earlier run has the model's bits and, if it is to be saved, its folder, which comes after them."""
    result = results.get(task.label, {})
    whole = saved is None or task.kind in PEERS or (saved / task.label).is_dir()
    return whole and "bits_per_byte" in result and "failed" not in result


def outputs_of(model: Any, ids: Tensor, budget: int | ResolvedBudget | None) -> Any:
    """`loss`, () mean nats of the next byte, and `logits` (B, L, V)."""
    options = {} if budget is None else {"spectral_budget": budget}
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.device.type == "cuda"):
        return model(input_ids=ids, labels=ids, use_cache=False, **options)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    p = common.parser(__doc__, rounds=None)
    p.add_argument("--train_file", type=Path, required=True, help="texts, as essm-train-clm reads them")
    p.add_argument("--text_file", type=Path, required=True, help="held-out texts")
    p.add_argument("--configs", nargs="+", type=common.config_folder, default=CONFIGS, help="folders of ES-SSMs")
    kinds = ["elastic", *PEERS]
    p.add_argument("--models", nargs="*", choices=kinds, default=kinds, help="of each configuration")
    p.add_argument("--alone", nargs="+", type=int, default=[], metavar="K", help="ES-SSMs of K channels, by themselves")
    p.add_argument("--updates", type=common.positive, help="of each model; of several limits the first one ends it")
    p.add_argument("--seconds", type=common.above_zero, help="of training, for each model")
    p.add_argument("--one_pass", action="store_true", help="read every block of the text once")
    p.add_argument("--first_bytes", type=common.positive, help="of the training text; by default all")
    p.add_argument("--batch", type=common.positive, default=16)
    p.add_argument("--length", type=int, default=1024, help="tokens of a window")
    p.add_argument("--learning_rate", type=common.above_zero, default=1.5e-3, help="at its highest")
    p.add_argument("--windows", type=common.positive, default=64, help="held-out windows that are scored")
    p.add_argument("--save", type=Path, help="folder for the ES-SSMs, each in one of its own, in bf16")
    p.add_argument("--limit", type=float, default=math.inf, help="seconds after which no further model begins")
    args = p.parse_args(argv)
    if not (args.updates is not None or args.seconds or args.one_pass):
        p.error("give --updates, --seconds or --one_pass")
    if args.length < 2:
        p.error(f"--length must be at least 2, got {args.length}")
    try:
        tasks = tasks_of(args)
        if len({task.label for task in tasks}) < len(tasks):
            raise ValueError(f"--configs must be folders of different names, got {[*map(str, args.configs)]}")
        held = json.loads(args.out.read_text(encoding="utf-8")) if args.out and args.out.exists() else {}
        results = held.get("results", {})
        tasks = [task for task in tasks if not is_done(task, results, args.save)]
        if args.save:
            claim(args.save, [task.label for task in tasks if task.kind not in PEERS], flag="")
    except ValueError as error:
        p.error(str(error))
    told = ("updates", "seconds", "one_pass", "first_bytes", "batch", "length", "learning_rate", "windows")
    settings = {name: getattr(args, name) for name in told}
    device, report = common.start("gpu_train", args, continues=bool(held), **settings)
    for part in ("machine", "settings") if held else ():
        if held.get(part) != report[part]:
            p.error(f"--out is a report of other {part}, {held.get(part)}: choose another file")
    report["results"] = results
    begun = time.monotonic()
    ids = to_stream(read_files([str(args.train_file)]), ByteEncoder())[0][: args.first_bytes]
    stream = torch.from_numpy(ids.astype("int16"))
    held_out = open_text([str(args.text_file)], ByteEncoder(), args.length, args.windows, args.batch)
    if len(stream) < args.length:
        p.error(f"--length must be within the {len(stream)} bytes of the training text, got {args.length}")
    windows = Windows(stream.to(device), args.length, args.batch, args.one_pass)
    if args.one_pass and not windows.updates:
        p.error(f"--batch must be at most the {len(windows.order)} blocks of the text, got {args.batch}")
    for task in tasks:

        def tell(text: str, label: str = task.label) -> None:
            print(f"{label}: {text}", flush=True)

        if (passed := time.monotonic() - begun) > args.limit:
            results[task.label] = {"failed": f"not begun: {passed:.0f} s had passed"}
            continue
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        try:
            run = Run(task, windows, args.learning_rate, device)
            result = results[task.label] = run.train(args.updates, args.seconds, tell)
            write_json(args.report, report, indent=1)
            budgets = run.schedule.budgets if run.schedule else (None,)
            result["bits_per_byte"] = {str(K): held_out.value(run.model.eval(), K or 1) for K in budgets}
            write_json(args.report, report, indent=1)
            if args.save and task.kind not in PEERS:
                run.save(args.save / task.label)
        except Exception as error:  # out of memory, say
            traceback.print_exc(limit=-4)
            results.setdefault(task.label, {})["failed"] = (
                f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
            )
        run = None  # type: ignore[assignment]
        write_json(args.report, report, indent=1)
        common.table([{"model": task.label} | results[task.label]])
    return common.finish(report, args)


if __name__ == "__main__":
    main()
