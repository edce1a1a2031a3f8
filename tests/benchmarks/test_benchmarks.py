# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Every benchmark runs from end to end on tiny sizes and writes the JSON that its readers expect; nothing is timed."""

import argparse
import dataclasses
import functools
import importlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ROOT, VARIANTS, random_model, start_killed_sweep, tiny_config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from essm_train.baselines.mamba import ChunkedMamba2Mixer
from modeling_essm import ESSMConfig, ESSMForCausalLM
from modeling_essm.decoding import compile_decoding
from modeling_essm.decoding.compiled_steps import CompiledSteps

TINY = {  # report: arguments
    "ablation_speed": ["--only", "gated, capacity 8", "mamba2", "mamba2, library"],
    "spectral_basis": ["--lengths", "64", "512"],
    "spectral_layer": ["--lengths", "128", "--budgets", "2", "--threads", "1"],
    "decoding": ["--contexts", "16", "80"],
    "decoding_limit": ["--table", "limit", "--backend", "eager"],
    "decoding_peers": ["--contexts", "128", "160"],
    "long_prompt": [],
    "prefix_loading": [],
    "quantization": [],
    "speculative": ["--tokens", "8"],
    "serving": ["--loads", "0.5"],
    "training_step": ["--table", "models", "--length", "64"],
    "training_step_essm": ["--table", "essm", "--lengths", "64", "32", "--batches", "1", "2"],
    "training_step_dropout": ["--table", "dropout", "--length", "64"],
}
SLOW = ("prefix_loading", "training_step_dropout")
MODULES = {
    "decoding_limit": "decoding",
    "training_step_essm": "training_step",
    "training_step_dropout": "training_step",
}


@pytest.fixture
def benchmark_module(monkeypatch):
    for folder in ("train", "."):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny products lose more to waiting threads than they gain
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))  # no C++ compiler
    yield lambda name: importlib.import_module(f"benchmarks.{MODULES.get(name, name)}")
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in TINY])
@pytest.mark.sampled(4)
def test_benchmark_writes_its_report(benchmark_module, tmp_path, name):
    path = tmp_path / f"{name}.json"
    arguments = ["--quick", "--device", "cpu", "--rounds", "1", "--out", str(path), *TINY[name]]
    benchmark_module(name).main(arguments)
    report = json.loads(path.read_text())
    assert report["benchmark"] == name
    assert {"cpu", "cpu_cores", "gpu", "torch", "transformers"} <= report["machine"].keys()
    assert report["results"] and (report["targets"] or name in ("training_step_essm", "ablation_speed"))  # no target
    assert all(isinstance(t["met"], bool) and t["value"] >= 0 for t in report["targets"])
    assert [p.name for p in tmp_path.iterdir()] == [path.name]  # no partial file stays
    assert torch.get_num_threads() == 1  # left as found


def test_peers_decode_from_the_context_at_their_budget(benchmark_module, tmp_path):
    """A smaller budget keeps less; Llama's cache grows with what was read, one with room is larger, others stay."""
    arguments = ["--quick", "--device", "cpu", "--rounds", "1", "--contexts", "128", "160"]
    report = benchmark_module("decoding_peers").main([*arguments, "--out", str(tmp_path / "report.json")])
    sizes = {(row["model"], row["context"]): row["cache_bytes"] for row in report["results"]}
    assert sizes["ES-SSM K=4", 128] == sizes["ES-SSM K=4", 160] < sizes["ES-SSM K=32", 160]
    assert sizes["Llama", 160] * 128 == sizes["Llama", 128] * 160
    assert sizes["Llama, static cache", 128] > sizes["Llama", 128]
    assert sizes["Mamba-2", 128] == sizes["Mamba-2", 160]


def test_a_round_of_updates_trains_every_budget_once(benchmark_module, monkeypatch):
    speed = benchmark_module("ablation_speed")
    model = random_model(**VARIANTS["gated"], num_spectral_channels=8)
    before, budgets, forward = model.lm_head.weight.clone(), [], model.forward

    def spy(*args, **kwargs):
        budgets.append(kwargs.get("spectral_budget"))
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", spy)
    run, tokens = speed.updates(model, 16)
    run()
    assert budgets == [2, 3, 4, 6, 8] and tokens == 5 * speed.BATCH * 16
    assert not torch.equal(model.lm_head.weight, before)


def test_a_mamba2_can_compute_as_the_library_does(benchmark_module):
    speed = benchmark_module("ablation_speed")
    model = speed.make_model(speed.matched_config(speed.ROWS["mamba2"], 60_000), 512)
    mixers = [layer.mixer for layer in model.model.backbone.layers]
    weights = [p.clone() for p in model.parameters()]
    assert {type(mixer) for mixer in mixers} == {ChunkedMamba2Mixer}
    speed.as_the_library(model)
    assert {type(mixer) for mixer in mixers} == {Mamba2Mixer}
    assert all(map(torch.equal, weights, model.parameters()))


GATED = {  # report: its budgets at a capacity of 8, from where 4 and 32 or more were asked for
    "decoding": lambda report: [row["budget"] for row in report["results"]],
    "decoding_limit": lambda report: [row["budget"] for row in report["results"]],
    "decoding_peers": lambda report: [row["model"] for row in report["results"]],
    "long_prompt": lambda report: [report["settings"]["budget"]],
    "prefix_loading": lambda report: [row["K"] for row in report["results"]],
    "quantization": lambda report: [row["budget"] for row in report["results"][0]["decoding"]],
    "training_step": lambda report: [row["model"] for row in report["results"]],
    "training_step_essm": lambda report: [row["budget"] for row in report["results"]],
    "training_step_dropout": lambda report: [K for row in report["results"][0]["updates"] for K in row["budgets"]],
}
EXPECTED = {
    "decoding_limit": {2, 4, 8},
    "decoding_peers": {"ES-SSM K=4", "ES-SSM K=32", "mine K=4", "mine K=8", "Llama", "Llama, static cache", "Mamba-2"},
    "long_prompt": {4},
    "prefix_loading": {2, 8, "whole"},
    "training_step": {"ES-SSM K=4", "ES-SSM K=32", "mine K=4", "mine K=8", "Llama", "Mamba-2"},
    "training_step_dropout": {2, 3, 4, 6, 8},
}


@pytest.fixture
def config_folder(tmp_path):
    """A gated configuration whose fields all differ from the paper's and from the sizes of --quick."""
    sizes = {"hidden_size": 48, "num_hidden_layers": 3, "inner_size": 80, "spectral_capacities": [8, 8, 6]}
    ESSMConfig(block="gated", num_spectral_channels=8, filter_length=2048, **sizes).save_pretrained(tmp_path / "mine")
    return str(tmp_path / "mine")


@pytest.mark.slow
@pytest.mark.parametrize("name", GATED)
def test_benchmark_measures_the_configuration_of_a_folder(benchmark_module, tmp_path, config_folder, monkeypatch, name):
    module = benchmark_module(name)
    monkeypatch.setattr(benchmark_module("common"), "RESULTS", tmp_path / "results")
    extra = ["--modes", "eager"] if name in ("training_step_essm", "training_step_dropout") else []
    arguments = ["--quick", "--device", "cpu", "--rounds", "1", "--config", config_folder, *TINY[name], *extra]
    module.main(arguments)
    (path,) = (tmp_path / "results").iterdir()
    assert path.name == f"{name}_mine-cpu-quick.json"
    report = json.loads(path.read_text())
    settings = report["settings"]
    assert (settings["config"], settings["block"], settings["capacity"]) == ("mine", "gated", 8)
    assert {*GATED[name](report)} == EXPECTED.get(name, {4, 8})


def test_configuration_of_a_folder(benchmark_module, config_folder):
    common, args = benchmark_module("common"), argparse.Namespace(config=Path(config_folder))
    longer = common.configuration(args, filter_length=4096)
    assert (longer.filter_length, longer.inner_size, longer.capacities) == (4096, 80, (8, 8, 6))
    small = common.configuration(args, hidden_size=32, num_hidden_layers=2)
    assert (small.block, small.inner_size, small.capacities, len(small.layer_types)) == ("gated", 64, (8, 8), 2)
    paper = common.configuration(argparse.Namespace(config=None), filter_length=64, num_spectral_channels=8)
    assert paper.to_dict() == ESSMConfig(filter_length=64, num_spectral_channels=8).to_dict()
    assert common.clipped([2, 4, 8, 16, 32], small) == [2, 4, 8]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "No such file"),
        ("{", "needs a folder with the config.json of an ES-SSM"),
        ("[]", "model_type must be 'essm', got None"),
        ('{"model_type": "llama"}', "model_type must be 'essm', got 'llama'"),
        ('{"model_type": "essm", "num_heads": 0}', "num_heads must be"),
        ('{"model_type": "essm", "num_input_features": 3}', "num_input_features must be None, got 3"),
    ],
)
def test_a_bad_configuration_is_refused_at_once(benchmark_module, tmp_path, capsys, text, reason):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    for name in ("decoding", "decoding_peers", "training_step", "long_prompt", "quantization", "prefix_loading"):
        with pytest.raises(SystemExit) as stopped:
            benchmark_module(name).main(["--quick", "--config", str(tmp_path)])
        message = capsys.readouterr().err
        assert stopped.value.code == 2 and reason in message and str(tmp_path) in message


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("variant", ["paper", "gated", "gated-diagonal"])
def test_bytes_of_weights_are_those_that_a_budget_reads(benchmark_module, variant, tied):
    model = random_model(**VARIANTS[variant], tie_word_embeddings=tied)
    for K in (2, 7, 32):
        model.zero_grad()
        model(torch.arange(8)[None], spectral_budget=K).logits.square().sum().backward()
        parameters = {name: p for name, p in model.named_parameters() if tied or "embed_tokens" not in name}
        read = sum(int(p.grad.flatten(1).ne(0).any(1).sum()) * p[0].nbytes for p in parameters.values() if p.ndim > 1)
        read += sum(int(p.grad.ne(0).sum()) * p.itemsize for p in parameters.values() if p.ndim == 1)
        assert benchmark_module("common").weight_bytes(model, K) == read


def test_compiled_steps_with_another_state_are_not_timed(benchmark_module, monkeypatch):
    module, run = benchmark_module("decoding"), CompiledSteps.run

    def forgets(self, model, input_ids, cache, budget):
        before = [layer.tensors["convolution"].clone() for layer in cache.layers if layer.tensors]
        outputs = run(self, model, input_ids, cache, budget)
        for layer, convolution in zip(cache.layers, before):
            layer.tensors["convolution"] = convolution
        return outputs

    eager = random_model(**VARIANTS["gated"])
    compiled = compile_decoding(random_model(**VARIANTS["gated"]), [4], backend="eager")
    measured = module.measure_limit(eager, compiled, torch.ones(64), 4, 1, 1)
    assert measured["relative_error"] < 1e-5 and measured["compiled_seconds"]["median"] > 0
    monkeypatch.setattr(CompiledSteps, "run", forgets)
    with pytest.raises(RuntimeError, match="compiled step, K = 4: relative error"):
        module.measure_limit(eager, compiled, torch.ones(64), 4, 1, 1)


def test_speculative_tells_the_block_in_its_name(benchmark_module, tmp_path, monkeypatch):
    module = benchmark_module("speculative")
    monkeypatch.setattr(benchmark_module("common"), "RESULTS", tmp_path / "results")
    random_model(**VARIANTS["gated"]).save_pretrained(tmp_path / "model")
    module.main(["--quick", "--device", "cpu", "--rounds", "1", "--model", str(tmp_path / "model")])
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["speculative_gated-cpu-quick.json"]


def test_quantization_times_budgets_that_a_model_has(benchmark_module, tmp_path):
    random_model(num_spectral_channels=6, **VARIANTS["gated"]).save_pretrained(tmp_path / "model")
    report = quick_report(benchmark_module("quantization"), tmp_path, "--models", str(tmp_path / "model"))
    budgets = [{row["budget"] for row in result["decoding"]} for result in report["results"]]
    assert budgets == [{4, 6}, {4, 32}] and [*report["results"][0]["formats"][0]["bits_per_byte"]] == [*"2346"]


def test_length_extrapolation(benchmark_module, tmp_path):
    ESSMForCausalLM(tiny_config(filter_length=64, num_spectral_channels=8)).save_pretrained(tmp_path / "equal")
    ESSMForCausalLM(tiny_config(filter_length=512, num_spectral_channels=8)).save_pretrained(tmp_path / "above")
    (tmp_path / "text.txt").write_bytes(bytes(range(256)) * 10)
    arguments = ["--training_length", "64", "--text_files", str(tmp_path / "text.txt"), "--budgets", "2", "8"]
    models = [f"equal={tmp_path / 'equal'},{tmp_path / 'equal'}", f"above={tmp_path / 'above'}"]
    report = quick_report(benchmark_module("length_extrapolation"), tmp_path, *arguments, "--models", *models)
    runs = {(r["name"], r["algorithm"]): r for r in report["results"]}
    assert list(runs) == [("equal", "chunked"), ("equal", "fft"), ("above", "chunked")]
    assert [r["seeds"] for r in runs.values()] == [2, 2, 1] and str(tmp_path) not in json.dumps(report)
    for run in runs.values():
        for K in ("2", "8"):
            contexts, positions = run["by_context"][K], run["by_position"][K]
            assert len(contexts) == 4 and len(positions) == 8 and all(entry["deviation"] == 0 for entry in contexts)
            assert abs(contexts[-1]["mean"] - sum(entry["mean"] for entry in positions) / 8) < 1e-4
    short, long = (runs["equal", name]["by_context"]["8"] for name in ("chunked", "fft"))
    assert abs(short[0]["mean"] - long[0]["mean"]) < 1e-4  # within the filters both are the same operator
    assert (tmp_path / "report.png").stat().st_size > 0


def quick_report(module, tmp_path, *arguments):
    path = tmp_path / "report.json"
    module.main(["--quick", "--device", "cpu", "--rounds", "1", "--out", str(path), *arguments])
    return json.loads(path.read_text())


@pytest.mark.slow
def test_training_step_measures_every_combination_when_asked(benchmark_module, tmp_path):
    module = benchmark_module("training_step")
    shape = ["--lengths", "32", "--batches", "1", "--budgets", "2", "3"]
    report = quick_report(module, tmp_path, "--table", "essm", "--full", *shape)
    rows = {(r["budget"], r["checkpointing"], r["compiled"]): r for r in report["results"]}
    assert len(rows) == len(report["results"]) == 8 and report["left_out"] == 0
    for (K, checkpointing, compiled), row in rows.items():
        assert row["tokens_per_second"]["median"] > 0 and row["peak_bytes"] > 0
        assert row["memory_over_plain"] == row["peak_bytes"] / rows[K, False, False]["peak_bytes"]
        assert ("gradient_error" in row) == (checkpointing or compiled)
        assert row.get("graphs") == (1 if compiled else None)  # one for each budget


def test_training_step_names_what_it_cannot_measure(benchmark_module, tmp_path, monkeypatch):
    def backend(graph, inputs):
        raise OSError("no C++ compiler")

    module = benchmark_module("training_step")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    report = quick_report(module, tmp_path, "--table", "essm", "--lengths", "32", "--batches", "1", "--budgets", "2")
    for row in report["results"]:
        assert ("no C++ compiler" in row.get("failed", "")) == row["compiled"] == ("seconds" not in row)
    report = quick_report(module, tmp_path, "--table", "dropout", "--length", "32")
    assert ["failed" in row for row in report["results"]] == [False, True] and len(report["targets"]) == 1
    report = quick_report(module, tmp_path, "--table", "essm", "--modes", "eager", "--memory", "1e-3")
    assert all("exceed" in row["skipped"] and "seconds" not in row for row in report["results"])


def test_training_step_dropout_is_balanced(benchmark_module):
    updates = importlib.import_module("benchmarks.training_step_dropout").balanced_updates(32)
    assert sorted(updates) == [(2,), (3,), (4,), (6,), (8,), (12,), (16,), (24,), (32,)]
    assert updates != sorted(updates)


@pytest.fixture
def ablation(benchmark_module):
    """The module, tiny arguments, and the runs that they make."""
    module = benchmark_module("ablation")

    def run(tmp_path, *arguments):
        (tmp_path / "text.txt").write_text("spectral budgets " * 300)
        order = ["--train_file", str(tmp_path / "text.txt"), "--runs_dir", str(tmp_path / "runs"), *arguments]
        return quick_report(module, tmp_path, *order)

    return module, run


@pytest.mark.slow
def test_ablation_runs_are_tabled_at_their_best_rate(ablation, tmp_path, monkeypatch, capsys):
    from essm_train import models

    module, run = ablation
    seen, run_at_budget = [], models.run_at_budget

    def watched(model, batch, budget):
        if "labels" in batch:  # an update
            seen.append(batch["input_ids"])
        return run_at_budget(model, batch, budget)

    monkeypatch.setattr(models, "run_at_budget", watched)
    names = ["gated", "llama"]
    report = run(tmp_path, "--only", *names, "--rates", "0.001", "0.1", "--seeds", "0", "1")
    assert {r["model"] for r in report["results"]} == {*names} and len(list((tmp_path / "runs").iterdir())) == 8
    runs = [json.loads(path.read_text()) for path in sorted((tmp_path / "runs").iterdir())]
    for result in report["results"]:
        assert result["seeds"] == [0, 1] and abs(result["parameters"] / 60_000 - 1) <= module.TOLERANCE
        assert result["rates"][f"{result['best_rate']:g}"] == min(result["rates"].values()) and result["at_the_edge"]
        best = [r for r in runs if (r["model"], r["rate"]) == (result["model"], result["best_rate"])]
        for K, bits in result["bits_per_byte"].items():
            assert bits["mean"] == pytest.approx(sum(r["bits_per_byte"][K] for r in best) / 2) and bits["deviation"] > 0
    budgets = {r["model"]: [*r["bits_per_byte"]] for r in report["results"]}
    assert budgets == {"gated": ["2", "4", "8", "16"], "llama": ["1"]}
    assert [t["target"] for t in report["targets"]][2:] == ["gated: bits per byte against llama"]
    gated, llama = (next(r for r in report["results"] if r["model"] == name) for name in names)
    above = [llama["by_seed"][seed]["1"] - gated["by_seed"][seed]["16"] for seed in "01"]
    assert llama["against_gated"] == {
        "mean": pytest.approx(sum(above) / 2),
        "deviation": pytest.approx(np.std(above, ddof=1)),
    }
    assert gated["against_gated"] == {"mean": 0.0, "deviation": 0.0}
    # 3 updates of 2 seeds at 2 rates: seed by seed, the same blocks for every model and rate.
    orders = [torch.stack(seen[i : i + 3]) for i in range(0, len(seen), 3)]
    assert len(orders) == 8 and all(torch.equal(order, orders[0]) for order in orders[:4])
    assert all(torch.equal(order, orders[4]) for order in orders[4:]) and not torch.equal(orders[0], orders[4])
    # A rate that has a seed of its own is compared by those that it shares.
    (worse,) = {*llama["rates"]} - {f"{llama['best_rate']:g}"}
    extra = json.loads((tmp_path / "runs" / f"llama-rate{worse}-seed0.json").read_text())
    extra |= {"seed": 2, "bits_per_byte": {"1": 0.01}}
    records = [r for r in runs if r["model"] == "llama"]
    assert module.summarise([*records, extra])["best_rate"] == llama["best_rate"]
    monkeypatch.setattr(module, "perform", None)
    assert run(tmp_path, "--table", "--only", *names)["results"] == report["results"]
    assert f"±{llama['bits_per_byte']['1']['deviation']:.4f}" in capsys.readouterr().out


def test_ablation_goes_on_where_it_was_killed(ablation, tmp_path, monkeypatch):
    module, run = ablation
    order = ["--only", "paper", "s4d", "--rates", "0.01"]
    start_killed_sweep(module, monkeypatch, lambda: run(tmp_path, *order))
    found = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").iterdir()}
    assert {path.name for path in found} == {"paper-rate0.01-seed0.json", "s4d-rate0.01-seed0.json"}
    (tmp_path / "runs" / ".partial-x-seed1.json").write_text("{")  # killed while it was written
    report = run(tmp_path, *order)
    assert [r["seeds"] for r in report["results"]] == [[0, 1, 2]] * 2
    assert all(path.stat().st_mtime_ns == time for path, time in found.items())
    with pytest.raises(ValueError, match=r"updates was 3 and is now 2; choose another --runs_dir"):
        run(tmp_path, *order, "--updates", "2")
    (tmp_path / "runs" / "other-seed0.json").write_text(json.dumps({"model": "x", "settings": {}}))
    with pytest.raises(ValueError, match="runs of different settings"):
        run(tmp_path, "--table")


def test_ablation_reports_a_run_that_diverged(ablation, tmp_path):
    (result,) = ablation[1](tmp_path, "--only", "paper", "--rates", "1e38", "0.01", "--seeds", "0")["results"]
    assert result["rates"]["1e+38"] is None and result["best_rate"] == 0.01
    (result,) = ablation[1](tmp_path / "runs", "--only", "paper", "--rates", "1e38", "--seeds", "0")["results"]
    assert result["best_rate"] is None


@pytest.mark.slow
def test_an_ablation_run_is_a_run_of_train_clm(ablation, tmp_path):
    """So that what it measures is what a user gets."""
    from essm_train.arguments import parse_arguments
    from essm_train.commands import train_clm

    ablation[1](tmp_path, "--only", "gated, FFN", "--rates", "0.01", "--seeds", "1")
    (path,) = (tmp_path / "runs").iterdir()
    record = json.loads(path.read_text())
    own = {"block": "gated", "embedding_initializer_range": 0.1, "conv_kernel_size": 4, "filter_length": 512}
    own |= {"scaling_exponent": 0.0}  # the base's
    own |= {"block_size": 64, "sweep_blocks": 4, "validation_blocks": 4, "per_device_train_batch_size": 2}
    own |= {"max_steps": 3, "learning_rate": 0.01, "seed": 1}
    own |= {"train_file": tmp_path / "text.txt", "output_dir": tmp_path / "run"}
    values = {name: size for name, size in record["sizes"].items() if name != "state_size"} | own
    line = [part for name, value in values.items() for part in (f"--{name}", str(value))]
    train_clm.main(parse_arguments(train_clm.CLMArguments, [*line, "--cpu_threads", "1"]))
    sweep = json.loads((tmp_path / "run" / "budget_sweep.json").read_text())
    bits = dict(zip(map(str, sweep["budgets"]), sweep["bits_per_byte"]))
    assert {K: bits[K] for K in record["bits_per_byte"]} == pytest.approx(record["bits_per_byte"], rel=1e-6)


def test_ablation_rows_are_what_their_names_say(benchmark_module):
    rows = benchmark_module("ablation").ROWS
    for name, row in rows.items():
        parts = name.split(", ")
        assert any(part.startswith("FFN") for part in parts) == (row.feed_forward > 0), name
        assert row.full_share == {"half full": 0.5, "no budget dropout": 1.0}.get(parts[-1], 0.0), name
        attending = next((int(part.split()[-1]) for part in parts if part.startswith("attention")), None)
        assert row.attention_every == attending, name
        if parts[0] == "gated":
            capacity = next((int(part.split()[1]) for part in parts if part.startswith("capacity")), 16)
            assert row.fields["num_spectral_channels"] == capacity, name
        if parts[-1] == "equal time":
            assert row.updates != 1 and dataclasses.replace(row, updates=1.0) == rows[", ".join(parts[:-1])], name
        else:
            assert row.updates == 1, name


NAMES = ["paper", "gated", "gated, d 16", "gated, inner D, d D/4", "gated, FFN", "gated, attention 1 in 3", "mamba2"]


@pytest.mark.parametrize("name", NAMES)
def test_ablation_models_have_as_many_parameters(benchmark_module, name):
    module = benchmark_module("ablation")
    row = module.ROWS[name]
    config = module.matched_config(row, 800_000)
    with torch.device("meta"):
        assert abs(module.make_model(config, 4096).num_parameters() / 800_000 - 1) <= 0.03
    for field, value in row.fields.items():
        assert value is None or getattr(config, field) == value
    if row.peer is None:
        assert abs(config.inner_size / config.hidden_size - row.expansion) <= 0.25
        assert abs(config.num_hidden_layers - row.layers) <= 2
        assert config.layer_types.count("full_attention") == (2 if "attention" in name else 0)
    with pytest.raises(ValueError, match="has 500 parameters"):
        module.matched_config(row, 500)


def test_peak_memory_is_exact_where_the_answer_is_known(benchmark_module):
    benchmark_module("common").check_peak_memory(torch.device("cpu"))


def test_wrong_results_are_refused(benchmark_module):
    common = benchmark_module("common")
    assert common.require_close("same", torch.ones(4), torch.ones(4), 1e-6) == 0.0
    for wrong in (torch.zeros(4), torch.full((4,), torch.nan)):
        with pytest.raises(RuntimeError, match="wrong results are not timed"):
            common.require_close("wrong", wrong, torch.ones(4), 1e-6)
