# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Budget dropout: which budgets each update trains, what their loss is, and how it gets into the Trainers."""

import copy
import json
import math
import random
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import random_ids, random_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from modeling_essm import ESSMForCausalLM, ESSMForSequenceClassification
from modeling_essm.training.budget_dropout import (
    BUDGETS,
    SCHEDULES,
    BudgetDropoutCallback,
    SandwichRule,
    budget_losses,
    budget_schedule,
    clip_budgets,
)

# ---------------------------------------------------------------------------------------------------------------------
# Schedules.


def assert_drawn_as(counts: Counter, probabilities: dict[int, float]) -> None:
    """Pearson's chi-square is below its mean plus five standard deviations."""
    assert set(counts) == set(probabilities)
    draws = sum(counts.values())
    chi_square = sum((counts[K] - draws * p) ** 2 / (draws * p) for K, p in probabilities.items())
    freedom = len(probabilities) - 1
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5


def test_budgets_are_clipped_to_the_capacity():
    assert clip_budgets(BUDGETS, 32) == BUDGETS
    assert clip_budgets(BUDGETS, 20) == (2, 3, 4, 6, 8, 12, 16, 20)
    assert clip_budgets(BUDGETS, 1) == (1,)


@pytest.mark.parametrize("capacity", [1, 2, 3, 10, 32])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_train_the_budgets_they_name(name, capacity):
    schedule = budget_schedule(name, capacity, seed=0)
    expected = {"uniform": tuple(range(1, capacity + 1)), "full": (capacity,)}
    assert schedule.budgets == expected.get(name, clip_budgets(BUDGETS, capacity))
    drawn = [schedule(update) for update in range(500)]
    assert {K for budgets in drawn for K in budgets} == set(schedule.budgets)
    assert all(budgets == tuple(sorted(set(budgets), reverse=True)) for budgets in drawn)
    assert name == "sandwich" or all(len(budgets) == 1 for budgets in drawn)


@pytest.mark.parametrize("name", ["discrete", "uniform"])
def test_every_budget_is_equally_likely(name):
    schedule = budget_schedule(name, 32, seed=3)
    counts = Counter(schedule(update)[0] for update in range(10000))
    assert_drawn_as(counts, dict.fromkeys(schedule.budgets, 1 / len(schedule.budgets)))


def test_authors_recipe():
    schedule = budget_schedule("authors", 32, seed=5, full_budget_updates=100)
    assert {schedule(update) for update in range(100)} == {(32,)}
    assert {schedule(update) for update in range(104, 10000, 8)} == {(32,)}
    # K = 2 * 16^v is snapped where K crosses the midpoint of two budgets, and P(v <= x) = 1 - (1 - x)^0.6.
    middles = [math.log((a + b) / 4, 16) for a, b in pairwise(BUDGETS)]
    below = [0.0, *(1 - (1 - x) ** 0.6 for x in middles), 1.0]
    probabilities = {K: b - a for K, (a, b) in zip(BUDGETS, pairwise(below), strict=True)}
    counts = Counter(schedule(update)[0] for update in range(100, 10100) if update % 8)
    assert_drawn_as(counts, probabilities)
    evenly = [math.log(b / a, 16) for a, b in pairwise([2, *((a + b) / 2 for a, b in pairwise(BUDGETS)), 32])]
    assert counts[32] > 1.2 * evenly[-1] * counts.total()  # biased to large, against log-uniform draws
    assert counts[2] < 0.8 * evenly[0] * counts.total()


def test_sandwich_rule():
    for num_random, length in ((0, 2), (1, 3), (2, 4), (7, 9), (100, 9)):
        schedule = budget_schedule("sandwich", 32, seed=1, sandwich_random=num_random)
        drawn = [schedule(update) for update in range(100)]
        assert all(len(K) == len(set(K)) == length and K[0] == 32 and K[-1] == 2 for K in drawn)
    schedule = budget_schedule("sandwich", 32, seed=1)
    between = BUDGETS[1:-1]
    counts = Counter(K for update in range(10000) for K in schedule(update)[1:-1])
    # Drawn without replacement, so that counts vary less than assumed: the bound is on the safe side.
    assert_drawn_as(counts, dict.fromkeys(between, 1 / len(between)))
    pairs = Counter(schedule(update)[1:-1] for update in range(10000))
    assert_drawn_as(pairs, {(a, b): 1 / 21 for a in between for b in between if a > b})


@pytest.mark.parametrize("name", SCHEDULES)
def test_first_updates_can_train_the_full_budget(name):
    warm, plain = (budget_schedule(name, 32, seed=2, full_budget_updates=n) for n in (20, 0))
    assert [warm(update) for update in range(20)] == [(32,)] * 20
    assert [warm(update) for update in range(20, 60)] == [plain(update) for update in range(20, 60)]
    assert warm.budgets == plain.budgets


# The format: checkpoints made on any machine, by any process, resume with these budgets.
GOLDEN = {
    "discrete": [(2,), (2,), (3,), (12,), (4,), (4,), (4,), (24,), (12,), (32,), (2,), (32,)],
    "uniform": [(22,), (14,), (6,), (32,), (16,), (14,), (31,), (5,), (26,), (27,), (16,), (6,)],
    "authors": [(32,), (24,), (2,), (24,), (24,), (6,), (32,), (8,), (32,), (6,), (24,), (8,)],
    "sandwich": [(32, 16, 3, 2), (32, 16, 4, 2), (32, 16, 12, 2), (32, 16, 3, 2), (32, 16, 8, 2), (32, 8, 6, 2)],
    "full": [(32,)] * 4,
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_budgets_depend_on_seed_and_update_only(name):
    schedule = budget_schedule(name, 32, seed=0)
    first = GOLDEN[name]
    assert [schedule(update) for update in range(len(first))] == first
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(123)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    assert [schedule(update) for update in reversed(range(len(first)))] == first[::-1]  # out of order, other seeds
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()
    other = budget_schedule(name, 32, seed=1)
    assert name == "full" or [other(update) for update in range(50)] != [schedule(update) for update in range(50)]


def test_bad_schedules_are_refused():
    with pytest.raises(ValueError, match=r"budget_schedule must be one of .*'discrete'.*, got 'cosine'"):
        budget_schedule("cosine", 32, seed=0)
    with pytest.raises(ValueError, match=r"capacity must be at least 1, got 0"):
        budget_schedule("uniform", 0, seed=0)
    with pytest.raises(ValueError, match=r"full_budget_updates must be at least 0, got -1"):
        budget_schedule("authors", 32, seed=0, full_budget_updates=-1)
    with pytest.raises(ValueError, match=r"sandwich_random must be at least 0, got -2"):
        budget_schedule("sandwich", 32, seed=0, sandwich_random=-2)


# ---------------------------------------------------------------------------------------------------------------------
# Losses.


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def losses_by_hand(model, inputs, budgets, weight, num_items=None) -> list[torch.Tensor]:
    """The losses of an update, position by position, for a language model whose inputs hold labels (B, L)."""
    losses, teacher = [], None
    scored = [(b, t) for b, t in np.ndindex(*inputs["labels"].shape) if t and inputs["labels"][b, t] != -100]
    count = len(scored) if num_items is None else num_items
    for K in budgets:
        logits = model(inputs["input_ids"], spectral_budget=K).logits.double()
        logp = logits.log_softmax(-1)
        cross_entropy = -sum(logp[b, t - 1, inputs["labels"][b, t]] for b, t in scored) / count
        if teacher is None:
            teacher, loss = logp.detach(), cross_entropy
        else:
            kl = sum((teacher[b, t - 1].exp() * (teacher[b, t - 1] - logp[b, t - 1])).sum() for b, t in scored) / count
            loss = (1 - weight) * cross_entropy + weight * kl
        losses.append(loss / len(budgets))
    return losses


@pytest.mark.parametrize("num_items", [None, 40], ids=["mean", "num_items_in_batch"])
@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_losses_of_a_language_model(weight, num_items):
    model, budgets = random_model().train(), (32, 6, 2)
    ids = random_ids(2, 12)
    labels = ids.clone()
    labels[0, :5] = labels[1, -3:] = -100
    inputs = {"input_ids": ids, "labels": labels}
    kwargs = {} if num_items is None else {"num_items_in_batch": num_items}
    by_hand = losses_by_hand(model, inputs, budgets, weight, num_items)
    sum(by_hand).backward()
    expected = gradients(model)
    model.zero_grad()

    def forward(K):
        return model(**inputs, **kwargs, spectral_budget=K)

    values = []
    for loss in budget_losses(forward, budgets, labels=labels, distillation_weight=weight, **kwargs):
        loss.backward()  # one graph at a time
        values.append(loss.detach())
    # fp32 against fp64 sums of some 30 numbers of size 5
    torch.testing.assert_close(torch.stack(values).double(), torch.stack(by_hand).detach(), rtol=1e-5, atol=1e-6)
    one_by_one = gradients(model)
    for name, gradient in expected.items():
        torch.testing.assert_close(one_by_one[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    model.zero_grad()
    sum(budget_losses(forward, budgets, labels=labels, distillation_weight=weight, **kwargs)).backward()
    for name, gradient in gradients(model).items():  # another order of sums
        torch.testing.assert_close(gradient, one_by_one[name], rtol=1e-4, atol=1e-6, msg=name)


def test_losses_of_a_classifier():
    model, budgets = random_model(ESSMForSequenceClassification, num_labels=5), (32, 4)
    ids, labels = random_ids(3, 8), torch.tensor([0, 4, 2])
    full, small = (model(ids, labels=labels, spectral_budget=K) for K in budgets)
    kl = F.kl_div(small.logits.log_softmax(-1), full.logits.softmax(-1), reduction="batchmean")
    assert kl > 1e-4
    for given in (labels, None):
        losses = budget_losses(
            lambda K: model(ids, labels=labels, spectral_budget=K), budgets, labels=given, distillation_weight=0.25
        )
        expected = torch.stack([full.loss / 2, (0.75 * small.loss + 0.25 * kl) / 2])
        torch.testing.assert_close(torch.stack(list(losses)), expected)


def test_forward_runs_when_its_loss_is_asked_for():
    ran = []

    def forward(K):
        ran.append(K)
        return SimpleNamespace(loss=torch.tensor(float(K)), logits=torch.zeros(1, 2))

    losses = budget_losses(forward, (8, 2))
    assert ran == []
    assert next(losses) == 4.0 and ran == [8]
    assert next(losses) == 1.0 and ran == [8, 2]
    assert next(losses, None) is None


def test_no_gradient_flows_into_the_soft_targets():
    logits = {K: torch.randn(3, 4, generator=torch.Generator().manual_seed(K), requires_grad=True) for K in (8, 2)}

    def forward(K):
        return SimpleNamespace(loss=0.0 * logits[K].sum(), logits=logits[K])

    sum(budget_losses(forward, (8, 2), distillation_weight=1.0)).backward()
    assert not logits[8].grad.any() and logits[2].grad.any()


def test_bad_losses_are_refused():
    def forward(K):
        return SimpleNamespace(loss=torch.tensor(1.0), logits=torch.zeros(1, 3, 2))

    for weight in (-0.1, 1.5, math.nan):
        with pytest.raises(ValueError, match=r"distillation_weight must be in \[0, 1\], got"):
            budget_losses(forward, (8, 2), distillation_weight=weight)
        with pytest.raises(ValueError, match=r"distillation_weight must be in \[0, 1\], got"):
            BudgetDropoutCallback(SandwichRule((2, 8)), weight)
    with pytest.raises(ValueError, match="at least one budget"):
        budget_losses(forward, ())
    with pytest.raises(ValueError, match=r"largest budget first, got \(2, 8\)"):
        budget_losses(forward, (2, 8), distillation_weight=0.5)
    with pytest.raises(ValueError, match=r"logits of shape \(1, 3, 2\) needs labels"):
        list(budget_losses(forward, (8, 2), distillation_weight=0.5))
    with pytest.raises(ValueError, match=r"integer type, got torch\.float32"):
        list(budget_losses(forward, (8, 2), labels=torch.zeros(1, 3), distillation_weight=0.5))
    with pytest.raises(ValueError, match="returned no loss"):
        list(budget_losses(lambda K: SimpleNamespace(loss=None), (8, 2)))


# ---------------------------------------------------------------------------------------------------------------------
# AdamW and the channels that an update does not read.


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_inactive_channels_move_as_under_a_gradient_of_zero(weight_decay):
    model, ids = random_model(ar_order=2).train(), random_ids(2, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=weight_decay, eps=1e-8)
    per_channel = {n: p for n, p in model.named_parameters() if p.shape[0] == 32 and ("mixing" in n or "gate_out" in n)}
    assert len(per_channel) == 8  # two layers of gate weight and bias, positive and negative filters
    model(ids, labels=ids, spectral_budget=32).loss.backward()
    optimizer.step()
    before = {name: p.detach().clone() for name, p in per_channel.items()}
    moments = {name: copy.deepcopy(optimizer.state[p]) for name, p in per_channel.items()}

    optimizer.zero_grad()
    model(ids, labels=ids, spectral_budget=2).loss.backward()
    for name, p in per_channel.items():
        assert not p.grad[2:].any() and p.grad[:2].any(), name
    optimizer.step()
    for name, p in per_channel.items():
        m, v = 0.9 * moments[name]["exp_avg"], 0.95 * moments[name]["exp_avg_sq"]
        step = (m / (1 - 0.9**2)) / ((v / (1 - 0.95**2)).sqrt() + 1e-8)
        expected = before[name] * (1 - 1e-2 * weight_decay) - 1e-2 * step
        torch.testing.assert_close(p.detach()[2:], expected[2:], rtol=1e-6, atol=1e-7)
        assert (p.detach() - before[name])[2:].abs().amax() > 1e-3, name  # momentum moves them
        torch.testing.assert_close(optimizer.state[p]["exp_avg"][2:], m[2:])
        torch.testing.assert_close(optimizer.state[p]["exp_avg_sq"][2:], v[2:])


# ---------------------------------------------------------------------------------------------------------------------
# transformers' Trainer.


class Recorder:
    """What each forward pass of a model's body ran at: (budget, training forward or not), and on which inputs."""

    def __init__(self, model):
        self.passes, self.ids = [], []
        model.model.register_forward_hook(self._record, with_kwargs=True)

    def _record(self, module, args, kwargs, output):
        assert len(set(output.spectral_budget)) == 1
        self.passes.append((output.spectral_budget[0], module.training and torch.is_grad_enabled()))
        self.ids.append(kwargs["input_ids"].clone())

    @property
    def trained(self) -> list[int]:
        return [K for K, training in self.passes if training]

    @property
    def evaluated(self) -> list[int]:
        return [K for K, training in self.passes if not training]


def dataset(rows: int = 32) -> list[dict]:
    """Rows of 10 bytes with some prompt positions not scored, and a column that no model knows."""
    examples = []
    for i, ids in enumerate(random_ids(rows, 10, seed=7)):
        labels = ids.clone()
        labels[: i % 4] = -100
        examples.append({"input_ids": ids, "labels": labels, "note": i})
    return examples


def make_trainer(folder, model, callbacks, cls=Trainer, args_cls=TrainingArguments, data=None, **fields):
    defaults = {
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
    }
    extra = {key: fields.pop(key) for key in ("processing_class", "eval_dataset") if key in fields}
    arguments = args_cls(output_dir=str(folder), **(defaults | fields))
    return cls(model=model, args=arguments, train_dataset=data or dataset(), callbacks=callbacks, **extra)


def assert_same_weights(a, b, exactly: bool = True) -> None:
    b_state = b.state_dict()
    for name, tensor in a.state_dict().items():
        # AdamW divides by the root of v: where a gradient is nearly 0, rounding of 1e-8 moves a weight by 1e-5.
        torch.testing.assert_close(
            tensor, b_state[name], rtol=0, atol=0 if exactly else 1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_trainer_runs_each_update_at_its_budget(tmp_path):
    model = random_model(dropout=0.1)
    recorder, schedule = Recorder(model), budget_schedule("discrete", 32, seed=4)
    trainer = make_trainer(
        tmp_path,
        model,
        [BudgetDropoutCallback(schedule)],
        eval_dataset=dataset(4),
        eval_strategy="steps",
        eval_steps=2,
        eval_on_start=True,
        save_strategy="steps",
        save_steps=3,
    )
    trainer.train()
    expected = [K for update in range(6) for K in schedule(update) * 2]  # two micro-batches each
    assert recorder.trained == expected and len(set(expected)) > 2
    assert len(recorder.evaluated) == 4 and set(recorder.evaluated) == {32}
    for folder in ("checkpoint-3", "checkpoint-6"):
        config = json.loads((tmp_path / folder / "config.json").read_text())
        assert config.get("spectral_budget") is None and config.get("trained_budgets") is None
    model.train()(random_ids(1, 4))
    assert recorder.trained[-1] == 32  # nothing is left on the model
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_trainer_compiles_every_budget(tmp_path):
    """Beyond its limit of recompilations, which one budget each would meet, torch goes on uncompiled."""
    torch._dynamo.reset()
    schedule = budget_schedule("discrete", 32, seed=4)
    trained = {K for update in range(3) for K in schedule(update)}
    assert len(trained) == 3
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        compiled = {"torch_compile": True, "torch_compile_backend": "eager", "gradient_accumulation_steps": 1}
        make_trainer(tmp_path, random_model(), [BudgetDropoutCallback(schedule)], max_steps=3, **compiled).train()
        assert torch._dynamo.config.recompile_limit >= len(schedule.budgets)
    torch._dynamo.reset()


def test_evaluation_and_generation_during_training_run_at_the_models_default(tmp_path):
    model = random_model(spectral_budget=7)
    recorder = Recorder(model)

    class Generate(BudgetDropoutCallback):
        def on_substep_end(self, args, state, control, model=None, **kwargs):
            assert model.training and self.budgets  # in the middle of an update
            model.generate(random_ids(1, 3), max_new_tokens=2, do_sample=False)

    trainer = make_trainer(
        tmp_path, model, [Generate(budget_schedule("full", 32, seed=0))], eval_dataset=dataset(4), eval_strategy="epoch"
    )
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    assert set(recorder.trained) == {32}
    assert set(recorder.evaluated) == {7} and len(recorder.evaluated) > 12
    assert ESSMForCausalLM.from_pretrained(tmp_path / "saved").config.spectral_budget == 7


@pytest.mark.parametrize("name", ["discrete", "sandwich"])
def test_resumed_training_equals_uninterrupted_training(tmp_path, name):
    def run(folder, resume=None, **fields):
        torch.manual_seed(0)
        model = random_model(dropout=0.2)
        recorder = Recorder(model)
        callback = BudgetDropoutCallback(budget_schedule(name, 32, seed=9), 0.5)
        fields = {"max_steps": 5, "save_strategy": "steps", "save_steps": 3} | fields
        make_trainer(folder, model, [callback], **fields).train(resume_from_checkpoint=resume)
        return model, recorder.trained

    whole, budgets = run(tmp_path)
    resumed, later = run(tmp_path, resume=str(tmp_path / "checkpoint-3"), save_strategy="no")
    assert later == budgets[-len(later) :] and len(budgets) / len(later) == 5 / 2
    assert_same_weights(whole, resumed)


def run_by_hand(model, recorder: Recorder, schedule, weight, updates: int, accumulation: int = 2) -> None:
    """Train on the inputs that a Trainer's model was recorded to read, as `make_trainer` sets it up."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    labels_of = {tuple(row["input_ids"].tolist()): row["labels"] for row in dataset()}
    passes = iter(recorder.ids)
    model.train()
    for update in range(updates):
        batches = []
        for _ in range(accumulation):
            ids, *_ = [next(passes) for _ in schedule(update)]  # read once per budget
            batches.append((ids, torch.stack([labels_of[tuple(row.tolist())] for row in ids])))
        num_items = sum((labels[:, 1:] != -100).sum() for _, labels in batches)
        for ids, labels in batches:
            inputs = {"input_ids": ids, "labels": labels}
            sum(losses_by_hand(model, inputs, schedule(update), weight, num_items)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert next(passes, None) is None


@pytest.mark.parametrize("weight", [0.0, 0.6])
def test_sandwich_and_distillation_in_trainer_equal_a_loop_by_hand(tmp_path, weight):
    model, twin = random_model(), random_model()
    recorder, schedule = Recorder(model), budget_schedule("sandwich", 32, seed=4, full_budget_updates=1)
    make_trainer(tmp_path, model, [BudgetDropoutCallback(schedule, weight)], max_steps=3).train()
    assert recorder.trained == [K for update in range(3) for K in schedule(update) * 2]
    run_by_hand(twin, recorder, schedule, weight, updates=3)
    assert_same_weights(model, twin, exactly=False)
    start = random_model()
    assert max((a - b).abs().max() for a, b in zip(model.parameters(), start.parameters())) > 1e-2


def test_logged_loss_is_the_mean_over_budgets(tmp_path):
    model = random_model()
    trainer = make_trainer(
        tmp_path,
        model,
        [BudgetDropoutCallback(budget_schedule("sandwich", 32, seed=4))],
        data=dataset(2),
        max_steps=1,
        gradient_accumulation_steps=1,
        logging_strategy="steps",
        logging_steps=1,
    )
    batch = {name: torch.stack([row[name] for row in dataset(2)]) for name in ("input_ids", "labels")}
    budgets = budget_schedule("sandwich", 32, seed=4)(0)
    with torch.no_grad():
        expected = np.mean([model(**batch, spectral_budget=K).loss.item() for K in budgets])
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected, rel=1e-4)


def test_gradient_checkpointing_recomputes_at_the_same_budget(tmp_path):
    models = []
    for checkpointing in (False, True):
        model = random_model()
        layers = []
        model.model.layers[0].mixer.register_forward_pre_hook(lambda m, args, seen=layers: seen.append(args[1]))
        callback = BudgetDropoutCallback(budget_schedule("sandwich", 32, seed=4), 0.5)
        make_trainer(tmp_path, model, [callback], max_steps=2, gradient_checkpointing=checkpointing).train()
        models.append((model, Counter(layers)))
    (plain, once), (recomputed, twice) = models
    assert twice == Counter({K: 2 * n for K, n in once.items()})
    assert_same_weights(plain, recomputed)


def test_classifier_in_trainer(tmp_path):
    data = [{"input_ids": ids, "labels": i % 5, "note": i} for i, ids in enumerate(random_ids(16, 8))]
    model = random_model(ESSMForSequenceClassification, num_labels=5)
    recorder, schedule = Recorder(model), budget_schedule("sandwich", 32, seed=0, sandwich_random=0)
    make_trainer(tmp_path, model, [BudgetDropoutCallback(schedule, 0.5)], data=data, max_steps=2).train()
    assert recorder.trained == [32, 2] * 4


def test_mixed_precision_in_trainer(tmp_path):
    model = random_model()
    recorder, schedule = Recorder(model), budget_schedule("sandwich", 32, seed=4)
    trainer = make_trainer(tmp_path, model, [BudgetDropoutCallback(schedule, 0.5)], max_steps=2, bf16=True)
    dtypes = set()
    model.lm_head.register_forward_hook(lambda module, args, output: dtypes.add(output.dtype))
    trainer.train()
    assert recorder.trained == [K for update in range(2) for K in schedule(update) * 2]
    assert dtypes == {torch.bfloat16}  # at every budget
    assert all(p.isfinite().all() for p in model.parameters())


def test_exception_in_an_update_leaves_no_budget_behind(tmp_path):
    model = random_model()
    recorder, schedule = Recorder(model), budget_schedule("discrete", 32, seed=4)
    callback = BudgetDropoutCallback(schedule)

    class Failing(Trainer):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            if len(recorder.trained) == 3:
                raise KeyboardInterrupt
            return loss

    with pytest.raises(KeyboardInterrupt):
        make_trainer(tmp_path, model, [callback], cls=Failing).train()
    assert recorder.trained == [schedule(0)[0]] * 2 + [schedule(1)[0]] and schedule(1)[0] != 32
    model(random_ids(1, 4)) if model.eval() else None
    assert recorder.evaluated == [32]
    model.save_pretrained(tmp_path / "saved")
    assert ESSMForCausalLM.from_pretrained(tmp_path / "saved").config.spectral_budget is None
    recorder.passes.clear()
    make_trainer(tmp_path, model, [callback], max_steps=1).train()  # the same callback starts anew
    assert recorder.trained == [schedule(0)[0]] * 2
    assert not model._forward_hooks


def test_a_forward_pass_that_names_its_budget_keeps_it(tmp_path):
    model = random_model()
    recorder = Recorder(model)

    class Naming(Trainer):
        def compute_loss(self, model, inputs, **kwargs):
            return model(**inputs, spectral_budget=5).loss

    callback = BudgetDropoutCallback(budget_schedule("sandwich", 32, seed=4))
    make_trainer(tmp_path, model, [callback], cls=Naming, max_steps=1).train()
    assert recorder.trained == [5, 5]


def test_a_training_forward_pass_between_updates_runs_at_the_models_default(tmp_path):
    model = random_model(spectral_budget=7)
    recorder = Recorder(model)

    class Probe(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            assert model.training
            model(random_ids(1, 3))

    schedule = budget_schedule("full", 32, seed=0)
    make_trainer(tmp_path, model, [BudgetDropoutCallback(schedule), Probe()], max_steps=2).train()
    assert recorder.trained == [32, 32, 7] * 2


def test_models_and_objectives_that_cannot_work_are_refused(tmp_path):
    small = random_model(num_spectral_channels=8)
    with pytest.raises(ValueError, match=r"budgets must be in \[1, 8\] for this model, got 32"):
        make_trainer(tmp_path, small, [BudgetDropoutCallback(budget_schedule("discrete", 32, seed=0))]).train()
    llama = LlamaForCausalLM(
        LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=259)
    )
    with pytest.raises(ValueError, match="a model that takes spectral_budget, got LlamaForCausalLM"):
        make_trainer(tmp_path, llama, [BudgetDropoutCallback(budget_schedule("discrete", 32, seed=0))]).train()
    sandwich = BudgetDropoutCallback(budget_schedule("sandwich", 32, seed=0))
    with pytest.raises(ValueError, match=r"returned no loss.*without label smoothing"):
        make_trainer(tmp_path, random_model(), [sandwich], label_smoothing_factor=0.1).train()


# ---------------------------------------------------------------------------------------------------------------------
# TRL's SFTTrainer, whose loss is not the model's own: it sums per-token log-probabilities of a fused head.


@pytest.fixture
def sft(tmp_path):
    """(model, callback, fields) -> SFTTrainer on the rows of `dataset()`."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    from modeling_essm import build_byte_tokenizer

    rows = [{"input_ids": r["input_ids"].tolist(), "labels": r["labels"].tolist()} for r in dataset()]

    def make(model, callback, **fields):
        return make_trainer(
            tmp_path,
            model,
            [callback],
            cls=trl.SFTTrainer,
            args_cls=trl.SFTConfig,
            data=datasets.Dataset.from_list(rows),
            processing_class=build_byte_tokenizer(),
            **({"dataset_kwargs": {"skip_prepare_dataset": True}, "gradient_checkpointing": False} | fields),
        )

    return make


def test_sft_trainer_runs_each_update_at_its_budget(sft):
    model = random_model()
    recorder, schedule = Recorder(model), budget_schedule("discrete", 32, seed=4)
    trainer = sft(model, BudgetDropoutCallback(schedule), gradient_checkpointing=True)
    trainer.train()
    assert recorder.trained == [K for update in range(6) for K in schedule(update) * 2]
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("weight", [0.0, 0.6])
def test_sandwich_and_distillation_in_sft_trainer_equal_a_loop_by_hand(sft, weight):
    model, twin = random_model(), random_model()
    recorder, schedule = Recorder(model), budget_schedule("sandwich", 32, seed=4)
    sft(model, BudgetDropoutCallback(schedule, weight), max_steps=2).train()
    # Distillation needs logits, which the fused head does not give: one more forward pass at the largest budget.
    again = [32] if weight else []
    assert recorder.trained == [K for update in range(2) for K in (*again, *schedule(update)) * 2]
    if weight:
        per_batch = len(schedule(0)) + 1
        recorder.ids = [ids for i, ids in enumerate(recorder.ids) if i % per_batch]
    run_by_hand(twin, recorder, schedule, weight, updates=2)
    assert_same_weights(model, twin, exactly=False)


def test_sft_objectives_that_are_no_mean_of_losses_are_refused(sft):
    callback = BudgetDropoutCallback(budget_schedule("sandwich", 32, seed=4))
    with pytest.raises(ValueError, match=r"several budgets in an update.* need SFTTrainer with loss_type 'nll'"):
        sft(random_model(), callback, loss_type="dft").train()
