# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Continuous batching: requests of different lengths and budgets share one running batch, and come and go at any step.

    python examples/serve_mixed_budgets.py [hub_configs/essm-novels-6m]

At the end the same requests run one after another: same text, fewer tokens/s.
"""

import sys
import time

import torch

from modeling_essm import ESSMConfig, ESSMForCausalLM
from modeling_essm.decoding import ContinuousBatch

SLOTS = 8
torch.manual_seed(0)
if len(sys.argv) > 1:
    model = ESSMForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
else:
    model = ESSMForCausalLM(ESSMConfig(hidden_size=64, num_hidden_layers=2)).eval()
BUDGETS = (2, 4, 6, model.config.num_spectral_channels)
prompts = [b"The ", b"In the beginning there was", b"def main(", b"It was a dark and", b"x", b"Once upon a time"] * 4


def serve(slots: int) -> tuple[list[list[int]], float]:
    """The new tokens of every request, and tokens per second."""
    batch = ContinuousBatch(model, max_state_bytes=1 << 30, max_rows=slots)
    requests = [
        batch.submit(list(prompt), max_new_tokens=8 + 5 * (i % 7), spectral_budget=BUDGETS[i % 4], eos_token_id=[])
        for i, prompt in enumerate(prompts)
    ]
    start = time.perf_counter()
    while batch:
        batch.step()
    tokens = [request.tokens for request in requests]
    return tokens, sum(map(len, tokens)) / (time.perf_counter() - start)


together, batched = serve(SLOTS)
one_by_one, alone = serve(1)
print(f"{len(prompts)} requests at K in {BUDGETS}: {batched:,.0f} tokens/s in {SLOTS} slots, {alone:,.0f} in one")
print("rows equal solo runs:", together == one_by_one)
