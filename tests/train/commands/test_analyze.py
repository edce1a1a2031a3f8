# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""essm-analyze: gate statistics, stability bounds and the cost model."""

import json
import sys

import pytest
import torch
from helpers import VARIANTS, blocks, random_ids, random_model, variants
from torch.utils.flop_counter import FlopCounterMode

from essm_train import analyze
from essm_train.measure.analysis import gate_statistics, layer_cost, measured_cost, parts_of, rows_of, stability_bounds
from modeling_essm import ESSMModel
from modeling_essm.loading_essm import spectral_mixers
from modeling_essm.mixer_essm import LayerCall


@blocks
@torch.no_grad()
def test_gate_statistics_are_those_of_the_gates(block):
    model, ids = random_model(ESSMModel, **block), random_ids(2, 20)
    mixer, inputs = spectral_mixers(model)[1], []
    mixer.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    means, entropies = gate_statistics(model, ids, 6)
    torch.testing.assert_close(means.sum(-1), torch.ones_like(entropies))
    u = inputs[0]
    alpha = (
        mixer.gates(u, 6, None).movedim(2, -1).double() / mixer.operator.sigma(6, mixer.scaling_exponent, u).double()
    )
    torch.testing.assert_close(means[1], alpha.flatten(0, 1).mean(0), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(entropies[1], -(alpha * alpha.log()).sum(-1).flatten(0, 1).mean(0), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_no_layer_amplifies_beyond_its_bound(name):
    model = random_model(ESSMModel, **VARIANTS[name])
    u = torch.nn.functional.normalize(torch.randn(4, 300, 16, generator=torch.Generator().manual_seed(0)), dim=-1)
    for K in (1, 4, 32):
        for mixer, bound in zip(spectral_mixers(model), stability_bounds(model, K), strict=True):
            assert mixer(u, LayerCall(K)).norm(dim=-1).max() <= bound * (1 + 1e-5)
    for mixer in spectral_mixers(model):
        if "block" in VARIANTS[name]:  # the norm takes this back
            mixer.channel_mixing.mul_(1e3)
        else:
            mixer.skip.weight.zero_()
    for mixer, bound in zip(spectral_mixers(model), stability_bounds(model, 1), strict=True):
        # The spectral part alone; of one channel random inputs reach a part of the bound.
        assert 0.003 * bound < mixer(u, LayerCall(1)).norm(dim=-1).max() <= bound * (1 + 1e-5)


def test_the_cost_model_counts_the_products():
    # Written out for K = 4 of 4096 positions, C = 64, N = 16, D = 32, D_g = 8: skip, gate, weights and mixing; then
    # features, and states of 64 chunks, between which a scan takes 63 + 31 + 15 + 7 + 3 + 1 steps.
    mixer = spectral_mixers(random_model(ESSMModel, hidden_size=32, filter_length=4096, chunk_size=64))[0]
    cost, fixed = layer_cost(mixer, 4, 4096), 32**2 + 32 * 8 + 8 * 4 + 4 + 4 * 32 + 4 * 32**2
    assert cost["chunked"] == fixed + 4 * 80 * 32 + (16 * 64 * 64 + 256 * (120 + 1)) * 32 / 4096
    assert cost["step"] == fixed + 16 * 17 * 32
    assert cost["fft"] == fixed + 5 * 2.5 * 13 * 32 + 16 * 32
    mixer = spectral_mixers(random_model(ESSMModel, hidden_size=32, filter_length=4096, gating="none"))[0]
    assert cost["step"] - layer_cost(mixer, 4, 4096)["step"] == 32 * 8 + 8 * 4 + 4


LENGTHS = {"step": (5,), "chunked": (5, 64)}  # of whole chunks, or of less than one


@variants
@pytest.mark.parametrize("algorithm, length", [(name, L) for name, lengths in LENGTHS.items() for L in lengths])
def test_the_cost_model_counts_what_a_layer_computes(variant, algorithm, length, monkeypatch):
    """All products that torch counts; it leaves out those of single elements: gates, their softmax, phi(0) u.

    Of the elastic block also convolutions and skip, a diagonal M_k, and what a step writes into the memory.
    """
    package = ESSMModel.__module__.rpartition(".")[0]
    operators, memory = (sys.modules[f"{package}.{name}"] for name in ("spectral_chunked", "memory_essm"))
    monkeypatch.setattr(operators, "_chunked_forward", operators._chunked_forward._init_fn)  # or torch sees one call
    step = memory.delta_rule

    def step_by_step(*inputs):
        *sequences, S = inputs
        outputs = []
        for t in range(length):
            o, S = step(*(x[:, t : t + 1] for x in sequences), S)
            outputs.append(o)
        return torch.cat(outputs, 1), S

    monkeypatch.setattr(memory, "delta_rule", step_by_step)
    part = parts_of(random_model(ESSMModel, spectral_algorithm=algorithm, **variant))[0]
    mixer = spectral_mixers(part)[0]
    elastic = part is not mixer
    for K in (1, 6, 32):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            part(torch.randn(1, length, 16), LayerCall(K))
        N, units = mixer.operator.num_states(K), K * mixer.filtered if elastic else 16
        elements = (K + (N if algorithm == "step" else 0)) * units
        if elastic:
            elements += K * K + K * mixer.head_size * mixer.taps + (1 + K) * units
            if mixer.memory is not None:
                keys = K * mixer.memory.keys
                elements += 2 * keys * mixer.taps + keys * (K * mixer.head_size - units)
        elif mixer.gated:
            elements += K
        products = layer_cost(part, K, length)[algorithm] - elements
        assert counter.get_total_flops() == pytest.approx(2 * length * products, rel=1e-12)


@variants
def test_measuring_leaves_the_layer_as_it_was(variant):
    model = random_model(ESSMModel, spectral_algorithm="step", **variant)
    model.truncate([8, 3])
    seconds = measured_cost(parts_of(model)[1], (2, 8), 20, rounds=1)
    assert [len(values) for values in seconds.values()] == [2, 2] and spectral_mixers(model)[1].algorithm == "step"


@blocks
def test_script(block, tmp_path, monkeypatch, capsys):
    model = tmp_path / "model"
    random_model(**block).save_pretrained(model)
    (tmp_path / "text.txt").write_text("spectral " * 200)
    argv = ["analyze.py", "--model", str(model), "--text_files", str(tmp_path / "text.txt"), "--block_size", "128"]
    monkeypatch.setattr(sys, "argv", [*argv, "--output_dir", str(tmp_path / "out")])
    analyze.run()
    record = json.loads((tmp_path / "out" / "analysis.json").read_text())
    assert torch.tensor(record["gates"]["mean"]).shape == ((2, 32, 32) if block else (2, 32))
    assert set(record["stability_bound_by_layer"]) == {str(K) for K in record["budgets"]}
    assert all((tmp_path / "out" / name).read_bytes()[:4] == b"\x89PNG" for name in ("gates.png", "cost.png"))
    assert "largest mean gates" in capsys.readouterr().out


@blocks
def test_layers_of_different_capacity(block):
    model, ids = random_model(ESSMModel, **block), random_ids(2, 20)
    bounds = [stability_bounds(model, K)[i] for i, K in enumerate((8, 3))]
    model.truncate([8, 3])
    assert stability_bounds(model, 8) == bounds
    mean, entropy = gate_statistics(model, ids, 8)
    held = mean[1] > 0
    assert mean.shape == (2, *((8,) * held.ndim)) and held.sum() == 3**held.ndim and held[(slice(3),) * held.ndim].all()
    assert len(rows_of(mean, entropy)) == (11 if block else 2)
