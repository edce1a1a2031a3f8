# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The field's probes of memory on the paper's block, the gated block and its peers, of equal size, at every budget.

    python -m benchmarks.memory_probes --processes 2
    python -m benchmarks.memory_probes --tasks mqar mqar:length=128,pairs=8 --only gated mamba2 --seeds 0
    python -m benchmarks.memory_probes --table --runs_dir runs/memory_probes

The tasks are those of `benchmarks.memory_tasks`. Every update has new samples, the same for every model and rate at a
seed; all runs of a task are measured on the same held-out samples. The figure is the error where something is asked:
the share of wrong tokens, or of noise the mean squared error relative to the variance, so that 1 is what knowing
nothing gives. Elastic models have 32 channels and are trained with budget dropout.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from essm_train.arguments import RunArguments
from essm_train.baselines.config import BaselineConfig
from essm_train.baselines.models import BaselineForCausalLM, BaselinePreTrainedModel
from essm_train.models import run_at_budget
from modeling_essm import ESSMConfig, ESSMForCausalLM, ESSMModel

from . import common, sweeps
from .matched_models import TOLERANCE, Row, definition_of, matched_config
from .memory_tasks import IGNORED, TASKS, InductionHeads, NoiseDelay, Task
from .sweeps import Run, Sweep

BUDGETS = (2, 4, 8, 16, 32)
HELD_OUT = 2**32  # seed of the samples that errors are measured on; those of training have others
METRIC = "error"

_GATED = {"block": "gated", "num_heads": 4, "embedding_initializer_range": 0.1}
_HYBRID = _GATED | {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
_RATES, _PEER_RATES = (3e-3, 1e-2), (2e-3, 6e-3)
ROWS: dict[str, Row] = {
    "paper": Row(2, {"num_spectral_channels": 32}, rates=_RATES),
    "gated": Row(3, _GATED, expansion=2.0, rates=_RATES),
    "gated, attention 1 in 6": Row(6, _HYBRID, expansion=2.0, rates=_RATES, attention_every=6),
    "gated, attention 1 in 3": Row(3, _HYBRID, expansion=2.0, rates=_RATES, attention_every=3),
    "llama": Row(2, peer="transformer", hidden_size=72, rates=_PEER_RATES),
    "mamba2": Row(2, {"initializer_range": 0.1}, peer="mamba2", hidden_size=96, rates=_PEER_RATES),
    "s4d": Row(3, peer="s4d", hidden_size=64, rates=_PEER_RATES),
}


@dataclass(frozen=True)
class Settings:
    """What all runs of a table have in common.

    Attributes:
        positions: of an update, in as many samples as make them, see `batch_size`. held_out: to measure on, likewise.
        budgets: that elastic models are measured at. quick: short tasks, unless the name of a task says otherwise.
    """

    parameters: int
    updates: int
    positions: int = 2048
    held_out: int = 65_536
    filter_length: int = 4096
    budgets: tuple[int, ...] = BUDGETS
    quick: bool = False
    device: str = "cpu"

    def task(self, name: str | None) -> Task:
        small = {"length": 32, "tau": 4, "pairs": 2, "tokens": 2} if self.quick else {}
        return sweeps.choose_task(TASKS, name or "", **small)


class Regressor(nn.Module):
    """A number for every position, from (B, L, 2): the signal and a constant one, so that every encoder has a bias."""

    config_class = BaselineConfig  # of the peers

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        if isinstance(config, ESSMConfig):
            self.model: nn.Module = ESSMModel(config)
        else:
            whole = BaselinePreTrainedModel(config, causal=True)
            whole.post_init()  # which draws its weights
            self.model = whole.model
        self.head = nn.Linear(config.hidden_size, 1)

    def forward(self, input_features: Tensor, use_cache: bool | None = None, spectral_budget: Any = None) -> Any:
        """(B, L, 2) -> logits (B, L)."""
        if isinstance(self.config, ESSMConfig):
            outputs = self.model(input_features=input_features, use_cache=False, spectral_budget=spectral_budget)
            hidden_states = outputs.last_hidden_state
        else:
            hidden_states, _ = self.model(None, input_features, None)
        return SimpleNamespace(logits=self.head(hidden_states).squeeze(-1))


def model_config(row: Row, task: Task, settings: Settings) -> Any:
    """The row's configuration for the task. Raises ValueError if none has as many parameters as asked for."""
    fields: dict[str, Any] = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    noise = isinstance(task, NoiseDelay)
    fields |= {"num_input_features": 2} if noise else {"vocab_size": task.vocabulary}
    if row.peer is None:
        fields["filter_length"] = settings.filter_length
    row = dataclasses.replace(row, fields=row.fields | fields)
    model_class: Any = Regressor
    return matched_config(row, settings.parameters, model_class if noise else None)


def make_model(config: Any) -> nn.Module:
    """A new model in fp32 with `logits`: (B, L, vocabulary) of tokens, or (B, L) of noise."""
    if config.num_input_features is not None:
        return Regressor(config).float()
    return (ESSMForCausalLM(config) if isinstance(config, ESSMConfig) else BaselineForCausalLM(config)).float()


def batch_of(task: Task, count: int, rng: np.random.Generator, device: Any) -> tuple[dict[str, Tensor], Tensor]:
    """What a model reads, and the targets."""
    inputs, targets = (torch.from_numpy(x).to(device) for x in task.sample(count, rng))
    if inputs.is_floating_point():
        return {"input_features": torch.stack([inputs, torch.ones_like(inputs)], -1)}, targets
    return {"input_ids": inputs}, targets


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """() mean over the positions where something is asked: cross-entropy in nats, or the squared error."""
    if targets.is_floating_point():
        asked = ~targets.isnan()
        return F.mse_loss(logits[asked], targets[asked])
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)


def batch_size(task: Task, positions: int) -> int:
    """Samples that make so many positions; twice as many of a task that asks a single question in each."""
    return max(1, (1 + isinstance(task, InductionHeads)) * positions // task.length)


def train(model: nn.Module, task: Task, settings: Settings, run: Run) -> dict[str, Any]:
    """All updates, each on new samples."""
    count, number = batch_size(task, settings.positions), iter(range(settings.updates))
    args = RunArguments(max_steps=settings.updates, learning_rate=run.rate, seed=run.seed)

    def next_forward() -> Callable[[int], Any]:
        rng = np.random.default_rng([run.seed, next(number)])
        batch, targets = batch_of(task, count, rng, settings.device)
        return lambda K: SimpleNamespace(loss=loss_of(run_at_budget(model, batch, K).logits, targets))

    return sweeps.train(model, next_forward, args, count * task.length)


@torch.inference_mode()
def score(model: nn.Module, budgets: Sequence[int], task: Task, settings: Settings) -> dict[str, float]:
    """The error on held-out samples at every budget."""
    size, rng = batch_size(task, settings.positions), np.random.default_rng(HELD_OUT)
    wrong, asked = dict.fromkeys(budgets, 0.0), 0.0
    model.eval()
    for _ in range(math.ceil(batch_size(task, settings.held_out) / size)):
        batch, targets = batch_of(task, size, rng, settings.device)
        noise = targets.is_floating_point()
        where = ~targets.isnan() if noise else targets != IGNORED
        wanted = targets[where]
        asked += float(wanted.double().square().sum()) if noise else wanted.numel()
        for K in budgets:
            answers = run_at_budget(model, batch, K).logits[where]
            errors = (answers - wanted).double().square() if noise else answers.argmax(-1) != wanted
            wrong[K] += float(errors.sum())
    return {str(K): value / asked for K, value in wrong.items()}


def define(settings: Settings, run: Run) -> dict[str, Any]:
    """The task and the row. Raises ValueError if there is no model of that size."""
    task = settings.task(run.task)
    model_config(ROWS[run.name], task, settings)
    return {"task": {"kind": type(task).__name__} | dataclasses.asdict(task)} | definition_of(ROWS[run.name])


def perform(settings: Settings, run: Run) -> dict[str, Any]:
    task = settings.task(run.task)
    config = model_config(ROWS[run.name], task, settings)
    torch.manual_seed(run.seed)
    model = make_model(config).to(settings.device)
    trained = train(model, task, settings, run)
    scored = lambda m, Ks: score(m, Ks, task, settings)  # noqa: E731
    return sweeps.measure(model, config, trained, scored, settings.budgets, METRIC, task.length)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Perform what is missing, then print the tables and write them, with every rate and the spread over seeds."""
    p = common.parser(__doc__)
    p.add_argument("--parameters", type=int, default=100_000, help=f"of every model, to {TOLERANCE:.0%}%")
    sweeps.add_arguments(p, ROWS, "runs/memory_probes", 800, TASKS)
    args = p.parse_args(argv)
    settings = Settings(args.parameters, args.updates, device=str(common.pick_device(args.device)))
    if args.quick:
        settings = Settings(50_000, min(args.updates, 3), positions=64, held_out=128, quick=True)
    records = sweeps.records_of(args, Sweep(settings, perform, define, METRIC), lambda name: ROWS[name].rates)
    device, report = common.start("memory_probes", args, **records[0]["settings"] | {"quick": args.quick})
    report["results"] = sweeps.summarise_all(records, METRIC)
    return common.finish(report, args, device)


if __name__ == "__main__":
    main()
