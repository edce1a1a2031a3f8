# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Random diagonal recurrences, what they do to inputs, and tiny models whose layers are such recurrences."""

import math

import torch
from torch import nn

from modeling_essm.companions import (
    DiagonalSSMConfig,
    DiagonalSSMForCausalLM,
    DiagonalSSMForSequenceClassification,
    hinf_norm,
)
from modeling_essm.companions.systems import DiagonalSystem
from modeling_essm.companions.truncation.training import InTrainingTruncation


def random_system(n=5, p=3, q=2, output="complex", r_min=0.4, r_max=0.95, seed=0, channels=None, directions=1):
    """Modes with moduli in [r_min, r_max] and any phase; with `channels` one recurrence of n modes for each."""
    g = torch.Generator().manual_seed(seed)
    C = (channels, n) if channels else (q, n)
    shapes = {"lam": C if channels else (n,), "B": C if channels else (n, p), "C": C if directions == 1 else (2, *C)}
    uniform = torch.rand(shapes["lam"], generator=g, dtype=torch.float64)
    phase = 2 * math.pi * torch.rand(shapes["lam"], generator=g, dtype=torch.float64)
    B, C = (torch.randn(*shapes[name], generator=g, dtype=torch.complex128) for name in ("B", "C"))
    return DiagonalSystem(torch.polar(r_min + (r_max - r_min) * uniform, phase), B, C, output)


def diagonal_model(kind, cls=DiagonalSSMForCausalLM, seed=0, **fields):
    """A tiny model in eval mode; embeddings of size 1, so that logits differ much more than they are rounded."""
    ids = {"vocab_size": 37, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    shape = {"hidden_size": 8, "num_hidden_layers": 3, "state_sizes": [5, 0, 3], "initializer_range": 0.5}
    torch.manual_seed(seed)
    return cls(DiagonalSSMConfig(**(ids | shape | {"parameterization": kind} | fields))).eval()


def ids_of(*shape, seed=0):
    """What such a model reads."""
    return torch.randint(3, 37, shape, generator=torch.Generator().manual_seed(seed))


def impulse_response(lam, B, C, lags):
    """C lam^k B, k = 0..lags-1: (lags, q, p), of lam (n,)."""
    terms = [B]
    for _ in range(lags - 1):
        terms.append(lam[:, None] * terms[-1])
    return torch.stack([C @ term for term in terms])


def error_norm(system, other):
    """The largest gain of the difference of two systems of lam (n,)."""
    lam, B = torch.cat([system.lam, other.lam]), torch.cat([system.B, other.B])
    return hinf_norm(DiagonalSystem(lam, B, torch.cat([system.C, -other.C], -1), system.output))


def regression(*sizes, seed=0):
    """Layers of LRU that turn (B, L, 4) features into one number a sequence."""
    shape = {"hidden_size": 4, "num_hidden_layers": len(sizes), "state_sizes": list(sizes)}
    shape |= {"num_input_features": 4, "num_labels": 1, "r_max": 0.995}
    return diagonal_model("lru", DiagonalSSMForSequenceClassification, seed, **shape)


def training_data(rows=32, length=6, seed=5):
    x = torch.randn(rows, length, 4, generator=torch.Generator().manual_seed(seed))
    return [{"input_features": row, "labels": row[0, 0] * row[1, 1]} for row in x]


def batch_of(rows):
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def on_two_ranks(group, steps=4):
    """Training in DistributedDataParallel with other data on each rank and truncations after steps 2 and 3, of which
    only the first rank may compute anything: sizes, weights, and how often the wrapper was exchanged gradients."""
    model = regression(8, 6)
    wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    truncation = InTrainingTruncation((2, 3), tau=0.1)
    if group.rank() == 1:
        truncation.tau = 0.9  # would choose other sizes
    batch = batch_of(training_data(8)[group.rank() :: 2])
    for step in range(1, steps + 1):
        wrapped(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        truncation.after_step(model, optimizer, step)  # as in Trainer, which does not show its wrapper to callbacks
    settings = (wrapped.find_unused_parameters, wrapped.training, wrapped.module is model)
    return model.config.state_sizes, truncation.history, dict(model.state_dict()), settings


def error_on_two_ranks(group):
    """What every rank says if the first cannot compute a truncation."""
    model = regression(8, 8)
    truncation = InTrainingTruncation((1,), tau=0.1)
    if group.rank() == 0:
        truncation.tau = 2.0
    try:
        truncation.after_step(model, torch.optim.AdamW(model.parameters()), 1)
    except ValueError as error:
        return str(error)
