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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import TrainerCallback

BUDGETS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
# Settings of the authors' published training code.
FULL_BUDGET_EVERY = 8  # updates
BIAS_TO_LARGE = 0.6
CHEAP = 4  # budgets of at most one in so many channels run on every row in "family"
FIRST_WEIGHT, LAST_WEIGHT = 0.25, 2.0  # of all smaller budgets together in "family", where the full one has 1


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
        seed: any integer. full_budget_updates, sandwich_random, updates: see `budget_schedule`.
    """

    name: str
    budgets: tuple[int, ...]
    seed: int = 0
    full_budget_updates: int = 0
    sandwich_random: int = 2
    updates: int = 0

    def __call__(self, update: int) -> tuple[int, ...]:
        """The budgets of that update (counted from 0), distinct, the largest first; in "rows" as rows have them."""
        return self.budgets[-1:] if update < self.full_budget_updates else SCHEDULES[self.name](self, update)

    def parts(self, update: int, batch_size: int, first: int = 0, together: bool = False) -> tuple[Part, ...]:
        """What that update runs on B rows of its batch, of which they are those from `first` on.

        Every budget runs on all rows, but in "rows" they share them out: row r has the (r mod n)th of n. In "family"
        those between a quarter of the capacity and the capacity share the rows out; all smaller ones together weigh a
        quarter of the full one at first and, rising evenly in the logarithm, twice as much in the end. Weights times
        shares add up to 1.

        Args:
            together: those that share the rows are one part, with a budget for each row: a pass at the largest of them,
                which costs arithmetic and saves the calls of the others, as an accelerator likes it.
        """
        full, *smaller = budgets = self(update)
        if self.name == "rows":
            return _shared(budgets, batch_size, first, together, 1.0)
        if self.name != "family" or not smaller:
            return tuple(Part(K, slice(None), 1.0, 1 / len(budgets)) for K in budgets)
        cheap = [K for K in smaller if full >= CHEAP * K]
        shared = [K for K in smaller if full < CHEAP * K]
        progress = min(1.0, update / self.updates) if self.updates else 0.5
        of_smaller = FIRST_WEIGHT * (LAST_WEIGHT / FIRST_WEIGHT) ** progress
        of_full = 1 / (1 + of_smaller)
        weight = (1 - of_full) / (len(cheap) + bool(shared))
        whole = (Part(full, slice(None), 1.0, of_full), *(Part(K, slice(None), 1.0, weight) for K in cheap))
        return *whole, *_shared(shared, batch_size, first, together, weight)

    def bits(self, update: int, draw: int = 0) -> int:
        """Random integer in [0, 2^64); the probabilities of its remainders modulo n differ by at most 2^-64."""
        key = f"budget {self.seed} {update}" + (f" {draw}" if draw else "")
        return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big")


def _shared(budgets: Sequence[int], batch_size: int, first: int, together: bool, weight: float) -> tuple[Part, ...]:
    """Parts in which row r has the ((first + r) mod n)th of n budgets; see `BudgetSchedule.parts`."""
    n = len(budgets)
    if together and n > 1:
        return (Part(tuple(budgets[(first + r) % n] for r in range(batch_size)), slice(None), 1.0, weight),)
    rows = [slice(i, None, n) if n > 1 else slice(None) for i in range(min(n, batch_size))]
    shares = [len(range(batch_size)[some]) / batch_size for some in rows]
    return tuple(Part(budgets[(first + i) % n], rows[i], shares[i], weight) for i in range(len(rows)))


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
    budgets = schedule.budgets
    drawn = _shuffled(schedule, update, budgets[1:-1])[: schedule.sandwich_random]
    return tuple(sorted({budgets[0], *drawn, budgets[-1]}, reverse=True))


def _draw_family(schedule: BudgetSchedule, update: int) -> tuple[int, ...]:
    """The largest budget, then all smaller ones in an order drawn anew."""
    return schedule.budgets[-1], *_shuffled(schedule, update, schedule.budgets[:-1])


def _draw_rows(schedule: BudgetSchedule, update: int) -> tuple[int, ...]:
    """All budgets in an order drawn anew."""
    return _shuffled(schedule, update, schedule.budgets)


def _shuffled(schedule: BudgetSchedule, update: int, budgets: Sequence[int]) -> tuple[int, ...]:
    left = list(budgets)
    return tuple(left.pop(schedule.bits(update, i) % len(left)) for i in range(len(left)))


SCHEDULES: dict[str, Callable[[BudgetSchedule, int], tuple[int, ...]]] = {
    "discrete": _draw_one,
    "uniform": _draw_one,
    "authors": _draw_as_the_authors,
    "sandwich": _draw_sandwich,
    "rows": _draw_rows,
    "family": _draw_family,
    "full": _draw_one,
}


def budget_schedule(
    name: str, capacity: int, seed: int, *, full_budget_updates: int = 0, sandwich_random: int = 2, updates: int = 0
) -> BudgetSchedule:
    """The schedule of that name for a model of that capacity K̄.

    Args:
        name: "discrete" draws from BUDGETS, "uniform" from 1..K̄, "authors" as their code does, "sandwich" trains
            several of BUDGETS in each update, "rows" one of 1 and BUDGETS for each row of the batch, "family" all of
            them: the capacity and those up to a quarter of it on the whole batch, and each row at one of the others,
            "full" the capacity only, without budget dropout.
        full_budget_updates: number of updates at the start that train the capacity only, with any name.
        sandwich_random: budgets between the smallest and the largest in each update of the sandwich rule.
        updates: of the training in all, over which "family" turns to the smaller budgets; 0 for not at all.
    Raises:
        ValueError: unknown name, capacity below 1, or a negative number.
    """
    if name not in SCHEDULES:
        raise ValueError(f"budget_schedule must be one of {tuple(SCHEDULES)}, got {name!r}")
    numbers = {"capacity": capacity, "full_budget_updates": full_budget_updates, "sandwich_random": sandwich_random}
    numbers["updates"] = updates
    for what, value in numbers.items():
        if value < (least := int(what == "capacity")):
            raise ValueError(f"{what} must be at least {least}, got {value}")
    with_one = clip_budgets((1, *BUDGETS), capacity)
    own = {"uniform": range(1, capacity + 1), "rows": with_one, "family": with_one, "full": (capacity,)}
    budgets = tuple(own.get(name, clip_budgets(BUDGETS, capacity)))
    return BudgetSchedule(name, budgets, seed, full_budget_updates, sandwich_random, updates)


# --- The loss of an update's budgets ----------------------------------------------------------------------------------


def budget_losses(
    forward: Callable[[Part], Any],
    parts: Sequence[Part],
    *,
    labels: Tensor | None = None,
    distillation_weight: float = 0.0,
    num_items_in_batch: Tensor | int | None = None,
    shift_labels: Tensor | None = None,
) -> Iterator[Tensor]:
    """One loss per part, in their order; their sum, a weighted mean, is the objective of an update.

    A forward pass runs when its loss is asked for. A loop that runs backward on each loss before it asks for the next
    holds one graph at a time. With weight w > 0 every part but the first learns from the detached outputs of the
    first: its loss is (1 - w) loss + w KL(softmax(first logits) || softmax(its logits)). Yu and Huang (2019) use w = 1.

    Args:
        forward: from a part to the output of its budget on its rows of one and the same batch, with `loss` () and
            `logits` (B, L, V) or (B, C).
        parts: those of `BudgetSchedule.parts`; with w > 0 the largest budget first, on all rows.
        labels: those of the whole batch; read only if w > 0. With (B, L), logits at t are scored against labels at
            t + 1, and positions labelled -100 are left out. With (B,), or None for logits (B, C), every row is scored.
        distillation_weight: w in [0, 1].
        num_items_in_batch: the divisor of the model's summed loss, by default the number of scored positions.
        shift_labels: (B, L) instead of labels; logits at t are scored against those at t.
    Raises:
        ValueError: w out of range, no parts, the largest not first or not on all rows; no loss; or labels that cannot
            be distilled.
    """
    _check_weight(distillation_weight)
    parts = tuple(parts)
    if not parts:
        raise ValueError("parts must hold at least one budget, got none")
    budgets = [part.budget for part in parts]
    if distillation_weight and budgets[0] != max(max(K) if isinstance(K, tuple) else K for K in budgets):
        raise ValueError(f"distillation needs the largest budget first, got {budgets}")
    if distillation_weight and len(parts) > 1 and parts[0].share < 1:
        raise ValueError(f"distillation needs the largest budget on all rows, got it on {parts[0].share:.3g} of them")
    if shift_labels is not None:
        labels = F.pad(shift_labels, (1, 0), value=-100)
    return _losses(forward, parts, labels, distillation_weight, num_items_in_batch)


def _losses(
    forward: Callable[[Part], Any], parts: tuple[Part, ...], labels: Tensor | None, weight: float, num_items: Any
) -> Iterator[Tensor]:
    teacher: Tensor | None = None

    def loss_of(part: Part) -> Tensor:  # a function, so that no graph outlives its loss here
        nonlocal teacher
        output = forward(part)
        loss = output.loss
        if loss is None:
            raise ValueError(
                "the model returned no loss: budgets are averaged over its own losses, so every batch needs labels, "
                "without label smoothing or a loss function outside of the model"
            )
        if weight and len(parts) > 1:
            if teacher is None:
                teacher = output.logits.detach()
            else:
                expected, read = teacher[part.rows], None if labels is None else labels[part.rows]
                loss = (1.0 - weight) * loss + weight * _divergence(expected, output.logits, read, num_items)
        return loss * part.weight * (part.share if num_items is None else 1.0)  # a sum has the rows' share in it

    for part in parts:
        yield loss_of(part)


def _divergence(teacher: Tensor, logits: Tensor, labels: Tensor | None, num_items: Any) -> Tensor:
    """KL(teacher || student) summed over scored positions, then divided as the model divides its cross-entropy."""
    if labels is None:
        if logits.ndim != 2:
            raise ValueError(f"distilling logits of shape {tuple(logits.shape)} needs labels (B, L), got None")
        scored = torch.ones(logits.shape[:1], dtype=torch.bool, device=logits.device)
    elif labels.is_floating_point():
        raise ValueError(f"distillation needs class labels of an integer type, got {labels.dtype}")
    else:
        labels = labels.to(logits.device)
        if logits.ndim == 3:
            labels = F.pad(labels[:, 1:], (0, logits.shape[1] + 1 - labels.shape[1]), value=-100)
        scored = (labels if logits.ndim == 3 else labels.flatten()) != -100
    divisor = scored.sum() if num_items is None else num_items
    if logits.ndim == 2:
        return _summed_divergence(teacher, logits, scored) / divisor
    # Text by text, and again in the backward pass: fp32 copies of all logits, of a large vocabulary, fill a GPU.
    texts = zip(teacher, logits, scored)
    # (The state of the random numbers, of which none are drawn, cannot always be read while a CUDA graph is recorded.)
    sums = [checkpoint(_summed_divergence, *text, use_reentrant=False, preserve_rng_state=False) for text in texts]
    return torch.stack(sums).sum() / divisor


def _summed_divergence(teacher: Tensor, logits: Tensor, scored: Tensor) -> Tensor:
    expected, got = (x.float().log_softmax(-1) for x in (teacher, logits))
    divergence = F.kl_div(got, expected, reduction="none", log_target=True).sum(-1)
    return divergence.masked_fill(~scored, 0.0).sum()


def _check_weight(weight: float) -> None:
    if not 0.0 <= weight <= 1.0:
        raise ValueError(f"distillation_weight must be in [0, 1], got {weight}")


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


class BudgetDropoutCallback(TrainerCallback):
    """Makes transformers' Trainer and TRL's SFTTrainer train with a schedule: `Trainer(.., callbacks=[this])`.

    While an update runs, hooks give every training forward pass (training mode, gradients enabled) the budgets of
    update `state.global_step`. Evaluation, generation and saving run at the config's default, which is never touched. A
    forward pass that names a spectral_budget keeps it. After an exception inside an update the hooks stay until
    `detach()` or the next `train()`.

    With several budgets in an update the loss is the sum of `budget_losses`, in one graph, so memory grows with their
    number. The other outputs, and the metrics that SFTTrainer logs, are those of the largest budget.

    Args:
        schedule: of `budget_schedule`.
        distillation_weight: as in `budget_losses`; updates of one budget ignore it.
    Raises:
        ValueError: a weight out of range, or above 0 with "rows". When training begins: a model without
            spectral_budget, or with a capacity below the schedule's largest budget. In updates of several budgets:
            outputs without a loss, or a TRL trainer whose objective is not the plain likelihood (SFTTrainer with
            loss_type "nll").
    """

    def __init__(self, schedule: BudgetSchedule, distillation_weight: float = 0.0):
        _check_weight(distillation_weight)
        if distillation_weight and schedule.name == "rows":
            raise ValueError(f"distillation needs the largest budget on all rows, got 'rows', {distillation_weight=}")
        self.schedule = self._given = schedule
        self.distillation_weight = distillation_weight
        self.update: int | None = None  # that is running
        self._batches, self._processes = 0, 1  # batches of the update before the next one here, and of all processes
        self._scheduled = False  # whether the forward pass that is running got its budget here
        self._parts: tuple[Part, ...] = ()  # which it runs
        self._plain_likelihood = False
        self._hooks: list[Any] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.detach()
        self._check_model(model)
        if isinstance(self._given, BudgetSchedule) and not self._given.updates:
            self.schedule = replace(self._given, updates=max(0, state.max_steps))
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
        if not training or self.update is None or kwargs.get("spectral_budget") is not None:
            self._scheduled = False
            return None
        self._scheduled = True
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
        unfuse = {"fused_lm_head": False} if fused and self.distillation_weight else {}

        def forward(part: Part) -> Any:
            if not unfuse and part is self._parts[0]:
                return output
            return module.forward(*args, **(kwargs | unfuse | {"spectral_budget": as_argument(part.budget)}))

        losses = budget_losses(
            forward,
            self._parts,
            labels=kwargs.get("labels"),
            distillation_weight=self.distillation_weight,
            num_items_in_batch=kwargs.get("num_items_in_batch"),
            shift_labels=kwargs.get("shift_labels"),
        )
        output.loss = torch.stack(tuple(losses)).sum()
        if fused:  # SFTTrainer sums these itself: every scored position stands for the mean over all of them
            output.log_probs = torch.where(output.label_mask, -output.loss, 0.0)
        return output
