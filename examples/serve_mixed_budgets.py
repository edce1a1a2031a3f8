# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Continuous batching: requests of different lengths and budgets share one running batch, and come and go at any step.

    python examples/serve_mixed_budgets.py [runs/train_clm/model]

A request is read alone, at its own budget; then its state joins the batch. At the end the same requests run one after
another: same text, fewer tokens/s.
"""

import sys
import time

import torch

from modeling_essm import ESSMConfig, ESSMForCausalLM

SLOTS = 8
torch.manual_seed(0)
if len(sys.argv) > 1:
    model = ESSMForCausalLM.from_pretrained(sys.argv[1]).eval()
else:
    model = ESSMForCausalLM(ESSMConfig(hidden_size=64, num_hidden_layers=2)).eval()
BUDGETS = (2, 4, 6, model.config.num_spectral_channels)
prompts = [b"The ", b"In the beginning there was", b"def main(", b"It was a dark and", b"x", b"Once upon a time"] * 4
requests = [
    {"ids": torch.tensor([list(prompt)]), "budget": BUDGETS[i % 4], "new": 8 + 5 * (i % 7), "out": []}
    for i, prompt in enumerate(prompts)
]


@torch.inference_mode()
def serve(requests: list[dict], slots: int) -> float:
    """Fill every request's `out`; returns tokens per second."""
    waiting, running, cache = list(requests), [], None
    start = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < slots:  # admit
            request = waiting.pop(0)
            first = model(request["ids"], use_cache=True, spectral_budget=request["budget"], logits_to_keep=1)
            request["out"] = [int(first.logits[0, -1].argmax())]
            states = first.past_key_values
            cache = states if cache is None else type(states).merge([cache, states])
            running.append(request)
        tokens = torch.tensor([[request["out"][-1]] for request in running])
        budgets = torch.tensor([request["budget"] for request in running])
        logits = model(tokens, past_key_values=cache, use_cache=True, spectral_budget=budgets).logits[:, -1]
        for request, token in zip(running, logits.argmax(-1).tolist()):
            request["out"].append(token)
        stay = [i for i, request in enumerate(running) if len(request["out"]) < request["new"]]
        if len(stay) < len(running):  # evict
            running, cache = [running[i] for i in stay], cache.select(stay) if stay else None
    return sum(len(request["out"]) for request in requests) / (time.perf_counter() - start)


batched = serve(requests, SLOTS)
together = [request["out"] for request in requests]
alone = serve(requests, 1)
print(f"{len(requests)} requests at K in {BUDGETS}: {batched:,.0f} tokens/s in {SLOTS} slots, {alone:,.0f} in one")
print("rows equal solo runs:", together == [request["out"] for request in requests])
