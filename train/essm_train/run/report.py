# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What a run says of its model at the end: the sweep over all budgets."""

from __future__ import annotations

from pathlib import Path

from accelerate import Accelerator
from transformers import PreTrainedModel

from essm_train.arguments import RunArguments
from essm_train.data.rows import LabelledData
from essm_train.measure.budget_sweep import save_sweep, sweep_accuracy
from essm_train.measure.scoring import Predictor
from essm_train.run.accelerator import say
from modeling_essm.budgets.curve import BudgetCurve


def report_sweep(
    accelerator: Accelerator, args: RunArguments, sweep: BudgetCurve, heading: str, **context: object
) -> None:
    """Show and save the sweep of `output_dir/model`, with `context` beside the figures. One process does."""
    output_dir = Path(args.output_dir)
    if accelerator.is_main_process:
        say(accelerator, heading + sweep.table())
        save_sweep(sweep, output_dir, model=str(output_dir / "model"), **context)
        say(accelerator, f"saved {output_dir / 'budget_sweep.json'} and budget_sweep.png")


def report_accuracy(
    accelerator: Accelerator,
    args: RunArguments,
    model: PreTrainedModel,
    data: LabelledData,
    predict: Predictor,
    what: str,
) -> BudgetCurve:
    """Sweep and report a classifier on its held-out samples, of which `what` tells people. All processes call it."""
    sweep = sweep_accuracy(model, data.held_out, predict, progress=lambda K: say(accelerator, f"sweep: K={K}"))
    context = {"split": "validation" if data.test is None else "test", "samples": len(data.held_out.samples)}
    report_sweep(accelerator, args, sweep, f"accuracy on {what}\n", **context, data=data.description)
    return sweep
