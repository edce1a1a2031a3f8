# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""essm_train/models.py: variants and baselines through the scripts, their sizes, weights and code that are read."""

import contextlib
import json

import numpy as np
import pytest
import torch
from helpers import random_ids, random_model
from safetensors.torch import load_file, save_file
from training_run import options, read, write
from transformers import AutoModelForCausalLM, AutoTokenizer

from essm_train.arguments import parse_arguments, sort_values
from essm_train.data.arguments import ClassificationArguments, CLMArguments
from essm_train.models import load_model, make_config, make_model
from essm_train.pairs import ESSMForPairClassification, ESSMPairConfig
from essm_train.run.classifier import train_classifier
from essm_train.run.language import train_language_model
from essm_train.tasks.catalog import ROOT, arguments_class, get_task, published_folder
from essm_train.tasks.experiments import EXPERIMENTS, get_experiment
from modeling_essm import ESSMConfig, ESSMForCausalLM, ESSMForSequenceClassification, ESSMModel, build_byte_tokenizer

TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_spectral_channels": 4, "filter_length": 512, "max_steps": 2}
TINY |= {"warmup_steps": 1, "eval_steps": 2, "per_device_train_batch_size": 2, "cpu_threads": 1}
ELASTIC = {"block": "elastic", "head_size": 3, "conv_kernel_size": 3, "intermediate_size": 24}


def parse(**values):
    return parse_arguments(CLMArguments, options(CLMArguments, values))


def count(args, cls=ESSMForCausalLM) -> int:
    with torch.device("meta"):
        return make_model(args, cls).num_parameters()


@pytest.mark.parametrize(
    ("changes", "budgets"),
    [
        ({"architecture": "ar_stu", "ar_negative_filters": False, "ar_feature_shift": 2}, [2, 3, 4]),
        ({"architecture": "transformer", "hidden_size": 32, "num_hidden_layers": 2}, [1]),
    ],
    ids=["AR-STU as released", "transformer"],
)
def test_variants_and_baselines_train(changes, budgets, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("spectral budgets " * 100)
    values = {"train_file": tmp_path / "text.txt", "block_size": 64, "validation_blocks": 2, "sweep_blocks": 2}
    train_language_model(parse(**TINY | values | changes, output_dir=tmp_path / "run"))
    config = read(tmp_path / "run" / "model" / "config.json")
    of_variant = {name for name in changes if "ar_" in name}
    assert {name: config[name] for name in of_variant} == {name: changes[name] for name in of_variant}
    assert read(tmp_path / "run" / "budget_sweep.json")["budgets"] == budgets
    block = f" ({config['block']} block)" if "block" in config else ""
    assert f" parameters{block} on 1 x cpu" in capsys.readouterr().out


def test_a_baseline_classifies_features(tmp_path):
    rng = np.random.default_rng(0)
    values = TINY | {"features_column": "frames", "architecture": "cnn", "hidden_size": 64, "num_hidden_layers": 2}
    for split in ("train", "test"):
        rows = {"frames": rng.random((12, 20, 8), np.float32).tolist(), "label": rng.integers(0, 3, 12).tolist()}
        values[f"{split}_file"] = write(tmp_path, f"{split}.parquet", rows)
    args = options(ClassificationArguments, values | {"num_labels": 3, "output_dir": tmp_path / "run"})
    train_classifier(parse_arguments(ClassificationArguments, args))
    assert json.loads((tmp_path / "run" / "budget_sweep.json").read_text())["budgets"] == [1]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gating": "none"},
        {"architecture": "ar_stu", "ar_feature_shift": 2},
        {"architecture": "ar_stu", "gating": "none", "ar_negative_filters": False},
    ],
    ids=["nothing to match", "no gate", "AR-STU with gate, shift", "AR-STU, no negative filters"],
)
def test_a_variant_has_as_many_parameters_as_es_ssm(changes):
    sizes = {"block": "paper", "hidden_size": 96, "num_hidden_layers": 3, "gate_hidden_size": 32}
    target = count(parse(**sizes))
    assert not changes or abs(count(parse(**sizes, **changes)) / target - 1) > 1e-4
    with torch.device("meta"):
        model = make_model(parse(**sizes, **changes, match_parameters=True), ESSMForCausalLM)
    config = model.config
    assert abs(model.num_parameters() / target - 1) <= 0.03
    assert all(getattr(config, name) == value for name, value in changes.items() if name != "architecture")
    assert config.num_hidden_layers == 3 and config.num_spectral_channels == 32
    # Fewer weights, or a few more, are made up for by the feed-forward layer.
    assert (config.hidden_size < 96) == ("architecture" in changes)
    assert abs(config.gate_hidden_size - config.hidden_size / 3) <= 1


@pytest.mark.parametrize("sizes", [{}, {"head_size": 20, "intermediate_size": 64}, {"memory_key_size": 2}], ids=str)
def test_an_elastic_block_has_the_parameters_of_the_papers_block(sizes):
    """And from a configuration of the paper's block, whose sizes of a block are not those of another."""
    sizes |= {"memory_value_size": 2} if "memory_key_size" in sizes else {}
    own = {"block": "elastic", "num_spectral_channels": 8, "match_parameters": True} | sizes
    elastic, shape = own | {"match_block": "paper"}, {"hidden_size": 64, "num_hidden_layers": 2}
    target = count(parse(block="paper", **shape))
    assert abs(count(parse(**shape, **elastic)) / target - 1) <= 0.03
    assert count(parse(**shape, **own)) < 0.6 * target
    if "head_size" not in sizes:
        return
    with torch.device("meta"):
        model = make_model(parse(config_name=ROOT / "hub_configs" / "essm-21m", **elastic), ESSMForCausalLM)
    assert abs(model.num_parameters() / 21_729_280 - 1) <= 0.03 and model.config.conv_kernel_size == 4
    assert model.config.hidden_size > 256 and model.config.head_size > 20


def test_hybrids():
    """The middle layer of every so many attends; matched, they have the parameters of the model without."""
    sizes = {"hidden_size": 128, "num_hidden_layers": 6}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = make_config(parse(**sizes, **heads, attention_every=3))
    assert config.layer_types == ["linear_attention", "full_attention", "linear_attention"] * 2
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 16)
    windowed = make_config(parse(**sizes, attention_every=6, sliding_window=64))
    assert windowed.layer_types.index("sliding_attention") == 3 and windowed.sliding_window == 64
    target, hybrid = count(parse(**sizes)), {**sizes, **heads, "attention_every": 3}
    assert abs(count(parse(**hybrid)) / target - 1) > 0.03
    assert abs(count(parse(**hybrid, match_parameters=True)) / target - 1) <= 0.03


def test_what_data_and_weights_say_is_not_overridden(tmp_path):
    with pytest.raises(ValueError, match="config_overrides: vocab_size must be 259 for this data, got 320"):
        make_config(parse(vocab_size=320), vocab_size=259)
    own = {"budget_presets": {"small": 2, "mine": 3}, "trained_budgets": [2, 8]}
    random_model(num_spectral_channels=8, **own).save_pretrained(tmp_path)
    for source, trained in (("config_name", None), ("model_name_or_path", [2, 8])):
        config = make_config(parse(**{source: tmp_path}))
        assert config.budget_presets == {"mine": 3} and config.trained_budgets == trained  # "small" was measured


def test_a_baseline_has_the_size_of_a_configuration(tmp_path):
    config = ESSMConfig(hidden_size=32, num_hidden_layers=2, num_spectral_channels=4, filter_length=600, dropout=0.1)
    config.save_pretrained(tmp_path)
    args = parse(config_name=tmp_path, architecture="transformer", embedding_dropout=0.5)
    baseline = make_model(args, ESSMForCausalLM, vocab_size=259)
    assert abs(baseline.num_parameters() / ESSMForCausalLM(config).num_parameters() - 1) <= 0.05
    found = baseline.config
    assert (found.max_position_embeddings, found.dropout, found.embedding_dropout) == (600, 0.1, 0.5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"block": "paper", "hidden_size": 2, "num_hidden_layers": 1, "gating": "none", "match_parameters": True},
            r"no such model has 771 parameters within 3.0%; the closest has \d+: hidden",
        ),
        ({"architecture": "transformer", "stochastic_depth": 0.1}, "stochastic_depth must be 0 with .*'transformer'"),
        ({"architecture": "diagonal_ssm", "parameterization": "s6"}, "(?s)config_overrides: .*parameterization"),
        ({"block": "foo", "attention_every": 2}, "(?s)config_overrides: .*block"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_models_that_cannot_be_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        make_model(parse(**values), ESSMForCausalLM)


def test_sizes_and_rates_override_a_configuration(tmp_path):
    """Those of a new model's defaults too, where the configuration has others."""
    own = {"hidden_size": 24, "num_hidden_layers": 3, "num_spectral_channels": 8, "filter_length": 600}
    own |= {"scaling_exponent": 0.125, "gating": "none", "dropout": 0.1, "stochastic_depth": 0.2, "chunk_size": 32}
    ESSMConfig(**own).save_pretrained(tmp_path)
    changes = {"embedding_initializer_range": 0.1, "intermediate_size": 20, "dropout": 0, "gating": "softmax"}
    changes |= {"hidden_size": 128, "num_hidden_layers": 4, "num_spectral_channels": 32, "filter_length": 1024}
    for name, value in {**changes, "scaling_exponent": 0.25}.items():
        config = make_config(parse(config_name=tmp_path, **{name: value}), vocab_size=300)
        assert {field: getattr(config, field) for field in {*own, name}} == own | {name: value}
        assert config.vocab_size == 300
    config = make_config(parse(config_name=tmp_path, gating="softmax", **ELASTIC))
    assert {name: getattr(config, name) for name in ELASTIC} == ELASTIC
    assert (config.hidden_size, config.scaling_exponent) == (24, 0.0)  # the exponent of a block goes with it
    for wrong, message in (({"num_spectral_channels": 99}, "channels.*, got 99"), ({"dropout": 1.5}, "dropout.* 1.5")):
        with pytest.raises(ValueError, match=f"(?s){message}"):
            make_config(parse(config_name=tmp_path, **wrong))


@pytest.mark.parametrize("saved", [ESSMForCausalLM, ESSMForSequenceClassification, ESSMModel])
@pytest.mark.parametrize("cls", [ESSMForCausalLM, ESSMForSequenceClassification])
def test_weights_are_read_and_a_head_of_another_class_is_new(cls, saved, tmp_path):
    source = random_model(saved, tie_word_embeddings=False).half()
    source.save_pretrained(tmp_path)
    model = make_model(parse(model_name_or_path=tmp_path, dropout=0.3), cls)
    assert type(model) is cls and model.dtype == torch.float32 and model.config.dropout == 0.3
    backbone = source if saved is ESSMModel else source.model
    for name, value in backbone.state_dict().items():
        assert torch.equal(model.model.state_dict()[name], value.float())
    head = {ESSMForCausalLM: "lm_head", ESSMForSequenceClassification: "score"}[cls]
    if saved is cls:
        assert torch.equal(getattr(model, head).weight, getattr(source, head).weight.float())
    else:  # a sample of the initial distribution, not whatever memory held
        assert 0.01 < float(getattr(model, head).weight.detach().std()) < 0.04


@pytest.mark.parametrize("lacking", ["model.norm.weight", "score.weight"])
def test_weights_that_are_not_all_there_are_refused(lacking, tmp_path):
    random_model(ESSMForSequenceClassification).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[lacking]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"the weights of .* lack {lacking}"):
        make_model(parse(model_name_or_path=tmp_path), ESSMForSequenceClassification)


def test_what_is_no_configuration_or_holds_no_weights_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ESSMForPairClassification(ESSMPairConfig(hidden_size=8, num_hidden_layers=1)).save_pretrained(tmp_path / "towers")
    ESSMConfig().save_pretrained(tmp_path / "config")
    (tmp_path / "empty").mkdir()
    for folder, found in (("towers", "'essm_two_tower'"), ("empty", "None")):
        with pytest.raises(ValueError, match=f"{folder}' must hold .* model_type 'essm', got model_type {found}"):
            make_config(parse(model_name_or_path=tmp_path / folder))
    with pytest.raises(ValueError, match=r"cannot read the configuration of .*MISSING'"):
        make_config(parse(config_name=tmp_path / "MISSING"))
    with pytest.raises(ValueError, match=r"cannot read the weights of .*config'.*no file named model\.safetensors"):
        make_model(parse(model_name_or_path=tmp_path / "config"), ESSMForCausalLM)


# --- Rows of one task are of one size, in every table that ranks models


OF_SCRIPTS = {
    "train_clm": (ESSMForCausalLM, {"vocab_size": 259}),
    "train_classification": (ESSMForSequenceClassification, {"num_labels": 10}),
    "train_retrieval": (ESSMForPairClassification, {"vocab_size": 259, "num_labels": 2}),
}


TABLES = ("table1", "table3", "table3_novels", "table4", "table4_novels", "table5")


def parameters_of(row, scale: str) -> int:
    spec = get_task(row.task)
    cls, fields = OF_SCRIPTS[spec.script]
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
    [
        ("table5_speech4", "small"),
        ("table4_novels", "small"),
        *(pytest.param(table, "full", marks=pytest.mark.slow) for table in TABLES),
    ],
)
def test_every_row_has_as_many_parameters_as_the_es_ssm_of_its_task(table, scale):
    """To 3% in Table 4, where rows differ in a part, not in kind."""
    sizes: dict[str, dict[str, int]] = {}
    tolerance = 0.03 if table.startswith("table4") else 0.05
    for name, row in get_experiment(table).rows.items():
        sizes.setdefault(row.task_name, {})[name] = parameters_of(row, scale)
    for found in sizes.values():
        target = found.get("ES-SSM") or next(iter(found.values()))
        assert len(found) >= 7 and all(abs(n / target - 1) <= tolerance for n in found.values()), found


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name not in TABLES])
def test_every_row_can_be_made(name):
    for row in get_experiment(name).rows.values():
        assert parameters_of(row, "full") > 0


# --- Code that lies beside weights runs only where it is asked for: the code here leaves a file when it runs


FOREIGN = """
from pathlib import Path
from transformers import PreTrainedConfig, PreTrainedModel

Path(MARKER).touch()


class Config(PreTrainedConfig):
    model_type = "foreign"


class Model(PreTrainedModel):
    config_class = Config
"""


def test_a_model_of_an_unknown_type_runs_its_code_with_leave_alone(tmp_path):
    marker = tmp_path / "the code ran"
    (tmp_path / "their_code.py").write_text(FOREIGN.replace("MARKER", repr(str(marker))))
    auto_map = dict.fromkeys(("AutoModel", "AutoModelForCausalLM"), "their_code.Model")
    config = {"model_type": "foreign", "auto_map": auto_map | {"AutoConfig": "their_code.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="give --trust_remote_code"):
        load_model(AutoModelForCausalLM, tmp_path)
    assert not marker.exists()
    with contextlib.suppress(OSError):  # there are no weights
        load_model(AutoModelForCausalLM, tmp_path, trust_remote_code=True)
    assert marker.exists()
    (tmp_path / "config.json").write_text('{"model_type": "unheard of"}')
    with pytest.raises(ValueError, match="unheard of"):  # as it is
        load_model(AutoModelForCausalLM, tmp_path)


def test_our_own_checkpoint_needs_none_of_its_code(tmp_path):
    """Config, model and tokenizer are read by this package, whatever the files say, trusted too."""
    model, ids, marker = random_model(), random_ids(1, 9), tmp_path / "the code ran"
    model.save_pretrained(tmp_path)
    build_byte_tokenizer(512).save_pretrained(tmp_path)
    for path in tmp_path.glob("*.py"):
        path.write_text(f"open({str(marker)!r}, 'w')\n{path.read_text()}")
    loaded = load_model(AutoModelForCausalLM, tmp_path, trust_remote_code=True)
    assert type(loaded) is ESSMForCausalLM and torch.equal(loaded(ids).logits, model(ids).logits)
    load_model(AutoTokenizer, tmp_path, trust_remote_code=True)
    assert not marker.exists()
