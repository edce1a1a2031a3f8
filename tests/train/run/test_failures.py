# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What goes wrong during a run stops it, says what it was, and leaves its last good checkpoint."""

import math
import os
import re

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from training_run import same, train, train_apart

from essm_train.arguments import RunArguments
from essm_train.run import accelerator as run_accelerator
from essm_train.run.accelerator import make_accelerator
from essm_train.run.checkpoints import list_checkpoints, publishing
from essm_train.run.weights import WeightAverage, non_finite
from modeling_essm import ESSMForCausalLM


@pytest.mark.parametrize("name", ["checkpoint-00000006", "best"])
def test_a_full_disk_keeps_the_last_good_checkpoint_and_the_run_goes_on_later(name, arguments, finished, tmp_path):
    codes, log = train_apart(arguments(tmp_path / "run"), tmp_path, ("full_disk_at", name))
    assert codes == [1]
    assert re.search(rf"OSError: cannot write .*{name}: .*Last good checkpoint: .*checkpoint-00000003", log), log
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["checkpoint-00000003"]
    assert not list((tmp_path / "run").glob(".tmp-*"))  # its space is free again
    train(arguments(tmp_path / "run"))
    assert same(tmp_path / "run", finished)


@pytest.mark.parametrize("broken", ["loss", "gradient"])
def test_training_stops_when_it_diverges(broken, arguments, tmp_path, monkeypatch):
    forward, calls = ESSMForCausalLM.forward, []

    def diverging(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        calls.extend([1] * self.training)
        if len(calls) == 5 and self.training:
            if broken == "loss":
                output.loss = output.loss * math.nan
            else:
                output.loss.register_hook(lambda gradient: gradient * math.inf)
        return output

    monkeypatch.setattr(ESSMForCausalLM, "forward", diverging)
    with pytest.raises(FloatingPointError, match=r"update 5: loss is .*Last good checkpoint: .*checkpoint-00000003"):
        train(arguments(tmp_path, budget_schedule="discrete"))
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-00000003"]
    assert not (tmp_path / "model").exists()


def test_infinity_that_is_meant_is_not_broken():
    """A mask, computed anew by every model; running statistics are saved with the weights."""
    accelerator, model = Accelerator(), nn.BatchNorm1d(3)
    model.register_buffer("mask", torch.full((3,), -math.inf), persistent=False)
    optimizer = torch.optim.AdamW(model.parameters())
    assert non_finite(accelerator, model, optimizer, []) == []
    model.running_var[1] = math.inf
    assert non_finite(accelerator, model, optimizer, [torch.tensor([math.nan])]) == [
        "the weights",
        "the averaged weights",
    ]


@pytest.mark.parametrize(
    ("part", "update"),
    [("weights", 6), ("averaged weights", 8), ("optimizer's state", 6)],
    ids=lambda value: str(value),
)
def test_what_an_update_breaks_is_not_saved(part, update, arguments, tmp_path, monkeypatch):
    """Its loss and gradient were finite: only what it leaves behind is not."""
    step, average, made = torch.optim.AdamW.step, WeightAverage.update, []

    def broken_step(self, *args, **kwargs):
        result = step(self, *args, **kwargs)
        made.append(1)
        if len(made) == update and part != "averaged weights":
            parameter = self.param_groups[0]["params"][-1]
            broken = parameter if part == "weights" else self.state[parameter]["exp_avg_sq"]
            broken.data.view(-1)[0] = math.inf
        return result

    def broken_average(self):
        average(self)
        if self.updates == update and part == "averaged weights":
            self.average[-1].view(-1)[0] = math.nan

    monkeypatch.setattr(torch.optim.AdamW, "step", broken_step)
    monkeypatch.setattr(WeightAverage, "update", broken_average)
    last = {6: 3, 8: 6}[update]
    with pytest.raises(
        FloatingPointError, match=f"update {update}: .*the {part}.* hold NaN .*checkpoint: .*checkpoint-0000000{last}"
    ):
        train(arguments(tmp_path, eval_steps=update))
    assert list_checkpoints(tmp_path)[-1].name == f"checkpoint-0000000{last}"
    assert not (tmp_path / "model").exists() and not (tmp_path / "best").exists()


def test_a_fault_of_the_program_is_no_full_disk(tmp_path):
    with pytest.raises(RuntimeError, match="size mismatch"), publishing(Accelerator(), tmp_path / "checkpoint"):
        raise RuntimeError("size mismatch")
    assert not os.listdir(tmp_path)


def test_processes_of_one_machine_share_its_threads(tmp_path, monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(run_accelerator, "cpu_cores", lambda: 6)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # of however many in all
    try:
        make_accelerator(RunArguments(output_dir=str(tmp_path)))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_an_output_dir_that_is_not_shared_is_refused(tmp_path, monkeypatch):
    args = RunArguments(output_dir=str(tmp_path), cpu_threads=1)
    make_accelerator(args)
    assert not list(tmp_path.glob(".seen-*"))
    monkeypatch.setattr(run_accelerator.Path, "touch", lambda path: None)  # as on a disk that this process does not see
    monkeypatch.setattr(run_accelerator.Path, "unlink", lambda path: None)
    with pytest.raises(ValueError, match="is one folder for 0 of 1 processes"):
        make_accelerator(args)
