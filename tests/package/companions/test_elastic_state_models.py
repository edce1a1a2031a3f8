# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The model: its backbone at depth 0, streams, counts, masks, objectives, and what is saved."""

import math

import pytest
import torch
from accelerate.utils import convert_outputs_to_fp32
from elastic_states import FIELDS, Counting, assert_same, random_inputs, random_model, run, smooth
from torch import nn
from transformers import AutoModel

from modeling_essm.companions import ElasticStateModel
from modeling_essm.companions.models import objectives_elastic_state as objectives

ALIGNED = 1e-5  # fp32: loaded weights lie where a file has them, and kernels sum in an order that depends on it


def test_depth_zero_is_the_recurrence():
    """The LRU as it is written, in complex numbers, and a model without objective bit for bit."""
    model, x = random_model(), random_inputs(2, 9, 5)
    plain = random_model(objective=None)
    source, z, states = model.source, torch.zeros(2, 3, dtype=torch.complex128), []
    with torch.no_grad():
        lam = torch.exp(torch.complex(-source.nu_log.exp(), source.theta_log.exp()))
        for t in range(9):
            u = source.embed_features(x[:, t]).to(torch.complex128)
            z = lam * z + source.gamma_log.exp() * (u @ torch.view_as_complex(source.B).T)
            states.append(torch.cat([z.real, z.imag], 1))
        expected = model.readout(torch.stack(states, 1))
    output = run(model, x, refine_depth=0)
    torch.testing.assert_close(output.latents, torch.stack(states, 1), rtol=0, atol=1e-13)
    torch.testing.assert_close(output.readouts, expected, rtol=0, atol=1e-13)
    without = run(plain, x, refine_depth=0)
    assert without.loss is None and without.losses is None
    for other in (without, run(model, x, max_refine_depth=0), run(model, x, gate_threshold_shift=float("inf"))):
        assert torch.equal(other.readouts, output.readouts) and torch.equal(other.latents, output.latents)
    assert torch.equal(output.losses, output.proposal_losses) and output.gradient_calls == 0


def test_the_refined_state_is_committed():
    """A proposal starts from z_K of the step before; with a backbone of its own nothing else changes."""
    model, x = random_model(), random_inputs(2, 4, 5)
    depths = torch.tensor([[0, 3, 0, 0], [0, 0, 0, 0]])
    output, plain = run(model, x, refine_depth=depths), run(model, x, refine_depth=0)
    assert torch.equal(output.refine_depths, depths)
    assert torch.equal(output.proposals[:, :2], plain.proposals[:, :2])
    assert torch.equal(output.latents[1], plain.latents[1])
    re, im = (output.latents[0, 1] - plain.latents[0, 1]).chunk(2)
    lam = torch.exp(torch.complex(-model.source.nu_log.exp(), model.source.theta_log.exp())).detach()
    change = torch.complex(re, im) * lam
    difference = output.proposals[0, 2] - plain.proposals[0, 2]
    assert difference.abs().max() > 1e-3
    torch.testing.assert_close(difference, torch.cat([change.real, change.imag]), rtol=0, atol=1e-13)


def test_gradients_are_computed_for_the_steps_that_are_taken():
    model, x, objective = random_model(), random_inputs(6, 8, 5), Counting()
    model.set_objective(objective)
    output = run(model, x)
    K = output.refine_depths
    assert len(K.unique()) >= 3 and 0 < K.sum() < K.numel() * 3  # the thresholds lie in between
    assert objective.gradients == output.gradient_calls == int(K.sum()) <= 8 * 6 * 3
    assert torch.equal(K, torch.stack([model.gate.depths(loss) for loss in output.proposal_losses.unbind(1)], 1))
    capped = run(model, x, max_refine_depth=1)
    assert capped.refine_depths.max() == 1 and capped.gradient_calls == int(capped.refine_depths.sum())
    fewer = run(model, x, gate_threshold_shift=1.0)
    assert 0 < fewer.gradient_calls < output.gradient_calls


@pytest.mark.parametrize(("mode", "history_length"), [(torch.no_grad, 0), (torch.inference_mode, 2)])
def test_a_stream_step_by_step_and_in_chunks(mode, history_length):
    model, x, y = random_model(history_length=history_length), random_inputs(3, 7, 5), random_inputs(3, 7, 5, seed=1)
    if history_length:
        model.set_objective(smooth)
    whole, cache, steps = run(model, x, y), None, []
    with mode():
        for t in range(7):
            steps.append(model.step(x[:, t], cache, y[:, t]))
            cache = steps[-1].past_key_values
        assert cache.get_seq_length() == 7 and cache.num_bytes >= 3 * 6 * 8
        first = model(x[:, :3], y[:, :3], use_cache=True)
        second = model(x[:, 3:], y[:, 3:], cache=first.cache)
    assert whole.gradient_calls == sum(step.gradient_calls for step in steps) > 0
    assert_same(whole, {name: torch.cat([step[name] for step in steps], 1) for name in FIELDS})
    assert_same(whole, {name: torch.cat([first[name], second[name]], 1) for name in FIELDS})
    with pytest.raises(ValueError, match="input_features must be given, got None"):
        model(None)


class Longest(nn.Module):
    """An objective with weights, constants and a history of its own: how many steps, and the largest readout so far."""

    def __init__(self, size=5):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))
        self.register_buffer("unit", torch.full((size,), 0.5), persistent=False)
        self.plain = torch.tensor([2.0])

    def initial_history(self, observation):
        return {"count": observation.new_zeros(len(observation)), "top": observation.new_zeros(observation.shape)}

    def commit(self, history, y, observation):
        return {"count": history["count"] + 1, "top": torch.maximum(history["top"], y)}

    def forward(self, y, observation, history):
        scale = self.scale * self.unit * self.plain
        return (scale * (y - observation - 0.1 * history["top"])).square().mean(-1) + history["count"]


def test_an_objective_keeps_its_history():
    model, x = random_model(), random_inputs(2, 5, 5)
    model.set_objective(Longest().double())
    output = run(model, x, use_cache=True)
    history = output.past_key_values.history
    assert history["count"].tolist() == [5, 5] and (output.losses >= torch.arange(5)).all()
    torch.testing.assert_close(history["top"], output.readouts.amax(1).clamp(min=0))
    rows, following = torch.tensor([1, 1, 0]), random_inputs(3, 5, seed=4)
    output.past_key_values.reorder_cache(rows)
    reordered = model.step(following, output.past_key_values)
    again = run(model, torch.cat([x[rows], following[:, None]], 1))
    torch.testing.assert_close(reordered.readouts[:, 0], again.readouts[:, -1], rtol=0, atol=1e-12)


def test_outputs_rebuilt_from_their_items_are_whole():
    model, x = random_model(dtype=torch.bfloat16), random_inputs(2, 6, 5, dtype=torch.bfloat16)
    given, rebuilt = (f(x, use_cache=True) for f in (model.forward, convert_outputs_to_fp32(model.forward)))
    assert list(rebuilt) == list(given) and rebuilt.losses.dtype == torch.float32
    assert rebuilt.gradient_calls == given.gradient_calls > 0 and rebuilt.past_key_values.states


def test_a_stream_is_not_decoded_in_training_mode():
    model, x = random_model(), random_inputs(2, 1, 5)
    cache = model.step(x[:, 0]).past_key_values
    with torch.no_grad(), pytest.raises(ValueError, match=r"training mode, .*: call model\.eval\(\) before decoding"):
        model.train().step(x[:, 0], cache)
    assert model.step(x[:, 0], cache).loss.requires_grad  # truncated backpropagation through a stream


def test_a_history_holds_the_last_steps_as_data():
    """Rows that have none yet have "real" false; no graph, and rows of a mask keep theirs."""
    y = random_inputs(4, 3, 5).requires_grad_()
    history = objectives.initial_history(None, y[0, :, :1].detach(), 2, y[0])
    for t in range(4):
        real = torch.tensor([True, t < 2, t == 0])
        history = objectives.commit(None, history, y[t], y[t, :, :1].detach(), real)
    assert not history["readouts"].requires_grad
    for row, last in enumerate(([2, 3], [0, 1], [None, 0])):
        assert history["real"][row].tolist() == [t is not None for t in last]
        for place, t in enumerate(last):
            expected = torch.zeros(5, dtype=torch.float64) if t is None else y[t, row]
            assert torch.equal(history["readouts"][row, place], expected)
            assert torch.equal(history["observations"][row, place], expected[:1])
    own = Longest()
    after = objectives.commit(own, own.initial_history(y[0].detach()), y[0], y[0].detach(), None)
    assert not after["top"].requires_grad


@pytest.mark.parametrize("acceptance", ["none", "reject"])
def test_a_state_is_judged_once(acceptance):
    """Every proposal, those rows again that take a step where others do not, and what each step led to."""
    model, x = random_model(acceptance=acceptance), random_inputs(4, 1, 5)
    depths = torch.tensor([[0], [2], [0], [0]])
    counting = model.set_objective(Counting()).objective

    def judged(*args, **kwargs):
        before = counting.values
        run(model, *args, **kwargs)
        return counting.values - before

    output = run(model, x, refine_depth=depths)
    assert counting.values == 4 + 1 + 2
    assert counting.gradients == output.gradient_calls == 2
    torch.testing.assert_close(output.readouts, model.readout(output.latents), rtol=0, atol=1e-12)
    torch.testing.assert_close(output.losses, (output.readouts - x).square().mean(-1), rtol=0, atol=1e-12)
    assert judged(x[1:2], refine_depth=2) == 1 + 2  # a stream
    model.train()
    assert judged(x) == 4 * (1 + 3)
    assert torch.equal(output.losses[[0, 2, 3]], output.proposal_losses[[0, 2, 3]])


def test_the_loss_is_objective_plus_penalty():
    model, x = random_model(compute_penalty=0.3, proposal_weight=0.7), random_inputs(3, 4, 5)
    output = run(model, x)
    expected = output.losses + 0.3 * output.refine_depths + 0.7 * output.proposal_losses
    torch.testing.assert_close(output.loss, expected.mean())


def test_every_weight_is_trained():
    model = random_model(trust_radius=1.0, drift=0.02, metric="cholesky").train()
    model(random_inputs(3, 4, 5)).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all() and (parameter.grad != 0).any(), name


def test_save_and_load(tmp_path, monkeypatch):
    """A model with a named objective whose weights are its own: everything comes back, the dials too."""
    monkeypatch.setitem(objectives.OBJECTIVES, "longest", Longest)
    fields = {"objective": "longest", "objective_arguments": {"size": 5}, "compute_penalty": 0.25, "metric": "low_rank"}
    model, x = random_model(dtype=torch.float32, **fields), random_inputs(2, 4, 5, dtype=torch.float32)
    model.set_gate_temperature(torch.tensor(0.5))
    model.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path)
    assert type(again) is ElasticStateModel
    assert {**again.config.to_dict(), "_name_or_path": ""} == model.config.to_dict()
    assert again.config.compute_penalty == 0.25 and again.config.gate_temperature == 0.5
    assert again.state_dict().keys() == model.state_dict().keys() and "objective.scale" in again.state_dict()
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    one, other = run(model, x), run(again, x)
    assert torch.equal(one.refine_depths, other.refine_depths)
    torch.testing.assert_close(one.readouts, other.readouts, rtol=0, atol=ALIGNED)


def test_an_objective_is_attached_after_loading(tmp_path):
    model, x = random_model(dtype=torch.float32, objective=None), random_inputs(2, 3, 5, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    again = ElasticStateModel.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="refinement needs an objective"):
        again(x)
    for objective in (Counting(), lambda y, x, history: (y - x).square().mean(-1), Counting()):
        output = run(again.set_objective(objective), x)
        assert output.gradient_calls > 0
    expected = run(model.set_objective(Counting()), x)
    assert torch.equal(output.refine_depths, expected.refine_depths)
    torch.testing.assert_close(output.readouts, expected.readouts, rtol=0, atol=ALIGNED)


def test_half_precision(tmp_path):
    """Weights of linear maps in bf16; the recurrence's poles, metric and gate stay in fp32, and states always are."""
    model, x = random_model(dtype=torch.float32), random_inputs(2, 3, 5, dtype=torch.float32)
    exact = run(model, x, refine_depth=2)
    model.save_pretrained(tmp_path)
    half = ElasticStateModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    kept = {name for name, parameter in half.named_parameters() if parameter.dtype == torch.float32}
    assert {name.rpartition(".")[0] for name in kept} == {"source", "corrector", "corrector.metric", "gate"}
    assert half.readout[0].weight.dtype == half.source.B.dtype == torch.bfloat16
    new = ElasticStateModel._from_config(model.config, dtype=torch.bfloat16)
    assert [p.dtype for p in new.parameters()] == [p.dtype for p in half.parameters()]
    for low in (half, half.to(torch.bfloat16)):
        output = run(low, x, refine_depth=2)
        assert output.latents.dtype == torch.float32
        torch.testing.assert_close(output.readouts, exact.readouts, rtol=0, atol=0.1)  # 2^-8 of values near 3, added up


def test_bad_calls():
    for kwargs, message in [
        ({"input_features": torch.zeros(2, 3, 4)}, r"input_features must have shape \(B, L, 5\)"),
        ({"refine_depth": 4}, r"refine_depth must be integers in \[0, 3\], got 4"),
        ({"refine_depth": 1.0}, r"refine_depth must be integers"),
        ({"refine_depth": torch.ones(3, dtype=torch.long)}, r"refine_depth must have shape \(\), \(2,\) or \(2, 3\)"),
        ({"gate_threshold_shift": math.nan}, "gate_threshold_shift must be a number, got nan"),
        ({"max_refine_depth": 4}, r"max_refine_depth must be an integer in \[0, 3\], got 4"),
        ({"spectral_budget": 3}, "spectral_budget needs a backbone that has one, got 3"),
        ({"attention_mask": torch.ones(2, 4)}, r"attention_mask must have shape \(2, 3\)"),
        ({"observations": torch.zeros(2, 2, 5)}, r"observations must be tensors \(2, 3, \.\.\), as input_features"),
        ({"observations": torch.zeros(2, 3)}, r"must have readout_size=5 numbers, in the shape \(2, 5\) .* got \(2,\)"),
        ({"observations": {"a": None}}, "observations must be tensors .* got None"),
    ]:
        model = random_model(dtype=torch.float32)
        with pytest.raises(ValueError, match=message):
            model(**({"input_features": torch.zeros(2, 3, 5)} | kwargs))


def test_a_bad_objective():
    model, x = random_model(), random_inputs(2, 1, 5)
    model.set_objective(lambda y, observation, history: y.sum())
    with pytest.raises(ValueError, match=r"an objective must give \(2,\) numbers, got shape \(\)"):
        model(x)
    model.set_objective(lambda y, observation, history: torch.tensor(y.tolist()).sum(1).abs() + 9)
    with pytest.raises(ValueError, match="computed from y by functions that autograd knows"):
        model(x, refine_depth=1)


def test_another_objective_takes_the_name_away(tmp_path):
    """So that a model does not come back with one that it was not refined on."""
    model = random_model(dtype=torch.float32)
    assert model.set_objective(model.objective).config.objective == "squared_error"
    model.set_objective(objectives.SquaredError())  # another one of that class may have other constants
    model.save_pretrained(tmp_path)
    assert model.config.objective is None and ElasticStateModel.from_pretrained(tmp_path).objective is None


# --- Positions that do not exist: they change nothing, and what lies there is not read


@pytest.mark.parametrize("acceptance", ["reject", "backtrack"])
def test_padding_does_not_exist(acceptance):
    """Each row is what it is alone, with depths of its own, where full steps often go up."""
    model = random_model(history_length=2, acceptance=acceptance, drift=0.1, step_size=1.0)
    model.set_objective(lambda y, *past: smooth(y, *past) + (9 * y).sin().square().mean(-1))
    mask = torch.ones(3, 8, dtype=torch.long)
    mask[0, :3], mask[1, 6:], mask[2, 2:4] = 0, 0, 0
    x = random_inputs(3, 8, 5).masked_fill(mask[..., None] == 0, torch.nan)
    output = run(model, x, attention_mask=mask, use_cache=True)
    total = count = 0
    for i in range(3):
        real = mask[i].bool()
        alone = run(model, x[i : i + 1, real])
        for name in FIELDS:
            torch.testing.assert_close(output[name][i, real], alone[name][0], rtol=0, atol=1e-12)
        assert (output.refine_depths[i, ~real] == 0).all()
        last = alone.latents[0, -1]
        torch.testing.assert_close(output.past_key_values.states[0][i], last, rtol=0, atol=1e-12)
        total, count = total + alone.loss * real.sum(), count + real.sum()
    torch.testing.assert_close(output.loss, total / count)
    forced = run(model, x, attention_mask=mask, refine_depth=2)
    assert torch.equal(forced.refine_depths, 2 * mask) and forced.gradient_calls == 2 * mask.sum()


class SinceTheFirst:
    """The distance from the observation before the first step, as a history of its own; not its square."""

    def initial_history(self, observation):
        return observation

    def commit(self, history, y, observation):
        return history

    def __call__(self, y, observation, history):
        return (y - history).square().sum(-1).sqrt()


def test_padding_before_the_first_position_does_not_exist():
    """Not as the first observation, nor as a gradient of the norm of zero: nothing is read and nothing observed."""
    model, mask = random_model(), torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    x = random_inputs(2, 5, 5).masked_fill(mask[..., None] == 0, torch.nan)
    model.set_objective(SinceTheFirst())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()  # so that y is 0 where nothing was read
    padded, alone = run(model, x, attention_mask=mask), run(model, x[:1, 2:])
    torch.testing.assert_close(padded.losses[0, 2:], alone.losses[0], rtol=0, atol=1e-12)
    assert torch.equal(padded.refine_depths[0, 2:], alone.refine_depths[0]) and alone.refine_depths.any()
    model.train().set_objective(lambda y, observation, history: (y - observation).square().sum(-1).sqrt())
    model(x, attention_mask=mask).loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
