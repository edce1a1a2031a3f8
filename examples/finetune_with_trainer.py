# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Budget dropout in transformers' own Trainer, by one callback; TRL's SFTTrainer takes the same one.

    python examples/finetune_with_trainer.py [runs/train_clm/model] [steps]

Without a folder it starts from random weights. It prints the loss at three budgets before and after.
"""

import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from transformers import Trainer, TrainingArguments

from modeling_essm import ESSMConfig, ESSMForCausalLM
from modeling_essm.training import BudgetDropoutCallback, budget_schedule

torch.manual_seed(0)
steps = int(sys.argv.pop()) if sys.argv[-1].isdigit() else 60
if len(sys.argv) > 1:
    model = ESSMForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)  # bf16 is too coarse for small updates
else:
    model = ESSMForCausalLM(ESSMConfig(hidden_size=64, num_hidden_layers=2, filter_length=512))
capacity = model.config.num_spectral_channels

text = Path(__file__).read_bytes()  # any bytes are text: this file, in blocks of 128
blocks = [list(text[i : i + 128]) for i in range(0, len(text) - 128, 32)]
data, batch = Dataset.from_dict({"input_ids": blocks, "labels": blocks}), torch.tensor(blocks)


@torch.no_grad()
def losses() -> str:
    model.eval()
    return ", ".join(f"{model(batch, labels=batch, spectral_budget=K).loss:.3f} at K={K}" for K in (2, 4, capacity))


before = losses()
with tempfile.TemporaryDirectory() as folder:
    quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    arguments = TrainingArguments(
        folder, max_steps=steps, per_device_train_batch_size=8, learning_rate=5e-3, use_cpu=True, **quiet
    )
    dropout = BudgetDropoutCallback(budget_schedule("discrete", capacity, seed=0))
    Trainer(model, arguments, train_dataset=data, callbacks=[dropout]).train()
print(f"before: {before}\nafter:  {losses()}")
