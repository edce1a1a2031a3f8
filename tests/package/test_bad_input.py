# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Mistakes in configs, inputs, caches and files: each is refused by an error that names the value and what is legal."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from helpers import captured_warnings, random_ids, random_model, tiny_config
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import DynamicCache

from modeling_essm import (
    ESSMCache,
    ESSMConfig,
    ESSMForCausalLM,
    ESSMForPairClassification,
    ESSMForSequenceClassification,
    ESSMModel,
    configuration_essm,
)

BAD_FIELDS = [
    ({"vocab_size": 0}, r"vocab_size must be .*an integer in \[1, \d+\], got 0"),
    ({"vocab_size": True}, r"vocab_size must be .*an integer in \[1, \d+\], got True"),
    ({"hidden_size": 0}, r"hidden_size must be .*an integer in \[1, \d+\], got 0"),
    ({"hidden_size": 2.5}, r"hidden_size must be .*an integer in \[1, \d+\], got 2.5"),
    ({"hidden_size": "16"}, r"hidden_size must be .*an integer in \[1, \d+\], got '16'"),
    ({"num_hidden_layers": 0}, r"num_hidden_layers must be .*an integer in \[1, \d+\], got 0"),
    ({"intermediate_size": -4}, r"intermediate_size must be .*an integer in \[0, \d+\], got -4"),
    ({"intermediate_size": 0}, r"intermediate_size of the paper's block must be at least 1, got 0"),
    ({"block": "s4"}, r"block must be one of \('paper', 'gated'\), got 's4'"),
    ({"num_heads": 2}, r'num_heads belongs to block="gated"; here it must be 1, got 2'),
    ({"block": "gated", "num_heads": 3}, r"num_heads must divide inner_size 32, .* got 3 and 1"),
    ({"block": "gated", "mixing_size": 3}, r"mixing_size the width of a head, got 4 and 3"),
    ({"block": "gated", "conv_kernel_size": 65}, r"conv_kernel_size must be None or an integer in \[0, 64\], got 65"),
    ({"block": "gated", "ar_order": 2}, r'ar_order must be 0 with block="gated", got 2'),
    ({"gate_hidden_size": 0}, r"gate_hidden_size must be .*an integer in \[1, \d+\], got 0"),
    ({"num_spectral_channels": 0}, r"num_spectral_channels must be .*an integer in \[1, \d+\], got 0"),
    ({"chunk_size": 0}, r"chunk_size must be .*an integer in \[1, \d+\], got 0"),
    ({"state_margin": -1}, r"state_margin must be an integer in \[0, \d+\], got -1"),
    ({"filter_length": 0}, r"filter_length must be an integer in \[1, \d+\], got 0"),
    ({"filter_length": 512.0}, r"filter_length must be an integer in \[1, \d+\], got 512.0"),
    ({"filter_length": 2**25}, rf"filter_length must be an integer in \[1, \d+\], got {2**25}"),
    ({"hidden_act": "nope"}, "hidden_act must be one of .*'gelu'.*, got 'nope'"),
    ({"spectral_algorithm": "fast"}, "spectral_algorithm must be one of .*'chunked'.*, got 'fast'"),
    ({"gating": "sigmoid"}, r"gating must be one of \('softmax', 'none'\), got 'sigmoid'"),
    ({"ar_order": 1}, r"ar_order must be one of \(0, 2\), got 1"),
    ({"ar_order": 2, "ar_feature_shift": 1}, r"ar_feature_shift must be one of \(0, 2\), got 1"),
    ({"ar_feature_shift": 2}, r"ar_feature_shift must be 0 with ar_order=0, got 2"),
    ({"ar_negative_filters": False}, r"ar_negative_filters must be True with ar_order=0, got False"),
    ({"classifier_pooling": "max"}, r"classifier_pooling must be one of \('mean', 'last'\), got 'max'"),
    ({"dropout": 1.0}, r"dropout must be a number in \[0, 1\), got 1.0"),
    ({"dropout": "0.1"}, r"dropout must be a number in \[0, 1\), got '0.1'"),
    ({"stochastic_depth": -0.1}, r"stochastic_depth must be a number in \[0, 1\), got -0.1"),
    ({"stochastic_depth": float("nan")}, r"stochastic_depth must be a number in \[0, 1\), got nan"),
    ({"initializer_range": -1.0}, r"initializer_range must be a number in \[0, inf\), got -1.0"),
    (
        {"embedding_initializer_range": -0.1},
        r"embedding_initializer_range must be None or a number in \[0, inf\), got -0.1",
    ),
    ({"layer_norm_eps": -1e-5}, r"layer_norm_eps must be a number in \[0, inf\), got -1e-05"),
    ({"scaling_exponent": float("nan")}, r"scaling_exponent must be None or a number in \[0, inf\), got nan"),
    ({"num_input_features": 0}, r"num_input_features must be None or an integer in \[1, \d+\], got 0"),
    ({"num_input_features": 2.5}, r"num_input_features must be None or an integer in \[1, \d+\], got 2.5"),
]


@pytest.mark.parametrize("fields, message", BAD_FIELDS, ids=[str(fields) for fields, _ in BAD_FIELDS])
def test_config_fields(fields, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(**fields)


NOTHING_TAKES = [object(), {1, 2}, 1j, b"x", math.nan, -math.inf, 10**400, [[4], [4]], {"a": {"b": 4}}, {(1, 2): 4}]
NOTHING_TAKES += [torch.tensor(2.5), torch.tensor([4, 4, 4]), np.array([4, 4]), [torch.zeros(2), 1], len]
NOT_AN_INTEGER = [
    "2",
    "",
    2.0,
    0.5,
    True,
    False,
    np.True_,
    math.inf,
    10**30,
    [4],
    (4, 4),
    {"a": 4},
    torch.tensor(4),
    "none",
]
NOT_A_NUMBER = ["2", "", True, False, np.False_, math.inf, -1, -0.5, [0.5], {"a": 0.5}, torch.tensor(0.5), "none"]
NOT_A_FLAG = ["true", "", 2.0, -1, 10**30, [True], {"a": 4}, torch.tensor(True), "none"]
NOT_A_CHOICE = ["2", "", 2.5, -1, True, ["gelu"], ("chunked",), {"a": 4}, torch.tensor(2), "none"]
NOT_TEXTS = ["2", 4, 2.5, True, [4], [None], {"a": 4}, torch.tensor(4)]
NOT_LABELS = ["ab", 4, 2.5, True, ["a"], {0: None}, {0: 2.5}, {None: "a"}, {0: ["a"]}]
BAD_VALUES = {
    "vocab_size hidden_size num_hidden_layers num_spectral_channels filter_length": [*NOT_AN_INTEGER, 0, -1],
    "chunk_size": [*NOT_AN_INTEGER[:-1], 0, -1],
    "intermediate_size gate_hidden_size num_input_features num_labels": [*NOT_AN_INTEGER[:-1], 0, -1],
    "inner_size num_heads mixing_size num_attention_heads num_key_value_heads": [*NOT_AN_INTEGER[:-1], 0, -1],
    "head_dim sliding_window": [*NOT_AN_INTEGER[:-1], 0, 1, -2],
    "rope_parameters": ["default", 4, True, ["default"], {"rope_type": "dynamic"}, {"rope_type": 4}, torch.tensor(4)],
    "conv_kernel_size": [*NOT_AN_INTEGER[:-1], 65, -1],
    "state_margin chunk_size_feed_forward": [*NOT_AN_INTEGER, -1],
    "ar_order ar_feature_shift": [*NOT_AN_INTEGER, 1, -1],
    "initializer_range layer_norm_eps": NOT_A_NUMBER,
    "scaling_exponent embedding_initializer_range": NOT_A_NUMBER[:-1],
    "dropout embedding_dropout activation_dropout attention_dropout stochastic_depth": [*NOT_A_NUMBER, 1, 1.0],
    "gate_bias": [x for x in NOT_A_NUMBER if type(x) not in (int, float) or x != x] + [0, 0.0, float("inf")],
    "tie_word_embeddings use_cache is_encoder_decoder stochastic_depth_ramp ar_negative_filters": NOT_A_FLAG,
    "output_hidden_states return_dict": NOT_A_FLAG[:-1],
    "hidden_act spectral_algorithm gating classifier_pooling block": NOT_A_CHOICE,
    "problem_type dtype": [*NOT_A_CHOICE[:-1], "load"],
    "pad_token_id bos_token_id": NOT_AN_INTEGER[:-1],
    "eos_token_id": [x for x in NOT_AN_INTEGER[:-1] if type(x) not in (list, tuple)] + [["a"], [2.0], [True], [None]],
    "transformers_version": [4, 2.5, True, ["5"]],
    "architectures": NOT_TEXTS,
    "layer_types": [*NOT_TEXTS, 5, ["linear_attention"], ["linear_attention"] * 3, ["conv", "conv"]],
    "spectral_capacities": [
        *["32", 32, [32], [32, 16, 8], [16, 16], [0, 32], [32.0, 32], ["32", 32], [True, 32], {"a": 4}]
    ],
    "spectral_budget": ["a", 0, 33, 2.0, True, [4], [4, 33], [4, "a"], [4, True], {"a": 4}, torch.tensor([4, 4])],
    "trained_budgets": ["4", 4, [0], [33], [2.0], [True], ["a"], [None], [[4, 4]], {"a": 4}, torch.tensor([4])],
    "budget_presets": [
        *[[4], "a", 4, {1: 4}, {1: 4, "a": 4}, {None: 4}, {"a": 33}, {"a": 2.0}, {"a": [4]}, {"a": True}],
        *[{"a": "b", "b": 4}, {"a": "a"}, {"a": torch.tensor([4, 4])}, {"a": [4, "b"], "b": 4}],
    ],
    "id2label": [*NOT_LABELS, {"x": "a"}],
    "label2id": NOT_LABELS,
}
BAD_VALUES = {name: values for names, values in BAD_VALUES.items() for name in names.split()}


def test_every_field_of_a_config_has_its_bad_values():
    assert {field.name for field in dataclasses.fields(ESSMConfig)} <= set(BAD_VALUES)


@pytest.mark.parametrize("name", BAD_VALUES)
def test_values_that_a_field_does_not_take(name):
    """No raw error and no acceptance: the message names the field, also where the value comes beside a file.

    Some versions of transformers look at the types of their own fields first.
    """
    for value in [*NOTHING_TAKES, *BAD_VALUES[name]]:
        value = None if isinstance(value, str) and value == "none" else value
        with pytest.raises((ValueError, StrictDataclassFieldValidationError), match=name):
            tiny_config(**{name: value})
    with pytest.raises((ValueError, StrictDataclassFieldValidationError), match=name):
        ESSMConfig.from_dict(tiny_config().to_dict(), **{name: BAD_VALUES[name][0]})


def test_other_names_of_fields_are_checked_too():
    with pytest.raises(ValueError, match=r"filter_length must be an integer in .* got \[512\]"):
        tiny_config(max_position_embeddings=[512])
    with pytest.raises(ValueError, match=r"filter_length must be an integer in .* got '512'"):
        ESSMConfig.from_dict(tiny_config().to_dict(), max_position_embeddings="512")
    with pytest.raises(ValueError, match=r"dtype must be .*, got 'float33'"):
        tiny_config(torch_dtype="float33")


ODD_BUT_LEGAL = {
    "hidden_size": (np.int64(24), 24),
    "num_hidden_layers": (np.int32(2), 2),
    "filter_length": (np.uint16(600), 600),
    "ar_order": (np.int64(2), 2),
    "dropout": (np.float32(0.5), 0.5),
    "scaling_exponent": (0, 0),
    "use_cache": (np.False_, False),
    "num_labels": (np.int64(3), 3),
    "id2label": ({"0": "a", "1": "b", "2": "c"}, {0: "a", 1: "b", 2: "c"}),
    "eos_token_id": ((np.int64(7), 8), [7, 8]),
    "layer_types": (("linear_attention",) * 2, ["linear_attention"] * 2),
    "spectral_capacities": ((np.int64(32), 16), [32, 16]),
    "spectral_budget": (torch.tensor(4), 4),
    "spectral_budget-list": ([np.int64(4), torch.tensor([5])], [4, 5]),
    "trained_budgets": ((np.int64(4), 8), [4, 8]),
    "budget_presets": ({"a": np.int64(4), "b": (4, np.int8(5)), "c": None}, {"a": 4, "b": [4, 5], "c": None}),
}


@pytest.mark.parametrize("name", ODD_BUT_LEGAL)
def test_what_a_config_takes_it_can_save(name, tmp_path):
    given, kept = ODD_BUT_LEGAL[name]
    name = name.split("-")[0]
    config = tiny_config(**{name: given})
    assert getattr(config, name) == kept and type(getattr(config, name)) is type(kept)
    config.save_pretrained(tmp_path)
    assert getattr(ESSMConfig.from_pretrained(tmp_path), name) == kept
    assert getattr(ESSMConfig.from_dict(tiny_config().to_dict(), **{name: given}), name) == kept


def test_a_field_set_later_is_checked_when_it_is_saved(tmp_path):
    model = random_model()
    model.config.spectral_budget = torch.tensor(4)
    model.save_pretrained(tmp_path / "converted")
    assert ESSMForCausalLM.from_pretrained(tmp_path / "converted").config.spectral_budget == 4
    model.config.spectral_budget = torch.tensor([4, 8])
    with pytest.raises(ValueError, match=r"spectral_budget.*in a call"):
        model.save_pretrained(tmp_path / "refused")
    assert not list((tmp_path / "refused").glob("config.json"))


LARGE = {
    "num_labels": 10**8,
    "num_hidden_layers": 10**9,
    "trained_budgets": [4] * 10**6,
    "budget_presets": {str(i): 4 for i in range(10**5)},
    "id2label": dict.fromkeys(range(1_000_001), "a"),
    "spectral_capacities": [4] * 10**6,
    "spectral_budget": [4] * 10**6,
    "architectures": ["a"] * 10**6,
}


@pytest.mark.parametrize("name", LARGE)
def test_large_values_are_refused_before_any_work(name, monkeypatch):
    """Nothing is built from them, nothing in them is looked at, and the message stays short."""
    monkeypatch.setattr(configuration_essm.PreTrainedConfig, "__post_init__", None)
    monkeypatch.setattr(configuration_essm, "resolve_budget", None)
    with pytest.raises(ValueError, match=name) as error:
        tiny_config(**{name: LARGE[name]})
    assert len(str(error.value)) < 300


def test_sizes_that_follow_from_others_are_derived_anew_beside_a_file():
    """Those that a file holds because of its block; what it says besides stays."""

    def sizes(given, **fields):
        config = ESSMConfig.from_dict(tiny_config(**fields).to_dict(), **given)
        return config.inner_size, config.num_heads, config.mixing_size, config.conv_kernel_size, config.scaling_exponent

    assert sizes({"hidden_size": 24}) == (24, 1, 24, 0, 0.25)
    assert sizes({"block": "gated"}, scaling_exponent=0.5) == (32, 4, 1, 4, 0.0)
    assert sizes({"block": "paper"}, block="gated", mixing_size=2) == (16, 1, 16, 0, 0.25)
    assert sizes({"block": "gated", "num_heads": 2, "scaling_exponent": 0.5}) == (32, 2, 1, 4, 0.5)
    assert sizes({"hidden_size": 24}, block="gated", conv_kernel_size=2) == (48, 4, 1, 2, 0.0)
    assert sizes({"hidden_size": 24}, block="gated", inner_size=24) == (24, 4, 1, 4, 0.0)
    assert sizes({"num_heads": 2}, block="gated", mixing_size=2) == (32, 2, 2, 4, 0.0)
    with pytest.raises(ValueError, match=r"block must be one of .*, got tensor"):
        sizes({"block": torch.tensor([1, 2])})


def test_changed_layers_beside_a_file():
    config = ESSMConfig.from_dict(tiny_config().to_dict(), num_hidden_layers=3)
    assert config.layer_types == ["linear_attention"] * 3
    config, unused = ESSMConfig.from_dict(tiny_config().to_dict(), hidden_size=8, foo=3, return_unused_kwargs=True)
    assert config.hidden_size == 8 and unused == {"foo": 3}


@pytest.mark.parametrize("filter_length, channels", [(64, 32), (512, 64), (1, 2)], ids=str)
def test_capacity_that_the_filter_cannot_resolve(filter_length, channels):
    message = rf"filter_length {filter_length} resolves at most \d+ spectral channels.*={channels}; use a longer filter"
    with pytest.raises(ValueError, match=message) as error:
        ESSMConfig(filter_length=filter_length, num_spectral_channels=channels)
    most = int(str(error.value).split("at most ")[1].split()[0])
    assert ESSMConfig(filter_length=filter_length, num_spectral_channels=most) is not None  # the hint works


def test_a_config_file_with_a_bad_field(tmp_path):
    tiny_config().save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"gating": "hard"}))
    with pytest.raises(ValueError, match="got 'hard'"):
        ESSMConfig.from_pretrained(tmp_path)


def test_language_model_of_continuous_features():
    with pytest.raises(ValueError, match="num_input_features must be None, got 5"):
        ESSMForCausalLM(tiny_config(num_input_features=5))


IDS = random_ids(2, 6)
BAD_CALLS = {
    "ids-too-large": ({"input_ids": torch.tensor([[0, 259]])}, r"input_ids must be in \[0, 258\], got .*0 to 259"),
    "ids-negative": ({"input_ids": torch.tensor([[-1, 3]])}, r"input_ids must be in \[0, 258\], got .*-1 to 3"),
    "ids-float": ({"input_ids": IDS.float()}, "integers of shape.*got torch.float32"),
    "ids-bool": ({"input_ids": IDS > 9}, "integers of shape.*got torch.bool"),
    "ids-uint8": ({"input_ids": IDS.to(torch.uint8)}, "int64 or int32 integers of shape.*got torch.uint8"),
    "ids-uint16": ({"input_ids": IDS.to(torch.uint16)}, "int64 or int32 integers of shape.*got torch.uint16"),
    "ids-int8": ({"input_ids": (IDS % 9).to(torch.int8)}, "int64 or int32 integers of shape.*got torch.int8"),
    "ids-1d": ({"input_ids": IDS[0]}, r"shape \(B, L\), got torch.int64 of shape \(6,\)"),
    "ids-3d": ({"input_ids": IDS[None]}, r"shape \(B, L\), got torch.int64 of shape \(1, 2, 6\)"),
    "empty": ({"input_ids": IDS[:, :0]}, r"at least one position, got shape \(2, 0\)"),
    "empty-embeds": ({"inputs_embeds": torch.zeros(2, 0, 16)}, r"at least one position, got shape \(2, 0\)"),
    "ids-and-embeds": ({"input_ids": IDS, "inputs_embeds": torch.zeros(2, 6, 16)}, "exactly one of input_ids"),
    "nothing": ({}, "exactly one of input_ids"),
    "embeds-width": ({"inputs_embeds": torch.zeros(2, 6, 7)}, r"\(B, L, 16\), got \(2, 6, 7\)"),
    "embeds-2d": ({"inputs_embeds": torch.zeros(6, 16)}, r"\(B, L, 16\), got \(6, 16\)"),
    "mask-short": ({"input_ids": IDS, "attention_mask": torch.ones(2, 5)}, r"shape \(2, 6\).*got \(2, 5\)"),
    "mask-long": ({"input_ids": IDS, "attention_mask": torch.ones(2, 7)}, r"shape \(2, 6\).*got \(2, 7\)"),
    "mask-rows": ({"input_ids": IDS, "attention_mask": torch.ones(1, 6)}, r"shape \(2, 6\).*got \(1, 6\)"),
    "mask-4d": ({"input_ids": IDS, "attention_mask": torch.ones(2, 1, 6, 6)}, r"shape \(2, 6\).*got \(2, 1, 6, 6\)"),
    "foreign-cache": ({"input_ids": IDS, "past_key_values": DynamicCache()}, "must be an ESSMCache, got DynamicCache"),
}


@pytest.mark.parametrize("kwargs, message", BAD_CALLS.values(), ids=BAD_CALLS.keys())
@pytest.mark.parametrize("cls", [ESSMModel, ESSMForCausalLM])
def test_inputs(cls, kwargs, message):
    with pytest.raises(ValueError, match=message):
        random_model(cls)(**kwargs)


@pytest.mark.parametrize(
    "features, message",
    [
        (torch.zeros(2, 6, 4), r"shape \(B, L, 5\), got \(2, 6, 4\)"),
        (torch.zeros(6, 5), r"shape \(B, L, 5\), got \(6, 5\)"),
        (torch.zeros(2, 0, 5), "at least one position"),
        (None, "exactly one of"),
    ],
    ids=["width", "2d", "empty", "none"],
)
def test_features(features, message):
    model = random_model(ESSMForSequenceClassification, num_input_features=5)
    with pytest.raises(ValueError, match=message):
        model(input_features=features)


def test_features_and_ids_for_the_wrong_model():
    with pytest.raises(ValueError, match=r"reads input_features of shape \(B, L, 5\), got input_ids"):
        random_model(ESSMForSequenceClassification, num_input_features=5)(IDS)
    with pytest.raises(ValueError, match=r"reads input_ids; input_features need config.num_input_features"):
        random_model(ESSMForSequenceClassification)(input_features=torch.zeros(2, 6, 5))


def test_empty_prompt_in_generate():
    with pytest.raises(ValueError, match="at least one position"):
        random_model().generate(IDS[:1, :0], max_new_tokens=2)


def test_caches_of_another_batch_or_model():
    model = random_model()
    cache = model(IDS, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="holds 2 rows, but the input has 1"):
        model(IDS[:1], past_key_values=cache)
    with pytest.raises(ValueError, match="has 2 layers, but the model has 3"):
        random_model(num_hidden_layers=3)(IDS, past_key_values=cache)


@pytest.mark.parametrize("budget", [0, 33, "x", [4]], ids=str)
def test_state_budget(budget):
    with pytest.raises(ValueError, match="spectral_budget"):
        ESSMCache(tiny_config(), state_budget=budget)


def test_passing_the_filter_length_warns_exactly_once():
    model = random_model(filter_length=512)
    with captured_warnings() as messages:
        cache = model(random_ids(1, 512), use_cache=True).past_key_values
        assert messages == []
        for _ in range(3):
            model(random_ids(1, 513))
            model(IDS[:1, :1], past_key_values=cache)
    assert len(messages) == 1 and "filter_length 512" in messages[0]


def test_decoding_past_the_filter_length_warns_exactly_once():
    model = random_model(filter_length=512)
    with captured_warnings() as messages:
        model.generate(random_ids(1, 510), max_new_tokens=6, min_new_tokens=6, do_sample=False)
    # the library's own warning about max_position_embeddings goes to another logger
    assert len(messages) == 1 and "filter_length 512" in messages[0]


# --- Files


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_a_checkpoint_with_nonfinite_weights(value, tmp_path):
    model = random_model()
    with torch.no_grad():
        model.model.layers[1].mixer.channel_mixing[31, 0, 0] = value
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"model.layers.1.mixer.channel_mixing of checkpoint .* contains NaN"):
        ESSMForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("kept", [0, 4, 100, -1], ids=["empty", "4-bytes", "100-bytes", "last-byte-missing"])
@pytest.mark.parametrize("shards", [1, 3], ids=["one-file", "sharded"])
def test_a_truncated_checkpoint(kept, shards, tmp_path):
    model = random_model()
    size = sum(p.numel() * 4 for p in model.parameters())
    model.save_pretrained(tmp_path, max_shard_size=size if shards == 1 else size // 2)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) == 1) == (shards == 1)
    files[-1].write_bytes(files[-1].read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"safetensors file of .* is truncated or corrupt"):
        ESSMForCausalLM.from_pretrained(tmp_path)


def test_a_missing_shard(tmp_path):
    model = random_model()
    model.save_pretrained(tmp_path, max_shard_size=sum(p.numel() * 4 for p in model.parameters()) // 2)
    lost = sorted(tmp_path.glob("*.safetensors"))[-1]
    lost.unlink()
    with pytest.raises(OSError, match=lost.name):
        ESSMForCausalLM.from_pretrained(tmp_path)


def test_a_shape_that_does_not_fit(tmp_path):
    random_model().save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match=r"ignore_mismatched_sizes"):
        ESSMForCausalLM.from_pretrained(tmp_path, num_spectral_channels=16)


@pytest.mark.parametrize("cls", [ESSMModel, ESSMForCausalLM, ESSMForSequenceClassification, ESSMForPairClassification])
def test_an_unwritable_output_folder(cls, tmp_path):
    """Permission bits do not bind root, so the folder lies below a regular file."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="file/model"):
        random_model(cls).save_pretrained(tmp_path / "file" / "model")
    assert (tmp_path / "file").read_text() == "in the way"


def test_saving_onto_a_file(tmp_path):
    """transformers alone would log a line, save nothing and return."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(NotADirectoryError, match=r"must be a folder, got the file .*file"):
        random_model().save_pretrained(tmp_path / "file")


@pytest.mark.parametrize("name", ["spectral_bugdet", "spectral_budgets", "budget"])
def test_a_misspelt_budget_is_refused(name):
    with pytest.raises(TypeError, match=f"unknown argument '{name}'"):
        random_model()(random_ids(1, 4), **{name: 3})


def test_an_unknown_description_of_packing_is_refused():
    with pytest.raises(ValueError, match="unknown argument 'seq_lengths'; packed sequences are described by"):
        random_model()(random_ids(1, 4), seq_lengths=[1, 3])
