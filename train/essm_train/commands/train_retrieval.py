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

import numpy as np
from accelerate import Accelerator
from accelerate.utils import set_seed

from essm_train.arguments import parse_arguments
from essm_train.commands.errors import run_script
from essm_train.data.samples import MapSamples
from essm_train.measure.budget_sweep import save_sweep, sweep_accuracy
from essm_train.measure.scoring import Predictor
from essm_train.run.accelerator import open_run, say
from essm_train.run.budgets import make_schedule
from essm_train.run.loop import train_and_record
from essm_train.run.task import classification_task
from essm_train.tasks.retrieval import (
    RetrievalArguments,
    TwoTowerClassifier,
    TwoTowerConfig,
    collate,
    load_retrieval,
    save_tokenizer,
)
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
    with open_run(args) as accelerator:
        return _run(accelerator, args)


def _run(accelerator: Accelerator, args: RetrievalArguments) -> BudgetCurve:
    assert args.num_spectral_channels is not None
    schedule = make_schedule(args, args.num_spectral_channels)
    data = load_retrieval(args)
    set_seed(args.seed)  # the same weights on every process
    model = make_model(args, schedule.budgets)
    length = args.max_length if args.torch_compile else None  # one shape to compile
    predict = Predictor(lambda pairs: collate(pairs, length), args.eval_batch_size, accelerator)

    lengths = np.minimum(data.train.pairs.lengths[data.train.rows], args.max_length)
    task = classification_task(
        model,
        MapSamples(data.train, args.seed),
        predict,
        data.validation,
        data.validation.labels,
        tokens_per_sample=max(1, round(float(lengths.sum(1).mean()))),
        save_companions=lambda folder: save_tokenizer(folder, args.max_length),
        identity=data.digests,
    )
    train_and_record(accelerator, args, task, schedule, script=__file__, data=data.description)

    # From here on only what was saved counts.
    output_dir = Path(args.output_dir)
    loaded = TwoTowerClassifier.from_pretrained(output_dir / "model").to(accelerator.device).eval()
    held_out = data.validation if data.test is None else data.test
    progress = lambda K: say(accelerator, f"sweep: K={K}")  # noqa: E731
    sweep = sweep_accuracy(loaded, held_out, held_out.labels, predict, progress=progress)
    if accelerator.is_main_process:
        say(accelerator, f"accuracy on {len(held_out):,} pairs\n{sweep.table()}")
        context = {"split": "validation" if data.test is None else "test", "samples": len(held_out)}
        save_sweep(sweep, output_dir, model=str(output_dir / "model"), **context, data=data.description)
        say(accelerator, f"saved {output_dir / 'budget_sweep.json'} and budget_sweep.png")
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return sweep


def run() -> None:
    """The command."""
    run_script(lambda: main(parse_arguments(RetrievalArguments)))


if __name__ == "__main__":
    run()
