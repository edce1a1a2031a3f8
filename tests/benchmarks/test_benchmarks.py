# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Benchmarks of speed and memory run from end to end on tiny sizes, and refuse to time wrong results."""

import functools
import gzip
import importlib
import json
import math
import os
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT, VARIANTS, random_model

from benchmarks import (
    ablation_speed,
    common,
    deadline,
    decoding,
    quantization,
    released,
    training_step,
)
from benchmarks.matched_models import Row
from essm_train.baselines.config import BaselineConfig
from essm_train.baselines.models import BaselineForCausalLM
from essm_train.data.blocks import evaluation_blocks, text_labels, to_stream
from essm_train.data.tokens import ByteEncoder
from modeling_essm import ESSMConfig

MODEL = ROOT / "hub_configs" / "essm-novels-6m"
RUNS = {
    "spectral_basis": ["--lengths", 64, 512],
    "spectral_layer": ["--lengths", 128, "--budgets", 2],
    "decoding --table limit": ["--backend", "eager"],
    "decoding --table prompt": [],
    "speculative": ["--model", MODEL],
    "serving": ["--model", MODEL, "--loads", 0.5],
    "training_step --table models": ["--length", 64],
    "budget_cost --table compute": [],
}
SLOW = {
    "ablation_speed": ["--only", "elastic", "mamba2", "mamba2, library"],
    "budget_cost --table loading": [],
    "training_step --table dropout": ["--length", 64],
}


@pytest.mark.parametrize("name", [*RUNS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_benchmark_writes_its_report(quick, tmp_path, name):
    module, *table = name.split()
    report = quick(importlib.import_module(f"benchmarks.{module}"), *table, *(RUNS | SLOW)[name])
    assert report["benchmark"].startswith(module)
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]  # no partial file stays


def test_a_report_replaces_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "REPORTS", tmp_path / "reports")
    for _ in range(3):
        args = common.parser("").parse_args(["--device", "cpu", "--quick"])
        report = common.start("mine", args)[1]
        common.finish(report | {"results": []}, args)
    names = {path.name for path in (tmp_path / "reports").iterdir()}
    assert names == {"mine-cpu-quick.json", "mine-cpu-quick-2.json", "mine-cpu-quick-3.json"}
    (tmp_path / "kept.png").touch()
    for path in (tmp_path / "reports" / "mine-cpu-quick.json", tmp_path / "kept.json", tmp_path / "kept.png" / "json"):
        with pytest.raises(ValueError, match=r"did not write|cannot be written"):
            common.start("mine", common.parser("").parse_args(["--device", "cpu", "--out", str(path)]))


def test_peers_decode_from_the_context_at_their_budget(quick):
    """A smaller budget keeps less; Llama's cache grows with what was read, one with room is larger, others stay."""
    report = quick(decoding, "--table", "peers", "--contexts", 128, 160)
    sizes = {(row["model"], row["context"]): row["cache_bytes"] for row in report["results"]}
    assert 0 < sizes["ES-SSM K=4", 128] == sizes["ES-SSM K=4", 160] < sizes["ES-SSM K=32", 160]
    assert sizes["Llama", 160] * 128 == sizes["Llama", 128] * 160
    assert sizes["Llama, static cache", 128] > sizes["Llama", 128]
    assert sizes["Mamba-2", 128] == sizes["Mamba-2", 160]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes cannot be pinned to a core")
def test_a_deadline_is_drawn_beside_full_size(quick, tmp_path):
    allowed = os.sched_getaffinity(0)
    report = quick(deadline, "--model", MODEL)
    assert os.sched_getaffinity(0) == allowed
    phases = [(row["run"], row["phase"]) for row in report["results"]]  # a busy machine may leave one without a step
    assert {run for run, _ in phases} == {"DeadlineBudget", "full size"}
    assert {phase for _, phase in phases} <= {*deadline.PHASES}
    assert {row["budget"] for row in report["results"] if row["run"] == "full size"} == {8}
    assert (tmp_path / "report.png").stat().st_size > 5_000


def test_steps_are_held_against_the_weights_of_their_budget(quick, monkeypatch):
    taken = set()
    monkeypatch.setattr(decoding, "decode", lambda model, cache, token, K, steps: taken.add((model, K)))
    rows = quick(decoding, "--table", "limit", "--backend", "eager")["results"]
    assert {K for _, K in taken} == {2, 32} and len(taken) >= 4  # eager and compiled
    weights = {(row["budget"], row["weight_bytes"]) for row in rows}
    assert len(weights) == 2 and min(weights)[1] < max(weights)[1]


def test_contexts_that_cannot_be_are_refused(tmp_path, capsys):
    """Peers' steps are checked on 128 tokens, and every model's on its last ones."""
    (tmp_path / "text.txt").write_text("text " * 60)
    texts = ["--train_file", tmp_path / "text.txt", "--text_files", tmp_path / "text.txt"]
    for benchmark, options, legal in (
        (decoding, ["--table", "peers", "--contexts", 127], "at least 128, got 127"),
        (released, ["--writer", MODEL, *texts, "--context", 6], "above 6 and below the"),
    ):
        with pytest.raises(SystemExit):
            benchmark.main([*map(str, options)])
        assert legal in capsys.readouterr().err


def test_wrong_results_are_refused():
    assert common.require_close("same", torch.ones(4), torch.ones(4), 1e-6) == 0.0
    for wrong in (torch.zeros(4), torch.full((4,), torch.nan)):
        with pytest.raises(RuntimeError, match="wrong results are not timed"):
            common.require_close("wrong", wrong, torch.ones(4))


def test_settings_of_training_steps(quick, monkeypatch):
    """Compiled and checkpointed steps have the eager gradient; a compiler that fails is told in its row."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))  # no C++ compiler
    report = quick(training_step, "--table", "essm", "--length", 32)
    rows = {(r["mode"], r["budget"]): r for r in report["results"]}
    assert {mode for mode, _ in rows} == {*training_step.MODES} and all("speed_over_eager" in r for r in rows.values())

    def backend(graph, inputs):
        raise OSError("no C++ compiler")

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    report = quick(training_step, "--table", "essm", "--length", 32, "--modes", "eager", "compiled")
    for row in report["results"]:
        assert ("no C++ compiler" in row.get("failed", "")) == (row["mode"] == "compiled")


@pytest.mark.parametrize("schedule", ["discrete", "family"])
def test_updates_are_at_the_budgets_of_their_schedule(schedule):
    model = random_model(**VARIANTS["elastic"], num_spectral_channels=8)
    before, budgets, forward = model.lm_head.weight.clone(), [], model.forward
    model.forward = lambda **kwargs: budgets.append(kwargs["spectral_budget"]) or forward(**kwargs)
    run, tokens = ablation_speed.updates(model, Row(1, schedule=schedule), 16)
    run()
    if schedule == "family":  # the full one, 1 and 2 on all rows, the others on some of four
        updates = [budgets[i : i + 6] for i in range(0, len(budgets), 6)]
        assert [(own[0], {*own[1:3]}, {*own[3:]}) for own in updates] == [(8, {1, 2}, {3, 4, 6})] * 5
    else:
        assert budgets == [2, 3, 4, 6, 8]
    assert tokens == 5 * ablation_speed.BATCH * 16 and not torch.equal(model.lm_head.weight, before)


def test_a_configuration_of_a_folder_is_measured(quick, tmp_path, capsys):
    """Its budgets, at a capacity of 8, from where 4 and 32 were asked for; sizes of --quick in the place of its own."""
    sizes = {"hidden_size": 48, "num_hidden_layers": 3, "head_size": 10, "spectral_capacities": [8, 8, 6]}
    ESSMConfig(block="elastic", num_spectral_channels=8, filter_length=2048, **sizes).save_pretrained(tmp_path / "mine")
    report = quick(decoding, "--contexts", 16, 80, "--config", tmp_path / "mine")
    settings = report["settings"]
    assert (settings["config"], settings["block"], settings["layers"], settings["width"]) == ("mine", "elastic", 2, 48)
    assert {row["budget"] for row in report["results"]} == {4, 8}
    longer = common.configuration(tmp_path / "mine", filter_length=4096)
    assert (longer.filter_length, longer.head_size, longer.capacities) == (4096, 10, (8, 8, 6))
    small = common.configuration(tmp_path / "mine", hidden_size=32, num_hidden_layers=2)
    assert (small.block, small.head_size, small.capacities, len(small.layer_types)) == ("elastic", 8, (8, 8), 2)
    (tmp_path / "mine" / "config.json").write_text('{"head_size": 0, "block": "elastic"}')
    for folder, reason in (("absent", "No such file"), ("mine", "head_size")):
        with pytest.raises(SystemExit):
            decoding.main(["--quick", "--config", str(tmp_path / folder)])
        assert reason in capsys.readouterr().err


@pytest.mark.parametrize(("variant", "tied"), [("paper", True), ("memory", False)])
def test_bytes_of_weights_are_those_that_a_budget_reads(variant, tied):
    model = random_model(**VARIANTS[variant], tie_word_embeddings=tied).double()
    for K in (2, 7, 32):
        model.zero_grad()
        model(torch.arange(8)[None], spectral_budget=K).logits.square().sum().backward()
        parameters = {name: p for name, p in model.named_parameters() if tied or "embed_tokens" not in name}
        assert common.weight_bytes(model, K) == sum(8 * int(p.grad.ne(0).sum()) for p in parameters.values())


def test_quantization(quick, tmp_path):
    pytest.importorskip("torchao")
    random_model(num_spectral_channels=8, **VARIANTS["elastic"]).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("spectral budgets " * 300)
    report = quick(quantization, "--model", tmp_path / "model", "--text_files", tmp_path / "text.txt")
    sizes = {row["format"]: row["bytes"] for row in report["results"]}
    assert sizes["int8"]["8"] < 0.9 * sizes["fp32"]["8"] and sizes["bf16"]["8"] < 0.6 * sizes["fp32"]["8"]
    assert all(list(size.values()) == sorted(size.values()) for size in sizes.values())
    assert [*report["results"][0]["bits_per_byte"]] == [*"1248"]


# ---------------------------------------------------------------------------------------------------------------------
# A model beside its peers, and the floors.


def witten_bell(train, held_out):
    """Bits per symbol, symbol by symbol."""
    bits = []
    for i in range(2, len(held_out)):
        probability = 1 / released.SYMBOLS
        for order in (1, 2, 3):
            context, starts = tuple(held_out[i - order + 1 : i]), range(len(train) - order + 1)
            following = Counter(train[j + order - 1] for j in starts if tuple(train[j : j + order - 1]) == context)
            if following:
                seen, ways = following[held_out[i]], len(following)
                probability = (seen + ways * probability) / (following.total() + ways)
        bits.append(-math.log2(probability))
    return sum(bits) / len(bits)


def test_the_trigram_is_that_of_witten_and_bell(monkeypatch):
    monkeypatch.setattr(released, "PIECE", 20)  # counted in several pieces
    texts = b"the cat sat on the mat and the dog sat too", b"the cat sat; that dog"
    train, held_out = (np.frombuffer(text, np.uint8).astype(np.uint16) for text in texts)
    assert released.trigram_bits(train, held_out) == pytest.approx(witten_bell(list(train), list(held_out)))


def test_the_frontier_of_a_model_and_its_peers(quick, tmp_path, capsys):
    """Every size is scored as its model scores it; a report alone keeps the bits, and makes models of its shapes."""
    torch.manual_seed(0)
    models: dict = {"mine": random_model(block="elastic", num_spectral_channels=8, trained_budgets=[2, 4, 8])}
    models["alone"] = random_model(block="elastic", num_spectral_channels=4)
    for name, state_size in (("matmamba", 8), ("mamba2", 8), ("transformer", 0)):
        config = BaselineConfig(architecture=name, hidden_size=16, num_hidden_layers=2, state_size=state_size)
        models[name] = BaselineForCausalLM(config)
    for name, model in models.items():
        model.save_pretrained(tmp_path / name / ("model" if name == "mamba2" else ""))
    (tmp_path / "text.txt").write_text(text := "the cat sat on the mat. " * 30)
    texts = ["--train_file", tmp_path / "text.txt", "--text_files", tmp_path / "text.txt", "--block_size", 64]
    folders = [tmp_path / name for name in reversed(models)]
    report = quick(released, "--models", *folders, "--writer", tmp_path / "mine", *texts)
    sizes = {"mine": (8, 4, 2), "alone": (4,), "matmamba": (8, 4, 2, 1), "mamba2": (1,), "transformer": (1,)}
    rows = {(row["name"], row["budget"]): row for row in report["results"] if row["name"] != released.WRITER}
    assert list(rows) == [(name, K) for name in models for K in sizes[name]]
    assert report["floors"]["gzip -9"] == 8 * len(gzip.compress(text.encode(), 9)) / len(text)
    blocks = evaluation_blocks(to_stream([text], ByteEncoder())[0], 64, 2)  # two in --quick
    for (name, K), row in rows.items():
        with torch.no_grad():
            logits = models[name].float()(blocks, spectral_budget=K).logits
        nats = F.cross_entropy(logits[:, :-1].flatten(0, 1), text_labels(blocks)[:, 1:].flatten())
        assert row["bits_per_byte"] == pytest.approx(float(nats) / math.log(2), rel=1e-4)
        whole = rows[name, max(sizes[name])]
        assert row["weights"] <= whole["weights"] == models[name].num_parameters()
        assert (row["weights"] < whole["weights"]) == (row["state_bytes"] < whole["state_bytes"]) == (row is not whole)
    assert list(report["texts"]) == ["2", "4", "8"]
    (tmp_path / "record.json").write_text(json.dumps(report))
    with pytest.raises(SystemExit):
        quick(released, "--record", tmp_path / "record.json", *texts[:-1], 32)
    assert "has the bits of other held-out blocks, {'block_size': 64" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        quick(released, "--models", tmp_path / "mamba2", tmp_path / "mamba2" / "model", *texts)
    assert "must be folders of different names" in capsys.readouterr().err
    again = quick(released, "--record", tmp_path / "record.json", *texts)
    same = ("name", "budget", "bits_per_byte", "weights", "state_bytes")
    assert [[row[x] for x in same] for row in again["results"]] == [[row[x] for x in same] for row in report["results"]]
    assert again["texts"] == report["texts"]
    left = released.draw(report).axes[0]
    assert {text.get_text() for text in left.texts} >= {"ES-SSM, K = 8", "K = 2", "K = 4 alone", "1/4", "Llama"}
    table = {line.split(" | ")[0]: line for line in released.markdown(report).splitlines()[2:]}
    names = ["nested Mamba-2", *(f"nested Mamba-2, {size}" for size in ("1/2", "1/4", "1/8")), "Mamba-2", "Llama"]
    assert [*table] == [f"| {name}" for name in (*(f"ES-SSM, K = {K}" for K in sizes["mine"]), *names)]
    assert table["| ES-SSM, K = 4"].endswith(f"| {rows['alone', 4]['bits_per_byte']:.3f} |")
