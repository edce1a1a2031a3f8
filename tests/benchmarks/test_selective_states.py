# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Reduced Mambas: projections against dense matrices, averages against selective layers that select nothing, a run."""

import json

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM

from benchmarks import selective_states
from benchmarks.selective_states import WAYS, averages, balanced, check_replacement, projected_scan, recurrences
from modeling_essm.companions import averaged_systems
from modeling_essm.companions.pruning.mamba_states import MambaAdapter
from modeling_essm.companions.truncation.selective_average import selective_layers

IDS = torch.randint(0, 30, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model():
    """Two layers whose states matter: weights are larger than at the start of a training."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "hidden_size": 8, "num_hidden_layers": 2, "state_size": 4}
    model = MambaForCausalLM(MambaConfig(**sizes, pad_token_id=0, bos_token_id=0, eos_token_id=0)).eval()
    with torch.no_grad():
        for layer in selective_layers(model).values():
            layer.x_proj.weight.mul_(30)
            layer.dt_proj.bias.fill_(-0.4)  # delta of 0.5
    return model


def moved(logits, expected):
    return float((logits - expected).norm() / expected.norm())


@torch.no_grad()
def test_the_loop_is_the_library_s_recurrence(model):
    check_replacement(model, IDS)
    layer = next(iter(selective_layers(model).values()))
    layer.D.add_(1.0)
    expected = model(IDS).logits
    layer.D.sub_(1.0)
    assert moved(model(IDS).logits, expected) > 1e-3  # so that the check can fail


@torch.no_grad()
def test_a_projection_is_a_dense_recurrence(model):
    layer = next(iter(selective_layers(model).values()))
    hidden = torch.randn(1, 6, 8, generator=torch.Generator().manual_seed(1))
    steps = MambaAdapter().steps(layer, hidden, None)
    u = torch.randn(1, 6, 16, generator=torch.Generator().manual_seed(2)).double()
    T = torch.randn(16, 4, 2, generator=torch.Generator().manual_seed(3)).double()
    left = torch.linalg.pinv(T)
    found = projected_scan(u, steps, (T, left))
    for d in (0, 7, 15):
        x = torch.zeros(2).double()
        for t in range(6):
            A = left[d] @ torch.diag((steps.delta[0, t, 0, d] * steps.A[0, d]).exp()) @ T[d]
            x = A @ x + left[d] @ steps.B[0, t, 0] * steps.delta[0, t, 0, d] * u[0, t, d]
            torch.testing.assert_close(found[0, t, d], steps.C[0, t, 0] @ T[d] @ x)


@torch.no_grad()
def test_all_balanced_directions_change_nothing_and_fewer_do(model):
    systems = averaged_systems(model, [IDS])
    expected, layers = model(IDS).logits, selective_layers(model)
    errors = []
    for size in (4, 2, 1):
        with recurrences(model, balanced(model, systems, size)):
            errors.append(moved(model(IDS).logits, expected))
    assert errors[0] < 1e-4 < min(errors[1:])
    assert selective_layers(model) == layers and torch.equal(model(IDS).logits, expected)


@torch.no_grad()
def test_an_average_is_exact_where_nothing_depends_on_the_input(model):
    for layer in selective_layers(model).values():
        layer.x_proj.weight.zero_()  # then delta comes from its bias alone
        fixed = torch.cat([torch.zeros(layer.time_step_rank), torch.arange(1.0, 9.0)])  # B and C
        layer.x_proj.register_forward_hook(lambda module, args, out, fixed=fixed: out + fixed)
    systems = averaged_systems(model, [IDS])
    expected = model(IDS).logits
    with recurrences(model, averages(model, systems, 4)):
        assert moved(model(IDS).logits, expected) < 1e-4
    with recurrences(model, averages(model, systems, 1)):
        assert moved(model(IDS).logits, expected) > 1e-4


def test_a_run_from_end_to_end(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("It was the best of times, it was the worst of times. " * 200)
    out = tmp_path / "found.json"
    argv = [
        "--quick",
        "--train_file",
        str(text),
        "--seeds",
        "0",
        "--runs_dir",
        str(tmp_path / "runs"),
        "--out",
        str(out),
    ]
    selective_states.main(argv)
    report = json.loads(out.read_text())
    assert {r["way"] for r in report["results"]} == {*WAYS} and out.with_suffix(".png").exists()
    assert {r["states"] for r in report["results"]} == {*selective_states.SIZES}
    capsys.readouterr()
    selective_states.main(argv)  # nothing is trained again
    assert "1 of 1 runs are there" in capsys.readouterr().out


def test_directions_that_an_average_does_not_have_are_no_rows():
    energies, average = {"12": 2.1, "8": 2.2, "4": 2.3}, {"12": 2.6, "8": 2.6, "4": 2.7}
    reduced = {way: average if "average" in way else energies for way in selective_states.WAYS}
    record = {"diverged": False, "seed": 0, "bits per byte": {"1": 2.0}, "reduced": reduced}
    rows = selective_states.summarise([record])
    sizes = {way: [r["states"] for r in rows if r["way"] == way] for way in selective_states.WAYS}
    assert sizes["exact energies"] == [12, 8, 4] and sizes["balanced average"] == [8, 4]
