# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What people do to companions and they got wrong: empty batches, NaN behind masks, other caches, library tables."""

import copy
import json

import pytest
import torch
from accelerate.utils import convert_outputs_to_fp32
from elastic_states import random_inputs, random_model, tiny
from helpers import assert_close, tiny_config
from torch.func import functional_call, grad, vmap
from transformers import LlamaConfig

from modeling_essm.companions import (
    DiagonalSSMConfig,
    DiagonalSSMForCausalLM,
    DiagonalSSMForSequenceClassification,
    ElasticStateModel,
)
from modeling_essm.companions.models.modeling_diagonal_ssm import _mean_of_real

IDS = torch.randint(3, 37, (2, 6), generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 1, 1]])
TOKENS = {"vocab_size": 37, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {"vocab_size": 3, "hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 8, "num_attention_heads": 2}
three = pytest.mark.parametrize("kind", ["s5", "lru", "s4d"])


def diagonal(kind, cls=DiagonalSSMForCausalLM, **fields):
    torch.manual_seed(0)
    shape = {"hidden_size": 8, "num_hidden_layers": 2, "state_size": 3, "parameterization": kind}
    return cls(DiagonalSSMConfig(**TOKENS | shape | fields)).eval()


def backbone(kind):
    return LlamaConfig(**LLAMA) if kind == "llama" else tiny_config(num_hidden_layers=1)


@three
def test_an_empty_batch_of_a_diagonal_model(kind):
    model, ids = diagonal(kind), IDS[:0]
    outputs = model(ids, attention_mask=torch.ones_like(ids), use_cache=True)
    for length in (1, 4):
        outputs = model(ids[:, :length], past_key_values=outputs.past_key_values)
        assert outputs.logits.shape == (0, length, 37)
    outputs.logits.sum().backward()
    assert all(not p.grad.any() for p in model.parameters())
    classifier = diagonal(kind, DiagonalSSMForSequenceClassification, bidirectional=True, num_labels=3)
    assert classifier(ids, attention_mask=torch.ones_like(ids)).logits.shape == (0, 3)


@pytest.mark.parametrize("kind", [None, "essm", "llama"])
def test_an_empty_batch_of_an_elastic_state(kind):
    model = random_model(backbone_config=kind and backbone(kind))
    outputs = model(random_inputs(0, 6, 5), use_cache=True)
    outputs.loss.backward()
    for _ in range(2):
        outputs = model(random_inputs(0, 1, 5), past_key_values=outputs.past_key_values, use_cache=True)
        assert outputs.readouts.shape == (0, 1, 5)


def gradients_with(model, name, filling, labels):
    """Of all weights and of inputs (2, 6, 8) that hold `filling` behind the mask."""
    model.zero_grad()
    x = random_inputs(2, 6, 8, dtype=torch.float32).masked_fill(MASK[..., None] == 0, filling).requires_grad_()
    model(**{name: x}, attention_mask=MASK, labels=labels).loss.backward()
    return [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


@three
def test_numbers_behind_a_mask_are_not_read(kind):
    labels, classes = IDS.masked_fill(MASK == 0, -100), torch.tensor([0, 1])
    signals = {"num_input_features": 8, "num_labels": 3, "bidirectional": True}
    for model, name, given in (
        (diagonal(kind), "inputs_embeds", labels),
        (diagonal(kind, DiagonalSSMForSequenceClassification, **signals), "input_features", classes),
    ):
        zeros, nans = (gradients_with(model, name, filling, given) for filling in (0.0, float("nan")))
        assert all(map(torch.equal, zeros, nans)) and all(each.isfinite().all() for each in nans)


def test_caches_of_other_elastic_states():
    models = {
        "own": random_model(),
        "wide": random_model(latent_size=8),
        "past": random_model(history_length=2),
        "llama": random_model(backbone_config=backbone("llama")),
        "essm": random_model(backbone_config=backbone("essm")),
    }
    x = random_inputs(2, 6, 5)
    caches = {name: model(x, use_cache=True).past_key_values for name, model in models.items()}
    llama, essm = "llama of 1 layers and width 8", "essm of 1 layers and width 16"
    for own, other, field, value, legal in (
        ("own", "wide", "latent_size", 8, 6),
        ("own", "past", "history_length", 2, 0),
        ("own", "llama", "backbone_config", llama, None),
        ("llama", "own", "backbone_config", None, llama),
        ("essm", "llama", "backbone_config", llama, essm),
    ):
        with pytest.raises(ValueError, match=f"is of a model of {field} {value}, but this one has {legal}"):
            models[own](x, past_key_values=copy.deepcopy(caches[other]))
        assert models[own](x, past_key_values=caches[own]).readouts.shape == x.shape


@three
def test_gradients_of_single_samples(kind):
    model = diagonal(kind)
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights, row):
        return functional_call(model, weights, (row[None],), {"labels": row[None], "use_cache": False}).loss

    together = vmap(grad(loss), (None, 0))(weights, IDS)
    for i, row in enumerate(IDS):
        for name, alone in grad(loss)(weights, row).items():
            assert_close(together[name][i], alone)


def test_a_stream_is_not_decoded_in_training_mode():
    model, x = random_model(), random_inputs(2, 1, 5)
    cache = model.step(x[:, 0]).past_key_values
    with torch.no_grad(), pytest.raises(ValueError, match=r"training mode, .*: call model\.eval\(\) before decoding"):
        model.train().step(x[:, 0], cache)
    assert model.step(x[:, 0], cache).loss.requires_grad  # truncated backpropagation through a stream


def test_outputs_rebuilt_from_their_items_are_whole():
    model, x = random_model(dtype=torch.bfloat16), random_inputs(2, 6, 5, dtype=torch.bfloat16)
    given, rebuilt = (f(x, use_cache=True) for f in (model.forward, convert_outputs_to_fp32(model.forward)))
    assert list(rebuilt) == list(given) and rebuilt.losses.dtype == torch.float32
    assert rebuilt.gradient_calls == given.gradient_calls > 0 and rebuilt.past_key_values.states


def test_long_rows_are_averaged_in_fp32():
    for length in (16_384, 70_000):
        states = torch.full((1, length, 1), 60.0, dtype=torch.float16)
        for real in (None, torch.ones(1, length)):
            assert _mean_of_real(states, real).item() == 60.0


def test_what_models_announce():
    signals = diagonal("s5", DiagonalSSMForSequenceClassification, num_input_features=4)
    assert (signals.main_input_name, diagonal("s5").main_input_name) == ("input_features", "input_ids")
    assert signals._keep_in_fp32_modules_strict == {"Lambda", "log_step"}  # those that there are
    assert not signals.supports_context_parallel and not random_model().supports_context_parallel


def test_a_configuration_names_only_code_that_lies_beside_it(tmp_path):
    """As a model saves it, all of it does; that of a backbone's package is not saved."""
    models = diagonal("s5"), ElasticStateModel(tiny(backbone_config=backbone("essm")))
    for model in models:
        config, folder = model.config, tmp_path / model.config.model_type
        config.save_pretrained(folder)
        named = json.loads((folder / "config.json").read_text())["auto_map"]
        assert set(named) == {"AutoConfig"} and (folder / f"{named['AutoConfig'].split('.')[0]}.py").exists()
        assert len(type(config).from_pretrained(folder).auto_map) > 1
        model.save_pretrained(folder)
        fields = json.loads((folder / "config.json").read_text())
        assert fields["auto_map"] == config.auto_map and not fields.get("backbone_config", {}).get("auto_map")
        assert config.auto_map and (config.model_type == "diagonal_ssm" or config.backbone_config.auto_map)
        elsewhere = {"AutoModel": "org/name--modeling_of.Model", "AutoTokenizer": ["mine.Tokenizer", None]}
        config.auto_map = config.auto_map | elsewhere
        config.save_pretrained(folder)
        assert elsewhere.items() <= json.loads((folder / "config.json").read_text())["auto_map"].items()
