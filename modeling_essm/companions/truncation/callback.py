# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Balanced truncation (CompreSSM) in transformers' Trainer: `Trainer(.., callbacks=[BalancedTruncationCallback()])`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from ..wrappers import unwrap
from .models import truncatable
from .training import InTrainingTruncation, attempt_steps


class BalancedTruncationCallback(InTrainingTruncation, TrainerCallback):
    """Shrinks the diagonal state spaces of the model while it trains.

    After steps round(j T / attempts), j = 1..attempts, every layer gives up the modes that hold at most a share `tau`
    of its Hankel singular values, if that is more than `min_reduction` of its modes. Shares compound: four attempts at
    0.15 keep about 0.85^4 = 0.52. The learning rate goes on. What is saved has the new sizes in config.state_sizes, so
    a run is resumed with the model of its checkpoint: AutoModelForCausalLM.from_pretrained(checkpoint). With
    load_best_model_at_end, the best is searched for among the models since the last truncation.

    Args:
        tau: share to discard in an attempt. attempts: how many. until: T, "warmup", a step, or a share of all steps.
        min_reduction: as in `InTrainingTruncation`. say: takes a line per attempt, on the first process.
    Attributes:
        history: a dict per attempt, as in `InTrainingTruncation`; the Trainer's log_history has them as `truncation`.
    Raises:
        ValueError: values out of range. When training begins: a schedule that does not fit the run, a model without
            diagonal layers, or a sharded one.
    """

    def __init__(
        self,
        tau: float = 0.1,
        attempts: int = 4,
        until: str | int | float = "warmup",
        min_reduction: float = 0.05,
        say: Callable[[str], None] = print,
    ):
        super().__init__((), tau=tau, min_reduction=min_reduction)
        self.attempts, self.until, self.say = attempts, until, say

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if getattr(args, "fsdp", None) or getattr(args, "deepspeed", None):
            raise ValueError("balanced truncation needs whole layers on every process, got FSDP or DeepSpeed")
        truncatable(unwrap(model))
        warmup_steps = args.get_warmup_steps(state.max_steps)
        steps = attempt_steps(self.attempts, self.until, max_steps=state.max_steps, warmup_steps=warmup_steps)
        self.steps = frozenset(steps)
        self.history = [entry["truncation"] for entry in state.log_history if "truncation" in entry]

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        report = self.after_step(model, optimizer, state.global_step)
        if report is None:
            return
        state.log_history.append({"step": state.global_step, "truncation": self.history[-1]})
        if report.replaced:
            state.best_metric = state.best_model_checkpoint = state.best_global_step = None
        if state.is_world_process_zero:
            self.say(self.line())
