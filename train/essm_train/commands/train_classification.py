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
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # before torch: threads that wait spin for microseconds, then sleep

import torch
from accelerate.utils import DistributedType, set_seed
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from essm_train.arguments import parse_arguments
from essm_train.commands.errors import command
from essm_train.data.arguments import ClassificationArguments
from essm_train.data.classification import ClassificationData, load_classification
from essm_train.data.labels import check_weights, class_names, trained_labels, unnamed_labels
from essm_train.models import make_config, make_model
from essm_train.publish.run_card import write_card_and_push
from essm_train.run.accelerator import open_run, say
from essm_train.run.loop import make_schedule, train_and_record
from essm_train.run.task import classification_task, make_predictor, report_accuracy
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

        # From here on only what was saved counts.
        folder, held_out = Path(args.output_dir) / "model", data.held_out
        sharded = accelerator.distributed_type == DistributedType.FSDP
        trained = not (args.load_best_model_at_end or args.ema_decay or sharded)
        cls = next(c for c in type(model).__mro__ if not c.__module__.startswith("torch."))
        with accelerator.local_main_process_first():  # or processes copy the model's code at the same time
            batch = {name: value.to(accelerator.device) for name, value in predict.batch(held_out.samples).items()}
            loaded = load_and_check(folder, batch, cls, model if trained else None)
        say(accelerator, f"the reloaded {folder} gives the same logits")
        shown = f"{len(held_out.samples):,} samples: {held_out.name}"
        report_accuracy(accelerator, args, loaded, data, predict, shown)
        if accelerator.is_main_process and not args.is_baseline:  # which has no remote code
            write_card_and_push(args)


def load_and_check(
    folder: Path, batch: dict[str, Tensor], cls: type[PreTrainedModel], trained: PreTrainedModel | None
) -> PreTrainedModel:
    """The saved model as a user gets it, on the device of `batch`, a batch of inputs.

    Args:
        cls: the model's class. trained: the model in memory that was saved, if there is one.
    Raises:
        RuntimeError: its logits on `batch` are not those of this package's code, or its weights not the trained ones.
    """
    device = next(iter(batch.values())).device
    loaded = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=False).to(device).eval()
    direct = cls.from_pretrained(folder).to(device).eval()
    with torch.no_grad():
        expected, got = (model(**batch).logits for model in (direct, loaded))
    if not torch.equal(expected, got):
        raise RuntimeError(f"{folder}: the reloaded model's logits differ by {(expected - got).abs().max().item():.3g}")
    if trained is not None:
        state = loaded.state_dict()
        for name, value in trained.state_dict().items():
            if not torch.equal(value.to(device), state[name]):
                raise RuntimeError(f"{folder}: the reloaded {name} is not the trained one")
    return loaded


run = command(lambda: main(parse_arguments(ClassificationArguments)))


if __name__ == "__main__":
    run()
