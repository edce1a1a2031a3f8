# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""A mask is a zero in C that can be taken back; removal computes what the mask did, with smaller tensors."""

import copy
import dataclasses
import io

import pytest
import torch
from companion_layers import Recurrence, RecurrenceAdapter, Stack
from helpers import BLOCKS, random_model
from recurrences import diagonal_model, ids_of, random_system
from torch.nn.utils import parametrize
from transformers import MambaConfig, MambaForCausalLM

from modeling_essm.companions import (
    DiagonalSSMConfig,
    DiagonalSSMForCausalLM,
    DiagonalSSMModel,
    allocate,
    describe,
    importance,
    is_pruned,
    prune,
    register,
    remove,
    restore,
    state_layers,
)
from modeling_essm.companions.pruning.scores import exact_energy

WIDTH = 3
layouts = pytest.mark.parametrize(
    "layout",
    [dict(output="complex"), dict(output="real", directions=2), dict(output="twice_real", channels=WIDTH)],
    ids=["mimo", "two_directions", "siso"],
)


def stack(dtype=torch.float64, **layout):
    return Stack(*(random_system(n=6, q=WIDTH, seed=seed, **layout) for seed in range(2)), dtype=dtype)


def inputs(dtype=torch.float64):
    return torch.randn(2, 9, WIDTH, dtype=dtype, generator=torch.Generator().manual_seed(1))


def half(model, **arguments):
    return allocate(importance(model, "energy", **arguments), amount=0.5)


@layouts
def test_a_mask_is_a_zero_in_C_and_removal_computes_the_same(layout):
    """But for the order of sums. A frozen weight stays frozen and keeps its notes."""
    model, x = stack(torch.float32, **layout), inputs(torch.float32)
    model.layers[0].lam.requires_grad_(False)
    model.layers[0].B._no_weight_decay = True
    by_hand, plan, size = copy.deepcopy(model), half(model), model.layers[0].C.shape[-2]
    for layer, keep in zip(by_hand.layers, plan.keep):
        layer.C.data *= keep[..., None]
    full = model(x)
    prune(model, plan)
    masked = model(x).detach()
    assert torch.equal(masked, by_hand(x)) and not torch.equal(masked, full)
    assert is_pruned(model) and not is_pruned(by_hand)
    assert remove(model) == plan.sizes == model.config.state_sizes
    assert not is_pruned(model) and model.layers[0].C.shape[-2] == plan.sizes[0] < size
    torch.testing.assert_close(model(x), masked, rtol=1e-6, atol=1e-6 * float(masked.abs().max()))
    assert int((importance(model, "energy").raw[0] > 0).sum()) == plan.kept[0]
    assert not model.layers[0].lam.requires_grad and model.layers[0].C.requires_grad
    assert model.layers[0].B._no_weight_decay


def test_gradients_are_those_of_the_modes_that_stay():
    model = stack(output="real", directions=2)
    plan = half(model)
    C = model.layers[0].C
    prune(model, plan)
    model(inputs()).square().sum().backward()
    keep = plan.keep[0][..., None].expand(C.shape)
    assert C.grad is not None and not C.grad[~keep].any() and C.grad[keep].all()
    assert any(C is value for value in model.parameters())  # an optimizer's reference is still the parameter


def test_restore_brings_every_bit_back():
    model = stack(output="twice_real", channels=WIDTH)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    names, output, ids = [n for n, _ in model.named_parameters()], model(inputs()), list(map(id, model.parameters()))
    prune(model, half(model))
    assert [name for name, _ in model.named_parameters()] == names and list(map(id, model.parameters())) == ids
    restore(model)
    assert not is_pruned(model) and type(model.layers[0]) is Recurrence
    assert [name for name, _ in model.named_parameters()] == names and list(map(id, model.parameters())) == ids
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(inputs()), output)


def test_what_is_refused_leaves_the_masks_there():
    """A class that was changed over the masks, and a second plan for a model of which one C is no plain parameter."""
    model = stack(output="real", directions=2)
    plan = half(model)
    prune(model, plan)
    output = model(inputs())
    parametrize.register_parametrization(model.layers[1], "B", torch.nn.Identity())
    for take_off in (restore, remove):
        with pytest.raises(ValueError, match=r"layers\.1: its masks can be taken off once"):
            take_off(model)
        assert torch.equal(model(inputs()), output) and is_pruned(model.layers[0])
    model = stack(output="real", directions=2)
    prune(model, dataclasses.replace(plan, layers=plan.layers[:1]))
    parametrize.register_parametrization(model.layers[1], "C", torch.nn.Identity())
    with pytest.raises(ValueError, match="C must be a plain parameter, but it is parametrized"):
        prune(model, plan)
    assert is_pruned(model.layers[0])


def test_a_masked_state_has_the_usual_names():
    model, plain = stack(), stack()
    before = copy.deepcopy(model.state_dict())
    prune(model, half(model))
    state = copy.deepcopy(model.state_dict())
    assert set(state) == set(before) and not any(value.requires_grad for value in state.values())
    plain.load_state_dict(state)
    assert torch.equal(plain(inputs()), model(inputs()))
    model.load_state_dict(state)  # as a trainer that goes back to its best checkpoint
    assert torch.equal(plain(inputs()), model(inputs()))
    restore(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    other = Stack(random_system(n=6, q=WIDTH, seed=7), random_system(n=6, q=WIDTH, seed=8))
    prune(model, half(model))
    model.load_state_dict(other.state_dict())  # weights of an unpruned model replace all
    restore(model)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in other.state_dict().items())


def test_masked_modes_have_no_energy():
    model = stack()
    plan = half(model)
    prune(model, plan)
    again = importance(model, "energy")
    assert all(torch.equal(raw > 0, keep) for raw, keep in zip(again.raw, plan.keep))
    report = describe(model)
    assert [layer.masked for layer in report.layers] == [6 - kept for kept in plan.kept]
    assert f"2 layers, 12 modes, {12 - sum(plan.kept)} of them masked" in str(report)


def test_a_plan_for_another_model_is_refused():
    model, small = stack(), Stack(random_system(n=6, q=WIDTH), random_system(n=5, q=WIDTH))
    with pytest.raises(ValueError, match=r"layers\.1: the plan is for modes \(6,\), the model has \(5,\)"):
        prune(small, half(model))
    with pytest.raises(ValueError, match=r"for a layer 'layers\.1', the model has layers\.0$"):
        prune(Stack(random_system(n=6, q=WIDTH)), half(model))
    assert not is_pruned(small)
    system = random_system(n=4, channels=3)
    rows = (torch.arange(4) < torch.tensor(sizes)[:, None] for sizes in ([4, 2, 3], [3, 4, 2]))
    before, after = (Stack(dataclasses.replace(system, present=present)) for present in rows)
    with pytest.raises(ValueError, match="the plan is for other modes of this shape"):
        prune(after, half(before))
    with pytest.raises(ValueError, match="must be pruned before"):
        remove(model)


def test_a_model_of_the_same_configuration_keeps_its_sizes(tmp_path):
    config = MambaConfig(vocab_size=16, hidden_size=8, num_hidden_layers=2, state_size=4)
    one, other = MambaForCausalLM(config), MambaForCausalLM(config)
    prune(one, allocate(importance(one, "random"), amount=0.5, scope="uniform"))
    assert remove(one) == [2, 2] and one.config.state_size == one.backbone.config.state_size == 2
    other.save_pretrained(tmp_path)
    assert MambaForCausalLM.from_pretrained(tmp_path).config.state_size == config.state_size == 4


def test_a_layer_whose_modes_no_dimension_counts_is_not_pruned():
    class Unnamed(RecurrenceAdapter):
        def mode_dims(self, layer):
            return {}

    class Other(Recurrence):
        pass

    class Masked(Unnamed):
        def masks(self, layer, keep):
            return [(layer, "C", keep[:, None])]

    register(Other, Unnamed())
    model = torch.nn.Sequential(Other(random_system()))
    with pytest.raises(ValueError, match="Unnamed must have mode_dims and output_names, or masks, tensors and shrink"):
        prune(model, half(model))
    register(Other, Masked())
    prune(model, half(model))
    with pytest.raises(ValueError, match="Masked must have mode_dims and output_names, or masks, tensors and shrink"):
        remove(model)
    assert is_pruned(model)


def test_wrapped_layers_count_once():
    model = DiagonalSSMModel(DiagonalSSMConfig(state_size=4, num_hidden_layers=1, vocab_size=9))
    model.layers[0].mixer = torch.compile(model.layers[0].mixer)
    assert [layer.size for layer in describe(model).layers] == [4]


def test_the_report_is_a_table():
    model = Stack(random_system(n=6, q=WIDTH), random_system(n=4, channels=WIDTH, output="real"))
    report = describe(model)
    first, second = report.layers
    assert (first.size, first.modes, second.size, second.modes) == (6, 6, 4, 12)
    assert first.energy == pytest.approx(float(exact_energy(random_system(n=6, q=WIDTH)).sum()))
    lines = str(report).splitlines()
    assert lines[0] == "Stack" and "layers.1" in lines[3] and len(lines) == 5
    with torch.no_grad():
        model.layers[0].lam[0] = torch.tensor([1.0, 0.5])
    assert describe(model).layers[0].energy == float("inf")
    assert "no layer" in str(describe(torch.nn.Linear(2, 2)))
    for block in BLOCKS:
        spectral = describe(random_model(**block | {"num_spectral_channels": 8})).layers
        assert {(layer.kind, layer.size, layer.tools[0]) for layer in spectral} == {("spectral", 8, "spectral_budget")}
    assert RecurrenceAdapter().shape(model.layers[1]) == (3, 4)


# --- Diagonal models, saved and loaded

SHAPE = {"hidden_size": 4, "num_hidden_layers": 2, "state_sizes": [6, 6]}


def logits(model):
    with torch.no_grad():
        return model(ids_of(2, 9)).logits


@pytest.mark.parametrize("name", ["s5", "s4d"])
def test_a_pruned_model_is_saved_and_loaded(name, tmp_path):
    model = diagonal_model(name, **SHAPE)
    full = logits(model)
    layers = state_layers(model)
    assert [layer.kind for layer in layers] == [name, name] == [layer.kind for layer in describe(model).layers]
    plan = allocate(importance(model), amount=0.5)
    prune(model, plan)
    masked = logits(model)
    assert (masked - full).abs().max() > 1e-3
    model.save_pretrained(tmp_path / "masked")
    assert torch.equal(logits(DiagonalSSMForCausalLM.from_pretrained(tmp_path / "masked").eval()), masked)
    assert remove(model) == plan.sizes == model.config.state_sizes
    scale = float(masked.abs().max())
    torch.testing.assert_close(logits(model), masked, rtol=1e-6, atol=2e-6 * scale)  # fp32 sums in another order
    model.save_pretrained(tmp_path / "removed")
    loaded, info = DiagonalSSMForCausalLM.from_pretrained(tmp_path / "removed", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert loaded.config.state_sizes == plan.sizes and torch.equal(logits(loaded.eval()), logits(model))
    assert [layer.modes for layer in describe(loaded).layers] == plan.kept


@pytest.mark.parametrize("name", ["lru", "s4d"])
def test_a_whole_layer_goes(name):
    model = diagonal_model(name, **SHAPE)
    with torch.no_grad():
        state_layers(model)[1].module.C.mul_(1e-12)
    plan = allocate(importance(model, eps=1e-6), amount=0.6, min_keep=0)
    assert plan.kept[1] == 0
    prune(model, plan)
    masked = logits(model)
    assert remove(model)[1] == 0
    torch.testing.assert_close(logits(model), masked, rtol=1e-6, atol=2e-6 * float(masked.abs().max()))


def test_a_masked_model_is_pickled_and_compiled():
    shape = SHAPE | {"num_hidden_layers": 1, "state_sizes": [6]}
    model = diagonal_model("lru", **shape)
    prune(model, allocate(importance(model), amount=0.5))
    file, masked = io.BytesIO(), logits(model)
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(logits(torch.load(file, weights_only=False)), masked)
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(logits(compiled), masked)
    restore(model)
    assert torch.equal(logits(compiled), logits(model)) and not torch.equal(logits(model), masked)
    assert torch.equal(logits(model), logits(diagonal_model("lru", **shape)))
