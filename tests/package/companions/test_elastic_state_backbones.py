# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""A latent beside other backbones: ES-SSM at any spectral budget, a diagonal model, a Mamba, a Transformer."""

import copy
import itertools

import pytest
import torch
from elastic_states import FIELDS, Counting, random_inputs, run
from elastic_states import random_model as elastic_model
from helpers import randomise, tiny_config
from transformers import GPT2Config, MambaConfig

from modeling_essm.companions import DiagonalSSMConfig, ElasticStateModel, allocate, importance, prune, remove

BACKBONES = {
    "essm": lambda: tiny_config(hidden_size=8, num_hidden_layers=1),
    "diagonal": lambda: DiagonalSSMConfig(hidden_size=8, num_hidden_layers=1, state_size=4, vocab_size=300),
    "mamba": lambda: MambaConfig(hidden_size=8, num_hidden_layers=1, state_size=4, vocab_size=8),
    "elastic": lambda: tiny_config(block="elastic", hidden_size=8, num_hidden_layers=1, num_spectral_channels=4),
    "gpt2": lambda: GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=32, vocab_size=8),
}
ATOL = 2e-5  # fp32, where steps and sequences sum in another order


def random_model(kind, **fields):
    """With a gate that hovers about the objective of random inputs, far from every one of them in the last digits."""
    model = elastic_model(backbone_config=BACKBONES[kind](), dtype=torch.float32, **fields)
    randomise(model.source.backbone)
    return model.eval()


@pytest.mark.parametrize("kind", ["essm", "mamba", "gpt2"])
def test_depth_zero_is_the_backbone(kind):
    """Bit for bit: the same tensors through the same modules, called directly."""
    model, x = random_model(kind, feedback=False, retraction="ball"), random_inputs(2, 5, 5, dtype=torch.float32)
    with torch.no_grad():
        source = model.source
        hidden = source.backbone(inputs_embeds=source.embed_features(x), use_cache=False).last_hidden_state
        z = source.proposal(hidden)
        steps = [model.corrector.retract(step) for step in z.unbind(1)]
        z, y = torch.stack(steps, 1), torch.stack([model.readout(step) for step in steps], 1)
    output = run(model, x, refine_depth=0, use_cache=False)
    assert torch.equal(output.latents, z) and torch.equal(output.readouts, y)
    assert (z.norm(dim=-1) <= 6**0.5 * (1 + 1e-6)).all()


@pytest.mark.parametrize(
    ("kind", "feedback"), [("essm", True), ("essm", False), ("diagonal", True), ("mamba", True), ("gpt2", False)]
)
def test_step_by_step(kind, feedback):
    model, x = random_model(kind, feedback=feedback), random_inputs(2, 4, 5, dtype=torch.float32)
    depths = torch.tensor([[1, 0, 2, 3], [0, 3, 0, 1]])  # a gate's could tip where fp32 rounds
    whole, cache, steps = run(model, x, refine_depth=depths), None, []
    for t in range(4):
        steps.append(run(model.step, x[:, t], cache, refine_depth=depths[:, t]))
        cache = steps[-1].past_key_values
    for name in FIELDS:
        actual = torch.cat([step[name] for step in steps], 1)
        torch.testing.assert_close(actual, whole[name], rtol=0, atol=ATOL)
    plain = run(model, x, refine_depth=0)
    assert not torch.allclose(plain.latents[:, 2], whole.latents[:, 2], atol=1e-3)
    changed = not torch.allclose(plain.proposals[1, 2], whole.proposals[1, 2], atol=1e-4)
    assert changed == feedback  # z enters the next input, and nothing else of the backbone
    assert torch.equal(plain.proposals[:, 0], whole.proposals[:, 0])


def test_two_dials():
    """The budget and the depth: each changes the output, neither the count of the other."""
    model, x = random_model("essm", acceptance="none"), random_inputs(2, 3, 5, dtype=torch.float32)
    readouts = {}
    for K, depth in itertools.product((2, 32), (0, 1, 3)):
        objective, budgets = Counting(), []
        hook = model.source.backbone.register_forward_hook(
            lambda module, args, output, into=budgets: into.append(output.spectral_budget)
        )
        output = run(model.set_objective(objective), x, refine_depth=depth, spectral_budget=K)
        hook.remove()
        assert len(budgets) == 3 and all(ran == budgets[0] for ran in budgets) and K in torch.tensor(budgets[0])
        assert objective.gradients == output.gradient_calls == 2 * 3 * depth
        assert not any(torch.allclose(output.readouts, other, atol=1e-4) for other in readouts.values())
        readouts[K, depth] = output.readouts
    torch.testing.assert_close(run(model, x, refine_depth=1).readouts, readouts[32, 1])


def test_training_reaches_the_backbone():
    model = random_model("essm").train()
    model(random_inputs(2, 3, 5, dtype=torch.float32)).loss.backward()
    unused = {"source.backbone.embed_tokens.weight"}
    for name, parameter in model.named_parameters():
        if name not in unused:
            assert parameter.grad is not None and (parameter.grad != 0).any(), name


def test_masks_need_the_own_recurrence():
    x = random_inputs(2, 3, 5, dtype=torch.float32)
    with pytest.raises(ValueError, match="attention_mask with zeros needs the model's own recurrence"):
        random_model("essm")(x, attention_mask=torch.tensor([[1, 1, 1], [1, 1, 0]]))
    assert run(random_model("essm"), x, attention_mask=torch.ones(2, 3)).readouts.shape == (2, 3, 5)
    with pytest.raises(ValueError, match="spectral_budget needs a backbone that has one"):
        random_model("gpt2")(x, spectral_budget=2)


def halved(model):
    prune(model, allocate(importance(model, "aire"), amount=0.5))
    remove(model)


@pytest.mark.parametrize(
    ("kind", "smaller", "sizes"),
    [
        ("diagonal", halved, {"state_sizes": [2]}),
        ("elastic", lambda model: model.source.backbone.truncate(2), {"num_spectral_channels": 2}),
    ],
    ids=["diagonal", "elastic"],
)
def test_a_smaller_backbone_is_saved(kind, smaller, sizes, tmp_path):
    """The configuration of the backbone, inside that of the model, tells the new sizes."""
    model, x = random_model(kind), random_inputs(2, 4, 5, dtype=torch.float32)
    smaller(model)
    model.save_pretrained(tmp_path)
    loaded = ElasticStateModel.from_pretrained(tmp_path).eval()
    assert sizes.items() <= loaded.config.backbone_config.to_dict().items()
    assert torch.equal(run(loaded, x, refine_depth=1).readouts, run(model, x, refine_depth=1).readouts)


@pytest.mark.parametrize("kind", ["elastic", "mamba"])
def test_half_precision(kind, tmp_path):
    """The gate and the metric of the latent stay in fp32, and of a backbone what it keeps by itself: not its gates."""
    model, x = random_model(kind), random_inputs(2, 3, 5, dtype=torch.float32)
    exact = run(model, x, refine_depth=2)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "whole")
    model.source.backbone.save_pretrained(tmp_path / "backbone")
    loaded = ElasticStateModel.from_pretrained(tmp_path / "whole", dtype=torch.bfloat16).eval()
    alone = type(model.source.backbone).from_pretrained(tmp_path / "backbone", dtype=torch.bfloat16)
    kept = {name for name, parameter in loaded.named_parameters() if parameter.dtype == torch.float32}
    prefix = "source.backbone."
    assert {name.removeprefix(prefix) for name in kept if name.startswith(prefix)} == {
        name for name, parameter in alone.named_parameters() if parameter.dtype == torch.float32
    }
    assert {name.partition(".")[0] for name in kept if not name.startswith(prefix)} == {"corrector", "gate"}
    output = run(loaded, x, refine_depth=2)
    assert output.latents.dtype == torch.float32
    torch.testing.assert_close(output.readouts, exact.readouts, rtol=0, atol=0.15)  # 2^-8 of values near 3, added up


def test_feedback_into_a_backbone_that_writes_in_place_is_not_trained():
    model, x = random_model("mamba", feedback=True).train(), random_inputs(2, 3, 5, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"writes its state in place.*train with feedback=False"):
        model(x, refine_depth=1)


def test_training_with_feedback_keeps_no_graph_of_the_past():
    """Gradients go through z alone: where z has no way into the next input, outputs give none to earlier inputs."""
    model, x = random_model("gpt2").train(), random_inputs(2, 3, 5, dtype=torch.float32).requires_grad_()
    model(x, x.detach()).loss.backward()
    with torch.no_grad():
        model.source.feedback.weight.zero_()
    x.grad = None
    model(x, refine_depth=0).readouts[:, 2].sum().backward()
    assert (x.grad[:, 2] != 0).any() and not x.grad[:, :2].any()


def test_models_of_one_configuration_are_apart():
    config = random_model("diagonal").config
    one, other = ElasticStateModel(config), ElasticStateModel(config)
    halved(other)
    other.set_gate_temperature(0.1)
    assert other.config.backbone_config.state_sizes == [2]
    assert one.config.backbone_config.state_sizes == config.backbone_config.state_sizes == [4]
    assert one.config.gate_temperature == config.gate_temperature == 1.0


@pytest.mark.parametrize("kind", [None, "essm", "gpt2"])
def test_an_empty_batch_of_an_elastic_state(kind):
    model = elastic_model(backbone_config=kind and BACKBONES[kind]())
    outputs = model(random_inputs(0, 6, 5), use_cache=True)
    outputs.loss.backward()
    for _ in range(2):
        outputs = model(random_inputs(0, 1, 5), past_key_values=outputs.past_key_values, use_cache=True)
        assert outputs.readouts.shape == (0, 1, 5)


def test_caches_of_other_elastic_states():
    models = {
        "own": elastic_model(),
        "wide": elastic_model(latent_size=8),
        "past": elastic_model(history_length=2),
        "gpt2": elastic_model(backbone_config=BACKBONES["gpt2"]()),
        "essm": elastic_model(backbone_config=BACKBONES["essm"]()),
    }
    x = random_inputs(2, 6, 5)
    caches = {name: model(x, use_cache=True).past_key_values for name, model in models.items()}
    gpt2, essm = "gpt2 of 1 layers and width 8", "essm of 1 layers and width 8"
    for own, other, field, value, legal in (
        ("own", "wide", "latent_size", 8, 6),
        ("own", "past", "history_length", 2, 0),
        ("own", "gpt2", "backbone_config", gpt2, None),
        ("gpt2", "own", "backbone_config", None, gpt2),
        ("essm", "gpt2", "backbone_config", gpt2, essm),
    ):
        with pytest.raises(ValueError, match=f"is of a model of {field} {value}, but this one has {legal}"):
            models[own](x, past_key_values=copy.deepcopy(caches[other]))
        assert models[own](x, past_key_values=caches[own]).readouts.shape == x.shape
