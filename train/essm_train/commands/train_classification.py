# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Train an ES-SSM classifier of sequences with budget dropout, then measure its accuracy at every budget.

    accelerate launch train/train_classification.py --train_file train.parquet --test_file test.parquet \\
        --features_column pixels --label_column label                     # numbers: one per position, or frames
    accelerate launch train/train_classification.py --train_file reviews.jsonl --text_column text --max_length 1024
    accelerate launch train/train_classification.py --dataset_name owner/name --text_column text --streaming \\
        --num_labels 4 --tokenizer_name gpt2 --max_steps 20000
    accelerate launch train/train_classification.py --model_name_or_path runs/books/model --train_file reviews.jsonl \\
        --text_column text --learning_rate 1e-3                           # fine-tune weights; their head, or a new one
    accelerate launch --mixed_precision bf16 train/train_classification.py arguments.yaml --learning_rate 1e-3
    python train/train_classification.py --help                           # every argument

Selection never looks at the test data: without validation data, a tenth of the training rows is held out. A run that
was interrupted continues from its last checkpoint when started again, bit for bit as if nothing had happened; see
essm_train/run/loop.py. Left in `output_dir`: checkpoint-*, best and model (for from_pretrained), log.jsonl,
training.json, budget_sweep.json and budget_sweep.png.
"""

from __future__ import annotations

import os

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # before torch: threads that wait spin for microseconds, then sleep

from accelerate.utils import set_seed
from transformers import PreTrainedModel

from essm_train.arguments import parse_arguments
from essm_train.commands.errors import command
from essm_train.data.arguments import ClassificationArguments
from essm_train.data.classification import ClassificationData, load_classification
from essm_train.data.labels import check_weights, class_names, trained_labels, unnamed_labels
from essm_train.models import make_config, make_model
from essm_train.run.accelerator import open_run
from essm_train.run.loop import make_schedule, train_and_record
from essm_train.run.saved import report_saved
from essm_train.run.task import classification_task, make_predictor
from modeling_essm import ESSMForSequenceClassification


def build_model(args: ClassificationArguments, data: ClassificationData) -> PreTrainedModel:
    """A model for that data. Raises ValueError as `make_model`, or if the weights do not fit the data."""
    config = make_config(args)
    fields = {"num_input_features": None, **data.reader.config_fields}
    if args.model_name_or_path:
        check_weights(args, config, data.reader, data.num_labels, data.label_names)
        fields["vocab_size"] = config.vocab_size  # which may have room to spare
    names = data.label_names
    if names is None:
        names = class_names(config) if config.num_labels == data.num_labels else unnamed_labels(data.num_labels)
    return make_model(
        args,
        ESSMForSequenceClassification,
        classifier_pooling=args.classifier_pooling or config.classifier_pooling,
        id2label=dict(enumerate(names)),
        label2id={name: i for i, name in enumerate(names)},
        problem_type="single_label_classification",
        **fields,
    )


def main(args: ClassificationArguments) -> None:
    """Train, save, sweep, push.

    Raises:
        ValueError: arguments, data or output folder that cannot work, or a run in output_dir with other arguments or
            data; all before the first update, except for rows of a stream.
        FloatingPointError, OSError: see `loop.train`.
    """
    with open_run(args) as accelerator:
        # Whatever is wrong with the arguments shows here, before anything is deleted or computed.
        config = make_config(args)
        args.set_max_length(config.filter_length)
        starts_new = not (args.model_name_or_path or args.is_baseline)
        if args.full_budget_updates is None and not (starts_new and config.block == "gated"):
            args.full_budget_updates = 0
        schedule = make_schedule(args, 1 if args.is_baseline else config.num_spectral_channels)
        with accelerator.main_process_first():
            data = load_classification(args, trained_labels(config))
        set_seed(args.seed)  # the same weights on every process
        model = build_model(args, data)
        if not args.is_baseline:
            model.config.trained_budgets = list(schedule.budgets)
        predict = make_predictor(args, data, accelerator)
        task = classification_task(model, data, predict)
        train_and_record(accelerator, args, task, schedule, script=__file__, data=data.description)

        shown = f"{len(data.held_out.samples):,} samples: {data.held_out.name}"
        report_saved(accelerator, args, model, data, predict, shown)


run = command(lambda: main(parse_arguments(ClassificationArguments)))


if __name__ == "__main__":
    run()
