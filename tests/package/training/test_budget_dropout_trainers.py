# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Budget dropout in transformers' Trainer and in TRL's SFTTrainer.

The loss of the second is not the model's own: it sums per-token log-probabilities of a fused head.
"""

from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from helpers import losses_by_hand, random_ids, random_model, trainer_arguments
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM, Trainer

from modeling_essm import ESSMForCausalLM, build_byte_tokenizer
from modeling_essm.training.budget_dropout import BudgetDropoutCallback, budget_schedule

kinds = pytest.mark.parametrize("kind", ["trainer", pytest.param("sft", marks=pytest.mark.slow)])  # which needs trl


def of_all(budgets):
    (K,) = {*budgets}
    return K


class Recorder:
    """What each forward pass of a model's body ran at: (budget, training forward or not), and on which inputs."""

    def __init__(self, model):
        self.passes, self.ids = [], []
        model.model.register_forward_hook(self._record, with_kwargs=True)

    def _record(self, module, args, kwargs, output):
        budget = output.spectral_budget
        budget = (*budget.tolist(),) if isinstance(budget, torch.Tensor) else of_all(budget)
        self.passes.append((budget, module.training and torch.is_grad_enabled()))
        self.ids.append((args[0] if args else kwargs["input_ids"]).clone())

    @property
    def trained(self) -> list[int]:
        return [K for K, training in self.passes if training]

    @property
    def evaluated(self) -> list[int]:
        return [K for K, training in self.passes if not training]


def rows(count: int = 32) -> list[dict]:
    """Rows of 10 bytes with some prompt positions not scored, and a column that no model knows."""
    examples = []
    for i, ids in enumerate(random_ids(count, 10, seed=7).tolist()):
        examples.append({"input_ids": ids, "labels": [-100] * (i % 4) + ids[i % 4 :], "note": i})
    return examples


def make_trainer(folder, model, callback, kind="trainer", cls=Trainer, **fields):
    defaults = {"max_steps": 6, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    defaults |= {"learning_rate": 1e-2, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    tools = {"train_dataset": rows(), "eval_dataset": rows(4), "callbacks": [callback]}
    arguments = None
    if kind == "sft":
        trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
        cls, arguments = trl.SFTTrainer, trl.SFTConfig
        tools |= {name: datasets.Dataset.from_list(tools[name]) for name in ("train_dataset", "eval_dataset")}
        tools["processing_class"] = build_byte_tokenizer()
        defaults |= {"dataset_kwargs": {"skip_prepare_dataset": True}, "gradient_checkpointing": False}
    return cls(model, trainer_arguments(folder, arguments, **defaults | fields), **tools)


@kinds
def test_each_update_runs_at_its_budget(kind, tmp_path):
    model = random_model(dropout=0.1)
    recorder, schedule = Recorder(model), budget_schedule("discrete", 32, seed=4)
    fields = {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True, "gradient_checkpointing": True}
    trainer = make_trainer(tmp_path, model, BudgetDropoutCallback(schedule), kind, **fields)
    trainer.train()
    expected = [K for update in range(6) for K in schedule(update) * 2]  # two micro-batches each
    assert recorder.trained == expected and len(set(expected)) > 2
    assert len(recorder.evaluated) == 4 and set(recorder.evaluated) == {32}
    trainer.save_model(tmp_path / "saved")
    config = ESSMForCausalLM.from_pretrained(tmp_path / "saved").config
    assert config.spectral_budget is None and config.trained_budgets is None
    model.train()(random_ids(1, 4))
    assert recorder.trained[-1] == 32  # nothing is left on the model
    assert not model._forward_hooks and not model._forward_pre_hooks


def run_by_hand(model, ids, schedule, weight, updates: int, accumulation: int = 2) -> list[float]:
    """The losses of updates on the inputs that a Trainer's model was recorded to read, as `make_trainer` sets it up."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    labels_of = {tuple(row["input_ids"]): torch.tensor(row["labels"]) for row in rows()}
    passes, logged = iter(ids), []
    model.train()
    for update in range(updates):
        batches = []
        for _ in range(accumulation):
            ids, *_ = [next(passes) for _ in schedule(update)]  # read once per budget
            batches.append({"input_ids": ids, "labels": torch.stack([labels_of[tuple(row.tolist())] for row in ids])})
        num_items = sum((inputs["labels"][:, 1:] != -100).sum() for inputs in batches)
        loss = sum(sum(losses_by_hand(model, inputs, schedule(update), weight, num_items)) for inputs in batches)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        logged.append(loss.item())
    assert next(passes, None) is None
    return logged


@pytest.mark.parametrize(
    ("kind", "weight"), [("trainer", 0.6), *(pytest.param("sft", w, marks=pytest.mark.slow) for w in (0.0, 0.6))]
)
def test_sandwich_and_distillation_equal_a_loop_by_hand(kind, weight, tmp_path):
    model, twin, start = random_model(), random_model(), random_model()
    recorder, schedule = Recorder(model), budget_schedule("sandwich", 32, seed=4, full_budget_updates=kind == "trainer")
    fields = {"max_steps": 3, "logging_steps": 1, "gradient_checkpointing": kind == "trainer"}
    trainer = make_trainer(tmp_path, model, BudgetDropoutCallback(schedule, weight), kind, **fields)
    trainer.train()
    # Distillation needs logits, which the fused head does not give: one more forward pass at the largest budget.
    again = [32] if weight and kind == "sft" else []
    assert recorder.trained == [K for update in range(3) for K in (*again, *schedule(update)) * 2]
    ids, per_batch = recorder.ids, len(schedule(0)) + 1
    losses = run_by_hand(twin, [x for i, x in enumerate(ids) if not again or i % per_batch], schedule, weight, 3)
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == pytest.approx(losses, rel=1e-4)
    for (name, tensor), other in zip(model.named_parameters(), twin.parameters()):
        # AdamW divides by the root of v: where a gradient is nearly 0, rounding of 1e-8 moves a weight by 1e-5.
        torch.testing.assert_close(tensor, other, rtol=0, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
    assert max((a - b).abs().max() for a, b in zip(model.parameters(), start.parameters())) > 1e-2


@kinds
@pytest.mark.parametrize("name", ["family", "rows"])
def test_rows_run_at_budgets_of_their_own(name, kind, tmp_path):
    """In two accumulated batches of three rows, those that share budgets in one pass."""
    model = random_model()
    recorder, schedule = Recorder(model), budget_schedule(name, 32, seed=4)
    fields = {"max_steps": 2, "per_device_train_batch_size": 3}
    make_trainer(tmp_path, model, BudgetDropoutCallback(schedule), kind, **fields).train()
    passes = [part for n in range(2) for i in range(2) for part in schedule.parts(n, 3, 3 * i, together=True)]
    assert recorder.trained == [part.budget for part in passes]
    of_rows = [part.budget for part in passes if isinstance(part.budget, tuple)]
    assert [len({*budgets}) for budgets in of_rows] == [3] * 4
    assert len(recorder.ids) == len(passes) and all(len(ids) == 3 for ids in recorder.ids)


def test_trainer_compiles_every_budget(tmp_path):
    """Beyond its limit of recompilations, which one budget each would meet, torch goes on uncompiled."""
    torch._dynamo.reset()
    schedule = budget_schedule("discrete", 32, seed=4)
    assert len({K for update in range(3) for K in schedule(update)}) == 3
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        compiled = {
            "torch_compile": True,
            "torch_compile_backend": "eager",
            "gradient_accumulation_steps": 1,
            "bf16": True,  # autocast inside of the graphs
        }
        model, before = random_model(num_hidden_layers=1), counters["stats"]["unique_graphs"]
        make_trainer(tmp_path, model, BudgetDropoutCallback(schedule), max_steps=3, **compiled).train()
        assert counters["stats"]["unique_graphs"] >= before + 3
        assert torch._dynamo.config.recompile_limit >= len(schedule.budgets)
    torch._dynamo.reset()
    AcceleratorState._reset_state(reset_partial_state=True)  # or what follows in this process would be in bf16


def test_what_does_not_train_runs_at_the_models_default(tmp_path):
    """Evaluation, generation in the middle of an update, and a forward pass in training mode between two."""
    model = random_model(spectral_budget=7)
    recorder = Recorder(model)

    class Probe(BudgetDropoutCallback):
        def on_substep_end(self, args, state, control, model=None, **kwargs):
            assert model.training and self.update is not None
            model.generate(random_ids(1, 3), max_new_tokens=2, do_sample=False)

        def on_step_end(self, args, state, control, model=None, **kwargs):
            super().on_step_end(args, state, control)
            assert model.training
            model(random_ids(1, 3))

    trainer = make_trainer(tmp_path, model, Probe(budget_schedule("full", 32, seed=0)), eval_strategy="epoch")
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    assert recorder.trained == [32, 32, 7] * 6
    assert set(recorder.evaluated) == {7} and len(recorder.evaluated) > 12
    assert ESSMForCausalLM.from_pretrained(tmp_path / "saved").config.spectral_budget == 7


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
        make_trainer(tmp_path, model, callback, cls=Failing).train()
    assert recorder.trained == [schedule(0)[0]] * 2 + [schedule(1)[0]] and schedule(1)[0] != 32
    model.eval()(random_ids(1, 4))
    assert recorder.evaluated == [32] and model.config.spectral_budget is None
    recorder.passes.clear()
    make_trainer(tmp_path, model, callback, max_steps=1).train()  # the same callback starts anew
    assert recorder.trained == [schedule(0)[0]] * 2
    assert not model._forward_hooks


def test_a_forward_pass_that_names_its_budget_keeps_it(tmp_path):
    model = random_model()
    recorder = Recorder(model)

    class Naming(Trainer):
        def compute_loss(self, model, inputs, **kwargs):
            return model(**inputs, spectral_budget=5).loss

    callback = BudgetDropoutCallback(budget_schedule("sandwich", 32, seed=4))
    make_trainer(tmp_path, model, callback, cls=Naming, max_steps=1).train()
    assert recorder.trained == [5, 5]


LLAMA = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 259}
REFUSED = {
    "small": (lambda: random_model(num_spectral_channels=8), {}, r"budgets must be in \[1, 8\] for this model, got 32"),
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(**LLAMA)), {}, "takes spectral_budget, got LlamaForCausalLM"),
    "smoothing": (random_model, {"label_smoothing_factor": 0.1}, "returned no loss.*without label smoothing"),
    "dft": (random_model, {"kind": "sft", "loss_type": "dft"}, "need SFTTrainer with loss_type 'nll'"),
}


@pytest.mark.parametrize("name", [*list(REFUSED)[:-1], pytest.param("dft", marks=pytest.mark.slow)])
def test_models_and_objectives_that_cannot_work_are_refused(name, tmp_path):
    make, fields, message = REFUSED[name]
    callback = BudgetDropoutCallback(budget_schedule("sandwich", 32, seed=0))
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, make(), callback, **fields).train()


def test_a_callback_takes_each_trainings_length():
    callback, model = BudgetDropoutCallback(budget_schedule("family", 32, 0)), random_model()
    for steps in (4, 9):
        callback.on_train_begin(None, SimpleNamespace(max_steps=steps), None, model=model)
        assert callback.schedule.updates == steps
    callback.detach()
