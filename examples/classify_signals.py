# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Continuous inputs: train a classifier of noisy damped tones in a minute, then run it at several budgets.

    python examples/classify_signals.py [updates]

Frames of 8 samples go in through `input_features`; the four classes are two frequencies times two decays.
"""

import sys

import torch

from modeling_essm import ESSMConfig, ESSMForSequenceClassification


def signals(n: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy tones (n, 32 frames, 8 samples) and their classes (n,)."""
    labels = torch.randint(0, 4, (n,), generator=generator)
    t = torch.arange(256) + 256 * torch.rand(n, 1, generator=generator)  # random phase
    frequency = torch.where(labels % 2 == 0, 0.05, 0.08)[:, None]
    decay = torch.where(labels < 2, 2.0, 6.0)[:, None]
    tone = torch.sin(6.283 * frequency * t) * torch.exp(-decay * torch.linspace(0, 1, 256))
    return (tone + 0.3 * torch.randn(n, 256, generator=generator)).view(n, 32, 8), labels


updates = int(sys.argv[1]) if len(sys.argv) > 1 else 200
torch.manual_seed(0)
config = ESSMConfig(
    hidden_size=32, num_hidden_layers=2, num_spectral_channels=16, filter_length=256, num_input_features=8, num_labels=4
)
model = ESSMForSequenceClassification(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
generator = torch.Generator().manual_seed(1)
budgets = (2, 4, 8, 16)
for update in range(updates):
    features, labels = signals(64, generator)
    model(input_features=features, labels=labels, spectral_budget=budgets[update * 7 % 4]).loss.backward()
    optimizer.step()
    optimizer.zero_grad()

model.eval()
features, labels = signals(2000, generator)
with torch.no_grad():
    for budget in budgets:
        accuracy = (model(input_features=features, spectral_budget=budget).logits.argmax(1) == labels).float().mean()
        print(f"K = {budget:2}: accuracy {accuracy:.3f}")
