# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Long Range Arena's Retrieval: do two documents belong together? One encoder reads both, a small head compares.

    python train/train_retrieval.py --train_file data/new_aan_pairs.train.tsv \\
        --validation_file data/new_aan_pairs.eval.tsv --test_file data/new_aan_pairs.test.tsv
    python train/train_retrieval.py --help                                # every argument; also as `arguments.yaml`

The files are those of the archive lra_release.gz; what they hold, and the model, are in essm_train/tasks/retrieval.py.
Interrupted runs continue, see essm_train/run/loop.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from accelerate.utils import set_seed

from essm_train.arguments import parse_arguments
from essm_train.commands.errors import command
from essm_train.run.accelerator import open_run
from essm_train.run.loop import make_schedule, train_and_record
from essm_train.run.task import classification_task, make_predictor, report_accuracy
from essm_train.tasks.retrieval import RetrievalArguments, TwoTowerClassifier, TwoTowerConfig, load_retrieval
from modeling_essm.budgets.curve import BudgetCurve


def make_model(args: RetrievalArguments, budgets: Sequence[int]) -> TwoTowerClassifier:
    """A new model. Raises ValueError for sizes that cannot be."""
    fields = {**args.given(), "head_hidden_size": args.head_hidden_size}
    labels = ("unrelated", "related")
    names = {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}
    return TwoTowerClassifier(TwoTowerConfig(**fields, **names, trained_budgets=list(budgets)))


def main(args: RetrievalArguments) -> BudgetCurve:
    """Train, save and sweep.

    Raises:
        ValueError: arguments, pairs or output folder that cannot work, or a run in output_dir with other arguments or
            pairs; all before the first update.
        FloatingPointError, OSError: see `loop.train`.
    """
    assert args.num_spectral_channels is not None
    with open_run(args) as accelerator:
        schedule = make_schedule(args, args.num_spectral_channels)
        data = load_retrieval(args)
        set_seed(args.seed)  # the same weights on every process
        model = make_model(args, schedule.budgets)
        predict = make_predictor(args, data, accelerator)
        task = classification_task(model, data, predict)
        train_and_record(accelerator, args, task, schedule, script=__file__, data=data.description)

        # From here on only what was saved counts.
        loaded = TwoTowerClassifier.from_pretrained(Path(args.output_dir) / "model").to(accelerator.device).eval()
        shown = f"{len(data.held_out.samples):,} pairs"
        return report_accuracy(accelerator, args, loaded, data, predict, shown)


run = command(lambda: main(parse_arguments(RetrievalArguments)))


if __name__ == "__main__":
    run()
