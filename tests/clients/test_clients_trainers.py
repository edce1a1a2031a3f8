# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""transformers' Trainer and TRL's SFTTrainer from training to generation, and checkpoints that FSDP has sharded.

What budget dropout does in both trainers is tested in test_budget_dropout_trainers, packed sequences in test_packing.
"""

import os

import numpy as np
import pytest
import torch
from accelerate.utils import merge_fsdp_weights
from helpers import VARIANTS, assert_close, random_ids, random_model, run_alone, trainer_arguments
from training_run import FSDP2, train_apart
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer

from modeling_essm import ESSMForCausalLM, build_byte_tokenizer
from modeling_essm.training.budget_dropout import BudgetDropoutCallback, budget_schedule

LENGTH, STEPS, BUDGETS = 24, 60, (2, 8, 32)
MEMORY = VARIANTS["memory"] | {"head_size": 16, "intermediate_size": 128}  # wide enough to learn at K = 2
TEXT = "abcdefgh" * 8
TEXTS = [TEXT[i % 8 : i % 8 + LENGTH] for i in range(24)]  # a cycle of letters from different places in it


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


def rows(texts) -> list[dict]:
    return [{"input_ids": list(text.encode()), "labels": list(text.encode())} for text in texts]


def arguments(folder, cls=None, **fields):
    settings = {"max_steps": STEPS, "per_device_train_batch_size": 4, "learning_rate": 1e-2}
    return trainer_arguments(folder, cls, **settings | fields)


def make_trainer(folder, model=None, **fields):
    tools = {"train_dataset": rows(TEXTS[:16]), "eval_dataset": rows(TEXTS[3:11])}
    tools |= {"processing_class": build_byte_tokenizer(), "callbacks": [dropout()]}
    return Trainer(model or random_model(), arguments(folder, **fields), **tools)


def make_sft(folder, model=None, data=None, peft_config=None, **fields):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    texts = [{"text": text} for text in TEXTS[:16]]
    tools = {"processing_class": build_byte_tokenizer(), "callbacks": [dropout()], "peft_config": peft_config}
    tools["train_dataset"] = datasets.Dataset.from_list(data or texts)
    tools["eval_dataset"] = datasets.Dataset.from_list(texts[:8])
    settings = arguments(folder, trl.SFTConfig, **{"max_length": LENGTH + 1} | fields)
    return trl.SFTTrainer(model=model or random_model(), args=settings, **tools)


def dropout() -> BudgetDropoutCallback:
    return BudgetDropoutCallback(budget_schedule("discrete", 32, seed=1))


def evaluations(trainer: Trainer) -> dict[int, float]:
    """The loss at each budget, by the default that evaluation runs at."""
    losses = {}
    for K in BUDGETS:
        trainer.model.config.spectral_budget = K
        losses[K] = trainer.evaluate(metric_key_prefix=f"eval_{K}")[f"eval_{K}_loss"]
    trainer.model.config.spectral_budget = None
    return losses


def learns(trainer: Trainer, by: float = 3) -> dict[int, float]:
    """The losses after training, which are lower by that much at every budget that was trained."""
    before = evaluations(trainer)
    assert max(before.values()) - min(before.values()) > 0.005
    trainer.train()
    after = evaluations(trainer)
    assert all(after[K] < before[K] - by for K in BUDGETS)
    return after


def assert_continues(folder, prompt="abcdefghabcd", then="efghabcd") -> None:
    """A saved folder, loaded as a user would, goes on with the letters at every budget that was trained."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    for K in BUDGETS:
        tokens = model.generate(ids, spectral_budget=K, max_new_tokens=8, do_sample=False)
        assert tokenizer.decode(tokens[0]) == prompt + then, K


def test_trainer_from_training_to_generation(tmp_path):
    """Trained with checkpointing, evaluated and predicted at budgets, resumed from a checkpoint, saved, loaded."""
    fields = {"gradient_checkpointing": True, "save_strategy": "steps", "save_steps": STEPS // 2}
    whole = make_trainer(tmp_path, random_model(**MEMORY), **fields)
    losses, ids = learns(whole), torch.tensor([row["input_ids"] for row in rows(TEXTS[3:11])])
    whole.model.config.spectral_budget = 2
    predicted = whole.predict(rows(TEXTS[3:11]))
    with torch.no_grad():
        for K in BUDGETS:
            expected = whole.model(ids, labels=ids, spectral_budget=K)
            assert losses[K] == pytest.approx(expected.loss.item(), abs=1e-5)
            if K == 2:
                assert predicted.metrics["test_loss"] == pytest.approx(losses[2])
                np.testing.assert_allclose(predicted.predictions, expected.logits.numpy(), atol=2e-5)
    whole.model.config.spectral_budget = None
    whole.save_model(tmp_path / "saved")
    for folder in ("saved", f"checkpoint-{STEPS}"):
        assert_continues(tmp_path / folder)
    resumed = make_trainer(tmp_path / "resumed", random_model(**MEMORY), gradient_checkpointing=True)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS // 2}"))
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], tensor), name


def test_predictions_with_keys_to_ignore(tmp_path):
    """The user's keys take the place of the config's, so the budget that ran must be no prediction."""
    trainer = make_trainer(tmp_path, max_steps=1, eval_strategy="steps", eval_steps=1)
    ignored = ["past_key_values"]
    assert trainer.predict(rows(TEXTS[:8]), ignore_keys=ignored).predictions.shape == (8, LENGTH, 259)
    trainer.train(ignore_keys_for_eval=ignored)
    assert any("eval_loss" in entry for entry in trainer.state.log_history)


# --- TRL


@pytest.mark.slow
@pytest.mark.parametrize(
    "block, fields",
    [({}, {}), ({}, {"padding_free": True, "max_length": None}), (MEMORY, {"packing": True})],
    ids=["paper", "padding-free", "memory-packing"],
)
def test_sft_trainer_from_text_to_generation(block, fields, tmp_path):
    trainer = make_sft(tmp_path, random_model(**block), **fields)
    learns(trainer)
    trainer.save_model(tmp_path / "saved")
    assert_continues(tmp_path / "saved")


@pytest.mark.slow
def test_sft_trainer_on_prompts_and_completions(tmp_path):
    """Only completions are scored, and <eos> behind them is learned."""
    trainer = make_sft(tmp_path, data=[{"prompt": text[:12], "completion": "XYZ!"} for text in TEXTS[:16]])
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 3  # texts without completions are still strange to it
    trainer.save_model(tmp_path / "saved")
    assert_continues(tmp_path / "saved", "cdefghabcdef", "XYZ!<eos>")


@pytest.mark.slow
def test_sft_trainer_with_an_adapter(tmp_path):
    peft, ids = pytest.importorskip("peft"), random_ids(1, 12)
    random_model(**MEMORY).save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=8, lora_alpha=32, task_type="CAUSAL_LM", target_modules="all-linear")
    trainer = make_sft(tmp_path, AutoModelForCausalLM.from_pretrained(tmp_path / "base"), peft_config=config)
    learns(trainer, by=1)
    trainer.save_model(tmp_path / "adapter")
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    for K in BUDGETS:
        with torch.no_grad():
            logits = [model(input_ids=ids, spectral_budget=K).logits for model in (loaded, trainer.model.eval())]
        assert_close(*logits)


PREFER = """
import sys
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

folder, settings = sys.argv[1], {"report_to": [], "use_cpu": True, "bf16": False, "save_strategy": "no"}
settings |= {"output_dir": "out", "max_steps": 1, "per_device_train_batch_size": 2}

def train(trainer, row, arguments, **options):
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    tools = {"train_dataset": Dataset.from_list([row] * 4), "processing_class": AutoTokenizer.from_pretrained(folder)}
    trainer(model, args=arguments, **tools, **options).train()

def prefer(**options):
    train(DPOTrainer, {"prompt": "ab", "chosen": "cd", "rejected": "xy"}, DPOConfig(**settings, **options))

def reward(**options):
    arguments = GRPOConfig(**settings, num_generations=2, max_completion_length=4, **options)
    train(GRPOTrainer, {"prompt": "ab"}, arguments, reward_funcs=lambda completions, **_: [*map(len, completions)])

for call, options in ((prefer, {}), (reward, {"beta": 0.1})):
    try:
        call(**options)
        raise SystemExit("trusted unasked")
    except ValueError as error:
        assert "custom code" in str(error), error
    call(**options, trust_remote_code=True)
reward()  # no reference
"""


@pytest.mark.slow
def test_dpo_and_grpo_load_their_reference_by_its_own_code(tmp_path):
    """Where the package is not imported they have to be told, as docs/clients.md says."""
    pytest.importorskip("trl")
    random_model().save_pretrained(tmp_path)
    build_byte_tokenizer(512).save_pretrained(tmp_path)
    run_alone(PREFER, tmp_path, str(tmp_path))


# --- FSDP: two CPU ranks, for which Accelerate has to be told, see essm_train/run/accelerator.py.


def train_with_trainer(folder, batch_size: int) -> Trainer:
    torch.manual_seed(0)
    fields = {"max_steps": 3, "save_strategy": "steps", "save_steps": 3, "max_grad_norm": 0.0}
    settings = arguments(folder, per_device_train_batch_size=batch_size, **fields)
    trainer = Trainer(random_model(), settings, train_dataset=rows(TEXTS[:16]))
    trainer.train()
    trainer.save_model(folder / "saved")
    return trainer


def sharded_rank(folder) -> None:
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


@pytest.mark.slow
def test_sharded_checkpoints_load_as_one_process_would_have_saved_them(tmp_path):
    """Whole ones carry the model's code, not that of the class which FSDP2 puts in front; the others are merged."""
    codes, log = train_apart(tmp_path, tmp_path, ranks=2, environment=FSDP2, command=sharded_rank)
    assert codes == [0, 0], log[-4000:]
    expected = train_with_trainer(tmp_path / "one", 4).model.state_dict()

    shards = tmp_path / "SHARDED_STATE_DICT" / "checkpoint-3" / "pytorch_model_fsdp_0"
    assert len(list(shards.glob("*.distcp"))) == 2  # each rank wrote its own
    merge_fsdp_weights(str(shards), str(tmp_path / "merged"))
    random_model().config.save_pretrained(tmp_path / "merged")
    whole = [tmp_path / "FULL_STATE_DICT" / name for name in ("saved", "checkpoint-3")]
    for folder in (tmp_path / "merged", *whole):
        model, found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert type(model) is ESSMForCausalLM and not any(found.values())
        assert model.lm_head.weight is model.model.embed_tokens.weight
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-5)
    for folder in whole:
        assert (folder / "modeling_essm.py").exists() and not list(folder.glob("_fsdp*"))
        remote = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        assert_close(remote(random_ids(1, 9)).logits, ESSMForCausalLM.from_pretrained(folder)(random_ids(1, 9)).logits)
