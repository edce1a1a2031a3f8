# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Train a small S5 to tell damped tones apart, then take modes out of it without training.

python examples/prune_a_state_space.py [updates, by default 150]
"""

import copy
import math
import sys

import torch

from modeling_essm.companions import (
    DiagonalSSMConfig,
    DiagonalSSMForSequenceClassification,
    allocate,
    importance,
    prune,
    remove,
)

torch.manual_seed(0)
torch.set_num_threads(1)
config = DiagonalSSMConfig(
    num_input_features=1, num_labels=8, hidden_size=16, num_hidden_layers=2, state_size=32, bidirectional=True
)
model = DiagonalSSMForSequenceClassification(config)


def tones(count):
    """(count, 96, 1) noisy tones of two pitches and four decays, and their classes."""
    labels = torch.randint(8, (count,))
    t = torch.arange(96.0)
    pitch, decay = 0.05 + 0.1 * (labels % 2)[:, None], 0.01 * 2.0 ** (labels // 2)[:, None]
    tone = torch.exp(-decay * t) * torch.sin(2 * math.pi * (pitch * t + torch.rand(count, 1)))
    return (tone + 0.1 * torch.randn(count, 96))[..., None], labels


optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 150):
    signals, labels = tones(32)
    model(input_features=signals, labels=labels).loss.backward()
    optimizer.step()
    optimizer.zero_grad()

signals, labels = tones(512)
for ratio in (0.0, 0.25, 0.5, 0.75):
    for method in ("aire", "last", "random"):
        smaller = copy.deepcopy(model).eval()
        prune(smaller, allocate(importance(smaller, method), amount=ratio))
        modes = remove(smaller)
        with torch.no_grad():
            accuracy = (smaller(input_features=signals).logits.argmax(-1) == labels).float().mean()
        size = smaller.num_parameters()
        print(f"{ratio:.0%} pruned by {method}: accuracy {accuracy:.1%}, modes {modes}, {size:,} parameters")
