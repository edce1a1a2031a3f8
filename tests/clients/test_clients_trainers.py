# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""transformers' Trainer and TRL's SFTTrainer from training to generation, and checkpoints that FSDP has sharded.

What budget dropout does in both trainers is tested in test_budget_dropout, packed sequences in test_packing.
"""

import contextlib
import os
import socket

import numpy as np
import pytest
import torch
from accelerate.utils import merge_fsdp_weights
from apart import start
from helpers import assert_close, random_ids, random_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from modeling_essm import ESSMForCausalLM, build_byte_tokenizer
from modeling_essm.training.budget_dropout import BudgetDropoutCallback, budget_schedule

LENGTH, STEPS, BUDGETS = 24, 60, (2, 8, 32)
TEXT = "abcdefgh" * 8


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


def rows(count: int, start: int = 0) -> list[dict]:
    """A cycle of letters from different places in it."""
    ids = [list(TEXT[i % 8 : i % 8 + LENGTH].encode()) for i in range(start, start + count)]
    return [{"input_ids": torch.tensor(row), "labels": torch.tensor(row)} for row in ids]


def arguments(folder, cls=TrainingArguments, **fields):
    settings = {"max_steps": STEPS, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "report_to": []}
    settings |= {"use_cpu": True, "bf16": False, "disable_tqdm": True, "save_strategy": "no", "logging_steps": STEPS}
    return cls(output_dir=str(folder), **settings | fields)


def dropout() -> BudgetDropoutCallback:
    return BudgetDropoutCallback(budget_schedule("discrete", 32, seed=1))


def assert_continues(folder) -> None:
    """A saved folder, loaded as a user would, goes on with the letters at every budget that was trained."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("abcdefghabcd", return_tensors="pt").input_ids
    for K in BUDGETS:
        tokens = model.generate(ids, spectral_budget=K, max_new_tokens=8, do_sample=False)
        assert tokenizer.decode(tokens[0]) == "abcdefghabcdefghabcd", K


def evaluations(trainer: Trainer) -> dict[int, float]:
    """The loss at each budget, by the default that evaluation runs at."""
    losses = {}
    for K in BUDGETS:
        trainer.model.config.spectral_budget = K
        losses[K] = trainer.evaluate(metric_key_prefix=f"eval_{K}")[f"eval_{K}_loss"]
    trainer.model.config.spectral_budget = None
    return losses


def losses_of(model, data: list[dict]) -> dict[int, float]:
    ids = torch.stack([row["input_ids"] for row in data])
    with torch.no_grad():
        return {K: model.eval()(ids, labels=ids, spectral_budget=K).loss.item() for K in BUDGETS}


def test_trainer_from_training_to_generation(tmp_path):
    """Trained with checkpointing, evaluated and predicted at budgets, resumed from a checkpoint, saved, loaded."""
    data, held_out = rows(16), rows(8, start=3)
    untrained = losses_of(random_model(), held_out)

    def trainer(folder, **fields):
        tools = {"train_dataset": data, "eval_dataset": held_out, "callbacks": [dropout()]}
        tools["processing_class"] = build_byte_tokenizer()
        return Trainer(random_model(), arguments(folder, gradient_checkpointing=True, **fields), **tools)

    whole = trainer(tmp_path, save_strategy="steps", save_steps=STEPS // 2)
    before = evaluations(whole)
    assert before == pytest.approx(untrained, abs=1e-5)
    assert max(before.values()) - min(before.values()) > 0.005
    whole.train()
    after = evaluations(whole)
    assert after == pytest.approx(losses_of(whole.model, held_out), abs=1e-5)
    assert all(after[K] < before[K] - 3 for K in BUDGETS)

    whole.model.config.spectral_budget = 2
    predicted = whole.predict(held_out)
    assert predicted.predictions.shape == (8, LENGTH, 259) and predicted.metrics["test_loss"] == pytest.approx(after[2])
    with torch.no_grad():
        ids = torch.stack([row["input_ids"] for row in held_out])
        expected = whole.model(ids, spectral_budget=2).logits.numpy()
    np.testing.assert_allclose(predicted.predictions, expected, atol=2e-5)
    whole.model.config.spectral_budget = None

    whole.save_model(tmp_path / "saved")
    assert_continues(tmp_path / "saved")
    assert_continues(tmp_path / f"checkpoint-{STEPS}")
    resumed = trainer(tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS // 2}"))
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], tensor), name


def test_predictions_with_keys_to_ignore(tmp_path):
    """The user's keys take the place of the config's, so the budget that ran must be no prediction."""
    ignored = ["past_key_values"]
    trainer = Trainer(random_model(), arguments(tmp_path, max_steps=2), train_dataset=rows(8), eval_dataset=rows(8))
    assert trainer.predict(rows(8), ignore_keys=ignored).predictions.shape == (8, LENGTH, 259)
    trainer.args.eval_strategy, trainer.args.eval_steps = "steps", 1
    trainer.train(ignore_keys_for_eval=ignored)
    assert any("eval_loss" in entry for entry in trainer.state.log_history)


# --- TRL


def sft(folder, model, data=None, **fields):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    texts = [{"text": TEXT[i % 8 : i % 8 + LENGTH]} for i in range(16)]
    extra = {name: fields.pop(name) for name in ("peft_config",) if name in fields}
    return trl.SFTTrainer(
        model=model,
        args=arguments(folder, trl.SFTConfig, **{"max_length": LENGTH + 1} | fields),
        train_dataset=datasets.Dataset.from_list(data or texts),
        eval_dataset=datasets.Dataset.from_list(texts[:8]),
        processing_class=build_byte_tokenizer(),
        callbacks=[dropout()],
        **extra,
    )


@pytest.mark.parametrize("fields", [{}, {"packing": True}, {"padding_free": True, "max_length": None}], ids=str)
def test_sft_trainer_from_text_to_generation(fields, tmp_path):
    trainer = sft(tmp_path, random_model(), **fields)
    before = evaluations(trainer)
    trainer.train()
    after = evaluations(trainer)
    assert all(after[K] < before[K] - 3 for K in BUDGETS)
    assert max(before.values()) - min(before.values()) > 0.005
    trainer.save_model(tmp_path / "saved")
    assert_continues(tmp_path / "saved")


def test_sft_trainer_on_prompts_and_completions(tmp_path):
    """Only completions are scored, and <eos> behind them is learned."""
    data = [{"prompt": TEXT[i % 8 : i % 8 + 12], "completion": "XYZ!"} for i in range(16)]
    trainer = sft(tmp_path, random_model(), data)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 3  # texts without completions are still strange to it
    trainer.save_model(tmp_path / "saved")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    for K in BUDGETS:
        tokens = model.generate(torch.tensor([list(b"cdefghabcdef")]), spectral_budget=K, do_sample=False)
        assert tokens[0, 12:].tolist() == [*b"XYZ!", 258], K


def test_sft_trainer_with_an_adapter(tmp_path):
    peft = pytest.importorskip("peft")
    random_model().save_pretrained(tmp_path / "base")
    targets = {"target_modules": ["ffn.up", "ffn.down", "mixer.skip"], "target_parameters": ["mixer.channel_mixing"]}
    config = peft.LoraConfig(r=8, lora_alpha=32, task_type="CAUSAL_LM", **targets)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    trainer = sft(tmp_path, base, peft_config=config)
    before = evaluations(trainer)
    trainer.train()
    after = evaluations(trainer)
    assert all(after[K] < before[K] - 1 for K in BUDGETS)
    trainer.save_model(tmp_path / "adapter")
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    ids = random_ids(1, 12)
    for K in BUDGETS:
        with torch.no_grad():
            expected = trainer.model.eval()(input_ids=ids, spectral_budget=K).logits
            assert_close(loaded(input_ids=ids, spectral_budget=K).logits, expected)


# --- FSDP: two CPU ranks, for which Accelerate has to be told, see essm_train/run/accelerator.py.

FSDP2 = {
    "ACCELERATE_USE_CPU": "true",
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}


def train_with_trainer(folder, batch_size: int) -> Trainer:
    torch.manual_seed(0)
    fields = {"max_steps": 3, "save_strategy": "steps", "save_steps": 3, "max_grad_norm": 0.0}
    settings = arguments(folder, per_device_train_batch_size=batch_size, **fields)
    trainer = Trainer(random_model(), settings, train_dataset=rows(16))
    trainer.train()
    trainer.save_model(folder / "saved")
    return trainer


def sharded_rank(folder, environment) -> None:
    os.environ.update(environment)
    with open(folder / f"log-{environment['RANK']}", "w") as log, contextlib.redirect_stderr(log):
        import transformers.trainer
        from accelerate import Accelerator

        from essm_train.run.accelerator import _shard_on_cpu

        class Sharding(Accelerator):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                _shard_on_cpu(self)

        transformers.trainer.Accelerator = Sharding
        for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
            os.environ["FSDP_STATE_DICT_TYPE"] = kind
            trainer = train_with_trainer(folder / kind, 2)
            assert trainer.is_fsdp_enabled and type(trainer.model_wrapped).__name__.startswith("FSDP")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """What Trainer leaves behind under FSDP2."""
    folder = tmp_path_factory.mktemp("sharded")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    ranks = []
    for rank in range(2):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        ranks.append(start(sharded_rank, (folder, FSDP2 | address | own)))
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0, 0], (folder / "log-0").read_text()[-4000:]
    return folder


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    return train_with_trainer(folder, 4).model.state_dict()


def assert_same_model(folder, expected: dict[str, torch.Tensor]) -> None:
    """Loaded as it stands, it is what one process trained."""
    model, found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(model) is ESSMForCausalLM and not any(found.values())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-5)
    assert model.generate(random_ids(1, 5), spectral_budget=3, max_new_tokens=4).shape[0] == 1


def test_sharded_checkpoints_are_merged_into_a_folder_that_loads(sharded, one_process, tmp_path):
    checkpoint = sharded / "SHARDED_STATE_DICT" / "checkpoint-3" / "pytorch_model_fsdp_0"
    assert len(list(checkpoint.glob("*.distcp"))) == 2  # each rank wrote its own
    merge_fsdp_weights(str(checkpoint), str(tmp_path / "merged"))
    random_model().config.save_pretrained(tmp_path / "merged")
    assert_same_model(tmp_path / "merged", one_process)


def test_whole_checkpoints_of_a_sharded_model_carry_the_models_code(sharded, one_process):
    """Not that of the class which FSDP2 puts in front of the model's."""
    for name in ("saved", "checkpoint-3"):
        folder = sharded / "FULL_STATE_DICT" / name
        assert_same_model(folder, one_process)
        assert (folder / "modeling_essm.py").exists() and not list(folder.glob("_fsdp*"))
        remote = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        assert_close(remote(random_ids(1, 9)).logits, ESSMForCausalLM.from_pretrained(folder)(random_ids(1, 9)).logits)
