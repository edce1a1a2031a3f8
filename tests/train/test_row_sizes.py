# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Rows of one task are of one size, in every table that ranks models."""

import pytest
import torch

from essm_train.arguments import sort_values
from essm_train.models import make_model
from essm_train.pairs import ESSMForPairClassification
from essm_train.tasks.catalog import arguments_class, get_task, published_folder
from essm_train.tasks.experiments import get_experiment
from modeling_essm import ESSMForCausalLM, ESSMForSequenceClassification

CLASSES = {
    "train_clm": (ESSMForCausalLM, {"vocab_size": 259}),
    "train_classification": (ESSMForSequenceClassification, {"num_labels": 10}),
    "train_retrieval": (ESSMForPairClassification, {"vocab_size": 259, "num_labels": 2}),
}
TABLES = ("table1", "table3", "table3_novels", "table4", "table4_novels", "table5", "table5_speech4")


def parameters(row, scale: str) -> int:
    spec = get_task(row.task)
    cls, fields = CLASSES[spec.script]
    values = spec.arguments | spec.sizes(scale) | row.arguments
    values = {key: published_folder(value, spec.name) for key, value in values.items() if value is not None}
    if spec.script == "train_classification":
        fields = fields | ({"num_input_features": 40} if "features_column" in values else {"vocab_size": 259})
    arguments = arguments_class(spec.script)
    args = arguments(**sort_values(arguments, values | _files(spec.script), row.task))
    with torch.device("meta"):
        return sum(p.numel() for p in make_model(args, cls, **fields).parameters())


def _files(script: str) -> dict:
    if script == "train_clm":
        return {"train_file": ["a.txt"]}
    names = {"train_file": "a.tsv", "validation_file": "b.tsv"}
    return names if script == "train_retrieval" else {name: [file] for name, file in names.items()}


@pytest.mark.parametrize(
    ("table", "scale"),
    [("table5_speech4", "small"), *(pytest.param(table, "full", marks=pytest.mark.slow) for table in TABLES)],
)
def test_every_row_has_as_many_parameters_as_the_es_ssm_of_its_task(table, scale):
    sizes: dict[str, dict[str, int]] = {}
    for name, row in get_experiment(table).rows.items():
        sizes.setdefault(row.task_name, {})[name] = parameters(row, scale)
    for found in sizes.values():
        target = found.get("ES-SSM") or next(iter(found.values()))
        assert len(found) >= 7 and all(abs(n / target - 1) <= 0.05 for n in found.values()), found


def test_no_row_of_the_ablation_differs_by_more_than_its_width_makes():
    """To 3% in Table 4, where rows differ in a part, not in kind."""
    for scale in ("small", "full"):
        rows = {name: parameters(row, scale) for name, row in get_experiment("table4_novels").rows.items()}
        assert len(rows) >= 9 and all(abs(n / rows["ES-SSM"] - 1) <= 0.03 for n in rows.values()), rows
