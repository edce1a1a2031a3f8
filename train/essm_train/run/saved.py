# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What a classifier's run left counts, not what is in memory: its saved model is loaded, compared and measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from essm_train.console import Failed
from essm_train.data.rows import LabelledData
from essm_train.measure.scoring import Predictor
from essm_train.publish.run_card import write_card_and_push
from essm_train.run.accelerator import say
from essm_train.run.task import report_accuracy
from modeling_essm.budgets.curve import BudgetCurve


def report_saved(
    accelerator: Accelerator,
    args: Any,
    model: PreTrainedModel,
    data: LabelledData,
    predict: Predictor,
    what: str,
) -> BudgetCurve:
    """Load what was trained and saved, sweep it over all budgets, write its card and push it. All processes call it.

    Args:
        args: `ClassificationArguments` or `RetrievalArguments`. model: that was trained. what: as in `report_accuracy`.
    Raises:
        Failed: see `load_and_check`.
    """
    folder = Path(args.output_dir) / "model"
    sharded = accelerator.distributed_type == DistributedType.FSDP
    trained = not (args.load_best_model_at_end or args.ema_decay or sharded)
    cls = next(c for c in type(model).__mro__ if not c.__module__.startswith("torch."))
    with accelerator.local_main_process_first():  # or processes copy the model's code at the same time
        batch = {name: value.to(accelerator.device) for name, value in predict.batch(data.held_out.samples).items()}
        loaded = load_and_check(folder, batch, cls, model if trained else None)
    say(accelerator, f"the reloaded {folder} gives the same logits")
    sweep = report_accuracy(accelerator, args, loaded, data, predict, what)
    if accelerator.is_main_process and any(folder.glob("*.py")):  # others have no card
        write_card_and_push(args)
    return sweep


def load_and_check(
    folder: Path, batch: dict[str, Tensor], cls: type[PreTrainedModel], trained: PreTrainedModel | None
) -> PreTrainedModel:
    """The saved model as a user gets it, on the device of `batch`, a batch of inputs.

    Args:
        cls: the model's class. trained: the model in memory that was saved, if there is one.
    Raises:
        Failed: its logits on `batch` are not those of this package's code, or its weights not the trained ones.
    """
    device = next(iter(batch.values())).device
    loaded = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=False).to(device).eval()
    direct = cls.from_pretrained(folder).to(device).eval()
    with torch.no_grad():
        expected, got = (model(**batch).logits for model in (direct, loaded))
    if not torch.equal(expected, got):
        raise Failed(f"{folder}: the reloaded model's logits differ by {(expected - got).abs().max().item():.3g}")
    if trained is not None:
        state = loaded.state_dict()
        for name, value in trained.state_dict().items():
            if not torch.equal(value.to(device), state[name]):
                raise Failed(f"{folder}: the reloaded {name} is not the trained one")
    return loaded
