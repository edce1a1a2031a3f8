# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Budget dropout in Trainer and in TRL's SFTTrainer."""

import json
from collections import Counter

import numpy as np
import pytest
import torch
from helpers import losses_by_hand, random_ids, random_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from modeling_essm import ESSMForCausalLM
from modeling_essm.training.budget_dropout import BudgetDropoutCallback, budget_schedule

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
        self.ids.append((args[0] if args else kwargs["input_ids"]).clone())

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


def test_what_does_not_train_runs_at_the_models_default(tmp_path):
    """Evaluation, generation in the middle of an update, and a forward pass in training mode between two."""
    model = random_model(spectral_budget=7)
    recorder = Recorder(model)

    class Probe(BudgetDropoutCallback):
        def on_substep_end(self, args, state, control, model=None, **kwargs):
            assert model.training and self.budgets
            model.generate(random_ids(1, 3), max_new_tokens=2, do_sample=False)

        def on_step_end(self, args, state, control, model=None, **kwargs):
            super().on_step_end(args, state, control)
            assert model.training
            model(random_ids(1, 3))

    trainer = make_trainer(
        tmp_path, model, [Probe(budget_schedule("full", 32, seed=0))], eval_dataset=dataset(4), eval_strategy="epoch"
    )
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    assert recorder.trained == [32, 32, 7] * 6
    assert set(recorder.evaluated) == {7} and len(recorder.evaluated) > 12
    assert ESSMForCausalLM.from_pretrained(tmp_path / "saved").config.spectral_budget == 7


def test_resumed_training_equals_uninterrupted_training(tmp_path):
    def run(folder, resume=None, **fields):
        torch.manual_seed(0)
        model = random_model(dropout=0.2)
        recorder = Recorder(model)
        callback = BudgetDropoutCallback(budget_schedule("sandwich", 32, seed=9), 0.5)
        fields = {"max_steps": 5, "save_strategy": "steps", "save_steps": 3} | fields
        make_trainer(folder, model, [callback], **fields).train(resume_from_checkpoint=resume)
        return model, recorder.trained

    whole, budgets = run(tmp_path)
    resumed, later = run(tmp_path, resume=str(tmp_path / "checkpoint-3"), save_strategy="no")
    assert later == budgets[-len(later) :] and len(later) < len(budgets)
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


def test_sandwich_and_distillation_in_trainer_equal_a_loop_by_hand(tmp_path):
    model, twin, weight = random_model(), random_model(), 0.6
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
