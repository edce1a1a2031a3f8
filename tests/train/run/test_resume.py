# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""A run goes on from its checkpoints with the same bits, whatever happened to it or to them."""

import json
import math
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from training_run import (
    NO_SIZES,
    command_line,
    final_state,
    flip,
    model_weights,
    read_log,
    same,
    train,
    train_apart,
)

from essm_train.arguments import parse_arguments
from essm_train.data.arguments import CLMArguments
from essm_train.files import delete, sha256_of
from essm_train.run.accelerator import open_run
from essm_train.run.checkpoints import list_checkpoints
from essm_train.run.steps import make_scheduler
from modeling_essm import ESSMConfig

KILLED = [-signal.SIGKILL]


EPOCH_AND_A_HALF = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
EPOCH_AND_A_HALF |= {"max_steps": 18, "save_steps": 4, "eval_steps": 5, "optimizer": "muon"}


@pytest.mark.parametrize("kind", ["map-style", pytest.param("streaming", marks=pytest.mark.slow)])
def test_a_run_killed_again_and_again_ends_with_the_same_bits(kind, arguments, tmp_path, capsys):
    """In mid-epoch, before and after a checkpoint is there, with the buffer and the rest of a row half used."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    train(arguments(whole / "run", kind, **EPOCH_AND_A_HALF))
    order = arguments(killed / "run", kind, **EPOCH_AND_A_HALF)
    of = lambda *updates: [f"checkpoint-{update:08d}" for update in updates]  # noqa: E731
    faults = {
        "checkpoint-00000008": of(4),
        "deleted-.*-checkpoint-00000004": of(4, 8, 12),
        "run/model": of(16, 18),
    }
    for name, left in faults.items():
        codes, log = train_apart(order, killed, ("kill_at_rename", name))
        assert codes == KILLED, log
        assert [path.name for path in list_checkpoints(killed / "run")] == left
        half_written = [path.name for path in (killed / "run").glob(".tmp-*")]
        assert bool(half_written) == ("deleted" not in name)
    train(order)
    assert "finished already" in capsys.readouterr().out
    assert same(killed / "run", whole / "run")
    assert not list((killed / "run").glob(".tmp-*"))
    for name in ("best", "model"):
        ours, theirs = (model_weights(folder / "run" / name) for folder in (killed, whole))
        assert all(torch.equal(ours[n], theirs[n]) for n in theirs)
    ours, theirs = (read_log(folder / "run") for folder in (killed, whole))
    for line in (*ours, *theirs):
        del line["tokens_per_second"]
    assert ours == theirs  # no update missing, none twice


def test_a_best_model_killed_while_it_is_replaced_comes_back(arguments, tmp_path):
    order = arguments(tmp_path / "run", eval_steps=2, load_best_model_at_end=True)
    train(order)
    expected = json.loads((tmp_path / "run" / "best" / "best.json").read_text())
    shutil.rmtree(tmp_path / "run")
    codes, log = train_apart(order, tmp_path, ("kill_at_rename", "replaced-.*-best"))
    assert codes == KILLED, log
    train(order)
    assert json.loads((tmp_path / "run" / "best" / "best.json").read_text()) == expected


def test_checkpoints_hold_everything_and_a_bounded_number_is_kept(finished):
    assert [path.name for path in list_checkpoints(finished)] == ["checkpoint-00000006", "checkpoint-00000008"]
    names = {path.name for path in list_checkpoints(finished)[-1].iterdir()}
    scheduler, rng = "custom_checkpoint_0.pkl", "random_states_0.pkl"
    files = {"pytorch_model.bin", "optimizer.bin", scheduler, rng, "average.pt", "data.pt", "run_state.json"}
    assert names == files | {"manifest.json"}
    manifest = json.loads((list_checkpoints(finished)[-1] / "manifest.json").read_text())
    assert manifest.keys() == files
    state = json.loads((list_checkpoints(finished)[-1] / "run_state.json").read_text())
    assert state["update"] == 8 and state["samples_seen"] == 16
    assert state["budget"]["schedule"] == "rows" and state["budget"]["trained"] == [1, 2, 3, 4, 6, 8]
    assert state["identity"]["learning_rate"] == 0.005 and state["identity"]["num_processes"] == 1
    data_state = torch.load(list_checkpoints(finished)[-1] / "data.pt", weights_only=False)
    assert data_state == {"position": 16}  # not that of the batch which is read ahead


def test_overwriting_starts_afresh(arguments, tmp_path):
    train(arguments(tmp_path, max_steps=3))
    for name in ("later-checkpoint-00000009", "damaged-checkpoint-00000009", "best/x"):
        (tmp_path / name).mkdir()
    train([*arguments(tmp_path, max_steps=2, seed=1, eval_steps=9), "--overwrite_output_dir"])
    assert [path.name for path in tmp_path.glob("*checkpoint-*")] == ["checkpoint-00000002"]
    assert [line["update"] for line in read_log(tmp_path)] == [1, 2] and not (tmp_path / "best/x").exists()


def test_what_another_run_has_left_is_not_trained_over(arguments, finished, tmp_path):
    """A run that has ended and whose checkpoints were deleted; with its own arguments or with others."""
    shutil.copytree(finished, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoint-*"))
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    for changes in ({}, {"seed": 1}):
        with pytest.raises(
            ValueError, match=r"run' holds model, training\.json(, best)?, which this run did not write: .*--ov"
        ):
            train(arguments(tmp_path / "run", **changes))
    assert {path: path.read_bytes() for path in before} == before
    for name in ("model", "training.json"):
        (tmp_path / "run" / name).rename(tmp_path / name)
    with pytest.raises(ValueError, match="run' holds best, which this run did not write"):
        train(arguments(tmp_path / "run", seed=1))


def test_the_weights_that_a_run_starts_from_are_not_replaced(arguments, finished, tmp_path):
    """Whether they are all there is, or the run that made them is to be overwritten."""
    start = tmp_path / "run" / "model"
    shutil.copytree(finished / "model", start)
    order = arguments(tmp_path / "run", **NO_SIZES, model_name_or_path=start)
    with pytest.raises(ValueError, match="run' holds model, which this run did not write"):
        train(order)
    (tmp_path / "link").symlink_to(start)
    for name in (start, tmp_path / "link"):
        with pytest.raises(ValueError, match=f"'{name}' is read, and '{start}' would be replaced"):
            train([*order, "--model_name_or_path", str(name), "--overwrite_output_dir"])
    assert same_files(start, finished / "model")


def same_files(a: Path, b: Path) -> bool:
    return {path.name: path.read_bytes() for path in a.glob("*.*")} == {
        path.name: path.read_bytes() for path in b.glob("*.*")
    }


def test_a_run_killed_before_its_first_checkpoint_begins_again(arguments, finished, tmp_path):
    """The best model so far is its own."""
    order = arguments(tmp_path / "run", save_steps=100)
    assert train_apart(order, tmp_path, ("kill_at_update", 5))[0] == KILLED
    assert (tmp_path / "run" / "best").exists() and not list_checkpoints(tmp_path / "run")
    train(order)
    assert same(tmp_path / "run", finished)


def test_resuming_with_other_arguments_is_refused_by_name(finished, arguments, tmp_path):
    before = final_state(finished)
    with pytest.raises(ValueError, match=r"ema_decay was 0.9 and is now 0.5, seed was 0 and is now 1; go back"):
        train(arguments(finished, seed=1, ema_decay=0.5))
    with pytest.raises(ValueError, match=r"streaming was False and is now True.*sha256 of the training text was"):
        train(arguments(finished, "streaming"))
    assert all(torch.equal(a, b) for a, b in zip(before, final_state(finished)))
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    train(
        arguments(tmp_path, save_steps=5, save_total_limit=1, logging_steps=3, load_best_model_at_end=True)
    )  # may change
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-00000008"]


def test_resuming_on_changed_data_is_refused(data, tmp_path):
    copies = {name: Path(shutil.copy(path, tmp_path)) for name, path in data["map-style"].items()}
    order = command_line(tmp_path / "run", **copies, max_steps=1)
    train(order)
    for name, said in (("validation_file", "validation blocks"), ("train_file", "training text")):
        text = copies[name].read_text()
        copies[name].write_text(text.replace("a", "b"))
        with pytest.raises(ValueError, match=f"sha256 of the {said} was"):
            train(order)
        copies[name].write_text(text)


def test_a_run_goes_back_to_the_checkpoint_that_is_asked_for(arguments, finished, tmp_path, capsys):
    """It ends with the same bits, killed on the way too; what came later is kept under another name."""
    shutil.copytree(finished, tmp_path / "run")
    first, last = list_checkpoints(tmp_path / "run")
    train(arguments(tmp_path / "run", resume_from_checkpoint=first))
    assert f"{last} is later; now later-{last.name}, and the run goes on from {first}" in capsys.readouterr().out
    assert same(tmp_path / "run", finished)
    ours, theirs = ([(line["update"], line["loss"]) for line in read_log(run)] for run in (tmp_path / "run", finished))
    assert ours == theirs
    order = arguments(tmp_path / "run")
    codes, log = train_apart([*order, "--resume_from_checkpoint", str(first)], tmp_path, ("kill_at_update", 7))
    assert codes == KILLED, log
    assert list_checkpoints(tmp_path / "run") == [first] and (tmp_path / "run" / f"later-{last.name}").is_dir()
    assert (tmp_path / "run" / f"later-{last.name}-1").is_dir()  # what was later the first time stays
    train(order)
    assert same(tmp_path / "run", finished)


def test_a_checkpoint_to_go_back_to_must_be_one_of_the_run(arguments, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    first, last = list_checkpoints(tmp_path / "run")
    for wrong in ("true", list_checkpoints(finished)[0], tmp_path / "run" / "model"):
        with pytest.raises(
            ValueError, match=f"must be a checkpoint of output_dir .{first}, {last}., got '{wrong}'; with"
        ):
            train(arguments(tmp_path / "run", resume_from_checkpoint=wrong))
    with pytest.raises(ValueError, match=r"must be a checkpoint of output_dir \(none yet\)"):
        train(arguments(tmp_path / "empty", resume_from_checkpoint=first))
    flip(first / "optimizer.bin")
    with pytest.raises(ValueError, match=r"checkpoint-00000006' is damaged: optimizer.bin is not what was written"):
        train(arguments(tmp_path / "run", resume_from_checkpoint=first))
    assert list_checkpoints(tmp_path / "run") == [first, last]


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("pytorch_model.bin", flip, "pytorch_model.bin is not what was written"),
        ("random_states_0.pkl", Path.unlink, "random_states_0.pkl is missing"),
        ("manifest.json", cut, "run_state.json or manifest.json cannot be read"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_damaged_checkpoint_gives_way_to_the_one_before_it(name, damage, said, arguments, finished, tmp_path, capsys):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    damage(tmp_path / "checkpoint-00000008" / name)
    train(arguments(tmp_path))
    out = capsys.readouterr().out
    assert re.search(rf"checkpoint-00000008 is damaged: {said}.*goes on from .*checkpoint-00000006", out), out
    assert same(tmp_path, finished)
    assert (tmp_path / "damaged-checkpoint-00000008").is_dir()
    for checkpoint in list_checkpoints(tmp_path):
        damage(checkpoint / name)
    with pytest.raises(ValueError, match=f"no checkpoint can be resumed from, .*{said}.*{said}"):
        train(arguments(tmp_path))


def test_random_states_that_cannot_be_put_back_are_refused(arguments, finished, tmp_path):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    delete(tmp_path / "checkpoint-00000008")
    path = tmp_path / "checkpoint-00000006" / "random_states_0.pkl"
    states = torch.load(path, weights_only=False)
    torch.save(states | {"random_state": "of another version"}, path)
    manifest = json.loads((path.parent / "manifest.json").read_text())
    manifest[path.name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    (path.parent / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"checkpoint-00000006: its random_states_0.pkl cannot be put back here"):
        train(arguments(tmp_path))


def test_a_changed_configuration_is_refused_by_name(arguments, tmp_path):
    config = ESSMConfig(hidden_size=16, num_hidden_layers=1, num_spectral_channels=8, filter_length=512)
    config.save_pretrained(tmp_path / "config")
    order = arguments(tmp_path / "run", **NO_SIZES, config_name=tmp_path / "config", max_steps=1)
    train(order)
    config.budget_presets = {"low": 2}  # may be set at any time
    config.save_pretrained(tmp_path / "config")
    train(order)
    config.hidden_act = "relu"
    config.save_pretrained(tmp_path / "config")
    with pytest.raises(ValueError, match="hidden_act of the model was 'gelu' and is now 'relu'"):
        train(order)
    with pytest.raises(ValueError, match="gating of the model was 'softmax' and is now 'none'"):
        train([*order, "--config_overrides", "gating=none,hidden_act=gelu"])


def test_damaged_lines_of_the_log_are_dropped(arguments, finished, tmp_path):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    good = (tmp_path / "log.jsonl").read_bytes().splitlines()
    bad = [b"\xff\xfe garbage", b"\0" * 9, b"[1, 2]", b'{"loss": 1.0}', b'{"update": "three"}', b""]
    (tmp_path / "log.jsonl").write_bytes(b"\n".join([*bad, *good, b'{"update": 8, "lo']))
    train(arguments(tmp_path))
    assert read_log(tmp_path) == read_log(finished)


def test_without_a_checkpoint_an_earlier_log_is_kept(arguments, tmp_path, capsys):
    (tmp_path / "log.jsonl").write_text('{"update": 1, "loss": 5.0}\n')
    train(arguments(tmp_path))
    assert (tmp_path / "earlier-log.jsonl").read_text() == '{"update": 1, "loss": 5.0}\n'
    assert "earlier-log.jsonl" in capsys.readouterr().out and read_log(tmp_path)[0]["update"] == 1


def test_a_second_run_in_the_folder_is_refused(arguments, tmp_path):
    """Until the first one ends."""
    args = parse_arguments(CLMArguments, arguments(tmp_path / "run"))
    with open_run(args), pytest.raises(ValueError, match=r"output_dir '.*run' is in use by another run"):
        train(arguments(tmp_path / "run"))
    assert not list_checkpoints(tmp_path / "run")
    train(arguments(tmp_path / "run"))


def test_a_finished_model_keeps_what_was_added_to_it(arguments, tmp_path, capsys):
    train(arguments(tmp_path))
    profile, sweep = tmp_path / "model" / "budget_profile.json", tmp_path / "budget_sweep.json"
    for path in (profile, sweep):
        path.write_text("{}")
    record = json.loads((tmp_path / "training.json").read_text())
    (tmp_path / "training.json").write_text(json.dumps(record | {"hardware": "of the training"}))
    train(arguments(tmp_path))
    assert json.loads((tmp_path / "training.json").read_text())["hardware"] == "of the training"
    assert "kept" in capsys.readouterr().out and profile.read_text() == sweep.read_text() == "{}"
    train(arguments(tmp_path, load_best_model_at_end=True))  # other weights, of which it says nothing
    assert f"{tmp_path / 'model'} as it was is now earlier-model\n" in capsys.readouterr().out
    assert not profile.exists() and not sweep.exists()  # a kill before the new sweep would leave it for the card
    profile.write_text("later")
    train([*arguments(tmp_path, max_steps=9, load_best_model_at_end=True), "--extend"])
    assert not profile.exists()
    earlier = [tmp_path / name / profile.name for name in ("earlier-model", "earlier-model-1")]
    assert [path.read_text() for path in earlier] == ["{}", "later"]


def test_a_finished_run_is_extended(arguments, finished, tmp_path, capsys):
    """Its learning rate rises and falls once more; killed and resumed, it ends with the same bits."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        shutil.copytree(finished, folder / "run")
    longer = {"max_steps": 14}
    with pytest.raises(ValueError, match=r"max_steps was 8 and is now 14 \(with --extend it may become larger\)"):
        train(arguments(whole / "run", **longer))
    with pytest.raises(ValueError, match=r"max_steps was 8 and is now 7 .*"):
        train([*arguments(whole / "run", max_steps=7), "--extend"])
    train([*arguments(whole / "run", **longer), "--extend"])
    assert "extended to 14 updates" in capsys.readouterr().out
    log = read_log(whole / "run")
    assert [line["update"] for line in log] == [*range(1, 15)]
    rates = [line["learning_rate"] for line in log]  # of the next update
    assert rates[:8] == [line["learning_rate"] for line in read_log(finished)]
    cosine = [5e-3 * 0.5 * (1 + math.cos(math.pi * n / 4)) for n in range(5)]
    assert rates[7:] == pytest.approx([0.0, 2.5e-3, *cosine], abs=1e-12)

    order = [*arguments(killed / "run", **longer), "--extend"]
    assert train_apart(order, killed, ("kill_at_update", 10))[0] == KILLED
    assert train_apart(order, killed, ("kill_at_update", 13))[0] == KILLED
    train(arguments(killed / "run", **longer))  # its checkpoint knows by now
    assert same(killed / "run", whole / "run")


def test_a_run_is_extended_before_its_end_and_by_epochs(arguments, finished, tmp_path):
    with pytest.raises(ValueError, match=r"extend needs a run to go on with, and output_dir .* holds no checkpoint"):
        train([*arguments(tmp_path), "--extend"])
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    delete(tmp_path / "checkpoint-00000008")
    train([*arguments(tmp_path, num_train_epochs=1), "--extend"])  # 12 updates
    rates = [line["learning_rate"] for line in read_log(tmp_path)]
    reached = rates[5]  # of update 7, where the old plan stood
    assert len(rates) == 12 and 0 < reached < 5e-3 and rates[6] == pytest.approx((reached + 5e-3) / 2)
    assert rates[7] == pytest.approx(5e-3) and rates[-1] == pytest.approx(0.0, abs=1e-12)


def test_a_decay_longer_than_what_is_left_is_refused():
    with pytest.raises(ValueError, match=r"decay_steps must be at most the 6 updates to come, got 3 \+ 4"):
        make_scheduler(
            torch.optim.SGD([torch.zeros(1)], lr=0.1), 3, [[0, 6]], "warmup_stable_decay", {"num_decay_steps": 4}
        )


def test_a_stable_run_extended_before_its_decay_has_the_weights_of_the_longer_run(arguments, tmp_path):
    stable = {"lr_scheduler_type": "warmup_stable_decay", "decay_steps": 2, "warmup_steps": 1, "save_steps": 4}
    train(arguments(tmp_path / "longer", max_steps=8, **stable))
    train(arguments(tmp_path / "extended", max_steps=6, **stable))
    earlier = str(tmp_path / "extended" / "checkpoint-00000004")  # before the decay
    longer = arguments(tmp_path / "extended", max_steps=8, **stable, resume_from_checkpoint=earlier)
    train([*longer, "--extend"])
    rates = [line["learning_rate"] for line in read_log(tmp_path / "extended")]
    assert rates == pytest.approx([5e-3] * 6 + [2.5e-3, 0.0], abs=1e-12)
    ours, theirs = (model_weights(tmp_path / run / "model") for run in ("extended", "longer"))
    assert all(torch.equal(ours[n], theirs[n]) for n in theirs)
