# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Mistakes in configs, inputs, caches and files: each is refused by an error that names the value and what is legal."""

import json

import pytest
import torch
from helpers import captured_warnings, random_ids, random_model, tiny_config
from transformers import DynamicCache

from modeling_essm import ESSMCache, ESSMConfig, ESSMForCausalLM, ESSMForSequenceClassification, ESSMModel

BAD_FIELDS = [
    ({"vocab_size": 0}, "vocab_size must be an integer >= 1, got 0"),
    ({"vocab_size": True}, "vocab_size must be an integer >= 1, got True"),
    ({"hidden_size": 0}, "hidden_size must be an integer >= 1, got 0"),
    ({"hidden_size": 2.5}, "hidden_size must be an integer >= 1, got 2.5"),
    ({"hidden_size": "16"}, "hidden_size must be an integer >= 1, got '16'"),
    ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer >= 1, got 0"),
    ({"intermediate_size": -4}, "intermediate_size must be an integer >= 1, got -4"),
    ({"gate_hidden_size": 0}, "gate_hidden_size must be an integer >= 1, got 0"),
    ({"num_spectral_channels": 0}, "num_spectral_channels must be an integer >= 1, got 0"),
    ({"chunk_size": 0}, "chunk_size must be an integer >= 1, got 0"),
    ({"state_margin": -1}, "state_margin must be an integer >= 0, got -1"),
    ({"filter_length": 0}, r"filter_length must be an integer in \[1, \d+\], got 0"),
    ({"filter_length": 512.0}, r"filter_length must be an integer in \[1, \d+\], got 512.0"),
    ({"filter_length": 2**25}, rf"filter_length must be an integer in \[1, \d+\], got {2**25}"),
    ({"hidden_act": "nope"}, "hidden_act must be one of .*'gelu'.*, got 'nope'"),
    ({"spectral_algorithm": "fast"}, "spectral_algorithm must be one of .*'chunked'.*, got 'fast'"),
    ({"gating": "sigmoid"}, r"gating must be one of \('softmax', 'none'\), got 'sigmoid'"),
    ({"ar_order": 1}, r"ar_order must be one of \(0, 2\), got 1"),
    ({"classifier_pooling": "max"}, r"classifier_pooling must be one of \('mean', 'last'\), got 'max'"),
    ({"dropout": 1.0}, r"dropout must be a number in \[0, 1\), got 1.0"),
    ({"dropout": "0.1"}, r"dropout must be a number in \[0, 1\), got '0.1'"),
    ({"stochastic_depth": -0.1}, r"stochastic_depth must be a number in \[0, 1\), got -0.1"),
    ({"stochastic_depth": float("nan")}, r"stochastic_depth must be a number in \[0, 1\), got nan"),
    ({"initializer_range": -1.0}, r"initializer_range must be a number in \[0, inf\), got -1.0"),
    ({"layer_norm_eps": -1e-5}, r"layer_norm_eps must be a number in \[0, inf\), got -1e-05"),
    ({"scaling_exponent": float("nan")}, r"scaling_exponent must be a number in \[0, inf\), got nan"),
    ({"num_input_features": 0}, "num_input_features must be None or an integer >= 1, got 0"),
    ({"num_input_features": 2.5}, "num_input_features must be None or an integer >= 1, got 2.5"),
]


@pytest.mark.parametrize("fields, message", BAD_FIELDS, ids=[str(fields) for fields, _ in BAD_FIELDS])
def test_config_fields(fields, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(**fields)


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


@pytest.mark.parametrize("cls", [ESSMModel, ESSMForCausalLM, ESSMForSequenceClassification])
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
