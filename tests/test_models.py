# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""train/models.py: the paper's variants and the baselines through the training scripts."""

import json
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))

import train_classification
import train_clm
from engine import parse_arguments
from models import make_model

TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_spectral_channels": 4, "filter_length": 512, "max_steps": 3}
TINY |= {"warmup_steps": 1, "validate_every": 3, "checkpoint_every": 2, "per_device_batch_size": 2, "cpu_threads": 1}


def command_line(**values) -> list[str]:
    return [part for name, value in values.items() for part in (f"--{name}", str(value))]


@pytest.mark.parametrize(
    "changes",
    [{"gating": "none"}, {"gating": "none", "ar_order": 2, "budget_schedule": "full"}, {"scaling_exponent": 0.0}],
    ids=["dropout only", "AR-STU", "exponent 0"],
)
def test_variants_train(changes, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("spectral budgets " * 100)
    values = TINY | {"train_file": text, "block_size": 64, "validation_blocks": 2, "sweep_blocks": 2} | changes
    train_clm.main(parse_arguments(train_clm.CLMArguments, command_line(**values, output_dir=tmp_path / "run")))
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert {name: config[name] for name in changes if name in config} == {
        name: value for name, value in changes.items() if name != "budget_schedule"
    }


@pytest.mark.parametrize("architecture", ["transformer", "s4d"])
def test_a_baseline_trains_on_the_same_data_with_as_many_parameters(architecture, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("spectral budgets " * 100)
    values = TINY | {"train_file": text, "block_size": 64, "validation_blocks": 2, "sweep_blocks": 2, "max_steps": 3}
    values |= {"hidden_size": 32, "num_hidden_layers": 2}
    line = command_line(**values, architecture=architecture)
    args = parse_arguments(train_clm.CLMArguments, [*line, "--output_dir", str(tmp_path / "run")])
    train_clm.main(args)
    train_clm.main(args)  # finished already
    sweep = json.loads((tmp_path / "run" / "budget_sweep.json").read_text())
    assert sweep["budgets"] == [1] and 0 < sweep["bits_per_byte"][0] < 8.2
    own = make_model(parse_arguments(train_clm.CLMArguments, command_line(**values)), (), vocab_size=259)
    baseline = make_model(args, (), vocab_size=259)
    assert abs(baseline.num_parameters() / own.num_parameters() - 1) <= 0.05


def test_a_baseline_classifies_features(tmp_path):
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        frames = pa.array([rng.random((20, 8), np.float32).tolist() for _ in range(12)])
        pq.write_table(pa.table({"frames": frames, "label": rng.integers(0, 3, 12)}), tmp_path / f"{split}.parquet")
    values = TINY | {"train_file": tmp_path / "train.parquet", "test_file": tmp_path / "test.parquet"}
    values |= {"features_column": "frames", "architecture": "cnn", "hidden_size": 32, "num_hidden_layers": 2}
    args = parse_arguments(
        train_classification.ClassificationArguments, command_line(**values, num_labels=3, output_dir=tmp_path / "run")
    )
    train_classification.main(args)
    assert json.loads((tmp_path / "run" / "budget_sweep.json").read_text())["budgets"] == [1]


def test_errors(tmp_path):
    line = command_line(**TINY, architecture="transformer")
    for extra in ({"config_name": "x"}, {"push_to_hub": True, "hub_model_id": "a/b"}):
        with pytest.raises(ValueError, match="'transformer' is there to compare with"):
            parse_arguments(train_clm.CLMArguments, [*line, *command_line(**extra)])
    with pytest.raises(ValueError, match=r"architecture must be one of .* got 'rnn'"):
        make_model(parse_arguments(train_clm.CLMArguments, command_line(**TINY, architecture="rnn")), ())
