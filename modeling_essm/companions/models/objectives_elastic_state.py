# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What a state is refined on: a self-supervised objective, and the committed past that it may look at.

An objective is a callable, or a module, `objective(y, observation, history) -> (B,)`: one number >= 0 for each row from
the readout y (B, d_y), what is observed at this step, and what was committed before. It must be differentiable in y,
treat rows one by one, and neither change its tensors nor keep them.

`history` is None, or a dict of the last `history_length` steps, oldest first: "readouts" (B, W, d_y), "observations"
(B, W, ..) and "real" (B, W) bool. An objective with `initial_history(observation)` and `commit(history, y,
observation)` keeps one of its own instead: any nest of tensors whose first dimension is B. It begins with the first
real position of a row in the first call, or with an observation of zeros if there is none.

Code does not travel with weights. An objective that a model should find when it loads has a name in
`register_objective` and config.objective; its own weights are saved with the model. Others are attached after loading,
`set_objective`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .cache_states import tree_map


class SquaredError(nn.Module):
    """mean_i (y_i - x_i)^2 where the observation x is (B, d_y): how far the readout is from what is observed."""

    def forward(self, y: Tensor, observation: Tensor, history: Any = None) -> Tensor:
        if observation.shape != y.shape:
            raise ValueError(
                f"an observation must have readout_size={y.shape[-1]} numbers, in the shape {tuple(y.shape)} of the "
                f"readout, got {tuple(observation.shape)}"
            )
        return (y - observation).square().mean(-1)


OBJECTIVES: dict[str, Callable[..., Any]] = {"squared_error": SquaredError}


def register_objective(name: str, factory: Callable[..., Any]) -> None:
    """Let models whose config.objective is `name` make theirs by factory(**config.objective_arguments)."""
    OBJECTIVES[name] = factory


def make_objective(config: Any) -> Any:
    """The objective that the configuration names; None without a name, or with one that is not registered here."""
    factory = OBJECTIVES.get(config.objective)
    if factory is None:
        return None
    with torch.device("cpu"):  # from_pretrained makes models on the meta device, where constants have no values
        return factory(**(config.objective_arguments or {}))


def initial_history(objective: Any, observation: Any, width: int, y: Tensor) -> Any:
    """What an objective sees before the first step; y (B, d_y) gives dtype and device."""
    if hasattr(objective, "initial_history"):
        return objective.initial_history(observation)
    if not width:
        return None
    return {
        "readouts": y.new_zeros(len(y), width, y.shape[1]),
        "observations": tree_map(lambda x: x.new_zeros(len(x), width, *x.shape[1:]), observation),
        "real": torch.zeros(len(y), width, dtype=torch.bool, device=y.device),
    }


def commit(objective: Any, history: Any, y: Tensor, observation: Any, real: Tensor | None) -> Any:
    """The history after a step; rows that are not `real` (B,) keep theirs. y is detached: the past is data."""
    if history is None:
        return None
    y = y.detach()
    if hasattr(objective, "commit"):
        new = objective.commit(history, y, observation)
    else:
        step = {"readouts": y, "observations": observation, "real": torch.ones_like(y[:, 0], dtype=torch.bool)}
        new = tree_map(lambda old, x: torch.cat([old[:, 1:], x[:, None].to(old.dtype)], 1), history, step)
    if real is None:
        return new
    return tree_map(lambda old, x: torch.where(real.view(-1, *(1,) * (x.ndim - 1)), x, old), history, new)
