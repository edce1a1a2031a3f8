# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Mistakes in configs, inputs, caches and files: each is refused by an error that names the value and what is legal."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from helpers import F_, L_, S_, VARIANTS, captured_warnings, random_ids, random_model, tiny_config
from huggingface_hub.errors import StrictDataclassError
from transformers import DynamicCache

from modeling_essm import ESSMCache, ESSMConfig, ESSMForCausalLM, ESSMForSequenceClassification

REFUSAL = (ValueError, TypeError, KeyError, StrictDataclassError)  # the third is that of the library for "yarn"

# --- Configurations

NOT_AN_INTEGER = ["2", 2.0, True, math.inf, [4], {"a": 4}, object()]
NOT_A_NUMBER = ["2", math.nan, -0.5, [0.5], {"a": 0.5}, object()]
NOT_A_FLAG = ["true", 2.0, -1, [True]]
NOT_A_CHOICE = ["nope", 2.5, ["gelu"], {"a": 4}]
BAD_VALUES = {
    "vocab_size hidden_size num_hidden_layers num_spectral_channels filter_length": [*NOT_AN_INTEGER, None, 0, -1],
    "gate_hidden_size num_input_features chunk_size head_size": [*NOT_AN_INTEGER, 0, -1],
    "num_attention_heads num_key_value_heads": [*NOT_AN_INTEGER, 0, -1],
    "intermediate_size attention_intermediate_size": [*NOT_AN_INTEGER, -1],
    "memory_key_size memory_value_size": [*NOT_AN_INTEGER, None, -1],
    "head_dim sliding_window": [*NOT_AN_INTEGER, 0, 1, -2],
    "rope_parameters": ["default", 4, ["default"]],
    "conv_kernel_size": [*NOT_AN_INTEGER, 65, 0],
    "state_margin": [*NOT_AN_INTEGER, None, -1],
    "initializer_range layer_norm_eps scaling_exponent embedding_initializer_range": NOT_A_NUMBER,
    "dropout embedding_dropout activation_dropout attention_dropout stochastic_depth": [*NOT_A_NUMBER, 1.0],
    "gate_bias": ["2", math.nan, 0.0, [0.5]],
    "tie_word_embeddings use_cache stochastic_depth_ramp": NOT_A_FLAG,
    "hidden_act spectral_algorithm gating classifier_pooling block": NOT_A_CHOICE,
    "pad_token_id bos_token_id": NOT_AN_INTEGER,
    "eos_token_id": ["2", 2.0, ["a"], [2.0]],
    "layer_types": ["2", 4, [4], [L_], [L_] * 3, ["conv", "conv"], [F_, F_]],
    "spectral_capacities": ["32", 32, [32], [32, 16, 8], [16, 16], [0, 32], [32.0, 32], ["32", 32]],
    "spectral_budget": ["a", 0, 33, 2.0, [4], [4, 33], [4, "a"], {"a": 4}, torch.tensor([4, 4])],
    "trained_budgets": ["4", 4, [0], [33], [2.0], ["a"], {"a": 4}],
    "budget_presets": [[4], "a", {1: 4}, {"a": 33}, {"a": 2.0}, {"a": [4]}, {"a": "b", "b": 4}],
}


def test_every_field_of_a_config_has_its_bad_values():
    own = {field.name for field in dataclasses.fields(ESSMConfig)}
    own -= {field.name for field in dataclasses.fields(ESSMConfig.__mro__[1])} - {"tie_word_embeddings"}
    assert own <= set(" ".join(BAD_VALUES).split())


@pytest.mark.parametrize("names", BAD_VALUES)
def test_values_that_a_field_does_not_take(names):
    """The message names the field, also where the value comes beside a file."""
    for name in names.split():
        for value in BAD_VALUES[names]:
            with pytest.raises(REFUSAL, match=name):
                tiny_config(**{name: value})
        with pytest.raises(REFUSAL, match=name):
            ESSMConfig.from_dict(tiny_config().to_dict(), **{name: BAD_VALUES[names][0]})


def test_special_tokens_of_bytes_are_those_of_no_smaller_vocabulary():
    names = ("pad_token_id", "bos_token_id", "eos_token_id")
    found = [[getattr(ESSMConfig(vocab_size=size), name) for name in names] for size in (100, 258, 259)]
    assert found == [[None] * 3, [256, 257, None], [256, 257, 258]]
    assert ESSMConfig(vocab_size=100, pad_token_id=3).pad_token_id == 3


def test_numbers_of_numpy_are_numbers():
    config = tiny_config(dropout=np.float64(0.1), initializer_range=1 / np.sqrt(512))
    assert (config.dropout, config.initializer_range) == (0.1, 1 / np.sqrt(512))


ELASTIC, MEMORY = VARIANTS["elastic"], VARIANTS["memory"]
ROPE = {"rope_type": "linear", "factor": 2.0}
BAD_TOGETHER = {
    "capacity": ({"filter_length": 64}, r"filter_length 64 resolves at most 22 .*channels.*=?32"),
    "paper-head": ({"head_size": 2}, "head_size.*belong to block=.elastic., got .*head_size': 2"),
    "paper-convolution": ({"conv_kernel_size": 4}, "belong to block=.elastic., got .*conv_kernel_size': 4"),
    "paper-no-feed-forward": ({"intermediate_size": 0}, "intermediate_size.*0"),
    "feed-forward": (ELASTIC | {"intermediate_size": 48}, "intermediate_size must be a multiple of the 32 .*got 48"),
    "gate": (ELASTIC | {"gate_hidden_size": 8}, "gate_hidden_size must be a multiple of the 32 channels, got 8"),
    "no-gate": (ELASTIC | {"gating": "none"}, "gating must be one of .*nested.* with block='elastic', got 'none'"),
    "paper-nested": ({"gating": "nested"}, "gating must be one of .*none.* with block='paper', got 'nested'"),
    "keys-alone": (ELASTIC | {"memory_key_size": 2}, "memory_key_size and memory_value_size.*got 2 and 0"),
    "values-alone": (ELASTIC | {"memory_value_size": 2}, "memory_key_size and memory_value_size.*got 0 and 2"),
    "no-filters": (MEMORY | {"memory_value_size": 8}, "values fewer than head_size 8, got 2 and 8"),
    "dynamic": ({"layer_types": [L_, F_], "rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters"),
    "window": ({"layer_types": [L_, S_]}, "sliding_window"),
    "odd-head": ({"layer_types": [L_, F_], "head_dim": 7}, "head_dim.*even.*7"),
    "groups": ({"layer_types": [L_, F_], "num_attention_heads": 4, "num_key_value_heads": 3}, "divide.*4.*3"),
    "yarn": ({"layer_types": [L_, F_], "rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.*factor"),
    "theta": ({"layer_types": [L_, F_], "rope_parameters": ROPE | {"rope_theta": 0.0}}, "rope_parameters"),
    "factor": ({"layer_types": [L_, F_], "rope_parameters": ROPE | {"factor": 0.5}}, "rope_parameters"),
    "partial": ({"layer_types": [L_, F_], "rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}, "rope_parameters"),
    "head-width": ({"layer_types": [L_, F_], "num_attention_heads": 16}, "head_dim"),
    "hybrid-capacities": ({"layer_types": [L_, F_], "spectral_capacities": [32, 32]}, "spectral_capacities"),
    "alias": ({"max_position_embeddings": "512"}, "filter_length|max_position_embeddings"),
}


@pytest.mark.parametrize("fields, message", BAD_TOGETHER.values(), ids=BAD_TOGETHER)
def test_fields_that_do_not_fit_each_other(fields, message):
    with pytest.raises(REFUSAL, match=message):
        tiny_config(**fields)


def test_attention_fields_belong_to_hybrids_and_follow_sizes():
    config = ESSMConfig(num_hidden_layers=2, layer_types=[L_, F_], hidden_size=200)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (3, 3, 66)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert config.capacities == (32,)
    plain = ESSMConfig()
    assert plain.rope_parameters is None and plain.num_attention_heads is None
    assert dataclasses.replace(plain, dropout=0.5) == ESSMConfig(dropout=0.5) != plain
    assert dataclasses.asdict(plain)["hidden_size"] == plain.hidden_size


@pytest.mark.parametrize(
    ("given", "fields", "sizes"),
    [
        ({"hidden_size": 48}, {}, (None, None, 64, 0.25)),
        ({"block": "elastic"}, {}, (1, 4, 0, 0.0)),
        ({"hidden_size": 48}, {"block": "elastic"}, (3, 4, 0, 0.0)),
        ({"hidden_size": 48}, {"block": "elastic", "head_size": 5}, (5, 4, 0, 0.0)),
        ({"num_spectral_channels": 12}, {"block": "elastic"}, (2, 4, 0, 0.0)),
        ({"block": "paper"}, ELASTIC, (None, None, 64, 0.25)),
        ({"block": "paper"}, MEMORY, (None, None, 64, 0.25)),
    ],
    ids=str,
)
def test_sizes_that_follow_from_others_are_derived_anew_beside_a_file(given, fields, sizes):
    config = ESSMConfig.from_dict(tiny_config(**fields).to_dict(), **given)
    assert (config.head_size, config.conv_kernel_size, config.intermediate_size, config.scaling_exponent) == sizes
    assert ESSMConfig.from_dict(config.to_dict(), num_hidden_layers=3).layer_types == [L_] * 3


def test_a_field_set_later_or_in_a_file_is_checked(tmp_path):
    config = tiny_config()
    config.save_pretrained(tmp_path)
    for name, value in (("spectral_budget", torch.tensor([4, 8])), ("dropout", 1.5), ("gating", "nope")):
        with pytest.raises(REFUSAL, match=name):
            setattr(config, name, value)
    config.spectral_budget = 33
    with pytest.raises(REFUSAL, match="spectral_budget"):
        config.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"gating": "hard"}))
    with pytest.raises(REFUSAL, match="gating"):
        ESSMConfig.from_pretrained(tmp_path)


# --- Inputs

IDS = random_ids(2, 6)
BAD_CALLS = {
    "ids-too-large": ({"input_ids": torch.tensor([[0, 259]])}, r"input_ids must be in \[0, 258\], got .*0 to 259"),
    "ids-negative": ({"input_ids": torch.tensor([[-1, 3]])}, r"input_ids must be in \[0, 258\], got .*-1 to 3"),
    "ids-float": ({"input_ids": IDS.float()}, "integers of shape.*got torch.float32"),
    "ids-uint8": ({"input_ids": IDS.to(torch.uint8)}, "int64 or int32 integers of shape.*got torch.uint8"),
    "ids-1d": ({"input_ids": IDS[0]}, r"shape \(B, L\), got torch.int64 of shape \(6,\)"),
    "empty": ({"input_ids": IDS[:, :0]}, r"at least one position, got shape \(2, 0\)"),
    "ids-and-embeds": ({"input_ids": IDS, "inputs_embeds": torch.zeros(2, 6, 16)}, "exactly one of input_ids"),
    "embeds-width": ({"inputs_embeds": torch.zeros(2, 6, 7)}, r"\(B, L, 16\), got \(2, 6, 7\)"),
    "mask-short": ({"input_ids": IDS, "attention_mask": torch.ones(2, 5)}, r"shape \(2, 6\).*got \(2, 5\)"),
    "foreign-cache": ({"input_ids": IDS, "past_key_values": DynamicCache()}, "must be an ESSMCache, got DynamicCache"),
    "misspelt": ({"input_ids": IDS, "spectral_bugdet": 3}, "unknown argument 'spectral_bugdet'"),
    "packing": ({"input_ids": IDS, "seq_lengths": [1, 3]}, "unknown argument 'seq_lengths'; packed sequences are"),
}


@pytest.mark.parametrize("kwargs, message", BAD_CALLS.values(), ids=BAD_CALLS)
def test_inputs(kwargs, message):
    with pytest.raises((ValueError, TypeError), match=message):
        random_model()(**kwargs)


def test_features():
    model = random_model(ESSMForSequenceClassification, num_input_features=5)
    for kwargs, message in (
        ({"input_features": torch.zeros(2, 6, 4)}, r"shape \(B, L, 5\), got \(2, 6, 4\)"),
        ({"input_features": torch.zeros(6, 5)}, r"shape \(B, L, 5\), got \(6, 5\)"),
        ({"input_features": torch.zeros(2, 0, 5)}, "at least one position"),
        ({}, "exactly one of"),
        ({"input_ids": IDS}, r"reads input_features of shape \(B, L, 5\), got input_ids"),
    ):
        with pytest.raises(ValueError, match=message):
            model(**kwargs)
    with pytest.raises(ValueError, match="num_input_features must be None, got 5"):
        ESSMForCausalLM(tiny_config(num_input_features=5))
    with pytest.raises(ValueError, match=r"reads input_ids; input_features need config.num_input_features"):
        random_model(ESSMForSequenceClassification)(input_features=torch.zeros(2, 6, 5))


@pytest.mark.parametrize("name", ["past_key_values", "cache", "state_lengths"])
def test_a_classifier_reads_whole_rows(name):
    with pytest.raises(ValueError, match=f"a classifier reads whole rows, and takes no {name}"):
        random_model(ESSMForSequenceClassification)(IDS, **{name: torch.tensor([3, 3])})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "holds 2 rows, but the input has 1"),
        ({"num_hidden_layers": 3}, "of a model of num_hidden_layers 2, but this one has 3"),
        ({"hidden_size": 24}, "of a model of hidden_size 16, but this one has 24"),
        ({"layer_types": [L_, F_]}, "layer_types"),
        ({"state_margin": 4}, "of a model of state_margin 16, but this one has 4"),
    ],
    ids=["rows", "layers", "width", "types", "margin"],
)
def test_caches_of_another_batch_or_model(fields, message):
    cache = random_model()(IDS, use_cache=True).past_key_values
    with pytest.raises(ValueError, match=message):
        random_model(**fields)(IDS if fields else IDS[:1], past_key_values=cache)
    with pytest.raises(ValueError, match="spectral_budget"):
        ESSMCache(tiny_config(), state_budget=33)


def test_passing_the_filter_length_warns_exactly_once():
    model = random_model(filter_length=512)
    with captured_warnings() as messages:
        cache = model(random_ids(1, 512), use_cache=True).past_key_values
        assert messages == []
        for _ in range(3):
            model(random_ids(1, 513))
            model(IDS[:1, :1], past_key_values=cache)
    assert len(messages) == 1 and "filter_length 512" in messages[0]


# --- Files


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_a_checkpoint_with_nonfinite_weights(value, tmp_path):
    model, load = random_model(), ESSMForCausalLM.from_pretrained
    with torch.no_grad():
        model.model.layers[1].mixer.channel_mixing[31, 0, 0] = value
    model.save_pretrained(tmp_path)
    for options in ({}, {"spectral_capacity": 32}):
        with pytest.raises(ValueError, match=r"model.layers.1.mixer.channel_mixing of checkpoint .* contains NaN"):
            load(tmp_path, **options)
    load(tmp_path, spectral_capacity=31)  # the damage is behind them


@pytest.mark.parametrize("options", [{}, {"spectral_capacity": 6}], ids=["whole", "prefix"])
@pytest.mark.parametrize("shards", [1, 2])
def test_damaged_weights(shards, options, tmp_path):
    model = random_model()
    model.save_pretrained(tmp_path, max_shard_size="1MB" if shards == 1 else "40KB")
    last = sorted(tmp_path.glob("*.safetensors"))[-1]
    whole = last.read_bytes()
    for kept in (0, 100, -1):
        last.write_bytes(whole[:kept])
        with pytest.raises(ValueError, match="truncated or corrupt"):
            ESSMForCausalLM.from_pretrained(tmp_path, **options)
    last.unlink()
    with pytest.raises((OSError, ValueError), match=last.name if shards == 2 else r"model.safetensors"):
        ESSMForCausalLM.from_pretrained(tmp_path, **options)


def test_places_where_nothing_can_be_saved(tmp_path):
    """Permission bits do not bind root, so the folder lies below a regular file; transformers alone would only log."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="file/model"):
        random_model().save_pretrained(tmp_path / "file" / "model")
    with pytest.raises(NotADirectoryError, match=r"must be a folder, got the file .*file"):
        random_model().save_pretrained(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "in the way"
