# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""essm_train/run/loop.py on two CPU ranks, under DDP and FSDP2: the same as one rank, and resumed exactly."""

import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from helpers import ROOT
from training_run import FSDP2, command_line, flip, model_weights, read_log, same, train, train_apart

from essm_train.run.checkpoints import list_checkpoints
from modeling_essm import ESSMForCausalLM

# Two ranks add up gradients in another order. Adam divides by a gradient's size, so a weight's share of that error is
# eps over how small its gradient is; of the 2^14 weights here the smallest is 2^-14 of the typical one. Five updates
# move a weight by at most the sum of their rates, 0.013: 0.013 * 2^14 * eps = 2.5e-5. A lost sample moves it by 1e-2.
# Muon multiplies that error of a matrix, as a share of it, by at most 3.45^5: less.
SUMMATION = 2.5e-5


# Runs that must not depend on the number of ranks: five updates of four samples, no dropout. Muon has AdamW inside.
EQUAL = {"optimizer": "muon", "dropout": 0.0, "max_steps": 5, "save_steps": 2, "eval_steps": 2}
EQUAL |= {"validation_blocks": 3, "sweep_blocks": 3}


@pytest.fixture(scope="module")
def equal(data) -> dict:
    return data["map-style"] | EQUAL


@pytest.fixture(scope="module")
def runs(tmp_path_factory, equal) -> dict[str, Path]:
    """The same run on one rank, on two under DDP, and on two under FSDP2."""
    folders = {}
    for name, batch, ranks, environment in (("one", 4, 1, {}), ("ddp", 2, 2, {}), ("fsdp2", 2, 2, FSDP2)):
        folder = folders[name] = tmp_path_factory.mktemp(name)
        order = command_line(folder / "run", **equal, per_device_train_batch_size=batch)
        codes, log = train_apart(order, folder, ranks=ranks, environment=environment)
        assert codes == [0] * ranks, log
    return folders


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_two_ranks_equal_one_at_the_same_global_batch(name, runs):
    """Averaged weights, loss, gradient norm and validation of all ranks."""
    ours, theirs = (model_weights(runs[kind] / "run" / "model") for kind in (name, "one"))
    assert ours.keys() == theirs.keys()
    for tensor in ours:
        torch.testing.assert_close(ours[tensor], theirs[tensor], atol=SUMMATION, rtol=0.0)
    for ours, theirs in zip(read_log(runs[name] / "run"), read_log(runs["one"] / "run"), strict=True):
        del ours["tokens_per_second"], theirs["tokens_per_second"]
        assert ours == pytest.approx(theirs, abs=5e-5)  # of size 6: 8 rounding steps in each of 10 sums


def test_fsdp2_leaves_a_model_that_loads(runs):
    for name in ("model", "best"):
        model = ESSMForCausalLM.from_pretrained(runs["fsdp2"] / "run" / name)
        assert type(model) is ESSMForCausalLM and model.lm_head.weight is model.get_input_embeddings().weight
        assert model(torch.arange(20)[None], spectral_budget=2).logits.isfinite().all()
    shards = {path.name for path in list_checkpoints(runs["fsdp2"] / "run")[-1].rglob("*.distcp")}
    assert len(shards) >= 2  # each rank wrote its own


@pytest.mark.slow
def test_three_ranks_share_eight_channels(tmp_path, equal):
    """A shard of FSDP2 is no whole number of them, which Muon moves one by one."""
    weights = []
    for ranks, batch, environment in ((3, 1, FSDP2), (1, 3, {})):
        (folder := tmp_path / str(ranks)).mkdir()
        order = command_line(
            folder / "run", **equal | {"max_steps": 2, "warmup_steps": 1}, per_device_train_batch_size=batch
        )
        codes, log = train_apart(order, folder, ranks=ranks, environment=environment)
        assert codes == [0] * ranks, log
        weights.append(model_weights(folder / "run" / "model"))
    for name, theirs in weights[1].items():
        torch.testing.assert_close(weights[0][name], theirs, atol=SUMMATION, rtol=0.0)


@pytest.mark.slow
def test_fsdp2_in_bf16_computes_what_ddp_does(tmp_path, equal):
    """Autocast, and losses in fp32: without it, or with Accelerate's own policy, they are up to 1e-3 off."""
    logs = []
    for name, environment in (("ddp", {}), ("fsdp2", FSDP2)):
        (tmp_path / name).mkdir()
        changes = {"max_steps": 3, "warmup_steps": 1, "per_device_train_batch_size": 2, "block": "paper"}
        order = command_line(tmp_path / name / "run", **equal | changes)
        bf16 = environment | {"ACCELERATE_MIXED_PRECISION": "bf16"}
        codes, log = train_apart(order, tmp_path / name, ranks=2, environment=bf16)
        assert codes == [0, 0], log
        logs.append(read_log(tmp_path / name / "run"))
    assert len(logs[0]) == 3
    for ours, theirs in zip(*logs, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=5e-6)


@pytest.mark.parametrize(
    ("kind", "environment"),
    [
        pytest.param("map-style", {}, id="map-style-ddp"),
        pytest.param("streaming", FSDP2, id="streaming-fsdp2", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_that_are_killed_resume_bit_for_bit(kind, environment, data, tmp_path):
    """Every rank has its own dropout, so the random state of each must come back."""
    changes = {**data[kind], "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 8}

    def run(folder: Path, fault: tuple | None = None) -> tuple[list[int | None], str]:
        folder.mkdir(exist_ok=True)
        return train_apart(command_line(folder / "run", **changes), folder, fault, ranks=2, environment=environment)

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    codes, log = run(whole)
    assert codes == [0, 0], log
    codes, _ = run(killed, ("kill_at_rename", "checkpoint-00000006"))
    assert codes[0] == -signal.SIGKILL and codes[1] != 0  # the main process dies, and the other cannot go on alone
    assert [path.name for path in list_checkpoints(killed / "run")] == ["checkpoint-00000003"]
    codes, log = run(killed)
    assert codes == [0, 0] and "checkpoint-00000003 holds update 3" in log, log
    assert same(killed / "run", whole / "run")
    random_states = [list_checkpoints(killed / "run")[-1] / f"random_states_{rank}.pkl" for rank in range(2)]
    first, second = (torch.load(path, weights_only=False)["torch_manual_seed"] for path in random_states)
    assert not torch.equal(first, second)


def test_another_number_of_ranks_is_refused_with_the_reason(runs, equal):
    reason = r"per_device_train_batch_size was 2 and is now 4, num_processes was 2 and is now 1 \(the random states of"
    with pytest.raises(ValueError, match=reason):
        train(command_line(runs["ddp"] / "run", per_device_train_batch_size=4, **equal))


def test_a_damaged_shard_gives_way_to_the_checkpoint_before_it(runs, equal, tmp_path):
    shutil.copytree(runs["fsdp2"] / "run", tmp_path / "run")
    shard = sorted((tmp_path / "run" / "checkpoint-00000005").rglob("__1_*.distcp"))[-1]
    flip(shard)
    codes, log = train_apart(command_line(tmp_path / "run", **equal), tmp_path, ranks=2, environment=FSDP2)
    assert codes == [0, 0] and log.count(f"{shard.name} is not what was written") == 1, log
    assert "goes on from" in log and (tmp_path / "run" / "damaged-checkpoint-00000005").is_dir()
    assert same(tmp_path / "run", runs["fsdp2"] / "run")


def test_a_weight_broken_on_one_rank_stops_all_before_anything_is_saved(data, tmp_path):
    order = command_line(tmp_path / "run", **data["map-style"])
    codes, log = train_apart(order, tmp_path, ("break_weight_at_update", 6, 1), ranks=2, environment=FSDP2)
    assert codes == [1, 1], log
    assert log.count("FloatingPointError: update 6: the weights") == 2, log
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["checkpoint-00000003"]
    assert not list((tmp_path / "run").glob(".tmp-*"))


def test_a_lost_rank_is_no_full_disk(data, tmp_path):
    """It dies while the ranks write a checkpoint."""
    order = command_line(tmp_path / "run", **data["map-style"])
    fault = ("kill_in_file", "random_states_1.pkl")
    codes, log = train_apart(order, tmp_path, fault, ranks=2, environment=FSDP2)
    assert codes == [1, -signal.SIGKILL], log
    assert "ConnectionError: lost another process of this run, " in log and "Last good checkpoint: none" in log, log
    assert "Make room" not in log and not list_checkpoints(tmp_path / "run")


@pytest.mark.slow
def test_several_ranks_say_once_why_they_refuse_and_then_train(data, tmp_path):
    """As a user starts them, with the script for two ranks: while another run has the folder, and after it."""
    (tmp_path / "run").mkdir()
    command = [str(ROOT / "train/launch/two_cpu_ranks.sh"), "-m", "essm_train.train_clm"]
    command += command_line(tmp_path / "run", **data["map-style"])
    with FileLock(tmp_path / "run" / ".lock"):
        run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr.count("error: output_dir ") == 1 and "in use by another run" in run.stderr, run.stderr
    assert 'language.py", line' not in run.stderr  # no traceback of the script's own
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0 and (tmp_path / "run" / "budget_sweep.json").exists(), run.stderr
