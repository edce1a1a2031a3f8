# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Budget dropout: every update trains at its own spectral budgets K, drawn from a set of budgets.

The budgets are a pure function of (seed, update index) and touch no random generator. So they are the same on every
process, in all micro-batches of an update, after every resume and in every version of torch, and the budgets of any
update can be looked up. `budget_losses` turns them into losses for a loop of one's own; `BudgetDropoutCallback` brings
them into transformers' Trainer and TRL's SFTTrainer.

Channels above K get a gradient of exactly zero, not None, and plain AdamW treats it as one: their moments decay, the
rest of their momentum still moves them, and weight decay shrinks them. We keep that. Skipping them would need an
optimizer with a step count per channel. It would also decay a channel in proportion to how often it is drawn, so the
late ones, which are drawn least and carry least, would be regularised least.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import TrainerCallback

BUDGETS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
# Settings of the authors' published training code.
FULL_BUDGET_EVERY = 8  # updates
BIAS_TO_LARGE = 0.6


def clip_budgets(budgets: Iterable[int], capacity: int) -> tuple[int, ...]:
    """The budgets that a model of that capacity K̄ can run, ascending; a larger one becomes the capacity."""
    return tuple(sorted({min(budget, capacity) for budget in budgets}))


# --- Which budgets an update trains -----------------------------------------------------------------------------------


class Part(NamedTuple):
    """A forward pass of an update: its budget (or one for each row), the rows of the batch that it reads, their share
    of the batch, and how much the mean loss of a whole batch would count."""

    budget: int | tuple[int, ...]
    rows: slice
    share: float
    weight: float


def as_argument(budget: int | tuple[int, ...]) -> int | Tensor:
    """A part's budget as models take it."""
    return torch.tensor(budget) if isinstance(budget, tuple) else budget


@dataclass(frozen=True)
class BudgetSchedule:
    """From the update index to its budgets, as `budget_schedule` makes it.

    Attributes:
        name: one of SCHEDULES.
        budgets: all budgets that it may train, distinct and ascending.
        seed: any integer. full_budget_updates, sandwich_random: see `budget_schedule`.
    """

    name: str
    budgets: tuple[int, ...]
    seed: int = 0
    full_budget_updates: int = 0
    sandwich_random: int = 2

    def __call__(self, update: int) -> tuple[int, ...]:
        """The budgets of that update (counted from 0), distinct, the largest first; in "rows" as rows have them."""
        return self.budgets[-1:] if update < self.full_budget_updates else SCHEDULES[self.name](self, update)

    def parts(self, update: int, batch_size: int, first: int = 0, together: bool = False) -> tuple[Part, ...]:
        """What that update runs on B rows of its batch, of which they are those from `first` on.

        Every budget runs on all rows, but in "rows" they share them out: row r has the (r mod n)th of n. Weights times
        shares add up to 1.

        Args:
            together: those that share the rows are one part, with a budget for each row: a pass at the largest of them,
                which costs arithmetic and saves the calls of the others, as an accelerator likes it.
        """
        budgets = self(update)
        n = len(budgets)
        if self.name != "rows" or n == 1:
            return tuple(Part(K, slice(None), 1.0, 1 / n) for K in budgets)
        if together:
            return (Part(tuple(budgets[(first + r) % n] for r in range(batch_size)), slice(None), 1.0, 1.0),)
        rows = [slice(i, None, n) for i in range(min(n, batch_size))]
        shares = [len(range(batch_size)[some]) / batch_size for some in rows]
        return tuple(Part(budgets[(first + i) % n], rows[i], shares[i], 1.0) for i in range(len(rows)))

    def bits(self, update: int, draw: int = 0) -> int:
        """Random integer in [0, 2^64); the probabilities of its remainders modulo n differ by at most 2^-64."""
        key = f"budget {self.seed} {update}" + (f" {draw}" if draw else "")
        return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big")


def _draw_one(schedule: BudgetSchedule, update: int) -> tuple[int, ...]:
    """One budget, uniform over all: the paper's budget dropout."""
    return (schedule.budgets[schedule.bits(update) % len(schedule.budgets)],)


def _draw_as_the_authors(schedule: BudgetSchedule, update: int) -> tuple[int, ...]:
    """One budget, as in the training code that Song and Wang published, which is not the paper's uniform draw.

    The largest at updates 0, 8, 16, .. (and at the first `full_budget_updates`: theirs are 2 epochs of 4000). Otherwise
    K = smallest (largest / smallest)^v is snapped to the nearest of `budgets`, the smaller one at a tie, where v is
    1 - u^(1 / 0.6) and u is uniform: large budgets are drawn more often than log-uniformly.
    """
    if update % FULL_BUDGET_EVERY == 0:
        return schedule.budgets[-1:]
    v = 1.0 - (schedule.bits(update) / 2.0**64) ** (1.0 / BIAS_TO_LARGE)
    low, high = math.log(schedule.budgets[0]), math.log(schedule.budgets[-1])
    K = math.exp(low + v * (high - low))
    return (min(schedule.budgets, key=lambda budget: abs(budget - K)),)


def _draw_sandwich(schedule: BudgetSchedule, update: int) -> tuple[int, ...]:
    """The largest budget, `sandwich_random` distinct others and the smallest (Yu and Huang 2019)."""
    budgets, between = schedule.budgets, list(schedule.budgets[1:-1])
    count = min(schedule.sandwich_random, len(between))
    drawn = [between.pop(schedule.bits(update, i) % len(between)) for i in range(count)]
    return tuple(sorted({budgets[0], *drawn, budgets[-1]}, reverse=True))


def _draw_rows(schedule: BudgetSchedule, update: int) -> tuple[int, ...]:
    """All budgets in an order drawn anew."""
    left = list(schedule.budgets)
    return tuple(left.pop(schedule.bits(update, i) % len(left)) for i in range(len(left)))


SCHEDULES: dict[str, Callable[[BudgetSchedule, int], tuple[int, ...]]] = {
    "discrete": _draw_one,
    "uniform": _draw_one,
    "authors": _draw_as_the_authors,
    "sandwich": _draw_sandwich,
    "rows": _draw_rows,
    "full": _draw_one,
}


def budget_schedule(
    name: str, capacity: int, seed: int, *, full_budget_updates: int = 0, sandwich_random: int = 2
) -> BudgetSchedule:
    """The schedule of that name for a model of that capacity K̄.

    Args:
        name: "discrete" draws from BUDGETS, "uniform" from 1..K̄, "authors" as their code does, "sandwich" trains
            several of BUDGETS in each update, "rows" one of 1 and BUDGETS for each row of the batch, "full" the
            capacity only, without budget dropout.
        full_budget_updates: number of updates at the start that train the capacity only, with any name.
        sandwich_random: budgets between the smallest and the largest in each update of the sandwich rule.
    Raises:
        ValueError: unknown name, capacity below 1, or a negative number.
    """
    if name not in SCHEDULES:
        raise ValueError(f"budget_schedule must be one of {tuple(SCHEDULES)}, got {name!r}")
    numbers = {"capacity": capacity, "full_budget_updates": full_budget_updates, "sandwich_random": sandwich_random}
    for what, value in numbers.items():
        if value < (least := int(what == "capacity")):
            raise ValueError(f"{what} must be at least {least}, got {value}")
    with_one = clip_budgets((1, *BUDGETS), capacity)
    own = {"uniform": range(1, capacity + 1), "rows": with_one, "full": (capacity,)}
    budgets = tuple(own.get(name, clip_budgets(BUDGETS, capacity)))
    return BudgetSchedule(name, budgets, seed, full_budget_updates, sandwich_random)


# --- The loss of an update's budgets ----------------------------------------------------------------------------------


def budget_losses(
    forward: Callable[[Part], Any], parts: Iterable[Part], num_items_in_batch: Tensor | int | None = None
) -> Iterator[Tensor]:
    """One loss per part, in their order; their sum, a weighted mean, is the objective of an update.

    A forward pass runs when its loss is asked for. A loop that runs backward on each loss before it asks for the next
    holds one graph at a time.

    Args:
        forward: from a part to the output of its budget on its rows of one and the same batch, with `loss` ().
        parts: those of `BudgetSchedule.parts`.
        num_items_in_batch: if the model's loss is a sum that was divided by it, instead of a mean over the rows.
    Raises:
        ValueError: there is no loss.
    """
    for part in parts:
        loss = forward(part).loss
        if loss is None:
            raise ValueError(
                "the model returned no loss: budgets are averaged over its own losses, so every batch needs labels, "
                "without label smoothing or a loss function outside of the model"
            )
        yield loss * part.weight * (part.share if num_items_in_batch is None else 1.0)  # a sum has the share in it
        del loss


# --- Trainer and SFTTrainer -------------------------------------------------------------------------------------------


def allow_compiled_budgets(count: int) -> None:
    """Raise torch.compile's limit, 8 graphs by default, to a graph for each of that many budgets.

    Beyond the limit torch goes on uncompiled. A budget takes up to four graphs: for training and evaluation, and for
    full and last batches.
    """
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 4 * count)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 4 * count)


def _batch_size(args: tuple, kwargs: Mapping[str, Any]) -> int:
    """B of a forward pass: that of its first tensor with dimensions."""
    return next(len(x) for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.ndim)


def _rows(arguments: Any, rows: slice, batch_size: int) -> Any:
    """Arguments of a forward pass for some rows of its batch."""
    return tree_map(lambda x: x[rows] if isinstance(x, Tensor) and x.ndim and len(x) == batch_size else x, arguments)


class BudgetDropoutCallback(TrainerCallback):
    """Makes transformers' Trainer and TRL's SFTTrainer train with a schedule: `Trainer(.., callbacks=[this])`.

    While an update runs, hooks give every training forward pass (training mode, gradients enabled) the budgets of
    update `state.global_step`. Evaluation, generation and saving run at the config's default, which is never touched. A
    forward pass that names a spectral_budget keeps it. After an exception inside an update the hooks stay until
    `detach()` or the next `train()`.

    With several budgets in an update the loss is the sum of `budget_losses`, in one graph, so memory grows with their
    number. The other outputs, and the metrics that SFTTrainer logs, are those of the largest budget.

    Args:
        schedule: a BudgetSchedule, or anything with its `budgets` and `parts`.
    Raises:
        ValueError: when training begins, a model without spectral_budget, or with a capacity
            below the schedule's largest budget; in updates of several budgets, outputs without a loss, or a TRL trainer
            whose objective is not the plain likelihood (SFTTrainer with loss_type "nll").
    """

    def __init__(self, schedule: BudgetSchedule):
        self.schedule = schedule
        self.update: int | None = None  # that is running
        self._batches, self._processes = 0, 1  # batches of the update before the next one here, and of all processes
        self._scheduled = False  # whether the forward pass that is running got its budget here
        self._parts: tuple[Part, ...] = ()  # which it runs
        self._plain_likelihood = False
        self._hooks: list[Any] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.detach()
        self._check_model(model)
        allow_compiled_budgets(len(self.schedule.budgets))
        is_sft = any(cls.__name__ == "SFTConfig" for cls in type(args).__mro__)
        self._plain_likelihood = is_sft and getattr(args, "loss_type", "nll") == "nll"
        self._hooks = [
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            model.register_forward_hook(self._after_forward, with_kwargs=True),
        ]

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.update, self._batches, self._processes = state.global_step, args.process_index, args.world_size

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.update = None

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.detach()

    def detach(self) -> None:
        """Take the hooks off the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.update = [], None

    def _check_model(self, model: Any) -> None:
        """Raises ValueError for a model that cannot run the schedule."""
        from accelerate.utils import extract_model_from_parallel  # which every Trainer has, and the package need not

        module = extract_model_from_parallel(model, keep_torch_compile=False)
        module = module.get_base_model() if hasattr(module, "get_base_model") else module  # inside PEFT's
        capacity = getattr(getattr(module, "config", None), "num_spectral_channels", None)
        if capacity is None or "spectral_budget" not in inspect.signature(type(module).forward).parameters:
            raise ValueError(f"budget dropout needs a model that takes spectral_budget, got {type(module).__name__}")
        largest = max(self.schedule.budgets)
        if largest > capacity:
            raise ValueError(f"the schedule's budgets must be in [1, {capacity}] for this model, got {largest}")

    def _before_forward(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        training = module.training and torch.is_grad_enabled()
        self._scheduled = training and self.update is not None and kwargs.get("spectral_budget") is None
        if not self._scheduled or self.update is None:
            return None
        count = _batch_size(args, kwargs)
        self._parts = self.schedule.parts(self.update, count, self._batches * count, together=True)
        self._batches += self._processes
        return args, kwargs | {"spectral_budget": as_argument(self._parts[0].budget)}

    def _after_forward(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        """The output at the first budget, its loss replaced by the objective of all."""
        if not self._scheduled or len(self._parts) == 1:
            return None
        fused = kwargs.get("fused_lm_head", False)  # TRL's: log-probabilities of the labels instead of logits
        if fused and not self._plain_likelihood:
            budgets = [part.budget for part in self._parts]
            raise ValueError(
                f"several budgets in an update, {budgets}, need SFTTrainer with loss_type 'nll' or the plain Trainer: "
                "other objectives are not averages of the model's own losses. Use a schedule of one budget"
            )

        def forward(part: Part) -> Any:
            if part is self._parts[0]:
                return output
            own, named = _rows((args, kwargs), part.rows, _batch_size(args, kwargs))
            return module.forward(*own, **(named | {"spectral_budget": as_argument(part.budget)}))

        losses = budget_losses(forward, self._parts, kwargs.get("num_items_in_batch"))
        output.loss = torch.stack(tuple(losses)).sum()
        if fused:  # SFTTrainer sums these itself: every scored position stands for the mean over all of them
            output.log_probs = torch.where(output.label_mask, -output.loss, 0.0)
        return output
