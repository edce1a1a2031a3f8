# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""training.py and callback.py: when, what an optimizer is told, resuming, ranks, Trainer."""

import copy

import pytest
import torch
from helpers import random_model, trainer_arguments
from parallel_run import on_ranks
from recurrences import batch_of, error_on_two_ranks, on_two_ranks, regression, training_data
from transformers import Trainer

from modeling_essm import ESSMForSequenceClassification
from modeling_essm.companions.truncation.callback import BalancedTruncationCallback
from modeling_essm.companions.truncation.training import InTrainingTruncation, attempt_steps, truncatable
from modeling_essm.companions.wrappers import unwrap

REWRITTEN = ("nu_log", "theta_log", "gamma_log", "B", "C")
SIZES = [10, 8]


def make_model():
    return regression(*SIZES)


def make_optimizer(model, lr=1e-2, weight_decay=0.1):
    """Two groups, poles without decay and at half the rate."""
    poles = [p for name, p in model.named_parameters() if name.endswith(("_log", ".B"))]
    others = [p for p in model.parameters() if not any(p is pole for pole in poles)]
    groups = [{"params": poles, "lr": lr / 2, "weight_decay": 0.0}, {"params": others, "weight_decay": weight_decay}]
    return torch.optim.AdamW(groups, lr=lr)


def update(model, optimizer, step):
    """One on the rows of that step, so that a run is a function of its steps."""
    optimizer.zero_grad()
    model(**batch_of(training_data(8, seed=step))).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


# --- When -------------------------------------------------------------------------------------------------------------


def test_attempts_are_equidistant():
    for attempts, until, steps in [
        (4, "warmup", (25, 50, 75, 100)),
        (4, 200, (50, 100, 150, 200)),
        (3, 0.5, (167, 333, 500)),
        (4, 1.0, (250, 500, 750, 1000)),
        (1, 1, (1,)),
        (3, 3, (1, 2, 3)),
    ]:
        assert attempt_steps(attempts, until, max_steps=1000, warmup_steps=100) == steps


def test_schedules_that_do_not_fit():
    for attempts, until, message in [
        (0, 5, "attempts must be at least 1, got 0"),
        (4, "epoch", "until must be 'warmup', a step or a share .* got 'epoch'"),
        (1, True, "until must be .warmup., a step or a share .* got True"),
        (4, "warmup", r"warm-up's steps \(until='warmup'\) must be in \[4, 1000\] for 4 attempts, got 3"),
        (4, 1001, r"until=1001 must be in \[4, 1000\] for 4 attempts, got 1001"),
        (4, 1.5, r"share of all steps in \(0, 1\], got 1.5"),
    ]:
        with pytest.raises(ValueError, match=message):
            attempt_steps(attempts, until, max_steps=1000, warmup_steps=3)


# --- The optimizer ----------------------------------------------------------------------------------------------------


def test_everything_else_stays():
    model = make_model()
    optimizer = make_optimizer(model)
    for step in range(1, 4):
        update(model, optimizer, step)
    kept = {name: p for name, p in model.named_parameters() if name.rpartition(".")[2] not in REWRITTEN}
    state = {name: copy.deepcopy(optimizer.state[p]) for name, p in kept.items()}
    old = {id(p) for p in model.parameters()} - {id(p) for p in kept.values()}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    balanced = InTrainingTruncation((3,), tau=0.1).after_step(model, optimizer, 3)
    assert len(balanced.replaced) == 10
    fresh = make_optimizer(model)  # the order in which a resumed run has them
    for group, other, before in zip(optimizer.param_groups, fresh.param_groups, groups):
        assert [id(p) for p in group["params"]] == [id(p) for p in other["params"]]
        assert {key: value for key, value in group.items() if key != "params"} == before
    assert not old & {id(p) for p in optimizer.state}
    assert len(optimizer.state) == len(kept)
    for name, p in kept.items():
        for key, value in state[name].items():
            assert torch.equal(optimizer.state[p][key], value)


# --- Resuming, compiling, ranks ---------------------------------------------------------------------------------------


def test_a_compiled_model_compiles_anew():
    """Also where torch.compile allows no further graph: it would go on uncompiled behind its limit."""
    torch._dynamo.reset()
    model = regression(8)
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(model, backend=count)
    x = batch_of(training_data(2, length=2))["input_features"]
    optimizer = make_optimizer(model)
    with torch._dynamo.config.patch(recompile_limit=1), torch.no_grad():
        compiled(input_features=x)
        seen = len(graphs)
        InTrainingTruncation((1,), tau=0.5, min_reduction=0.0).after_step(compiled, optimizer, 1)
        assert model.config.state_sizes != [8]
        torch.testing.assert_close(compiled(input_features=x).logits, model.forward(input_features=x).logits)
        assert len(graphs) > seen > 0
    assert unwrap(compiled) is model


def test_two_ranks_choose_the_same():
    """Gradients of the new tensors are exchanged too, or weights would part: the last update is behind a truncation.
    Against one process with both ranks' rows, AdamW's quotients of small gradients differ by rounding of the sums."""
    (sizes, history, weights, settings), other = on_ranks(2, on_two_ranks)
    assert other[0] == sizes != [8, 6]
    assert [entry["after"] for entry in other[1]] == [entry["after"] for entry in history]
    assert settings == (True, True, True)
    for name, tensor in weights.items():
        assert torch.equal(tensor, other[2][name]), name

    model, batch = regression(8, 6), batch_of(training_data(8))
    optimizer, truncation = torch.optim.AdamW(model.parameters(), 1e-2), InTrainingTruncation((2, 3), tau=0.1)
    for step in range(1, 5):
        model(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        truncation.after_step(model, optimizer, step)
    assert model.config.state_sizes == sizes
    alone = model(**batch).logits
    model.load_state_dict(weights)
    torch.testing.assert_close(model(**batch).logits, alone, rtol=0, atol=1e-3)


def test_an_error_of_the_first_rank_is_everybodys():
    said = on_ranks(2, error_on_two_ranks)
    assert len(said) == 2 and all("must be in [0, 1), got 2.0" in each for each in said)


# --- transformers' Trainer --------------------------------------------------------------------------------------------


def make_trainer(folder, model, callbacks, cls=Trainer, **fields):
    defaults = {"max_steps": 8, "warmup_steps": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    defaults |= {"learning_rate": 1e-2, "max_grad_norm": 0.0, "logging_steps": 1}
    arguments = trainer_arguments(folder, **defaults | fields)
    data = training_data()
    return cls(model, arguments, train_dataset=data, eval_dataset=data[:4], callbacks=callbacks)


def test_a_trainer_shrinks_its_model(tmp_path):
    """After updates 2 and 4, whatever is evaluated when; the learning rate does not notice."""
    lines, model = [], make_model()
    callback = BalancedTruncationCallback(tau=0.1, attempts=2, say=lines.append)
    trainer = make_trainer(tmp_path, model, [callback], eval_strategy="steps", eval_steps=3)
    trainer.train()
    assert [entry["step"] for entry in callback.history] == [2, 4]
    assert callback.history[-1]["after"] == model.config.state_sizes
    assert all(a < b for a, b in zip(model.config.state_sizes, SIZES))
    assert [entry["truncation"] for entry in trainer.state.log_history if "truncation" in entry] == callback.history
    assert len(lines) == 2
    assert lines[0].startswith("update 2: truncated from 10, 8 to ")
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    plain = make_trainer(tmp_path, make_model(), [])
    plain.train()
    assert rates == [entry["learning_rate"] for entry in plain.state.log_history if "learning_rate" in entry]


def test_a_trainer_resumes_behind_a_truncation(tmp_path):
    """With the model of the checkpoint, and the checkpoint's history; the same bits as without the interruption."""

    def callback():
        return BalancedTruncationCallback(tau=0.1, attempts=2, until=6, say=lambda line: None)

    whole, first = make_model(), callback()
    make_trainer(tmp_path / "run", whole, [first], save_strategy="steps", save_steps=1).train()
    for step in (3, 5):
        checkpoint = tmp_path / "run" / f"checkpoint-{step}"
        model, again = type(whole).from_pretrained(checkpoint), callback()
        assert model.config.state_sizes == first.history[0]["after"]
        make_trainer(tmp_path / "again", model, [again]).train(resume_from_checkpoint=str(checkpoint))
        assert [entry["after"] for entry in again.history] == [entry["after"] for entry in first.history]
        assert again.history[0] == first.history[0]
        for name, tensor in whole.state_dict().items():
            assert torch.equal(model.state_dict()[name], tensor), name


def test_the_best_model_is_one_of_the_last_shape(tmp_path):
    """More modes are better here, and yet the best is one of the models since the last truncation, after update 4."""

    class CountsModes(Trainer):
        def evaluate(self, *args, **kwargs):
            return super().evaluate(*args, **kwargs) | {"eval_modes": len(self.model.mixers[0].nu_log)}

    model = make_model()
    callback = BalancedTruncationCallback(tau=0.3, attempts=2, say=lambda line: None)
    trainer = make_trainer(
        tmp_path, model, [callback], CountsModes, load_best_model_at_end=True, metric_for_best_model="modes",
        eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
    )  # fmt: skip
    trainer.train()
    assert int(trainer.state.best_model_checkpoint.rpartition("-")[2]) == 4
    assert trainer.model.config.state_sizes == callback.history[-1]["after"]
    assert len(trainer.model.mixers[0].nu_log) == callback.history[-1]["after"][0]


def test_trainers_that_cannot_truncate(tmp_path):
    with pytest.raises(ValueError, match=r"warm-up's steps .* must be in \[4, 8\] for 4 attempts, got 0"):
        make_trainer(tmp_path, make_model(), [BalancedTruncationCallback()], warmup_steps=0).train()
    model = random_model(ESSMForSequenceClassification)
    with pytest.raises(ValueError, match=r"needs layers with lti\(\) and set_lti\(\), ESSMForSequence\w+ has none"):
        make_trainer(tmp_path, model, [BalancedTruncationCallback()]).train()
    model = make_model()
    model.mixers[0].B.placements = ("Shard(0)",)
    with pytest.raises(ValueError, match="needs whole layers"):
        truncatable(model)
    trainer = make_trainer(tmp_path, make_model(), [BalancedTruncationCallback()])
    trainer.args.deepspeed = "anything"
    with pytest.raises(ValueError, match="FSDP or DeepSpeed"):
        trainer.callback_handler.on_train_begin(trainer.args, trainer.state, trainer.control)


def test_bad_arguments():
    for options in ({"tau": 0.0}, {"tau": 1.0}, {"min_reduction": 1.0}):
        with pytest.raises(ValueError, match=r"must be in [(\[]0, 1\), got "):
            BalancedTruncationCallback(**options)
