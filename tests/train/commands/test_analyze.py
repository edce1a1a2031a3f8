# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""essm-analyze: gate statistics, stability bounds and measured cost."""

import json
import math
import re
import sys

import pytest
import torch
from helpers import VARIANTS, blocks, random_ids, random_model

from essm_train import analyze
from essm_train.measure.analysis import (
    gate_statistics,
    rows_of,
    spectral_mixers,
    stability_bounds,
)
from modeling_essm import ESSMModel
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
    expected = -torch.xlogy(alpha, alpha).sum(-1).flatten(0, 1).mean(0)
    torch.testing.assert_close(entropies[1], expected, atol=1e-6, rtol=1e-5)
    counted = torch.arange(20) < torch.tensor([[20], [3]])
    means, entropies = gate_statistics(model, ids, 6, counted)
    torch.testing.assert_close(means[1], alpha[counted].mean(0), atol=1e-6, rtol=1e-5)
    expected = torch.special.entr(alpha[counted]).sum(-1).mean(0)
    torch.testing.assert_close(entropies[1], expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_no_layer_amplifies_beyond_its_bound(name):
    model = random_model(ESSMModel, **VARIANTS[name])
    u = torch.nn.functional.normalize(torch.randn(4, 300, 16, generator=torch.Generator().manual_seed(0)), dim=-1)
    for mixer in spectral_mixers(model):
        if "block" in VARIANTS[name]:  # a head whose z counts for more than all else
            z = mixer.in_proj.weight.view(32, -1, 16)[2, : mixer.head_size]
            z.mul_(1e3)
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


@pytest.mark.parametrize("block", [{}, VARIANTS["elastic"]], ids=["paper", "elastic"])
def test_script(block, tmp_path, monkeypatch, capsys):
    model = tmp_path / "model"
    random_model(num_spectral_channels=8, **block).save_pretrained(model)
    (tmp_path / "text.txt").write_text("spectral " * 200)
    argv = ["analyze.py", "--model", str(model), "--text_files", str(tmp_path / "text.txt"), "--block_size", "128"]
    monkeypatch.setattr(sys, "argv", [*argv, "--output_dir", str(tmp_path / "out")])
    analyze.run()
    record = json.loads((tmp_path / "out" / "analysis.json").read_text())
    assert torch.tensor(record["gates"]["mean"]).shape == ((2, 8, 8) if block else (2, 8))
    assert set(record["stability_bound_by_layer"]) == {str(K) for K in record["budgets"]}
    assert all((tmp_path / "out" / name).read_bytes()[:4] == b"\x89PNG" for name in ("gates.png", "cost.png"))
    printed = capsys.readouterr().out
    assert "largest mean gates" in printed and "analysis.json, gates.png, cost.png" in printed
    if json.loads((model / "config.json").read_text())["gating"] == "nested":
        for head in (1, 2, 8):  # which mixes so many filters
            assert re.search(rf"layer 1, head {head}: .* entropy [0-9.]+ of {math.log(head):.3f}\n", printed)
        return
    random_model(num_spectral_channels=8, gating="none").save_pretrained(model)
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--overwrite"])
    analyze.run()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"analysis.json", "cost.png"}


@blocks
def test_layers_of_different_capacity(block):
    model, ids = random_model(ESSMModel, **block), random_ids(2, 20)
    bounds = [stability_bounds(model, K)[i] for i, K in enumerate((8, 3))]
    model.truncate([8, 3])
    assert stability_bounds(model, 8) == bounds
    mean, entropy = gate_statistics(model, ids, 8)
    held = mean[1] > 0  # (filters,), or (heads, filters) where head j has filters 1 to j
    expected = torch.zeros_like(held)
    expected[(slice(3),) * held.ndim] = True
    expected = expected.tril() if model.config.gating == "nested" else expected
    assert mean.shape == (2, *((8,) * held.ndim)) and torch.equal(held, expected)
    rows = rows_of(mean, entropy, (0, 3))  # of a hybrid, whose layers 1 and 2 attend
    assert len(rows) == (11 if block else 2) and {name.split(",")[0] for name, *_ in rows} == {"layer 0", "layer 3"}
