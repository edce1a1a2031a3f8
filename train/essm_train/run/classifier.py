# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""A classifier's run, of sequences or of pairs of documents: its model, the task for the loop, the report after it."""

from __future__ import annotations

from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from essm_train.data.arguments import ClassificationArguments, RetrievalArguments
from essm_train.data.classification import ClassificationData, load_classification
from essm_train.data.labels import check_weights, class_names, trained_labels, unnamed_labels
from essm_train.data.rows import LabelledData
from essm_train.measure.budget_sweep import sweep_budgets
from essm_train.measure.metric import ACCURACY
from essm_train.measure.scoring import Predictor, hold_out_samples
from essm_train.models import make_config, make_model
from essm_train.pairs import ESSMForPairClassification, ESSMPairConfig
from essm_train.publish.run_card import write_card_and_push
from essm_train.run.accelerator import open_run, say
from essm_train.run.loop import make_schedule, train_and_record
from essm_train.run.task import Task, report_sweep
from essm_train.tasks.retrieval import LABELS, load_retrieval
from modeling_essm import ESSMForSequenceClassification
from modeling_essm.budgets.curve import BudgetCurve
from modeling_essm.training.budget_dropout import BudgetSchedule


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


def build_pair_classifier(args: RetrievalArguments) -> PreTrainedModel:
    """A model of pairs. Raises ValueError as `make_model`."""
    return make_model(args, ESSMForPairClassification, **_labels(LABELS))


def _labels(names: list[str] | tuple[str, ...]) -> dict[str, dict]:
    return {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}


def train_classifier(args: ClassificationArguments) -> BudgetCurve:
    """Train, save, sweep, push; the sweep.

    Raises:
        ValueError: arguments, data or output folder that cannot work, or a run in output_dir with other arguments or
            data; all before the first update, except for rows of a stream.
        FloatingPointError, OSError: see `loop.train`.
    """
    with open_run(args) as accelerator:
        # Whatever is wrong with the arguments shows here, before anything is deleted or computed.
        config = make_config(args)
        if not args.is_diagonal:
            args.set_max_length(config.filter_length)
        starts_new = not (args.model_name_or_path or args.is_baseline)
        if args.full_budget_updates is None and not (starts_new and config.block == "gated"):
            args.full_budget_updates = 0
        schedule = make_schedule(args, 1 if args.is_baseline else config.num_spectral_channels)
        with accelerator.main_process_first():
            data = load_classification(args, trained_labels(config))
        set_seed(args.seed)  # the same weights on every process
        model = build_classifier(args, data)
        what = f"{len(data.held_out.samples):,} samples: {data.held_out.name}"
        return _train(accelerator, args, model, schedule, data, what, "essm-train-classification")


def train_pair_classifier(args: RetrievalArguments) -> BudgetCurve:
    """The same for pairs of documents. Raises as `train_classifier`."""
    with open_run(args) as accelerator:
        config = make_config(args, ESSMPairConfig)
        args.check_max_length(config.filter_length)
        schedule = make_schedule(args, 1 if args.is_baseline else config.num_spectral_channels)
        data = load_retrieval(args)
        set_seed(args.seed)  # the same weights on every process
        model = build_pair_classifier(args)
        return _train(
            accelerator, args, model, schedule, data, f"{len(data.held_out.samples):,} pairs", "essm-train-retrieval"
        )


def _train(
    accelerator: Accelerator,
    args: ClassificationArguments | RetrievalArguments,
    model: PreTrainedModel,
    schedule: BudgetSchedule,
    data: LabelledData,
    what: str,
    script: str,
) -> BudgetCurve:
    """All of it; from the end of the training on what was saved counts. All processes call it."""
    if not args.is_baseline:
        model.config.trained_budgets = list(schedule.budgets)
    length = args.max_length if args.torch_compile else None  # where the model is compiled, batches have one length
    predict = Predictor(lambda samples: data.collate(samples, length), args.eval_batch_size, accelerator)
    task = classification_task(model, data, predict)
    train_and_record(accelerator, args, task, schedule, script=script, data=data.description)

    folder = Path(args.output_dir) / "model"
    with accelerator.local_main_process_first():
        saved = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=False)
    saved.to(accelerator.device).eval()
    held_out = hold_out_samples(data.held_out, predict, data.description)
    sweep = sweep_budgets(saved, held_out, progress=lambda K: say(accelerator, f"sweep: K={K}"))
    context = {"split": "validation" if data.test is None else "test", "samples": len(data.held_out.samples)}
    report_sweep(accelerator, args, sweep, f"accuracy on {what}\n", **context, data=data.description)
    if accelerator.is_main_process and any(folder.glob("*.py")):  # others have no card
        write_card_and_push(args)
    return sweep


def classification_task(model: PreTrainedModel, data: LabelledData, predict: Predictor) -> Task:
    """One class per sample; judged by the accuracy on the validation split."""

    def evaluate(accelerator: Accelerator, module: nn.Module, K: int) -> float:
        predictions = predict(accelerator.unwrap_model(module), data.validation.samples, K)
        return float((predictions == data.validation.labels).double().mean())

    return Task(
        model=model,
        source=data.source,
        collate=predict.collate,
        training_figure=lambda outputs, batch: (outputs.logits.argmax(-1) == batch["labels"]).float().mean(),
        evaluate=evaluate,
        metric=ACCURACY,
        tokens_per_sample=data.tokens_per_sample,
        save_beside=data.save_beside,
        identity=data.digests,
    )
