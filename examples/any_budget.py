# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""One model at three budgets: greedy text, and the bytes of state that each budget carries; then within a deadline.

    python examples/any_budget.py runs/train_clm/model "def main("

The folder is any saved ES-SSM language model; README's first command makes this one.
"""

import sys

import torch
from transformers import AutoTokenizer

from modeling_essm import ESSMForCausalLM
from modeling_essm.decoding import DeadlineBudget

folder, prompt = sys.argv[1:3] if len(sys.argv) > 2 else ("runs/train_clm/model", "def main(")
model = ESSMForCausalLM.from_pretrained(folder).eval()  # our own class: code that lies in the folder is not run
tokenizer = AutoTokenizer.from_pretrained(folder)
inputs = tokenizer(prompt, return_tensors="pt")

for budget in (2, 6, model.config.num_spectral_channels):
    out = model.generate(
        **inputs, spectral_budget=budget, max_new_tokens=60, do_sample=False, return_dict_in_generate=True
    )
    text = tokenizer.decode(out.sequences[0], skip_special_tokens=True)
    print(f"--- K = {budget}: {out.past_key_values.num_bytes:,} bytes of state\n{text}")

# Requests of different budgets share a batch; each row is what it would have been alone.
budgets = torch.tensor([2, 6])
batch = tokenizer([prompt, prompt], return_tensors="pt")
rows = model.generate(**batch, spectral_budget=budgets, max_new_tokens=20, do_sample=False)
print("--- one batch, K = 2 and K = 6\n" + "\n".join(tokenizer.batch_decode(rows, skip_special_tokens=True)))

# The largest budget that keeps a mean time of a token, whatever else the machine does meanwhile.
deadline = DeadlineBudget(model, milliseconds_per_token=5)
text = model.generate(**inputs, step_budgets=deadline, max_new_tokens=100, do_sample=False)
budgets, seconds = zip(*deadline.history)
print(f"--- {1000 * sum(seconds) / len(seconds):.1f} ms a token, at budgets {sorted(set(budgets))}")
print(tokenizer.decode(text[0], skip_special_tokens=True))
