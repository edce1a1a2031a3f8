# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What each part of the gated block is worth, beside the paper's block and its peers; results/ablation_protocol.md.

    python -m benchmarks.ablation --train_file novels-train.parquet --validation_file novels-validation.parquet
    python -m benchmarks.ablation --only paper gated llama --updates 500 --processes 2   # Python's own sources
    python -m benchmarks.ablation --table --runs_dir runs/ablation                       # of the runs that are there

A run is a model, a learning rate and a seed: one JSON file in runs_dir, written when the run has ended. A sweep that
was killed goes on when it is started again: finished runs are skipped, others begin anew. Models have as many
parameters as asked for within 3%: widths give way first, then depth.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from modeling_essm import ESSMConfig, ESSMForCausalLM

from . import common

sys.path.append(str(Path(__file__).parents[1] / "train"))

TOLERANCE = 0.03  # of the number of parameters
SEEDS = (0, 1, 2)
BUDGETS = (2, 4, 8)  # and the capacity


# ---------------------------------------------------------------------------------------------------------------------
# What is compared.


@dataclass(frozen=True)
class Row:
    """A model of the table.

    Attributes:
        layers: blocks to begin with. fields: of ESSMConfig, or of BaselineConfig.
        expansion: inner width of the gated block over D. feed_forward: width of its feed-forward layer over D.
        peer: architecture of train/baselines.py instead. hidden_size: of a peer, to begin with.
        rates: learning rates.
    """

    layers: int
    fields: dict[str, Any] = field(default_factory=dict)
    expansion: float = 1.0
    feed_forward: float = 0.0
    peer: str | None = None
    hidden_size: int = 0
    rates: tuple[float, ...] = (3e-3, 6e-3, 1.2e-2)


def _gated(layers: int = 6, expansion: float = 2.0, feed_forward: float = 0.0, **fields: Any) -> Row:
    """The gated block of the protocol with some of its parts exchanged; mixing_size None is the width of a head."""
    base = {"block": "gated", "num_heads": 4, "mixing_size": 1, "conv_kernel_size": 4, "scaling_exponent": 0.0}
    base |= {"num_spectral_channels": 16, "embedding_initializer_range": 0.1}
    return Row(layers, base | fields, expansion, feed_forward)


_PEER_RATES = (1.5e-3, 3e-3, 6e-3)
ROWS: dict[str, Row] = {
    "paper": Row(3, {"num_spectral_channels": 16}),
    "gated": _gated(),
    "gated, d 16": _gated(mixing_size=16),
    "gated, inner D": _gated(expansion=1.0),
    "gated, inner D, d 16": _gated(expansion=1.0, mixing_size=16),
    "gated, inner D, d D/4": _gated(expansion=1.0, mixing_size=None),
    "gated, inner D, d D": _gated(expansion=1.0, mixing_size=None, num_heads=1),
    "gated, inner 3 D": _gated(expansion=3.0),
    "gated, 1 head": _gated(num_heads=1),
    "gated, 8 heads": _gated(num_heads=8),
    "gated, 16 heads": _gated(num_heads=16),
    "gated, 4 blocks": _gated(layers=4),
    "gated, 9 blocks": _gated(layers=9),
    "gated, FFN": _gated(layers=3, feed_forward=8 / 3),
    "gated, no convolution": _gated(conv_kernel_size=0),
    "gated, exponent 1/16": _gated(scaling_exponent=1 / 16),
    "gated, exponent 1/4": _gated(scaling_exponent=1 / 4),
    "gated, no gating": _gated(gating="none"),
    "gated, capacity 8": _gated(num_spectral_channels=8),
    "gated, capacity 32": _gated(num_spectral_channels=32),
    "gated, embeddings 0.02": _gated(embedding_initializer_range=0.02),
    "llama": Row(5, peer="transformer", hidden_size=112, rates=_PEER_RATES),
    # The library's own scale of new weights for Mamba-2.
    "mamba2": Row(4, {"initializer_range": 0.1}, peer="mamba2", hidden_size=160, rates=_PEER_RATES),
    "s4d": Row(3, peer="s4d", hidden_size=152, rates=_PEER_RATES),
}


def matched_config(row: Row, target: int) -> Any:
    """The configuration with that many parameters, to 3%, whose shape is nearest to the row's in log distance.

    Of an ES-SSM the inner width is what its heads divide, and the width D is even; both, then the depth, give way.

    Raises:
        ValueError: there is none.
    """
    if row.peer is not None:
        from baselines import matched_baseline

        sizes = {"hidden_size": row.hidden_size, "num_hidden_layers": row.layers}
        return matched_baseline(row.peer, target, tolerance=TOLERANCE, **sizes, **row.fields)
    gated = row.fields.get("block") == "gated"
    step = math.lcm(2, row.fields["num_heads"] * (row.fields["mixing_size"] or 1)) if gated else 2

    def make(hidden: int, inner: int, layers: int) -> ESSMConfig:
        sizes = {"hidden_size": hidden, "num_hidden_layers": layers}
        if gated:
            sizes |= {"inner_size": inner, "intermediate_size": 8 * round(row.feed_forward * hidden / 8)}
            sizes["mixing_size"] = row.fields["mixing_size"] or inner // row.fields["num_heads"]
        return ESSMConfig(**row.fields | sizes)

    @functools.cache
    def law(hidden: int, inner: int) -> tuple[int, int]:
        one, two = (count_parameters(make(hidden, inner, layers)) for layers in (1, 2))
        return 2 * one - two, two - one  # of all layers together, of each

    def count(hidden: int, inner: int, layers: int) -> int:
        fixed, each = law(hidden, inner)
        return fixed + layers * each

    def first(reaches: Callable[[int], bool]) -> int:
        """The first even number for which a monotone condition holds."""
        low, high = 1, 2
        while not reaches(2 * high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if reaches(2 * middle) else (middle, high)
        return 2 * high

    def follows(hidden: int) -> int:
        return max(step, round(row.expansion * hidden / step) * step) if gated else hidden

    found: list[tuple[float, int, int, int]] = []  # distance, then sizes
    depths = range(1, 2 * row.layers + 1)
    for layers in sorted(depths, key=lambda n: abs(math.log(n / row.layers))):
        depth = math.log(layers / row.layers) ** 2
        if found and depth >= min(found)[0]:
            break
        middle = first(lambda D, layers=layers: count(D, follows(D), layers) >= target)
        around = range(follows(middle) - step, follows(middle) + step + 1, step)
        for inner in [width for width in around if width > 0] if gated else [0]:
            hidden = first(lambda D, inner=inner, layers=layers: count(D, inner or D, layers) >= target)
            for D in (hidden - 2, hidden):
                if D >= 2 and abs(count(D, inner or D, layers) / target - 1) <= TOLERANCE:
                    ratio = math.log((inner or D) / (row.expansion * D))
                    found.append((ratio**2 + depth, D, inner or D, layers))
    if not found:
        raise ValueError(f"no model of this shape has {target:,} parameters to {TOLERANCE:.0%}: {row}")
    _, hidden, inner, layers = min(found)
    return make(hidden, inner, layers)


def count_parameters(config: ESSMConfig) -> int:
    """A tied matrix counts once; allocates nothing."""
    with torch.device("meta"):
        return sum(p.numel() for p in ESSMForCausalLM(config).parameters())


# ---------------------------------------------------------------------------------------------------------------------
# One run.


@dataclass(frozen=True)
class Run:
    """A row at a learning rate and a seed."""

    name: str
    rate: float
    seed: int

    @property
    def file(self) -> str:
        words = "".join(c if c.isalnum() else "-" for c in self.name).replace("--", "-")
        return f"{words}-rate{self.rate:g}-seed{self.seed}.json"


@dataclass(frozen=True)
class Settings:
    """What all runs of a table have in common; training is otherwise at the defaults of train_clm.py."""

    train_file: tuple[str, ...] | None
    validation_file: tuple[str, ...] | None
    parameters: int
    updates: int
    batch_size: int = 4
    block_size: int = 512
    validation_blocks: int = 64
    filter_length: int = 4096
    device: str = "cpu"

    def arguments(self, rate: float = 0.0, seed: int = 0) -> Any:
        """A run as arguments of train_clm.py, without the model's sizes."""
        from train_clm import CLMArguments

        return CLMArguments(
            train_file=self.train_file,
            validation_file=self.validation_file,
            block_size=self.block_size,
            filter_length=self.filter_length,
            validation_blocks=self.validation_blocks,
            sweep_blocks=self.validation_blocks,
            max_steps=self.updates,
            per_device_batch_size=self.batch_size,
            learning_rate=rate,
            warmup_steps=50,
            weight_decay=0.1,
            adam_beta2=0.95,
            max_grad_norm=1.0,
            budget_schedule="discrete",
            seed=seed,
        )


@functools.cache
def load(settings: Settings) -> tuple[Any, dict[str, Any]]:
    """The text, and what must be the same of a run that is found: settings, and hashes of what is read.

    In which folder the text lies is not part of it.
    """
    from text_data import ByteEncoder, load_text

    text = load_text(settings.arguments(), ByteEncoder())
    values = {k: v for k, v in dataclasses.asdict(settings).items() if not k.endswith("_file")}
    held_out = hashlib.sha256(text.held_out.numpy().tobytes()).hexdigest()
    data = {"data": text.description, "training_text": text.fingerprint, "validation_blocks_hash": held_out}
    return text, values | data


def perform(settings: Settings, run: Run, path: Path) -> dict[str, Any]:
    """Train on one thread, measure, write the file in one move, return what it holds."""
    from engine import capacity_of, write_json
    from samples import MapSamples

    with common.threads(1):
        text, values = load(settings)
        config = matched_config(ROWS[run.name], settings.parameters)
        torch.manual_seed(run.seed)
        model = make_model(config, settings.filter_length).to(settings.device)
        record: dict[str, Any] = {"model": run.name, "rate": run.rate, "seed": run.seed}
        record |= {"settings": values, "definition": definition(run.name)}
        record |= {"parameters": model.num_parameters(), "sizes": sizes_of(config)}
        source = MapSamples(text.source.samples, run.seed)  # the order that train_clm.py has at this seed
        record |= train(model, source, settings.arguments(run.rate, run.seed))
        budgets = sorted({min(K, capacity_of(model)) for K in (*BUDGETS, capacity_of(model))})
        record["bits_per_byte"] = None if record["diverged"] else score(model, text.held_out, budgets)
        record["machine"] = common.machine(torch.device(settings.device))
    write_json(path, record)
    return record


def make_model(config: Any, filter_length: int) -> nn.Module:
    """A new language model of bytes in fp32, with filters of that length."""
    if isinstance(config, ESSMConfig):
        return ESSMForCausalLM(ESSMConfig.from_dict(config.to_dict(), filter_length=filter_length)).float()
    from baselines import BaselineForCausalLM

    return BaselineForCausalLM(config).float()


def train(model: nn.Module, source: Any, args: Any) -> dict[str, Any]:
    """All updates. The time is that of the process's processor, in updates alone: data and scoring do not count."""
    from budget_dropout import budget_losses
    from engine import capacity_of, make_schedule, parameter_groups, run_at_budget
    from learning_rate import make_scheduler

    schedule = make_schedule(args, capacity_of(model))
    groups, betas = parameter_groups(model, args.weight_decay), (0.9, args.adam_beta2)
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=betas, fused=True)
    scheduler = make_scheduler(optimizer, args.warmup_steps, [[0, args.max_steps]])
    seconds, recent, done = 0.0, [], 0
    model.train()
    for update in range(args.max_steps):
        blocks = source.load(source.draw(args.per_device_batch_size))
        ids = torch.from_numpy(np.stack(blocks).astype(np.int64)).to(model.device)
        started = time.process_time()
        loss = 0.0
        forward = functools.partial(run_at_budget, model, {"input_ids": ids, "labels": ids})
        for part in budget_losses(forward, schedule(update)):
            part.backward()
            loss += part.item()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm))
        if not math.isfinite(loss + norm):
            break
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        seconds, done = seconds + time.process_time() - started, update + 1
        recent = [*recent[-49:], loss]
    tokens = done * args.per_device_batch_size * args.block_size
    return {
        "diverged": done < args.max_steps,
        "updates_done": done,
        "training_loss": statistics.fmean(recent) if recent else None,  # nats, of the last 50 updates
        "cpu_seconds": seconds,
        "tokens_per_cpu_second": tokens / seconds if seconds else None,
    }


def score(model: nn.Module, held_out: torch.Tensor, budgets: Sequence[int]) -> dict[str, float]:
    """Bits per byte of the blocks at every budget, as the final sweep of train_clm.py has them."""
    from budget_sweep import num_scored, total_nats
    from text_data import text_labels

    labels = text_labels(held_out)
    scale = 1 / (math.log(2) * num_scored(labels))
    return {str(K): total_nats(model.eval(), held_out, labels, K, 8) * scale for K in budgets}


def definition(name: str) -> dict[str, Any]:
    """What makes a row, but for its rates, as JSON gives it back."""
    return json.loads(json.dumps({k: v for k, v in dataclasses.asdict(ROWS[name]).items() if k != "rates"}))


def sizes_of(config: Any) -> dict[str, Any]:
    names = ("hidden_size", "num_hidden_layers", "inner_size", "num_heads", "mixing_size", "intermediate_size")
    names += ("num_spectral_channels", "state_size")
    return {name: getattr(config, name) for name in names if hasattr(config, name)}


# ---------------------------------------------------------------------------------------------------------------------
# All runs.


def read_run(path: Path) -> dict[str, Any] | None:
    """What the file of a finished run holds; None if there is none."""
    return json.loads(path.read_text()) if path.exists() else None


def check_run(path: Path, record: dict[str, Any], settings: dict[str, Any]) -> None:
    """Raises ValueError if a run that was found is not one of this table."""
    wanted = settings | {"definition": definition(record["model"])}
    held = record["settings"] | {"definition": record["definition"]}
    changed = [f"{k} was {held.get(k)!r} and is now {wanted[k]!r}" for k in wanted if held.get(k) != wanted[k]]
    if changed:
        raise ValueError(f"{path} is of another table: {', '.join(changed)}; choose another --runs_dir, or delete it")


def sweep(settings: Settings, runs: Sequence[Run], folder: Path, processes: int) -> None:
    """Perform the runs that are not there yet.

    Raises:
        ValueError: a run was found that has other settings, or a model cannot be made; before any work.
    """
    _, values = load(settings)
    for name in dict.fromkeys(run.name for run in runs):
        matched_config(ROWS[name], settings.parameters)
    waiting = []
    for run in runs:
        if (record := read_run(folder / run.file)) is None:
            waiting.append(run)
        else:
            check_run(folder / run.file, record, values)
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{len(runs) - len(waiting)} of {len(runs)} runs are there", flush=True)
    for i, record in enumerate(_performed(settings, waiting, folder, processes), 1):
        bits = record["bits_per_byte"]
        shown = "diverged" if bits is None else " ".join(f"K={K} {value:.4f}" for K, value in bits.items())
        head = f"{i}/{len(waiting)} {record['model']}, rate {record['rate']:g}, seed {record['seed']}"
        print(f"{head}: {shown} ({record['cpu_seconds']:.0f} CPU s)", flush=True)


def _performed(settings: Settings, runs: list[Run], folder: Path, processes: int) -> Iterator[dict[str, Any]]:
    if processes == 1:
        for run in runs:
            yield perform(settings, run, folder / run.file)
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(perform, settings, run, folder / run.file) for run in runs]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def collect(folder: Path) -> list[dict[str, Any]]:
    """The records of a folder. Raises ValueError if there are none, or they have different settings."""
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("[!.]*-seed*.json"))]
    if not records:
        raise ValueError(f"{folder} holds no finished run")
    for record in records:
        if record["settings"] != records[0]["settings"]:
            raise ValueError(
                f"{folder} holds runs of different settings: {record['settings']} {records[0]['settings']}"
            )
    return records


def summarise(records: list[dict[str, Any]]) -> dict[str, Any]:
    """One model at its best rate, that of the lowest mean over budgets and the seeds that all its rates have.

    A diverged run rules its rate out.
    """
    by_rate: dict[float, list[dict[str, Any]]] = {}
    for record in sorted(records, key=lambda r: (r["rate"], r["seed"])):
        by_rate.setdefault(record["rate"], []).append(record)
    shared = set.intersection(*({run["seed"] for run in runs} for runs in by_rate.values()))
    means = {
        rate: None
        if any(run["diverged"] for run in runs)
        else statistics.fmean(
            statistics.fmean(run["bits_per_byte"].values()) for run in runs if not shared or run["seed"] in shared
        )
        for rate, runs in by_rate.items()
    }
    first = records[0]
    result = {name: first[name] for name in ("model", "definition", "parameters", "sizes")}
    result |= {"rates": {f"{rate:g}": mean for rate, mean in means.items()}, "best_rate": None}
    whole = {rate: mean for rate, mean in means.items() if mean is not None}
    if not whole:
        return result
    best = min(whole, key=lambda rate: whole[rate])
    runs = by_rate[best]
    ends = (min(means), max(means))
    return result | {
        "best_rate": best,
        "at_the_edge": best in ends,  # a rate beyond may be better still
        "seeds": [run["seed"] for run in runs],
        "by_seed": {str(run["seed"]): run["bits_per_byte"] for run in runs},
        "bits_per_byte": {K: _mean([run["bits_per_byte"][K] for run in runs]) for K in runs[0]["bits_per_byte"]},
        "tokens_per_cpu_second": _mean([run["tokens_per_cpu_second"] for run in runs]),
        "cpu_seconds": _mean([run["cpu_seconds"] for run in runs]),
        "cpus": sorted({run["machine"]["cpu"] for run in runs}),
    }


def _mean(values: Sequence[float]) -> dict[str, float]:
    return {"mean": statistics.fmean(values), "deviation": statistics.stdev(values) if len(values) > 1 else 0.0}


def difference(result: dict[str, Any], other: dict[str, Any]) -> dict[str, float] | None:
    """Bits per byte at the full budget above the other model's, seed by seed; None where they share no seed."""
    mine, theirs = (
        {seed: list(bits.values())[-1] for seed, bits in r.get("by_seed", {}).items()} for r in (result, other)
    )
    shared = [mine[seed] - theirs[seed] for seed in mine if seed in theirs]
    return _mean(shared) if shared else None


def full(result: dict[str, Any]) -> float:
    """Mean bits per byte at the full budget; infinite if every rate diverged."""
    bits = result.get("bits_per_byte")
    return list(bits.values())[-1]["mean"] if bits else math.inf


def print_table(results: list[dict[str, Any]]) -> None:
    def shown(value: dict[str, float] | None, sign: str = "") -> str:
        return f"{value['mean']:{sign}.4f}±{value['deviation']:.4f}" if value else "-"

    rows = []
    for r in results:
        rate = "diverged" if r["best_rate"] is None else f"{r['best_rate']:g}" + "*" * r["at_the_edge"]
        s = r["sizes"]
        shape = f"{s['hidden_size']}x{s['num_hidden_layers']}"
        speed = f"{r['tokens_per_cpu_second']['mean']:,.0f}" if "cpus" in r else "-"
        bits = r.get("bits_per_byte", {})
        cells = [bits.get(str(K)) for K in BUDGETS] + [(list(bits.values()) or [None])[-1]]
        row = [r["model"].replace(" ", "_"), f"{r['parameters']:,}", shape, rate, len(r.get("seeds", []))]
        rows.append([*row, *map(shown, cells), shown(r["against_gated"], "+"), speed])
    budgets = " ".join(f"K={K}" for K in BUDGETS)
    common.table(f"model parameters DxL rate seeds {budgets} full full-gated tokens/CPU_s", rows)
    print("* the best rate is the smallest or the largest tried; full-gated: the difference, seed by seed")


def targets_of(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The goals for the best gated model, as far as there are the models that they compare with."""
    found = {r["model"]: r for r in results if r["best_rate"] is not None}
    gated = [r for name, r in found.items() if name.startswith("gated")]
    if not gated:
        return []
    best = min(gated, key=full)
    bits, name = {K: value["mean"] for K, value in best["bits_per_byte"].items()}, best["model"]
    targets = [
        common.target(f"{name}: bits per byte at K={K} over full", bits[K] / full(best), most=most)
        for K, most in (("4", 1.007), ("2", 1.015))
    ]
    for peer, most in (("mamba2", 1.0), ("llama", None)):
        if peer in found:
            limit = full(found[peer]) if most else full(found[peer]) - 0.1
            targets.append(common.target(f"{name}: bits per byte against {peer}", full(best), most=limit))
    return targets


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Perform what is missing, then print the table and write it, with every rate and the spread over seeds."""
    p = common.parser(__doc__)
    p.set_defaults(device="cpu")
    p.add_argument("--train_file", nargs="+", help="text to train on; by default Python's own sources")
    p.add_argument("--validation_file", nargs="+", help="held-out text; by default the end of train_file")
    p.add_argument("--only", nargs="+", metavar="NAME", choices=ROWS, help=f"models, out of {[*ROWS]}")
    p.add_argument("--updates", type=int, default=500)
    p.add_argument("--parameters", type=int, default=800_000, help="of every model, to 3%%")
    p.add_argument("--rates", type=float, nargs="+", help="learning rates, instead of the three of each model")
    p.add_argument("--seeds", type=int, nargs="+", default=[*SEEDS])
    p.add_argument("--processes", type=int, default=1, help="runs at a time, each on one thread")
    p.add_argument("--runs_dir", type=Path, default=Path("runs/ablation"), help="where the file of every run goes")
    p.add_argument("--table", action="store_true", help="run nothing: the table of the runs that are in runs_dir")
    args = p.parse_args(argv)
    for name in ("updates", "parameters", "processes"):
        if getattr(args, name) < 1:
            p.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    names = args.only or [*ROWS]
    if not args.table:
        size = (60_000, min(args.updates, 3)) if args.quick else (args.parameters, args.updates)
        small = {"batch_size": 2, "block_size": 64, "validation_blocks": 4, "filter_length": 512} if args.quick else {}
        device = str(common.pick_device(args.device))
        files = [None if paths is None else tuple(paths) for paths in (args.train_file, args.validation_file)]
        settings = Settings(*files, *size, **small, device=device)
        # Seed by seed, so that a sweep cut short is a whole table of fewer seeds.
        runs = [
            Run(name, rate, seed)
            for seed, name in itertools.product(args.seeds, names)
            for rate in args.rates or ROWS[name].rates
        ]
        sweep(settings, runs, args.runs_dir, args.processes)
    records = [record for record in collect(args.runs_dir) if record["model"] in names]
    device, report = common.start("ablation", args, **records[0]["settings"])
    by_name = {name: [r for r in records if r["model"] == name] for name in names}
    report["results"] = sorted((summarise(runs) for runs in by_name.values() if runs), key=full)
    gated = next((r for r in report["results"] if r["model"] == "gated"), {})
    for result in report["results"]:
        result["against_gated"] = difference(result, gated)
    print_table(report["results"])
    report["targets"] = targets_of(report["results"])
    return common.finish(report, args, device)


if __name__ == "__main__":
    main()
