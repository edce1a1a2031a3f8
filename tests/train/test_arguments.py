# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""essm_train/arguments.py: values of files and options, what is refused and what is named instead, without torch."""

import dataclasses
import json
import math
import os
import re
import subprocess
import sys

import pytest
from helpers import COMMANDS

from essm_train.analyze import AnalyzeArguments
from essm_train.arguments import ModelArguments, RunArguments, as_words, parse_arguments
from essm_train.data.arguments import ClassificationArguments, CLMArguments, RetrievalArguments
from essm_train.evaluate import EvaluateArguments
from essm_train.make_pairs import PairsArguments
from essm_train.publish.arguments import CalibrateArguments, PruneArguments
from essm_train.reproduce import ReproduceArguments
from essm_train.sweep import SweepArguments


def test_arguments_come_from_files_and_are_overridden(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("learning_rate: 1e-3\ntrain_file: x.txt\nstreaming: true\neval_budgets: [2, 4]\nema_decay: null\n")
    args = parse_arguments(CLMArguments, [str(path), "--learning_rate", "0.5", "--max_steps", "7"])
    assert (args.learning_rate, args.max_steps, args.train_file) == (0.5, 7, ["x.txt"])
    assert (args.streaming, args.eval_budgets, args.ema_decay) == (True, [2, 4], 0.0)
    assert parse_arguments(CLMArguments, [str(path)]).learning_rate == 1e-3  # which YAML reads as text
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"max_steps": 7, "train_file": ["x.txt", "y.txt"], "num_train_epochs": 1}))
    assert as_words(ClassificationArguments, {"text_column": "-x"}) == ["--text_column=-x"]
    args = parse_arguments(CLMArguments, [str(path), "--train_file", "z.txt"])
    assert (args.max_steps, args.train_file, args.num_train_epochs) == (7, ["z.txt"], 1.0)


def test_fields_of_the_configuration_are_overrides(tmp_path):
    """In a file they stand beside the arguments; later overrides replace them one by one."""
    path = tmp_path / "a.yaml"
    path.write_text("max_steps: 3\nhidden_size: 32\ndropout: 1e-1\nconfig_overrides: {gating: none}\n")
    args = parse_arguments(CLMArguments, [str(path), "--config_overrides", "hidden_size=48,head_size=3"])
    given = {"hidden_size": 48, "dropout": 0.1, "gating": "none", "head_size": 3}
    assert args.config_overrides == given
    assert given.items() <= args.fields().items() and args.fields()["num_hidden_layers"] == 8  # and the script's own
    hybrid = '{"num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"]}'
    args = parse_arguments(CLMArguments, ["--config_overrides", hybrid])
    assert args.fields()["layer_types"] == ["full_attention", "linear_attention"]


def test_a_new_model_has_the_size_of_the_script_and_its_block():
    elastic = {"block": "elastic", "hidden_size": 128, "num_hidden_layers": 8, "num_spectral_channels": 8}
    assert CLMArguments().fields() == elastic | {"filter_length": 1024}
    paper = CLMArguments(config_overrides="block=paper,hidden_size=16").fields()
    assert (paper["hidden_size"], paper["num_hidden_layers"], paper["num_spectral_channels"]) == (16, 4, 32)
    assert paper["filter_length"] == 1024
    assert RetrievalArguments(train_file="a.tsv").fields()["filter_length"] == 4096
    beside = CLMArguments(config_name="x", config_overrides={"gating": "none"})
    assert beside.fields() == {"gating": "none"}  # all else is the configuration's


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("max_stepz: 3", "unknown argument max_stepz; nearest: max_steps"),
        ("hiden_size: 3", "unknown argument hiden_size; nearest: hidden_size"),
        ("- 3", "must hold a table"),
        ("a: [", "is not YAML"),
        ("max_steps: !!python/object:os.system {}", "is not YAML: could not determine a constructor for the tag"),
        ("max_steps: !!bool perhaps", "is not YAML: 'perhaps'"),
        ("config_overrides: [1]", r"config_overrides must be a table, or like hidden_size=256, got \[1\]"),
        ("config_overrides: {1: 2}", "config_overrides: 1 is no field"),
        ("block: [1]\nnum_hidden_layers: x", "num_hidden_layers must be an integer, got 'x'"),
        (b"train_file: caf\xe9", "a.yaml is not YAML: 'utf-8' codec can't decode byte 0xe9"),
        ("max_steps: 1.5", "invalid int value"),
        ("streaming: maybe", "[Tt]ruthy value"),
        ("dropout: much", "config_overrides: dropout must be a number, got 'much'"),
    ],
)
def test_broken_argument_files_are_refused(content, reason, tmp_path):
    path = tmp_path / "a.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=reason):
        parse_arguments(CLMArguments, [str(path)])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--max_train_steps", "3"], "unknown argument --max_train_steps; nearest: --max_steps"),
        (["--max_step=3"], "unknown argument --max_step; nearest: --max_steps"),  # no abbreviation
        (["--lr", "1"], "nearest: --learning_rate"),
        (["--batch-size", "1"], "nearest: --per_device_train_batch_size"),
        (["--xyz", "1"], "unknown argument --xyz; see --help"),
        (["--hidden_size", "3"], "a field of the configuration: --config_overrides hidden_size=..."),
        (["hello"], "unexpected 'hello'"),
        (["--max_steps", "x"], "argument --max_steps.*: invalid int value: 'x'"),
        (["--config_overrides", "hidden=3"], "hidden is no field of the configuration; nearest: hidden_"),
        (["--config_overrides", "hidden_size"], "must be like hidden_size=256,num_hidden_layers=8, got 'hidden_size'"),
        (["--config_overrides", "state_size=3"], "state_size is no field of the configuration"),
        (["--config_overrides", "auto_classes=3"], "auto_classes is no field of the configuration"),
        (["--architecture", "diagonal_ssm", "--config_overrides", "gating=none"], "gating is no field"),
        (["--block_size", "2000"], r"block_size must be in \[2, filter_length = 1024\], got 2000"),
        (["--validation_blocks", "3", "--sweep_blocks", "2"], "must be at most sweep_blocks = 2, got 3"),
        (["--architecture", "diagonal_ssm", "--block_size", "1"], "block_size must be at least 2, got 1"),
        (["--validation_file", "x"], "validation_file needs train_file or dataset_name"),
        (["--dataset_config_name", "x"], "dataset_config_name needs dataset_name"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_nearest_legal_argument_is_named(given, message):
    with pytest.raises(ValueError, match=message):
        parse_arguments(CLMArguments, given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_steps": 0}, "max_steps must be at least 1, got 0"),
        ({"seed": 20261129120000}, r"seed must be in \[0, 2147483647\], got 20261129120000"),
        ({"ema_decay": 1.0}, r"ema_decay must be in \[0, 1\), got 1.0"),
        ({"num_train_epochs": math.inf}, r"num_train_epochs must be in \(0, inf\), got inf"),
        ({"learning_rate": math.nan}, "learning_rate must be at least 0, got nan"),
        ({"max_grad_norm": 0.0}, r"max_grad_norm must be in \(0, inf\], got 0.0"),
        ({"extend": True, "overwrite_output_dir": True}, "give overwrite_output_dir or extend, not both"),
        ({"min_lr_rate": 0.1}, "'cosine_with_min_lr' and min_lr_rate need each other, got 'cosine' and 0.1"),
        ({"decay_steps": 9}, "'warmup_stable_decay' and decay_steps need each other, got 'cosine' and 9"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "lr_scheduler_type must be one of cosine, .*linear, .*, got"),
        ({"distillation_weight": 0.5}, "distillation_weight needs budget_schedule 'sandwich' or 'family'"),
        (
            {"truncation_tau": 0.1, "truncation_until": "soon"},
            "truncation_until must be 'warmup', an update or a share, got 'soon'",
        ),
        ({"truncation_attempts": 2}, "truncation_attempts needs truncation_tau"),
        ({"early_stopping_threshold": 0.1}, "early_stopping_threshold needs early_stopping_patience"),
        ({"push_to_hub": True}, "push_to_hub needs hub_model_id"),
        ({"architecture": "mamba", "push_to_hub": True, "hub_model_id": "a/b"}, "'mamba' is there to compare with"),
        ({"architecture": "diagonal_ssm", "config_name": "x"}, "has no config_name, no match_parameters and no"),
        ({"architecture": "diagonal_ssm", "attention_every": 2}, "has no config_name, .* and no attention_every"),
        ({"architecture": "s4d", "match_parameters": True}, "match_parameters is for a new ES-SSM"),
        ({"match_block": "paper"}, "match_block is for match_parameters"),
        ({"config_name": "x", "model_name_or_path": "y"}, "config_name or model_name_or_path, not both"),
        ({"model_name_or_path": "x", "config_overrides": "gating=none"}, "gating is part of model_name_or_path"),
        ({"attention_every": 9}, r"attention_every must be in \[2, num_hidden_layers = 8\], got 9"),
        ({"attention_every": 2, "config_name": "x"}, "beside a configuration give layer_types"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelArguments(**changes)


def test_new_language_models_learn_by_muon_and_weights_go_on_by_adamw():
    assert (CLMArguments().optimizer, RunArguments().optimizer) == ("muon", "adamw")
    weights = {"model_name_or_path": "runs/train_clm/model"}
    assert [CLMArguments(**weights, optimizer=name).optimizer for name in (None, "muon")] == ["adamw", "muon"]


def test_what_defines_a_run_is_told_from_what_does_not():
    """Where the model's shape comes from does not: its configuration is compared as a whole."""
    identity = RunArguments(seed=3).identity()
    assert identity["seed"] == 3 and not identity.keys() & {"output_dir", "save_steps", "cpu_threads", "extend"}
    named = CLMArguments(config_name="x", config_overrides="gating=none").identity()
    assert not named.keys() & {"config_name", "config_overrides", "architecture"} and "model_name_or_path" in named


def test_no_command_imports_torch_before_its_arguments_are_right():
    """All of them in one process, which would take seconds more with torch."""
    code = f"""
import contextlib, importlib, io, sys
for module in {[entry.partition(":")[0] for entry in COMMANDS.values()]}:
    for argv in (["--no_such_argument", "1"], ["--help"]):
        sys.argv, said = [module, *argv], io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            try:
                importlib.import_module(module).run()
            except SystemExit as end:
                assert end.code == (0 if "--help" in argv else 1), (module, end.code, said.getvalue())
        assert (" --" if "--help" in argv else "error: ") in said.getvalue(), (module, said.getvalue())
        assert "Traceback" not in said.getvalue()
        assert "torch" not in sys.modules, (module, argv)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)
    assert run.returncode == 0, run.stderr[-2000:]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_file": None, "text_column": "t"}, "no data to train on"),
        ({"dataset_name": "x", "text_column": "t"}, "train_file or dataset_name, not both"),
        ({}, "give text_column or features_column"),
        ({"text_column": "t", "frame_length": 2}, "frame_length needs features_column"),
        ({"text_column": "t", "max_length": 2000}, r"max_length must be in \[1, filter_length = 1024\], got 2000"),
        ({"features_column": "f", "feature_scale": "big"}, "feature_scale must be"),
    ],
    ids=str,
)
def test_wrong_arguments_of_a_classifier_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ClassificationArguments(**{"train_file": ["a.jsonl"]} | changes)


def test_a_typing_error_is_named_before_what_is_missing():
    with pytest.raises(ValueError, match="unknown argument --text_file; nearest: --text_files"):
        parse_arguments(AnalyzeArguments, ["--model", "x", "--text_file=y", "--output-dir", "z"])


LEAST = {  # of every command, arguments that it needs
    CLMArguments: {},
    ClassificationArguments: {"train_file": ["x"], "text_column": "text"},
    RetrievalArguments: {"train_file": "x"},
    AnalyzeArguments: {"model": "x", "text_files": ["x"], "output_dir": "x"},
    CalibrateArguments: {"model": "x", "timing_only": True},
    EvaluateArguments: {"models": ["x"], "task": "x"},
    PairsArguments: {"books": "x"},
    PruneArguments: {"model": "x", "output_dir": "x", "amount": 0.5, "task": "x"},
    ReproduceArguments: {},
    SweepArguments: {"model": "x", "text_files": ["x"], "output_dir": "x"},
}


@pytest.mark.parametrize("cls", LEAST, ids=lambda cls: cls.__name__)
def test_no_count_is_negative(cls):
    """`eval_budgets` are held against a model's capacity, when there is one."""
    for field in dataclasses.fields(cls):
        if field.name != "eval_budgets" and "int" in re.split(r"\W+", str(field.type)):
            value = [-1] if "list" in str(field.type) else -1
            with pytest.raises(ValueError, match=rf"{field.name} must be (at least|in) .*got -1"):
                cls(**LEAST[cls] | {field.name: value})


def test_a_file_of_arguments_is_utf_8_in_every_locale(tmp_path):
    (tmp_path / "a.yaml").write_text("text_column: Wörter\ntrain_file: x.csv\n", encoding="utf-8")
    code = (
        "import locale, sys\n"
        "from essm_train.arguments import parse_arguments\n"
        "from essm_train.console import run_script\n"
        "from essm_train.data.arguments import ClassificationArguments\n"
        "assert locale.getpreferredencoding(False) != 'UTF-8' and sys.stdout.encoding != 'utf-8'\n"
        "args = parse_arguments(ClassificationArguments, sys.argv[1:])\n"
        "run_script(lambda: print(args.text_column == 'W\\u00f6rter', args.text_column))\n"
    )
    env = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}
    run = subprocess.run([sys.executable, "-c", code, tmp_path / "a.yaml"], capture_output=True, text=True, env=env)
    assert run.stdout == "True W\\xf6rter\n", run.stderr
