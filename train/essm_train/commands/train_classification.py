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
engine.py. Left in `output_dir`: checkpoint-*, best and model (for from_pretrained), log.jsonl, training.json,
budget_sweep.json and budget_sweep.png.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # before torch: threads that wait spin for microseconds, then sleep

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, set_seed
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from essm_train.commands.errors import run_script
from essm_train.data.classification import ClassificationData, Reader, collate, load_classification
from essm_train.data.samples import SampleSource, even_shares
from essm_train.measure.budget_sweep import BudgetSweep, load_metric, sweep_metric
from essm_train.models import ModelArguments, check_vocabulary, holds_head, make_model, read_config
from essm_train.publish.hub import check_can_push
from essm_train.publish.run_card import write_card_and_push
from essm_train.run.engine import (
    Metric,
    RunArguments,
    Task,
    _arg,
    make_schedule,
    open_run,
    parse_arguments,
    run_at_budget,
    say,
    train_and_record,
)
from modeling_essm import ESSMConfig, ESSMForSequenceClassification
from modeling_essm.training.budget_dropout import BUDGETS

ACCURACY = Metric("accuracy", higher_is_better=True)


@dataclass
class ClassificationArguments(ModelArguments):
    """Data; the model is in models.ModelArguments, how to train in engine.RunArguments."""

    output_dir: str = _arg("runs/train_classification", "Where everything goes; a run found there is continued.")
    full_budget_updates: int | None = field(
        default=None,
        metadata={
            "help": "With any schedule: updates at the full budget before all others; by default half of the updates "
            "that a new gated model is started with, of others none."
        },
    )

    train_file: list[str] | None = field(
        default=None, metadata={"help": "Local parquet, json(l) or csv files to train on, all of one kind."}
    )
    validation_file: list[str] | None = field(
        default=None, metadata={"help": "Files to select by; without them, a random tenth of the training rows."}
    )
    test_file: list[str] | None = field(
        default=None,
        metadata={"help": "Files for the final sweep, looked at once; without them it reports validation."},
    )
    dataset_name: str | None = _arg(
        None,
        "Instead of files: a data set on the Hub, or a local folder, of WAV files one folder per class.",
    )
    dataset_config_name: str | None = _arg(None, "Which configuration of that data set.")
    streaming: bool = _arg(False, "Read while training instead of before: for data larger than the disk.")
    shuffle_buffer: int = _arg(1000, "With streaming: samples among which the next one is drawn.")
    text_column: str | None = _arg(None, "The column that holds text. Give this one or features_column.")
    features_column: str | None = _arg(
        None,
        "The column that holds a flat list of numbers per sample (pixels, mu-law codes, ..), each one a position, a "
        "list of frames, each one a list of as many numbers, or WAV files (of a folder of them: audio). A pattern such "
        "as 't*' stands for all columns of numbers of such names, in the order of the file.",
    )
    frame_length: int | None = field(
        default=None,
        metadata={"help": "So many consecutive numbers, frames or samples of a sound are one position; by default 1."},
    )
    label_column: str = _arg("label", "The column that holds the class, an integer from 0 or text.")
    num_labels: int | None = field(
        default=None, metadata={"help": "Classes; by default what the data says. Streams of plain integers need it."}
    )
    max_length: int | None = field(
        default=None,
        metadata={"help": "Positions (bytes, tokens or frames) that are read of a sample; by default filter_length."},
    )
    tokenizer_name: str | None = _arg(
        None,
        "A tokenizer of the Hub, a local folder or a tokenizer.json; by default that of model_name_or_path, else bytes "
        "are tokens.",
    )
    replace_tokenizer: bool = _arg(False, "Take tokenizer_name although model_name_or_path has another one.")
    feature_scale: str = _arg(
        "auto",
        "'auto' maps columns of type uint8 from [0, 255] onto [-1, 1] and leaves others as they are; 'uint8' does so "
        "whatever the type; a number multiplies.",
    )
    validation_samples: int | None = field(
        default=None, metadata={"help": "At most so many validation samples, at random (of a stream the first)."}
    )
    test_samples: int | None = field(
        default=None, metadata={"help": "At most so many test samples, at random (of a stream the first)."}
    )
    eval_batch_size: int = _arg(32, "Samples per process and forward pass of validation and sweep.")

    per_device_batch_size: int = _arg(16, "Samples per process and forward pass.")
    classifier_pooling: str | None = field(
        default=None,
        metadata={
            "help": "What is classified: the 'mean' over all positions, or the 'last' one; by default 'mean', or as "
            "configured."
        },
    )

    RESUMABLE = RunArguments.RESUMABLE | {"eval_batch_size", "test_file", "test_samples", "replace_tokenizer"}

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("train_file", "validation_file", "test_file"):
            if isinstance(getattr(self, name), str):  # one name in a YAML file
                setattr(self, name, [getattr(self, name)])
        counts = "shuffle_buffer eval_batch_size validation_samples test_samples max_length frame_length"
        for name in counts.split():
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not self.train_file and not self.dataset_name:
            raise ValueError(
                "no data to train on: give --train_file data.parquet (or .jsonl, .csv) or --dataset_name owner/name, "
                "with --text_column or --features_column, and --label_column"
            )
        if self.train_file and self.dataset_name:
            raise ValueError("give train_file or dataset_name, not both")
        if (self.validation_file or self.test_file) and not self.train_file:
            raise ValueError("validation_file and test_file need train_file; a dataset has splits")
        if (self.text_column is None) == (self.features_column is None):
            raise ValueError(
                f"give text_column or features_column, and not both, got {self.text_column!r}, {self.features_column!r}"
            )
        if self.tokenizer_name and self.text_column is None:
            raise ValueError("tokenizer_name needs text_column")
        if self.replace_tokenizer and not (self.tokenizer_name and self.model_name_or_path):
            raise ValueError("replace_tokenizer needs tokenizer_name and model_name_or_path")
        if self.frame_length is not None and self.features_column is None:
            raise ValueError("frame_length needs features_column")
        if self.num_labels is not None and self.num_labels < 2:
            raise ValueError(f"num_labels must be at least 2, got {self.num_labels}")
        if self.source is None:
            self.classifier_pooling = self.classifier_pooling or "mean"
            self.set_max_length(self.filter_length)
        if self.feature_scale not in ("auto", "uint8") and not _is_number(self.feature_scale):
            raise ValueError(f"feature_scale must be 'auto', 'uint8' or a number, got {self.feature_scale!r}")

    def set_max_length(self, filter_length: int) -> None:
        """By default what the filters cover. Raises ValueError if they do not cover it."""
        self.max_length = filter_length if self.max_length is None else self.max_length
        if self.max_length > filter_length:
            raise ValueError(f"max_length must be in [1, filter_length = {filter_length}], got {self.max_length}")


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text)) and float(text) != 0
    except ValueError:
        return False


def check_weights(
    args: ClassificationArguments, config: ESSMConfig, reader: Reader, num_labels: int, label_names: list[str] | None
) -> None:
    """Raises ValueError if the weights read other inputs than the data's, or hold a head for other classes.

    Args:
        reader, num_labels, label_names: of the data.
    """
    name, fields = repr(args.model_name_or_path), reader.config_fields
    width = fields.get("num_input_features")
    if config.num_input_features != width:
        raise ValueError(
            f"num_input_features of {name} must be {width} for column {reader.column!r}, got "
            f"{config.num_input_features} (None reads token ids)"
        )
    if width is None:
        check_vocabulary(args, config, reader.name, fields["vocab_size"], reader.tokenizer is None)
    if not holds_head(config, ESSMForSequenceClassification):
        return
    if config.num_labels != num_labels:
        raise ValueError(
            f"the head of {name} has {config.num_labels} labels, and the data {num_labels}: give num_labels "
            f"{config.num_labels} if the data merely shows fewer, or start from weights without a head"
        )
    names = class_names(config)
    if label_names is not None and names != _unnamed(len(names)) and names != label_names:
        raise ValueError(f"the labels of {name} are {names}, and those of the data {label_names}")
    if args.classifier_pooling not in (None, config.classifier_pooling):
        raise ValueError(
            f"classifier_pooling must be {config.classifier_pooling!r}, with which the head of {name} was trained, got "
            f"{args.classifier_pooling!r}"
        )


def trained_labels(config: ESSMConfig) -> list[str] | None:
    """The names of the classes of a trained head; None if there is no such head, or it has none."""
    names = class_names(config)
    return names if holds_head(config, ESSMForSequenceClassification) and names != _unnamed(len(names)) else None


def class_names(config: ESSMConfig) -> list[str]:
    return [config.id2label[i] for i in range(config.num_labels)]


def _unnamed(count: int) -> list[str]:
    return [f"LABEL_{i}" for i in range(count)]


def build_model(args: ClassificationArguments, data: ClassificationData) -> PreTrainedModel:
    """A model for that data. Raises ValueError as `make_model`, or if the weights do not fit the data."""
    config = read_config(args)
    fields = {"num_input_features": None, **data.reader.config_fields}
    if args.model_name_or_path:
        check_weights(args, config, data.reader, data.num_labels, data.label_names)
        fields["vocab_size"] = config.vocab_size  # which may have room to spare
    names = data.label_names
    if names is None:
        names = class_names(config) if config.num_labels == data.num_labels else _unnamed(data.num_labels)
    return make_model(
        args,
        ESSMForSequenceClassification,
        classifier_pooling=args.classifier_pooling or config.classifier_pooling,
        id2label=dict(enumerate(names)),
        label2id={name: i for i, name in enumerate(names)},
        problem_type="single_label_classification",
        **fields,
    )


class Predictor:
    """Predicted classes of held-out samples, shared out among the processes.

    Every process makes the same number of forward passes, as sharded weights need, and gets all predictions.

    Args:
        collate: samples to the model's inputs and labels, as CPU tensors. batch_size: samples per forward pass.
    """

    def __init__(self, accelerator: Accelerator, collate: Callable[[list[Any]], dict[str, Tensor]], batch_size: int):
        self.accelerator, self.collate, self.batch_size = accelerator, collate, batch_size

    def batch(self, samples: Sequence[Any], start: int = 0) -> dict[str, Tensor]:
        """One batch of inputs, without labels, on the device."""
        rows = range(start, min(start + self.batch_size, len(samples)))
        batch = self.collate([samples[row] for row in rows])
        return {name: value.to(self.accelerator.device) for name, value in batch.items() if name != "labels"}

    @torch.no_grad()
    def __call__(self, model: nn.Module, samples: Sequence[Any], budget: int) -> Tensor:
        """(n,) int64 classes, on the CPU."""
        starts = range(0, len(samples), self.batch_size)
        found = torch.zeros(len(samples), dtype=torch.int64, device=self.accelerator.device)
        for i in even_shares(len(starts), self.accelerator.process_index, self.accelerator.num_processes):
            start = starts[i or 0]
            logits = run_at_budget(model, self.batch(samples, start), budget).logits
            if i is not None:
                found[start : start + len(logits)] = logits.argmax(-1) + 1  # 0 where another process predicts
        return self.accelerator.reduce(found, "sum").cpu() - 1


def make_task(
    model: PreTrainedModel,
    source: SampleSource,
    predict: Predictor,
    samples: Sequence[Any],
    labels: Tensor,
    **rest: Any,
) -> Task:
    """One class per sample; judged by the accuracy on held-out samples and their labels (n,) int64.

    Args:
        rest: tokens_per_sample, save_companions and identity of the `Task`.
    """

    def evaluate(accelerator: Accelerator, module: nn.Module, K: int) -> float:
        predictions = predict(accelerator.unwrap_model(module), samples, K)
        return float((predictions == labels).double().mean())

    return Task(
        model=model,
        source=source,
        collate=predict.collate,
        training_figure=lambda outputs, batch: (outputs.logits.argmax(-1) == batch["labels"]).float().mean(),
        evaluate=evaluate,
        metric=ACCURACY,
        **rest,
    )


def main(args: ClassificationArguments) -> None:
    """Train, save, sweep, push.

    Raises:
        ValueError: arguments, data or output folder that cannot work, or a run in output_dir with other arguments or
            data; all before the first update, except for rows of a stream.
        FloatingPointError, OSError: see `engine.train`.
    """
    with open_run(args) as accelerator:
        _run(accelerator, args)


def _run(accelerator: Accelerator, args: ClassificationArguments) -> None:
    # Whatever is wrong with the arguments shows here, before anything is deleted or computed.
    if args.push_to_hub and accelerator.is_main_process:
        check_can_push(str(args.hub_model_id), private=args.hub_private)
    config = read_config(args)
    args.set_max_length(config.filter_length)
    if args.full_budget_updates is None and (args.model_name_or_path or args.is_baseline or config.block != "gated"):
        args.full_budget_updates = 0
    schedule = make_schedule(args, 1 if args.is_baseline else config.num_spectral_channels)
    with accelerator.main_process_first():
        data = load_classification(args, trained_labels(config))
    set_seed(args.seed)  # the same weights on every process
    model = build_model(args, data)
    if not args.is_baseline:
        model.config.trained_budgets = list(schedule.budgets)
    length = args.max_length if args.torch_compile else None  # one shape to compile
    predict = Predictor(accelerator, lambda samples: collate(data.reader, samples, length), args.eval_batch_size)

    task = make_task(
        model,
        data.source,
        predict,
        data.validation.samples,
        data.validation.labels,
        tokens_per_sample=data.tokens_per_sample,
        save_companions=data.reader.save_pretrained,
        identity=data.fingerprints,
    )
    train_and_record(accelerator, args, task, schedule, script=__file__, data=data.description)

    # From here on only what was saved counts.
    output_dir = Path(args.output_dir)
    held_out = data.validation if data.test is None else data.test
    trained = args.final_model == "last" and not args.ema_decay and accelerator.distributed_type != DistributedType.FSDP
    cls = next(c for c in type(model).__mro__ if not c.__module__.startswith("torch."))
    with accelerator.local_main_process_first():  # or processes copy the model's code at the same time
        loaded = reload(output_dir / "model", predict.batch(held_out.samples), cls, model if trained else None)
    say(accelerator, f"the reloaded {output_dir / 'model'} gives the same logits")
    progress = lambda K: say(accelerator, f"sweep: K={K}")  # noqa: E731
    sweep = sweep_accuracy(loaded, held_out.samples, held_out.labels, predict, progress=progress)
    if accelerator.is_main_process:
        say(accelerator, f"accuracy on {len(held_out.samples):,} samples: {held_out.name}\n{sweep.table()}")
        context = {"split": "validation" if data.test is None else "test", "samples": len(held_out.samples)}
        sweep.save(output_dir, model=str(output_dir / "model"), **context, data=data.description)
        say(accelerator, f"saved {output_dir / 'budget_sweep.json'} and budget_sweep.png")
        if not args.is_baseline:  # which has no remote code
            write_card_and_push(args)
    accelerator.wait_for_everyone()
    accelerator.end_training()


def reload(folder: Path, batch: dict[str, Tensor], cls: type, trained: PreTrainedModel | None) -> PreTrainedModel:
    """The saved model as a user gets it, on the device of `batch`, a batch of inputs.

    Args:
        cls: the model's class. trained: the model in memory that was saved, if there is one.
    Raises:
        RuntimeError: its logits on `batch` are not those of this package's code, or its weights not the trained ones.
    """
    device = next(iter(batch.values())).device
    loaded = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=False).to(device).eval()
    own = cls.from_pretrained(folder).to(device).eval()
    with torch.no_grad():
        expected, got = (model(**batch).logits for model in (own, loaded))
    if not torch.equal(expected, got):
        raise RuntimeError(f"{folder}: the reloaded model's logits differ by {(expected - got).abs().max().item():.3g}")
    if trained is not None:
        state = loaded.state_dict()
        for name, value in trained.state_dict().items():
            if not torch.equal(value.to(device), state[name]):
                raise RuntimeError(f"{folder}: the reloaded {name} is not the trained one")
    return loaded


def sweep_accuracy(
    model: PreTrainedModel,
    samples: Sequence[Any],
    labels: Tensor,
    predict: Predictor,
    budgets: Sequence[int] = BUDGETS,
    progress: Callable[[int], object] = lambda budget: None,
) -> BudgetSweep:
    """Accuracy, by the `evaluate` module of this folder, and speed at every budget. All processes must call it.

    Args:
        labels: (n,) int64, of the samples. progress: called with each K before its evaluation.
    """
    with predict.accelerator.main_process_first():
        metric = load_metric("accuracy")

    def accuracy(K: int) -> float:
        return metric.compute(predictions=predict(model, samples, K), references=labels)["accuracy"]

    return sweep_metric(model, accuracy, predict.batch(samples), metric=ACCURACY, budgets=budgets, progress=progress)


def run() -> None:
    """The command."""
    run_script(lambda: main(parse_arguments(ClassificationArguments)))


if __name__ == "__main__":
    run()
