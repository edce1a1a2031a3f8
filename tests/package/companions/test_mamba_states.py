# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""States of the library's Mamba and Mamba-2: their energies against sums over impulse responses, masks and removal."""

import copy
import itertools

import pytest
import torch
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM

from modeling_essm.companions import (
    allocate,
    certify,
    describe,
    importance,
    is_pruned,
    prune,
    remove,
    restore,
    state_layers,
)
from modeling_essm.companions.pruning.mamba import Energies, Steps, measure_energies

WORDS, LENGTH = 31, 12
models = pytest.mark.parametrize("name", ["mamba", "mamba2", "mamba2_biases"])


def build(name):
    """Two layers; weights large enough that states matter to the logits."""
    common = dict(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, state_size=6, pad_token_id=0, eos_token_id=None
    )
    torch.manual_seed(0)
    if name == "mamba":
        model = MambaForCausalLM(MambaConfig(**common))
    else:
        bias = dict(use_bias=True) if name == "mamba2_biases" else dict(use_conv_bias=False)
        bias.update(time_step_limit=(0.3, 0.9)) if name == "mamba2_limits" else None
        shape = dict(num_heads=4, head_dim=8, n_groups=2, chunk_size=4)
        model = Mamba2ForCausalLM(Mamba2Config(**common, **shape, **bias))
    with torch.no_grad():
        for parameter_name, value in model.named_parameters():
            if parameter_name.endswith(("x_proj.weight", "in_proj.weight", "conv1d.weight")):
                value.normal_(std=0.5)
            if parameter_name.endswith(("in_proj.bias", "conv1d.bias")):
                value.normal_(std=0.2)
    return model.eval()


def ids(length=LENGTH, seed=0):
    return torch.randint(1, WORDS, (2, length), generator=torch.Generator().manual_seed(seed))


def energy_of_states(steps, how):
    energies = Energies(how)
    energies.add(steps)
    return energies.mean()


def random_steps(B=2, L=7, G=2, D=3, N=4, shared=False, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    counted = torch.ones(B, L, dtype=torch.float64)
    A = -normal(G, D, 1 if shared else N).exp()
    return Steps(normal(B, L, G, D).exp() / 4, A, normal(B, L, G, N), normal(B, L, G, N), counted)


def by_brute_force(steps):
    """Mean over impulse times s of sum_{t >= s} (C_t prod_{s < r <= t} a_r delta_s B_s)^2."""
    length = steps.delta.shape[1]
    a = torch.exp(steps.delta[..., None] * steps.A)
    total = 0.0
    for s, t in itertools.combinations_with_replacement(range(length), 2):
        between = a[:, s + 1 : t + 1].prod(1)
        response = steps.C[:, t, :, None] * between * steps.delta[:, s, ..., None] * steps.B[:, s, :, None]
        total = total + response.square().sum(0)
    return total / steps.counted.sum()


@pytest.mark.parametrize("shared", [False, True], ids=["mamba", "mamba2"])
def test_energy_along_the_text_is_the_double_sum(shared):
    steps = random_steps(shared=shared)
    torch.testing.assert_close(energy_of_states(steps, "along"), by_brute_force(steps), rtol=1e-13, atol=0.0)


def test_frozen_energy_is_energy_along_the_text_for_constant_parameters():
    """But for the tails that the text's end cuts off: (1 / L) sum_s a^(2 (L - s)) of each."""
    varying, L = random_steps(), 40
    first = {name: getattr(varying, name)[:1, :1] for name in ("delta", "B", "C")}
    constant = {name: value.expand(1, L, *value.shape[2:]) for name, value in first.items()}
    steps = Steps(A=varying.A, counted=torch.ones(1, L, dtype=torch.float64), **constant)
    squared = torch.exp(2 * first["delta"][0, 0, ..., None] * steps.A)
    seen = 1 - squared[..., None].pow(torch.arange(1, L + 1)).mean(-1)
    frozen, along = energy_of_states(steps, "frozen"), energy_of_states(steps, "along")
    torch.testing.assert_close(along, frozen * seen, rtol=1e-12, atol=0.0)
    impulse = (first["delta"][..., None] * first["B"][..., None, :] * first["C"][..., None, :])[0, 0] ** 2
    torch.testing.assert_close(frozen, impulse / (1 - squared), rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("name", ["mamba", "mamba2", "mamba2_limits"])
def test_the_recurrence_is_the_layer_s(name):
    """From delta, A, B and C and the layer's own input the model's own output: nothing of the layer is missed."""
    model = build(name)
    layer = state_layers(model)[1]
    mixer, seen = layer.module, {}
    handles = [
        mixer.register_forward_pre_hook(
            lambda _, args, kwargs: seen.update(args=args, kwargs=kwargs), with_kwargs=True
        ),
        mixer.out_proj.register_forward_pre_hook(lambda _, args: seen.update(gated=args[0])),
    ]
    with torch.no_grad():
        model(ids())
        hidden = (seen["args"] or [seen["kwargs"].get("hidden_states")])[0]
        steps = layer.adapter.steps(mixer, hidden, None)
        projected, E = mixer.in_proj(hidden), mixer.intermediate_size
        if name == "mamba":
            x, gate = projected.split([E, E], -1)
        else:
            gate, x, _ = projected.split([E, mixer.conv_dim, mixer.num_heads], -1)
        u = mixer.act(mixer.conv1d(x.transpose(1, 2))[..., :LENGTH]).transpose(1, 2)[..., :E].double()
        width = layer.adapter.channel_width(mixer)
        u = u.unflatten(-1, (*steps.A.shape[:2], width))
        h, outputs = torch.zeros(1), []
        for t in range(LENGTH):
            delta = steps.delta[:, t, ..., None, None]  # (B, G, D, width, N)
            h = torch.exp(delta * steps.A[:, :, None]) * h + delta * steps.B[:, t, :, None, None] * u[:, t, ..., None]
            outputs.append((steps.C[:, t, :, None, None] * h).sum(-1))
        D = mixer.D.double().repeat_interleave(width).view(u.shape[2:])
        y = (torch.stack(outputs, 1) + D * u).flatten(2).float()
        expected = y * torch.nn.functional.silu(gate) if name == "mamba" else mixer.norm(y, gate)
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(seen["gated"], expected, rtol=1e-4, atol=1e-5)  # fp32 scan against fp64


@pytest.mark.parametrize(("name", "method", "how"), [("mamba", "aire", "frozen"), ("mamba2", "aire_exact", "along")])
def test_importance_measures_every_layer(name, method, how):
    model = build(name).train()
    layers = state_layers(model)
    found = importance(model, method, [ids(), {"input_ids": ids(seed=1)}])
    assert model.training and all(module.training for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert [raw.shape for raw in found.raw] == [(6,), (6,)]
    energies = measure_energies(model, layers, [torch.cat([ids(), ids(seed=1)])], how)
    for layer, raw in zip(layers, found.raw):  # means over tokens, however they are batched: rounding of fp32 layers
        torch.testing.assert_close(raw, energies[layer.name], rtol=1e-4, atol=0.0)
        assert raw.dtype == torch.float64 and (raw > 0).all()


@pytest.mark.parametrize(("name", "side"), [("mamba", "left"), ("mamba2", "left"), ("mamba2_biases", "right")])
def test_padding_does_not_count(name, side):
    model = build(name)
    layers = state_layers(model)
    after = side == "right"
    padded = {"input_ids": torch.nn.functional.pad(ids(), (5 * (not after), 5 * after))}
    padded["attention_mask"] = (padded["input_ids"] > 0).long()
    for how in ("frozen", "along"):
        found, plain = (measure_energies(model, layers, [each], how) for each in (padded, ids()))
        for layer in layers:
            torch.testing.assert_close(found[layer.name], plain[layer.name], rtol=1e-4, atol=0.0)


def assert_same(found, expected):
    """Zeros less in sums of fp32, in another order."""
    assert (found - expected).norm() <= 1e-6 * expected.norm()


def logits(model, length=LENGTH):
    with torch.no_grad():
        return model(ids(length)).logits


@models
def test_removal_computes_what_the_mask_did_and_loads(name, tmp_path):
    model = build(name)
    full, before = logits(model), copy.deepcopy(model.state_dict())
    plan = allocate(importance(model, "aire", [ids()]), amount=0.5, scope="uniform")
    assert plan.sizes == [3, 3]
    prune(model, plan)
    masked = logits(model)
    assert (masked - full).abs().max() > 1e-3  # states matter
    restore(model)
    assert torch.equal(logits(model), full)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    prune(model, plan)
    model.save_pretrained(tmp_path / "masked")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "masked")), masked)
    assert remove(model) == [3, 3] and model.config.state_size == 3
    assert_same(logits(model), masked)
    assert sum(value.numel() for value in model.parameters()) < sum(value.numel() for value in before.values())
    model.save_pretrained(tmp_path / "removed")
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "removed", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and loaded.config.state_size == 3
    assert torch.equal(logits(loaded), logits(model))
    generated = [each.generate(ids(4), max_new_tokens=4, do_sample=False) for each in (loaded, model)]
    assert torch.equal(*generated)


@pytest.mark.parametrize("name", ["mamba", "mamba2_biases"])
def test_layers_with_fewer_states_are_padded(name):
    """state_size is one number: that of the layer with most states."""
    model = build(name)
    plan = allocate(importance(model, "random"), total=7, min_keep=2)
    plan.layers[0].keep[:] = torch.tensor([1, 0, 0, 1, 0, 0], dtype=torch.bool)
    plan.layers[1].keep[:] = torch.tensor([0, 1, 1, 1, 1, 0], dtype=torch.bool)
    prune(model, plan)
    masked = logits(model)
    assert plan.sizes == [2, 4] and remove(model) == [4, 4] and model.config.state_size == 4
    assert_same(logits(model), masked)
    again = importance(model, "energy", [ids()])
    assert [int((raw > 0).sum()) for raw in again.raw] == [2, 4]


@models
def test_the_report_counts_the_numbers_that_the_library_keeps(name):
    model = build(name)
    kept = model(ids()[:1], use_cache=True).cache_params.layers
    layers = describe(model).layers
    numbers = [sum(t.numel() for t in tree_leaves(layer.recurrent_states)) for layer in kept]
    assert [layer.states for layer in layers] == numbers
    assert {(layer.size, layer.modes, layer.tools) for layer in layers} == {(6, 6, ("prune with calibration",))}


def test_what_a_selective_layer_has_no_formula_for():
    model = build("mamba")
    for method, calibration, arguments, message in [
        ("aire", None, {}, "give calibration"),
        ("last", [ids()], {}, r"hinf of backbone\.layers\.0\.mixer \(mamba\) is not defined"),
        ("aire", [ids()], {"horizon": 3}, "horizon must be None"),
        ("aire", [], {}, "calibration must hold at least one token, got none"),
    ]:
        with pytest.raises(ValueError, match=message):
            importance(model, method, calibration, **arguments)
    with pytest.raises(TypeError, match="a batch of calibration must be input_ids or a dict, got str"):
        importance(model, "aire", ["text"])
    with pytest.raises(ValueError, match="input have no certificate"):
        certify(allocate(importance(model, "random"), amount=0.5), model)
    with pytest.raises(TypeError, match="MambaMixer is no fixed linear system"):
        state_layers(model)[0].read()


class Wrapped(torch.nn.Module):
    """A projection inside another module, as an adapter has it."""

    weight, bias = (property(lambda self, name=name: getattr(self.base_layer, name)) for name in ("weight", "bias"))

    def __init__(self, layer):
        super().__init__()
        self.base_layer, self.forward = layer, layer.forward


@pytest.mark.parametrize(("name", "part"), [("mamba", "x_proj"), ("mamba2", "in_proj")])
def test_wrapped_projections_are_refused_before_anything_changes(name, part):
    """By `prune` where C is in them, else by `remove`."""
    model = build(name)
    plan = allocate(importance(model, "aire", [ids()]), amount=0.5)
    mixer = model.backbone.layers[0].mixer
    setattr(mixer, part, Wrapped(getattr(mixer, part)))
    full = logits(model)
    with pytest.raises(ValueError, match=r"layers\.0.* must be a tensor of a plain module.*merge_and_unload"):
        prune(model, plan)
        masked = logits(model)
        remove(model)
    assert torch.equal(logits(model), masked if is_pruned(model) else full)
