# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""How the tests of generate() decode: every strategy, with and without a cache."""

import helpers
import pytest
import torch

NEW = 8
FIXED = {"max_new_tokens": NEW, "min_new_tokens": NEW}  # min_new_tokens keeps eos away, so that rows stay comparable
GREEDY = {**FIXED, "do_sample": False}
BEAMS = {**GREEDY, "num_beams": 3}
STRATEGIES = {
    "greedy": GREEDY,
    "sampling": {**FIXED, "do_sample": True, "top_k": 20, "temperature": 0.8},
    "beams": BEAMS,
    "all-beams": {**BEAMS, "num_return_sequences": 3},
    "sampled-beams": {**BEAMS, "do_sample": True},
    "many-samples": {**FIXED, "do_sample": True, "num_return_sequences": 3},
}
strategies = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES.keys())


def random_model(seed=2, **fields):
    """With so small an exponent late channels count as much as early ones, and decoding differs at K = 1, 3, 8, 32."""
    return helpers.random_model(seed=seed, **{"scaling_exponent": 0.02, **fields})


@torch.no_grad()
def greedy_without_cache(model, ids, **kwargs):
    """The definition of greedy decoding: one full forward pass per token."""
    for _ in range(NEW):
        logits = model(ids, use_cache=False, **kwargs).logits[:, -1]
        logits[:, 258] = -torch.inf  # eos
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
    return ids


def generate(model, ids, seed=0, **kwargs):
    torch.manual_seed(seed)
    return model.generate(ids, **kwargs)
