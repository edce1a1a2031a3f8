# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Long Range Arena's Retrieval: do two documents belong together? One encoder reads both, a small head compares.

    python train/train_retrieval.py --train_file data/new_aan_pairs.train.tsv \\
        --validation_file data/new_aan_pairs.eval.tsv --test_file data/new_aan_pairs.test.tsv
    python train/train_retrieval.py --train_file data/new_aan_pairs.train.tsv --architecture transformer   # a baseline
    python train/train_retrieval.py --help                                # every argument; also as `arguments.yaml`

The files are those of the archive lra_release.gz; what they hold is in essm_train/tasks/retrieval.py,
and the model in essm_train/pairs.py. Interrupted runs continue, see essm_train/run/loop.py.
"""

from __future__ import annotations

from accelerate.utils import set_seed
from transformers import PreTrainedModel

from essm_train.arguments import parse_arguments
from essm_train.commands.errors import command
from essm_train.models import make_config, make_model
from essm_train.pairs import ESSMForPairClassification, ESSMPairConfig
from essm_train.run.accelerator import open_run
from essm_train.run.loop import make_schedule, train_and_record
from essm_train.run.saved import report_saved
from essm_train.run.task import classification_task, make_predictor
from essm_train.tasks.retrieval import LABELS, RetrievalArguments, load_retrieval
from modeling_essm.budgets.curve import BudgetCurve


def build_model(args: RetrievalArguments) -> PreTrainedModel:
    """A model of pairs. Raises ValueError as `make_model`."""
    head = {} if args.head_hidden_size is None else {"head_hidden_size": args.head_hidden_size}
    names = {"id2label": dict(enumerate(LABELS)), "label2id": {label: i for i, label in enumerate(LABELS)}}
    return make_model(args, ESSMForPairClassification, **names, **head)


def main(args: RetrievalArguments) -> BudgetCurve:
    """Train, save, sweep, push.

    Raises:
        ValueError: arguments, pairs or output folder that cannot work, or a run in output_dir with other arguments or
            pairs; all before the first update.
        FloatingPointError, OSError: see `loop.train`.
    """
    with open_run(args) as accelerator:
        config = make_config(args, ESSMPairConfig)
        args.check_max_length(config.filter_length)
        schedule = make_schedule(args, 1 if args.is_baseline else config.num_spectral_channels)
        data = load_retrieval(args)
        set_seed(args.seed)  # the same weights on every process
        model = build_model(args)
        if not args.is_baseline:
            model.config.trained_budgets = list(schedule.budgets)
        predict = make_predictor(args, data, accelerator)
        task = classification_task(model, data, predict)
        train_and_record(accelerator, args, task, schedule, script=__file__, data=data.description)
        return report_saved(accelerator, args, model, data, predict, f"{len(data.held_out.samples):,} pairs")


run = command(lambda: main(parse_arguments(RetrievalArguments)))


if __name__ == "__main__":
    run()
