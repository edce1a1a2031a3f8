# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""essm-analyze: gate statistics, stability bounds and the cost model."""

import json
import sys

import pytest
import torch
from helpers import VARIANTS, blocks, random_ids, random_model, variants
from torch.utils.flop_counter import FlopCounterMode

from essm_train import analyze
from essm_train.measure.analysis import gate_statistics, layer_cost, measured_cost, parts_of, stability_bounds
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
    u = mixer.convolve(inputs[0], None, None)[0] if mixer.taps else inputs[0]
    alpha = mixer.gates(u, 6).movedim(2, -1).double() / mixer.operator.sigma(6, mixer.scaling_exponent, u).double()
    torch.testing.assert_close(means[1], alpha.flatten(0, 1).mean(0), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(entropies[1], -(alpha * alpha.log()).sum(-1).flatten(0, 1).mean(0), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["paper", "no-gate", "gated"])
def test_no_layer_amplifies_beyond_its_bound(name):
    model = random_model(ESSMModel, **VARIANTS[name])
    for mixer in spectral_mixers(model):
        if mixer.taps:  # so that no bound holds without its gain
            mixer.convolution.data.mul_(1e3)
    width = model.config.inner_size
    u = torch.nn.functional.normalize(torch.randn(4, 300, width, generator=torch.Generator().manual_seed(0)), dim=-1)
    for K in (1, 4, 32):
        for mixer, bound in zip(spectral_mixers(model), stability_bounds(model, K), strict=True):
            with torch.no_grad():
                assert mixer(u, LayerCall(K)).norm(dim=-1).max() <= bound * (1 + 1e-5)
    for mixer in spectral_mixers(model):
        mixer.skip.weight.data.zero_()
    for mixer, bound in zip(spectral_mixers(model), stability_bounds(model, 1), strict=True):
        with torch.no_grad():  # the spectral part alone; of one channel random inputs reach a part of the bound
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

    Of the gated block also convolution and skip, and a diagonal M_k.
    """
    module = sys.modules[ESSMModel.__module__.rpartition(".")[0] + ".spectral_chunked"]
    monkeypatch.setattr(module, "_chunked_forward", module._chunked_forward._init_fn)  # or torch sees one opaque call
    part = parts_of(random_model(ESSMModel, spectral_algorithm=algorithm, **variant))[0]
    mixer = spectral_mixers(part)[0]
    D, G, d = mixer.skip.weight.shape[-1], mixer.num_heads, mixer.channel_mixing.shape[2]
    for K in (1, 6, 32):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            part(torch.randn(1, length, 16), LayerCall(K))
        N = mixer.operator.num_states(K)
        elements = (K + (N if algorithm == "step" else 0)) * D + (G * K if mixer.gated else 0)
        elements += (mixer.taps + 1) * D if part is not mixer else 0
        elements += K * D if d == 1 else 0
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
    assert torch.tensor(record["gates"]["mean"]).shape == ((2, 4, 32) if block else (2, 32))
    assert set(record["stability_bound_by_layer"]) == {str(K) for K in record["budgets"]}
    assert all((tmp_path / "out" / name).read_bytes()[:4] == b"\x89PNG" for name in ("gates.png", "cost.png"))
    assert "largest mean gates" in capsys.readouterr().out


def test_layers_of_different_capacity():
    model, ids = random_model(ESSMModel), random_ids(2, 20)
    bounds = [stability_bounds(model, K)[i] for i, K in enumerate((8, 3))]
    model.truncate([8, 3])
    assert stability_bounds(model, 8) == bounds
    mean, _ = gate_statistics(model, ids, 8)
    assert mean.shape == (2, 8) and (mean[1, 3:] == 0).all() and (mean[1, :3] > 0).all()
