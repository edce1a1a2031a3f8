# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The field's probes of memory on the paper's block, the elastic block and its peers, of equal size, at every budget.

    python -m benchmarks.memory_probes --processes 2
    python -m benchmarks.memory_probes --tasks mqar mqar:length=128,pairs=8 --only elastic mamba2 --seeds 0
    python -m benchmarks.memory_probes --tasks recall --updates 2000 --runs_dir runs/recall     # and a figure
    python -m benchmarks.memory_probes --table --runs_dir runs/memory_probes

Every update has new samples, the same for every model and rate at a seed; all runs of a task are measured on the same
held-out samples. The error is that where something is asked: the share of wrong tokens, or of noise the mean squared
error relative to the variance, so that 1 is what knowing nothing gives. One run trains all budgets of an ES-SSM: in
every batch a quarter of the rows has the full one, and each other quarter one that is drawn.

Tasks are pure functions of their parameters and of the generator. Those of tokens give inputs (n, L) int64 in
[0, vocabulary) and targets (n, L) int64: the token that the output AT that position shall be, not the next one, or
IGNORED where nothing is asked. Delays of noise give float32 (n, L) of variance 1, and targets that are NaN there.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib import colormaps
from matplotlib.figure import Figure
from torch import Tensor, nn

from essm_train.arguments import RunArguments
from essm_train.baselines.config import BaselineConfig
from essm_train.baselines.models import BaselineForCausalLM, BaselinePreTrainedModel
from essm_train.files import write_figure
from essm_train.models import capacity_of, run_at_budget
from modeling_essm import ESSMConfig, ESSMForCausalLM, ESSMModel
from modeling_essm.training.budget_dropout import Part, clip_budgets

from . import common, sweeps
from .matched_models import TOLERANCE, Row, matched_config
from .sweeps import Run, Sweep

BUDGETS = (1, 2, 3, 4, 6, 8)
PAIRS = (2, 4, 8, 12, 16, 24, 32, 48)  # that recall is measured with
HELD = 0.9  # of the values, where that many pairs count as held
HELD_OUT = 2**32  # seed of the samples that errors are measured on; those of training have others
METRIC = "error"
IGNORED = -100  # as torch's cross-entropy has it
Samples = tuple[np.ndarray, np.ndarray]

_ELASTIC = {"block": "elastic", "num_spectral_channels": 8}
_RATES, _PEER_RATES = (3e-3, 6e-3), (2e-3, 6e-3)
ROWS: dict[str, Row] = {
    "paper": Row(2, {"num_spectral_channels": 32}, rates=_RATES),
    "elastic": Row(2, _ELASTIC, expansion=2.0, rates=_RATES),
    "elastic, memory": Row(2, _ELASTIC, expansion=2.0, memory=0.5, rates=_RATES),
    "elastic, softmax": Row(2, _ELASTIC | {"gating": "softmax"}, expansion=2.0, rates=_RATES),
    "llama": Row(2, peer="transformer", hidden_size=72, rates=_PEER_RATES),
    "mamba2": Row(2, {"initializer_range": 0.1}, peer="mamba2", hidden_size=96, rates=_PEER_RATES),
    "s4d": Row(3, peer="s4d", hidden_size=64, rates=_PEER_RATES),
}


def _distinct(rng: np.random.Generator, weights: np.ndarray, count: int, size: int) -> np.ndarray:
    """(count, size) distinct indices of `weights` a row, drawn one after the other in proportion to them.

    The largest of log(weight) + Gumbel noise, in descending order, are such a draw.
    """
    keys = np.log(weights) + rng.gumbel(size=(count, len(weights)))
    return np.argsort(-keys, axis=1)[:, :size]


def _check(task: Any, **ranges: tuple[float, float]) -> None:
    """Raises ValueError for a number of the task outside its range."""
    for name, (low, high) in ranges.items():
        if not low <= (value := getattr(task, name)) <= high:
            raise ValueError(f"{name} must be in [{low:g}, {high:g}], got {value} in {task}")


@dataclass(frozen=True)
class AssociativeRecall:
    """MQAR of Zoology (Arora et al. 2023, arXiv 2312.04927): keys with values, then every key once, in any order.

        k1 v1 k2 v2 .. | .. k2 ? .. k1 ? ..       the output at a key of the second part is its value

    Keys are from the lower half of the vocabulary, without 0, values from the upper half, both without repetition. In
    the room after the pairs every second position can hold a key; number i from there (0, 1, ..) with a weight of
    (i + 1)^(power - 1). All other positions there hold random tokens of the whole vocabulary.
    """

    length: int = 32
    pairs: int = 4
    vocabulary: int = 32
    power: float = 0.01

    def __post_init__(self) -> None:
        _check(self, vocabulary=(4, math.inf), pairs=(1, min(self.vocabulary // 2 - 1, self.length // 4)))

    def sample(self, count: int, rng: np.random.Generator) -> Samples:
        half, first = self.vocabulary // 2, 2 * self.pairs
        keys = 1 + _distinct(rng, np.ones(half - 1), count, self.pairs)
        values = half + _distinct(rng, np.ones(self.vocabulary - half), count, self.pairs)
        slots = np.arange(1, (self.length - first) // 2 + 1)
        places = first + 2 * _distinct(rng, slots ** (self.power - 1.0), count, self.pairs)
        inputs = rng.integers(self.vocabulary, size=(count, self.length))
        inputs[:, 0:first:2], inputs[:, 1:first:2] = keys, values
        targets = np.full_like(inputs, IGNORED)
        np.put_along_axis(inputs, places, keys, 1)
        np.put_along_axis(targets, places, values, 1)
        return inputs, targets


@dataclass(frozen=True)
class Recall:
    """Keys with values, then the same keys in another order, each before its value again.

        k1 v1 k2 v2 .. | .. k2 v2 .. k1 v1       the output at a key of the second part is its value

    Keys are distinct tokens of the lower half of the vocabulary, values any of the upper half.
    """

    keys: int = 64
    pairs: int = 32

    def __post_init__(self) -> None:
        _check(self, pairs=(1, self.keys))

    @property
    def vocabulary(self) -> int:
        return 2 * self.keys

    @property
    def length(self) -> int:
        return 4 * self.pairs - 1

    def sample(self, count: int, rng: np.random.Generator) -> Samples:
        keys = _distinct(rng, np.ones(self.keys), count, self.pairs)
        pairs = np.stack([keys, rng.integers(self.keys, self.vocabulary, size=keys.shape)], 2)
        order = _distinct(rng, np.ones(self.pairs), count, self.pairs)
        asked = np.take_along_axis(pairs, order[..., None], 1)
        whole = np.concatenate([pairs, asked], 1).reshape(count, -1)
        targets = np.full((count, self.length), IGNORED)
        targets[:, 2 * self.pairs :: 2] = asked[..., 1]
        return whole[:, :-1], targets


@dataclass(frozen=True)
class SelectiveCopying:
    """Selective copying (Gu and Dao 2023, arXiv 2312.00752): tokens at random places among noise, then in their order.

        . . b . a . . c . | > > >         the outputs at the markers are b a c

    Token 0 is noise and 1 the marker; data are uniform over the others, with repetition. The length holds the markers.
    """

    length: int = 32
    tokens: int = 4
    vocabulary: int = 16

    def __post_init__(self) -> None:
        _check(self, vocabulary=(3, math.inf), tokens=(1, self.length // 2))

    def sample(self, count: int, rng: np.random.Generator) -> Samples:
        context = self.length - self.tokens
        data = rng.integers(2, self.vocabulary, size=(count, self.tokens))
        places = np.sort(_distinct(rng, np.ones(context), count, self.tokens), axis=1)
        inputs = np.zeros((count, self.length), np.int64)
        np.put_along_axis(inputs, places, data, 1)
        inputs[:, context:] = 1
        targets = np.full_like(inputs, IGNORED)
        targets[:, context:] = data
        return inputs, targets


@dataclass(frozen=True)
class InductionHeads:
    """Induction heads (Olsson et al. 2022, as in Gu and Dao 2023): what followed the special token the first time?

        c a * b d a c b * -> b         one question, at the last position

    Token 0 is special: it stands once at a random place, before a token of its own, and at the end. All others are
    uniform over the rest of the vocabulary.
    """

    length: int = 32
    vocabulary: int = 16

    def __post_init__(self) -> None:
        _check(self, length=(3, math.inf), vocabulary=(2, math.inf))

    def sample(self, count: int, rng: np.random.Generator) -> Samples:
        inputs = rng.integers(1, self.vocabulary, size=(count, self.length))
        places, rows = rng.integers(self.length - 2, size=count), np.arange(count)
        inputs[rows, places] = inputs[:, -1] = 0
        targets = np.full_like(inputs, IGNORED)
        targets[:, -1] = inputs[rows, places + 1]
        return inputs, targets


@dataclass(frozen=True)
class NoiseDelay:
    """The delay of Gaussian noise of variance 1: white, or without frequencies above `band` cycles a step.

    Band-limited noise is a window of a period of at least 4 lengths and 8 / band steps, so that nothing comes back:

        x(t) = sum_j a_j cos(2 pi j t / n) + b_j sin(2 pi j t / n),   0 < j <= band n,   a, b ~ N(0, 1 / number of j)
    """

    length: int = 64
    tau: int = 16
    band: float = 0.5

    def __post_init__(self) -> None:
        _check(self, tau=(1, self.length - 1), band=(1e-6, 0.5))

    def sample(self, count: int, rng: np.random.Generator) -> Samples:
        if self.band == 0.5:
            noise = rng.standard_normal((count, self.length))
        else:
            period = 2 ** math.ceil(math.log2(max(4 * self.length, 8 / self.band)))
            number = math.floor(self.band * period)
            a, b = rng.standard_normal((2, count, number)) / math.sqrt(number)
            spectrum = np.zeros((count, period // 2 + 1), complex)
            spectrum[:, 1 : number + 1] = (a - 1j * b) * (period / 2)
            noise = np.fft.irfft(spectrum, period)[:, : self.length]
        inputs = noise.astype(np.float32)
        targets = np.full_like(inputs, np.nan)
        targets[:, self.tau :] = inputs[:, : -self.tau]
        return inputs, targets


Task = AssociativeRecall | Recall | SelectiveCopying | InductionHeads | NoiseDelay
TASKS: dict[str, Task] = {
    "mqar": AssociativeRecall(),
    "recall": Recall(),
    "selective-copying": SelectiveCopying(),
    "induction": InductionHeads(),
    "delay-white": NoiseDelay(),
    "delay-band": NoiseDelay(band=0.05),
}


@dataclass(frozen=True)
class Settings:
    """What all runs of a table have in common.

    Attributes:
        positions: of an update, in as many samples as make them, see `batch_size`. held_out: to measure on, likewise.
        budgets: that an ES-SSM is trained for and measured at.
        quick: short tasks, unless the name of a task says otherwise.
    """

    parameters: int
    updates: int
    positions: int = 2048
    held_out: int = 65_536
    filter_length: int = 4096
    budgets: tuple[int, ...] = BUDGETS
    quick: bool = False
    device: str = "cpu"

    def task(self, name: str) -> Task:
        return sweeps.choose_task(
            TASKS, name, **({"length": 32, "tau": 4, "pairs": 2, "tokens": 2} if self.quick else {})
        )


class Regressor(nn.Module):
    """A number for every position, from (B, L, 2): the signal and a constant one, so that every encoder has a bias."""

    config_class = BaselineConfig  # of the peers

    def __init__(self, config: Any):
        super().__init__()
        self.config, self.elastic = config, isinstance(config, ESSMConfig)
        if self.elastic:
            self.model: nn.Module = ESSMModel(config)
        else:
            whole = BaselinePreTrainedModel(config, causal=True)
            whole.post_init()  # which draws its weights
            self.model = whole.model
        self.head = nn.Linear(config.hidden_size, 1)

    def forward(self, input_features: Tensor, **options: Any) -> Any:
        if self.elastic:
            hidden_states = self.model(input_features=input_features, **options).last_hidden_state
        else:
            hidden_states, _ = self.model(None, input_features, None)
        return SimpleNamespace(logits=self.head(hidden_states).squeeze(-1))


def model_config(row: Row, task: Any, settings: Settings) -> Any:
    """The row's configuration for the task. Raises ValueError if none has as many parameters as asked for."""
    fields: dict[str, Any] = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    noise = isinstance(task, NoiseDelay)
    fields |= {"num_input_features": 2} if noise else {"vocab_size": task.vocabulary}
    fields |= {"filter_length": settings.filter_length} if row.peer is None else {}
    return matched_config(row.with_fields(**fields), settings.parameters, Regressor if noise else None)


def make_model(config: Any) -> nn.Module:
    """A new model in fp32 with `logits`: (B, L, vocabulary) of tokens, or (B, L) of noise."""
    if config.num_input_features is not None:
        return Regressor(config).float()
    return (ESSMForCausalLM(config) if isinstance(config, ESSMConfig) else BaselineForCausalLM(config)).float()


def batch_of(task: Task, count: int, rng: np.random.Generator, device: Any) -> tuple[dict[str, Tensor], Tensor]:
    inputs, targets = (torch.from_numpy(x).to(device) for x in task.sample(count, rng))
    if inputs.is_floating_point():
        return {"input_features": torch.stack([inputs, torch.ones_like(inputs)], -1)}, targets
    return {"input_ids": inputs}, targets


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """() mean over the positions where something is asked: cross-entropy in nats, or the squared error."""
    if targets.is_floating_point():
        return F.mse_loss(logits[~targets.isnan()], targets[~targets.isnan()])
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)


def batch_size(task: Task, positions: int) -> int:
    """Samples that make so many positions, twice as many where little is asked; at least 4, so that smaller sizes are
    among those of an update."""
    return max(4, (1 + isinstance(task, (InductionHeads, Recall))) * positions // task.length)


def tasks_of_updates(task: Task) -> list[Task]:
    """The task itself; recall with all of its pairs, a half, a quarter or an eighth of them."""
    if not isinstance(task, Recall):
        return [task]
    return [dataclasses.replace(task, pairs=-(-task.pairs >> i)) for i in range(4)]


def budgets_of_rows(budgets: Sequence[int], count: int, rng: np.random.Generator) -> Tensor:
    """(count,) int64: of a quarter of the rows the last budget, of each other quarter one of all."""
    return torch.from_numpy(np.array([budgets[-1], *rng.choice(budgets, 3)]).repeat(-(-count // 4))[:count])


def train(model: nn.Module, task: Task, settings: Settings, run: Run) -> dict[str, Any]:
    count, number, tasks = batch_size(task, settings.positions), iter(range(settings.updates)), tasks_of_updates(task)
    budgets = clip_budgets((*settings.budgets, capacity_of(model)), capacity_of(model))
    fields: dict[str, Any] = {"max_steps": settings.updates, "learning_rate": run.rate, "seed": run.seed}

    def next_batch() -> dict[str, Tensor]:
        rng = np.random.default_rng([run.seed, next(number)])
        batch, targets = batch_of(tasks[rng.integers(len(tasks))], count, rng, settings.device)
        return batch | {"labels": targets, "budgets": budgets_of_rows(budgets, count, rng).to(settings.device)}

    def forward(model: nn.Module, batch: dict[str, Tensor], part: Part) -> Any:
        inputs = dict(batch)
        targets, rows = inputs.pop("labels"), inputs.pop("budgets")
        return SimpleNamespace(loss=loss_of(run_at_budget(model, inputs, rows).logits, targets))

    args = RunArguments(**fields, budget_schedule="full")
    length = statistics.fmean(task.length for task in tasks)
    found = sweeps.train(model, next_batch, args, count * length, forward=forward)
    return found | {"trained_budgets": [*budgets]}


@torch.inference_mode()
def score(model: nn.Module, budgets: Sequence[int], task: Task, settings: Settings) -> dict[str, float]:
    size, rng = batch_size(task, settings.positions), np.random.default_rng(HELD_OUT)
    wrong, questions = dict.fromkeys(budgets, 0.0), 0.0
    model.eval()
    for _ in range(math.ceil(batch_size(task, settings.held_out) / size)):
        batch, targets = batch_of(task, size, rng, settings.device)
        noise = targets.is_floating_point()
        asked = ~targets.isnan() if noise else targets != IGNORED
        wanted = targets[asked]
        questions += float(wanted.double().square().sum()) if noise else wanted.numel()
        for K in budgets:
            answers = run_at_budget(model, batch, K).logits[asked]
            errors = (answers - wanted).double().square() if noise else answers.argmax(-1) != wanted
            wrong[K] += float(errors.sum())
    return {str(K): value / questions for K, value in wrong.items()}


def define(settings: Settings, run: Run) -> dict[str, Any]:
    row, task = ROWS[run.name], settings.task(run.task)
    config = model_config(row, task, settings)
    return {"task": {"kind": type(task).__name__} | dataclasses.asdict(task)} | row.definition(config)


def perform(settings: Settings, run: Run) -> dict[str, Any]:
    task = settings.task(run.task)
    config = model_config(ROWS[run.name], task, settings)
    torch.manual_seed(run.seed)
    model = make_model(config).to(settings.device)
    scored = functools.partial(score, task=task, settings=settings)
    trained = train(model, task, settings, run)
    record = sweeps.measure(model, trained, scored, settings.budgets, METRIC, task.length)
    if isinstance(task, Recall) and (errors := record[METRIC]):
        few = [dataclasses.replace(task, pairs=P) for P in PAIRS if task.keys >= P]
        record["error_by_pairs"] = {str(t.pairs): score(model, [*map(int, errors)], t, settings) for t in few}
    return record


def pairs_recalled(result: dict[str, Any], records: list[dict[str, Any]]) -> dict[str, Any]:
    """Of a model at its best rate: the share of values that it recalls, by the number of pairs and by the budget."""
    wanted = [result["task"], result["model"], result["best_rate"]]
    runs = [r["error_by_pairs"] for r in records if [r["task"], r["model"], r["rate"]] == wanted]
    return {P: {K: sweeps.mean([1 - run[P][K] for run in runs]) for K in runs[0][P]} for P in runs[0]}


def pairs_held(recalled: dict[str, Any]) -> dict[str, int]:
    """By budget, up to which number of pairs the mean share is at least HELD; 0 for none."""

    def held(K: str) -> int:
        few = itertools.takewhile(lambda P: recalled[P][K]["mean"] >= HELD, recalled)
        return max(map(int, few), default=0)

    return {K: held(K) for K in next(iter(recalled.values()))}


def draw(results: list[dict[str, Any]]) -> Figure:
    """The share of recalled values against the pairs: a line for every budget of a model with a memory, and others."""
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    for result in results:
        recalled, memory = result["recalled"], "memory" in result["model"]
        budgets = [*next(iter(recalled.values()))]
        for i, K in enumerate(budgets if memory else budgets[-1:]):
            means = [values[K]["mean"] for values in recalled.values()]
            spread = [values[K]["deviation"] for values in recalled.values()]
            style: dict[str, Any] = {"label": result["model"] + (f", K = {K}" if len(budgets) > 1 else "")}
            if memory:
                style |= {"color": colormaps["viridis_r"]((i + 1) / len(budgets)), "marker": "o"}
            else:
                style |= {"color": "gray", "linestyle": ":"}
            axes.errorbar([*map(int, recalled)], means, spread, markersize=3.5, linewidth=1.4, capsize=2, **style)
    pairs = [*map(int, results[0]["recalled"])]
    axes.set(xscale="log", ylim=(0, 1.03), xlabel="pairs to remember", ylabel="share of values recalled")
    axes.set_xticks(pairs, [*map(str, pairs)])
    axes.minorticks_off()
    figure.legend(loc="outside right upper", fontsize=8)
    return figure


def main(argv: list[str] | None = None) -> dict[str, Any]:
    p = common.parser(__doc__, rounds=None)
    p.add_argument("--parameters", type=common.positive, default=100_000, help=f"of every model, to {TOLERANCE:.0%}%")
    sweeps.add_arguments(p, ROWS, "runs/memory_probes", 800, TASKS)
    args = p.parse_args(argv)
    settings = Settings(args.parameters, args.updates, device=str(common.pick_device(args.device)))
    if args.quick:
        settings = Settings(
            50_000, min(args.updates, 3), positions=64, held_out=128, quick=True, device=settings.device
        )
    records, report = sweeps.run("memory_probes", args, Sweep(settings, perform, define, METRIC))
    report["results"] = sweeps.summarise_all(records, METRIC)
    recalls = [r for r in report["results"] if r["definition"]["task"]["kind"] == Recall.__name__ and METRIC in r]
    for result in recalls:
        result["recalled"] = pairs_recalled(result, records)
        result["pairs_held"] = pairs_held(result["recalled"])
    if recalls:
        write_figure(args.report.with_suffix(".png"), draw(recalls), dpi=130)
    return common.finish(report, args)


if __name__ == "__main__":
    main()
