# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""A filter that works longer where its stream surprises it. Eight noisy sensors read a rotating state, which jumps at
one step in twenty. The model predicts each reading from the one before, and refines its state where the reading says
that it was wrong, as often as a gate grants. Nothing tells it where the jumps are.

python examples/refine_a_stream.py [updates, by default 150]
"""

import sys

import torch

from modeling_essm.companions import ElasticStateConfig, ElasticStateModel

torch.manual_seed(0)
torch.set_num_threads(1)
sizes = {"num_input_features": 8, "latent_size": 16, "hidden_size": 32, "readout_hidden_size": 0}
model = ElasticStateModel(ElasticStateConfig(**sizes, objective="squared_error", compute_penalty=0.02))
sensors = torch.randn(4, 8) / 2


def streams(batch, length=49):
    """Readings (batch, length, 8), and where the state jumped, (batch, length) bool."""
    angle = torch.tensor([0.3, 0.8])
    jumps = torch.rand(batch, length) < 0.05
    state, readings = torch.randn(batch, 2, dtype=torch.cfloat), []
    for t in range(length):
        new = torch.randn(batch, 2, dtype=torch.cfloat)
        state = torch.where(jumps[:, t, None], new, state * torch.exp(1j * angle))
        clean = torch.view_as_real(state).flatten(1) @ sensors
        readings.append(clean + 0.05 * torch.randn_like(clean))
    return torch.stack(readings, 1), jumps


optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 150):
    readings, _ = streams(16)
    model(readings[:, :-1], readings[:, 1:]).loss.backward()  # error, and 0.02 for each inner step
    optimizer.step()
    optimizer.zero_grad()

model.eval()
readings, jumps = streams(64)
for name, depth in (("no refinement", 0), ("the gate's depth", None), ("all steps", 4)):
    with torch.no_grad():
        output = model(readings[:, :-1], readings[:, 1:], refine_depth=depth)
    K, jumped = output.refine_depths.float(), jumps[:, 1:]
    print(f"{name}: error {output.losses.mean():.4f}, {K.mean():.2f} inner steps a position", end="")
    print(f", {K[jumped].mean():.2f} at jumps, {K[~jumped].mean():.2f} elsewhere")
