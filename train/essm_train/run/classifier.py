# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What essm-train-classification and essm-train-retrieval train: classes of sequences, or of pairs of documents."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from accelerate.utils import set_seed
from transformers import PreTrainedModel

from essm_train.data.arguments import ClassificationArguments, RetrievalArguments
from essm_train.data.classification import (
    ClassificationData,
    check_weights,
    class_names,
    load_classification,
    trained_labels,
    unnamed_labels,
)
from essm_train.data.rows import LabelledData
from essm_train.measure.scoring import ACCURACY, hold_out_samples
from essm_train.models import make_config, make_model
from essm_train.pairs import ESSMForPairClassification, ESSMPairConfig
from essm_train.run.accelerator import open_run
from essm_train.run.loop import Task, train_and_sweep
from essm_train.tasks.retrieval import LABELS, load_retrieval
from modeling_essm import ESSMForSequenceClassification
from modeling_essm.budgets.curve import BudgetCurve


def build_classifier(args: ClassificationArguments, data: ClassificationData) -> PreTrainedModel:
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
        classifier_pooling=args.classifier_pooling or getattr(config, "classifier_pooling", "mean"),
        problem_type="single_label_classification",
        **_labels(names),
        **fields,
    )


def _labels(names: Sequence[str]) -> dict[str, dict]:
    return {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}


def train_classifier(args: ClassificationArguments) -> BudgetCurve:
    """Train, save, sweep, push; the sweep.

    Raises:
        ValueError: arguments, data or output folder that cannot work, or a run in output_dir with other arguments or
            data; all before the first update, except for rows of a stream. Others: as `train_and_sweep`.
    """
    with open_run(args) as accelerator:
        # Whatever is wrong with the arguments shows here, before anything is deleted or computed.
        config = make_config(args)
        if not args.is_diagonal:
            args.check_length(config.filter_length)
        starts_new = not (args.model_name_or_path or args.is_baseline)
        if args.full_budget_updates is None and not (starts_new and config.block == "elastic"):
            args.full_budget_updates = 0
        with accelerator.main_process_first(), accelerator.local_main_process_first():  # caches may be local
            data = load_classification(args, trained_labels(config) if args.model_name_or_path else None)
        set_seed(args.seed)  # the same weights on every process
        model = build_classifier(args, data)
        what = f"{len(data.held_out.samples):,} samples: {data.held_out.name}"
        task = make_task(args, model, data, "essm-train-classification", what)
        return train_and_sweep(accelerator, args, task)


def train_pair_classifier(args: RetrievalArguments) -> BudgetCurve:
    """The same for pairs of documents. Raises as `train_classifier`."""
    with open_run(args) as accelerator:
        args.check_length(make_config(args, ESSMPairConfig).filter_length)
        data = load_retrieval(args)
        set_seed(args.seed)  # the same weights on every process
        model = make_model(args, ESSMForPairClassification, **_labels(LABELS))
        what = f"{len(data.held_out.samples):,} pairs"
        task = make_task(args, model, data, "essm-train-retrieval", what)
        return train_and_sweep(accelerator, args, task)


def make_task(
    args: ClassificationArguments | RetrievalArguments,
    model: PreTrainedModel,
    data: LabelledData,
    script: str,
    what: str,
) -> Task:
    """One class per sample, judged by accuracy.

    Args:
        what: is held out, for people.
    """
    length = args.max_length if args.torch_compile else None  # where the model is compiled, batches have one length
    collate = functools.partial(data.collate, length=length)
    validation, held_out = (
        hold_out_samples(split, collate, args.eval_batch_size, data.description)
        for split in (data.validation, data.held_out)
    )
    return Task(
        script=script,
        description=data.description,
        model=model,
        source=data.source,
        collate=collate,
        figure=lambda outputs, batch: (outputs.logits.argmax(-1) == batch["labels"]).float().mean(),
        metric=ACCURACY,
        validation=validation,
        held_out=held_out,
        tokens_per_sample=data.tokens_per_sample,
        save_beside=data.save_beside,
        identity=data.digests,
        swept={"split": "validation" if data.test is None else "test", "samples": len(data.held_out.samples)},
        heading=f"accuracy on {what}\n",
    )
