# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""essm_train/models.py: the paper's variants and the baselines through the training scripts."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers import random_model
from safetensors.torch import load_file, save_file
from training_run import options

from essm_train.arguments import parse_arguments
from essm_train.data.arguments import ClassificationArguments, CLMArguments
from essm_train.models import make_config, make_model
from essm_train.pairs import ESSMForPairClassification, ESSMPairConfig
from essm_train.run.classifier import train_classifier
from essm_train.run.language import train_language_model
from essm_train.tasks.catalog import ROOT
from modeling_essm import (
    ESSMConfig,
    ESSMForCausalLM,
    ESSMForSequenceClassification,
    ESSMModel,
)

TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_spectral_channels": 4, "filter_length": 512, "max_steps": 3}
GATED = {"block": "gated", "inner_size": 24, "num_heads": 3, "conv_kernel_size": 3}
GATED |= {"intermediate_size": 20}
TINY |= {"warmup_steps": 1, "eval_steps": 3, "save_steps": 2, "per_device_train_batch_size": 2, "cpu_threads": 1}


def command_line(script=CLMArguments, **values) -> list[str]:
    return options(script, values)


@pytest.mark.parametrize(
    "changes",
    [
        {"gating": "none"},
        {"architecture": "ar_stu", "ar_negative_filters": False, "ar_feature_shift": 2},
        GATED | {"scaling_exponent": 0.0625, "embedding_initializer_range": 0.1},
    ],
    ids=["dropout only", "AR-STU as released", "gated"],
)
def test_variants_train(changes, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("spectral budgets " * 100)
    values = TINY | {"train_file": text, "block_size": 64, "validation_blocks": 2, "sweep_blocks": 2} | changes
    train_language_model(parse_arguments(CLMArguments, command_line(**values, output_dir=tmp_path / "run")))
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert {name: config[name] for name in changes if name in config} == {
        name: value for name, value in changes.items() if name not in ("budget_schedule", "architecture")
    }
    assert f" parameters ({config['block']} block) on " in capsys.readouterr().out


@pytest.mark.parametrize("architecture", ["transformer"])
def test_a_baseline_trains_on_the_same_data_with_as_many_parameters(architecture, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("spectral budgets " * 100)
    values = TINY | {"train_file": text, "block_size": 64, "validation_blocks": 2, "sweep_blocks": 2, "max_steps": 3}
    values |= {"hidden_size": 32, "num_hidden_layers": 2}
    line = command_line(**values, architecture=architecture)
    args = parse_arguments(CLMArguments, [*line, "--output_dir", str(tmp_path / "run")])
    train_language_model(args)
    train_language_model(args)  # finished already
    sweep = json.loads((tmp_path / "run" / "budget_sweep.json").read_text())
    assert sweep["budgets"] == [1] and 0 < sweep["bits_per_byte"][0] < 8.2
    own_args = parse_arguments(CLMArguments, command_line(**values))
    own, baseline = (make_model(each, ESSMForCausalLM, vocab_size=259) for each in (own_args, args))
    assert abs(baseline.num_parameters() / own.num_parameters() - 1) <= 0.05


def test_a_baseline_classifies_features(tmp_path):
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        frames = pa.array([rng.random((20, 8), np.float32).tolist() for _ in range(12)])
        pq.write_table(pa.table({"frames": frames, "label": rng.integers(0, 3, 12)}), tmp_path / f"{split}.parquet")
    values = TINY | {"train_file": tmp_path / "train.parquet", "test_file": tmp_path / "test.parquet"}
    values |= {"features_column": "frames", "architecture": "cnn", "hidden_size": 32, "num_hidden_layers": 2}
    args = parse_arguments(
        ClassificationArguments,
        command_line(ClassificationArguments, **values, num_labels=3, output_dir=tmp_path / "run"),
    )
    train_classifier(args)
    assert json.loads((tmp_path / "run" / "budget_sweep.json").read_text())["budgets"] == [1]


CLASSES = {
    CLMArguments: {},
    ClassificationArguments: {"train_file": "a.jsonl", "text_column": "text"},
}
scripts = pytest.mark.parametrize("script", CLASSES, ids=["language model", "classifier"])


def parse(script=CLMArguments, **values):
    return parse_arguments(script, options(script, CLASSES[script] | values))


AR_STU = {"gating": "none", "architecture": "ar_stu"}
MATCHED = {
    "no gate": {"gating": "none"},
    "AR-STU": AR_STU,
    "AR-STU with gate, shift": {"architecture": "ar_stu", "ar_feature_shift": 2},
    "AR-STU, no negative filters": AR_STU | {"ar_negative_filters": False},
    "nothing to match": {},
}


def count(args, cls=ESSMForCausalLM, **fields) -> int:
    with torch.device("meta"):
        return make_model(args, cls, **fields).num_parameters()


@scripts
@pytest.mark.parametrize("changes", MATCHED.values(), ids=MATCHED)
@pytest.mark.parametrize("width", [96])
def test_a_variant_has_as_many_parameters_as_es_ssm(script, changes, width):
    sizes = {"block": "paper", "hidden_size": width, "num_hidden_layers": 3, "gate_hidden_size": width // 3}
    cls = ESSMForCausalLM if script is CLMArguments else ESSMForSequenceClassification
    target = count(parse(script, **sizes), cls)
    args = parse(script, **sizes, **changes, match_parameters=True)
    assert abs(count(args, cls) / target - 1) <= 0.03 and (
        abs(count(parse(script, **sizes, **changes), cls) / target - 1) > 1e-4 or not changes
    )
    with torch.device("meta"):
        config = make_model(args, cls).config
    assert all(getattr(config, name) == value for name, value in changes.items() if name != "architecture")
    assert config.num_hidden_layers == 3 and config.num_spectral_channels == 32
    if width == 96:  # fewer weights, or a few more, are made up for by the feed-forward layer
        assert (config.hidden_size < width) == ("architecture" in changes)
    assert abs(config.gate_hidden_size - config.hidden_size / 3) <= 1


@pytest.mark.parametrize("inner", [None, 192], ids=["2 D", "other"])
def test_a_gated_block_without_feed_forward_layer_is_matched_by_its_widths(inner):
    sizes = {"hidden_size": 128} | ({} if inner is None else {"inner_size": inner})
    target, args = count(parse(**sizes)), parse(**sizes, gating="none", match_parameters=True)
    with torch.device("meta"):
        model = make_model(args, ESSMForCausalLM)
    assert abs(model.num_parameters() / target - 1) <= 0.03 and model.config.intermediate_size == 0
    assert model.config.hidden_size > 128 and model.config.inner_size > (inner or 256)


def test_hybrids():
    """The middle layer of every so many attends; matched, they have the parameters of the model without."""
    sizes = {"hidden_size": 128, "num_hidden_layers": 6}
    full, spectral = "full_attention", "linear_attention"
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = make_config(parse(**sizes, **heads, attention_every=3))
    assert config.layer_types == [spectral, full, spectral] * 2
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 16)
    windowed = make_config(parse(**sizes, attention_every=6, sliding_window=64))
    assert windowed.layer_types.index("sliding_attention") == 3 and windowed.sliding_window == 64
    named = parse(num_hidden_layers=2, layer_types=[full, spectral])
    assert make_config(named).layer_types == [full, spectral]
    target = count(parse(**sizes))
    assert abs(count(parse(**sizes, **heads, attention_every=3)) / target - 1) > 0.03
    matched = parse(**sizes, **heads, attention_every=3, match_parameters=True)
    assert abs(count(matched) / target - 1) <= 0.03
    for every, message in ((1, r"\[2, num_hidden_layers = 6\], got 1"), (7, "got 7")):
        with pytest.raises(ValueError, match=message):
            parse(**sizes, attention_every=every)
    with pytest.raises(ValueError, match="not both"):
        parse(num_hidden_layers=2, attention_every=2, layer_types=[full, spectral])


def test_what_cannot_be_matched_is_refused():
    for others in ({"architecture": "s4d"}, {"model_name_or_path": "x"}):
        with pytest.raises(ValueError, match="match_parameters is for a new ES-SSM"):
            parse(match_parameters=True, **others)
    tiny = {"hidden_size": 2, "num_hidden_layers": 1, "gating": "none", "match_parameters": True}
    with pytest.raises(ValueError, match=r"no such model has 671 parameters within 3.0%; the closest has \d+: hidden"):
        make_model(parse(**tiny), ESSMForCausalLM)


def test_a_gated_block_has_the_parameters_of_the_papers_block():
    """And from a configuration of the paper's block, whose sizes of a block are not those of another."""
    own = {"block": "gated", "num_spectral_channels": 32, "match_parameters": True}
    gated = own | {"match_block": "paper"}
    sizes = {"hidden_size": 64, "num_hidden_layers": 2}
    target = count(parse(block="paper", **sizes))
    assert abs(count(parse(**sizes, **gated)) / target - 1) <= 0.03
    assert count(parse(**sizes, **own)) < target / 3
    with torch.device("meta"):
        model = make_model(parse(config_name=ROOT / "hub_configs" / "essm-21m", **gated), ESSMForCausalLM)
    assert abs(model.num_parameters() / 21_729_280 - 1) <= 0.03 and model.config.conv_kernel_size == 4
    assert "match_block" not in parse(**sizes, match_parameters=True).identity()
    with pytest.raises(ValueError, match="match_block is for match_parameters, got match_block='paper' without"):
        parse(**sizes, match_block="paper")
    with pytest.raises(ValueError, match="wide"):
        make_model(parse(**sizes, **gated | {"match_block": "wide"}), ESSMForCausalLM)


@pytest.mark.parametrize("name", ["activation_dropout", "stochastic_depth", "embedding_dropout"])
def test_a_baseline_has_the_regularisation_it_is_told_or_refuses_it(name):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "block": "paper", "num_spectral_channels": 4}
    if name != "embedding_dropout":
        with pytest.raises(
            ValueError, match=f"{name} must be 0 with architecture 'transformer', which has none, got 0.1"
        ):
            make_model(parse(**sizes, architecture="transformer", **{name: 0.1}), ESSMForCausalLM)
        return
    model = make_model(parse(**sizes, architecture="transformer", embedding_dropout=0.5), ESSMForCausalLM)
    ids = torch.arange(12)[None]
    assert model.train()(ids).logits.ne(model(ids).logits).any()
    assert model.eval()(ids).logits.equal(model(ids).logits)


@scripts
def test_a_configuration_is_read_and_rates_override_it(script, tmp_path):
    fields = {"hidden_size": 16, "num_spectral_channels": 4, "filter_length": 512}
    ESSMConfig(**fields, dropout=0.1, stochastic_depth=0.2, gating="none").save_pretrained(tmp_path)
    config = make_config(parse(script, config_name=tmp_path))
    assert {name: getattr(config, name) for name in fields} == fields
    assert (config.dropout, config.stochastic_depth, config.gating) == (0.1, 0.2, "none")
    config = make_config(parse(script, config_name=tmp_path, dropout=0), vocab_size=300)
    assert (config.dropout, config.stochastic_depth, config.vocab_size) == (0, 0.2, 300)
    with pytest.raises(ValueError, match=r"(?s)dropout.* must be a number in \[0, 1\), got 1.5"):
        make_config(parse(script, config_name=tmp_path, dropout=1.5))


@scripts
def test_sizes_override_a_configuration(script, tmp_path):
    """Those of a new model's defaults too, where the configuration has others."""
    own = {"hidden_size": 24, "num_hidden_layers": 3, "num_spectral_channels": 8, "filter_length": 600}
    own |= {"scaling_exponent": 0.125, "gating": "none"}
    ESSMConfig(**own, chunk_size=32).save_pretrained(tmp_path)
    config = make_config(parse(script, config_name=tmp_path, **GATED))
    assert {name: getattr(config, name) for name in GATED} == GATED
    assert (config.hidden_size, config.scaling_exponent) == (24, 0.0)  # the exponent of a block goes with it
    changes = {"embedding_initializer_range": 0.1, "intermediate_size": 20}
    changes |= {"hidden_size": 128, "num_hidden_layers": 4, "num_spectral_channels": 32, "filter_length": 1024}
    changes |= {"scaling_exponent": 0.25, "gating": "softmax"}
    for name, value in changes.items():
        config = make_config(parse(script, config_name=tmp_path, **{name: value}))
        assert {field: getattr(config, field) for field in {*own, name}} == own | {name: value}
        assert config.chunk_size == 32
    with pytest.raises(ValueError, match=r"(?s)num_spectral_channels.*, got 99"):
        make_config(parse(script, config_name=tmp_path, num_spectral_channels=99))


def test_a_baseline_has_the_size_of_a_configuration(tmp_path):
    config = ESSMConfig(hidden_size=32, num_hidden_layers=2, num_spectral_channels=4, filter_length=600, dropout=0.1)
    config.save_pretrained(tmp_path)
    args = parse(config_name=tmp_path, architecture="transformer")
    baseline = make_model(args, ESSMForCausalLM, vocab_size=259)
    assert abs(baseline.num_parameters() / ESSMForCausalLM(config).num_parameters() - 1) <= 0.05
    assert (baseline.config.max_position_embeddings, baseline.config.dropout) == (600, 0.1)


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


def test_weights_that_cannot_be_read_are_refused(tmp_path):
    random_model().save_pretrained(tmp_path / "lm")
    tensors = load_file(tmp_path / "lm" / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "lm" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"the weights of .*lm' lack model\.norm\.weight"):
        make_model(parse(model_name_or_path=tmp_path / "lm"), ESSMForSequenceClassification)
    random_model(ESSMForSequenceClassification).save_pretrained(tmp_path / "headless")
    tensors = load_file(tmp_path / "headless" / "model.safetensors")
    del tensors["score.weight"]
    save_file(tensors, tmp_path / "headless" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"the weights of .*headless' lack score\.weight"):
        make_model(parse(model_name_or_path=tmp_path / "headless"), ESSMForSequenceClassification)
    ESSMConfig().save_pretrained(tmp_path / "config")
    with pytest.raises(ValueError, match=r"cannot read the weights of .*config'.*no file named model\.safetensors"):
        make_model(parse(model_name_or_path=tmp_path / "config"), ESSMForCausalLM)


def test_what_is_no_configuration_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ESSMForPairClassification(ESSMPairConfig(hidden_size=8, num_hidden_layers=1)).save_pretrained(tmp_path / "towers")
    (tmp_path / "empty").mkdir()
    for folder, found in (("towers", "'essm_two_tower'"), ("empty", "None")):
        with pytest.raises(ValueError, match=f"{folder}' must hold .* model_type 'essm', got model_type {found}"):
            make_config(parse(model_name_or_path=tmp_path / folder))
    with pytest.raises(ValueError, match=r"cannot read the configuration of .*MISSING'"):
        make_config(parse(config_name=tmp_path / "MISSING"))
