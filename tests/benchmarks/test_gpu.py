# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What is run where a GPU is lent, on a CPU: the call of all parts, its limits, and the new tables."""

import argparse
import itertools
import json
import subprocess
import sys
import types

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from benchmarks import gpu_all, gpu_layers, gpu_peers, gpu_train
from modeling_essm.spectral_ops import SpectralOperator

WRITES = "import json, sys; json.dump({'rows': [1]}, open(sys.argv[sys.argv.index('--out') + 1], 'w'));"


def part(code, seconds=30.0, **fields):
    return gpu_all.Part(("-c", code), seconds, **fields)


def run(parts, tmp_path, monkeypatch, *arguments):
    monkeypatch.setattr(gpu_all, "PARTS", parts)
    monkeypatch.setattr(gpu_all, "POLL_SECONDS", 0.2)
    path = tmp_path / "all.json"
    gpu_all.main(["--device", "cpu", "--out", str(path), *arguments])
    return json.loads(path.read_text())["parts"]


def test_a_part_that_fails_costs_the_others_nothing(tmp_path, monkeypatch):
    parts = {
        "fails": part("print('why'); raise SystemExit(3)"),
        "writes": part(WRITES + "import os; print(sys.argv[1:], os.environ['ESSM_TRITON'])", kernels=True),
        "is killed": part("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", reports=False),
        "needs a model": part("", needs_model="--model"),
    }
    results = run(parts, tmp_path, monkeypatch, "--quick")
    assert {name: result["status"] for name, result in results.items()} == {
        "fails": "exit status 3",
        "writes": "done",
        "is killed": "exit status -9",
        "needs a model": "not begun: no --model",
    }
    assert results["fails"]["output"] == "why\n" and "report" not in results["fails"]
    assert results["writes"]["report"] == {"rows": [1]}
    output = results["writes"]["output"]
    assert "'--device', 'cpu', '--quick', '--out'" in output and output.endswith("1\n")


def test_a_part_that_takes_too_long_is_stopped_and_what_it_wrote_is_kept(tmp_path, monkeypatch):
    waits = WRITES + "sys.stdout.flush(); import time; time.sleep(600)"
    results = run({"long": part(waits, 4.0), "after": part(WRITES)}, tmp_path, monkeypatch)
    assert results["long"]["status"].startswith("stopped after") and results["long"]["report"] == {"rows": [1]}
    assert results["after"]["status"] == "done"


def test_no_part_begins_without_time(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_all, "LEAST_SECONDS", 1)
    results = run({"a": part("import time; time.sleep(60)"), "b": part("")}, tmp_path, monkeypatch, "--seconds", "2")
    assert results["a"]["status"].startswith("stopped after")
    assert results["b"]["status"] == "not begun: 0 s were left"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--seconds", "0"], "must be positive, got 0"), (["--model", "nowhere"], "nowhere has no config.json")],
)
def test_bad_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit):
        gpu_all.main(arguments)
    assert message in capsys.readouterr().err


def test_every_part_is_a_command_that_exists(capsys):
    for name, command in gpu_all.PARTS.items():
        if command.reports:
            module = __import__(command.command[1], fromlist=["main"])
            with pytest.raises(SystemExit) as stopped:
                module.main([*command.command[2:], *([command.needs_model, "x"] if command.needs_model else []), "-h"])
            assert stopped.value.code == 0, name
    assert "--out" in capsys.readouterr().out


def test_layers_on_a_cpu(tmp_path):
    out = tmp_path / "layers.json"
    gpu_layers.main(["--quick", "--device", "cpu", "--rounds", "1", "--out", str(out)])
    report = json.loads(out.read_text())
    assert {(r["mixing"], r["budget"], r["passes"]) for r in report["operator"]} == {
        (mixing, K, passes) for mixing in ("dense", "diagonal") for K in (2, 4) for passes in (1, 3)
    }
    forward, both = report["blocks"]
    ours = {f"ES-SSM{kernels}, K={K}" for K in (2, 4) for kernels in ("", ", kernels")}
    assert set(forward["seconds"]) == ours | {"ES-SSM, fft, K=4"} and set(both["seconds"]) == ours
    assert set(forward["missing"]) == {"Mamba-2", "simple GLA"}


def test_the_floor_counts_operations_and_bytes():
    limits = {"product_flops_per_second": 1e12, "copy_bytes_per_second": 1e9}
    op = SpectralOperator(4096, chunk_size=64)
    B, L, D, K = 2, 128, 16, 4
    floor = gpu_layers.operator_floor(op, B, L, D, K, False, 1, limits)
    assert floor["flops"] == 2 * B * L * K * D * (64 + op.num_states(K) + D)
    assert floor["by_bytes"] == pytest.approx(2 * (2 * B * L * D + B * L * K + K * D * D) / 1e9)
    assert gpu_layers.operator_floor(op, B, L, D, K, False, 3, limits)["flops"] == 3 * floor["flops"]


@pytest.mark.parametrize(("setting", "value"), [(gpu_layers.plain, "0"), (gpu_layers.kernels, "1")])
def test_kernels_are_chosen_only_inside(setting, value, monkeypatch):
    monkeypatch.delenv("ESSM_TRITON", raising=False)
    read = setting(lambda: gpu_layers.os.environ.get("ESSM_TRITON"))
    assert read() == value and "ESSM_TRITON" not in gpu_layers.os.environ
    monkeypatch.setenv("ESSM_TRITON", "else")
    assert read() == value and gpu_layers.os.environ["ESSM_TRITON"] == "else"


def recurrence(x, dt, A, B, C, D, dt_bias):
    """SSD one step at a time: (b, L, h, p)."""
    dt, state, y = torch.nn.functional.softplus(dt + dt_bias), 0, []
    for t in range(x.shape[1]):
        state = state * (A * dt[:, t])[..., None, None].exp() + torch.einsum(
            "bhp,bn,bh->bhpn", x[:, t], B[:, t, 0], dt[:, t]
        )
        y.append(torch.einsum("bhpn,bn->bhp", state, C[:, t, 0]) + D[:, None] * x[:, t])
    return torch.stack(y, 1)


def test_the_mamba_2_block_is_that_of_the_library(monkeypatch):
    """Its kernel replaced by the recurrence: transformers' mixer gives the same from the same weights."""
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    def scan(x, dt, A, B, C, chunk, D, dt_bias, dt_softplus):
        assert dt_softplus and chunk == 256
        return recurrence(x, dt, A, B, C, D, dt_bias)

    monkeypatch.setattr(gpu_peers, "ssd_kernel", lambda: scan)
    torch.manual_seed(0)
    block = gpu_peers.Mamba2Block(32, state=16, head=16).double()
    sizes = {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "state_size": 16, "n_groups": 1, "expand": 2}
    theirs = Mamba2Mixer(Mamba2Config(**sizes, use_conv_bias=False, num_hidden_layers=1), 0).double()
    with torch.no_grad():
        theirs.in_proj.weight.copy_(block.in_proj.weight)
        theirs.out_proj.weight.copy_(block.out_proj.weight)
        theirs.conv1d.weight.copy_(block.convolution.T[:, None])
        theirs.dt_bias.copy_(block.dt_bias)
        theirs.A_log.copy_(block.log_decay)
        u = torch.randn(2, 40, 32, dtype=torch.float64)
        # The library's gated norm has the gate inside it; ours, as ES-SSM's block, outside.
        monkeypatch.setattr(
            theirs.norm, "forward", lambda y, gate: block.mixer_norm(y) * torch.nn.functional.silu(gate)
        )
        expected = theirs(block.norm(u))
        torch.testing.assert_close(block(u) - u, expected, rtol=1e-5, atol=1e-8)


def test_peers_have_the_parameters_of_a_gated_block(monkeypatch):
    monkeypatch.setattr(gpu_peers, "ssd_kernel", lambda: None)
    attention = types.ModuleType("fla.ops.simple_gla")
    attention.chunk_simple_gla = None
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "fla.ops.simple_gla", attention)
    args = argparse.Namespace(length=64)
    for D in (512, 1024, 2048):
        made, missing = gpu_layers.blocks(args, D, 8)
        counts = {name: sum(p.numel() for p in block.parameters()) for name, block in made.items()}
        assert not missing and len(counts) == 4
        assert max(counts.values()) < 1.15 * min(counts.values()), counts


@pytest.fixture
def texts(tmp_path):
    """Two Parquet files of text that is easy to learn."""
    for name in ("train", "held_out"):
        pq.write_table(pa.table({"text": ["the cat sat on the mat. " * 30] * 2}), tmp_path / f"{name}.parquet")
    return tmp_path


@pytest.fixture
def clock(monkeypatch):
    """Every look at the clock takes a tenth of a second, two looks an update."""
    ticks = itertools.count()
    monkeypatch.setattr(gpu_train, "time", types.SimpleNamespace(monotonic=lambda: next(ticks) / 10))
    monkeypatch.setattr(gpu_train, "WARMUP", 5)


def train(texts, *arguments):
    out = texts / "report.json"
    size = ["--batch", "2", "--length", "48", "--windows", "2", "--learning_rate", "0.01", "--output_dir", str(texts)]
    files = ["--train_file", str(texts / "train.parquet"), "--text_file", str(texts / "held_out.parquet")]
    report = gpu_train.main([*files, *size, "--device", "cpu", "--quick", "--out", str(out), *arguments])
    assert json.loads(out.read_text())["results"].keys() == report["results"].keys()
    return report["results"]


def scan(x, dt, A, B, C, chunk, D, dt_bias, dt_softplus):
    return recurrence(x, dt, A, B, C, D, dt_bias)


@pytest.mark.slow
def test_all_three_models_learn(texts, clock, monkeypatch):
    monkeypatch.setattr(gpu_peers, "ssd_kernel", lambda: scan)
    results = train(texts, "--seconds", "40", "--log_every", "1")
    assert set(results) == {"flagship", "Mamba-2", "Llama"}
    for name, result in results.items():
        assert max(result["bits_per_byte"].values()) < result["losses"][0][2] - 1, name
        assert len(result["losses"]) == result["updates"] and result["tokens"] == 96 * result["updates"]
    assert set(results["flagship"]["bits_per_byte"]) == {"2", "3", "4", "6", "8", "12", "16"}
    assert {budget for _, budget, _ in results["flagship"]["losses"]} <= {2, 3, 4, 6, 8, 12, 16}
    assert set(results["Llama"]["bits_per_byte"]) == {"None"}


def test_a_stopped_run_goes_on_and_a_missing_model_is_named(texts, clock):
    first = train(texts, "--seconds", "3", "--models", "Llama", "--log_every", "1")["Llama"]
    again = train(texts, "--seconds", "10", "--models", "Llama", "Mamba-2", "--log_every", "1")
    assert first["updates"] + 5 < again["Llama"]["updates"] == len(again["Llama"]["losses"])
    assert again["Llama"]["losses"][: first["updates"]] == first["losses"]
    assert again["Mamba-2"] == {"missing": "mamba_ssm is not installed"}


def test_the_rate_rises_and_falls_to_zero():
    assert gpu_train.rate(0, 0.0) == 1 / gpu_train.WARMUP
    assert gpu_train.rate(1000, 0.5) == 1.0 and gpu_train.rate(1000, 1.0) == 0.0
    assert gpu_train.rate(1000, 0.875) == pytest.approx(0.5)


def test_models_of_the_gpu_run_have_one_size(monkeypatch):
    monkeypatch.setattr(gpu_peers, "ssd_kernel", lambda: None)
    with torch.device("meta"):
        counts = {
            name: sum(p.numel() for p in gpu_train.make_model(name, False).parameters()) for name in gpu_train.SHARES
        }
    assert max(counts.values()) < 1.05 * min(counts.values()), counts


def test_train_bad_arguments(texts, capsys):
    for arguments, message in (
        (["--length", "9999"], "must be shorter than either text"),
        (["--text_file", "no"], "no file no"),
    ):
        with pytest.raises(SystemExit):
            train(texts, *arguments)
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_machine_without_datasets_runs_all_parts():
    """The GPU machine has torch and transformers, and none of what `[train]` brings."""
    code = "import sys; sys.modules['datasets'] = sys.modules['evaluate'] = None\n"
    code += "from benchmarks import " + ", ".join(
        sorted({part.command[1][11:] for part in gpu_all.PARTS.values() if part.reports})
    )
    ran = subprocess.run([sys.executable, "-c", code + ", gpu_train"], cwd=gpu_all.ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
