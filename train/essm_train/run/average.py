# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The exponential average of the weights that a run may keep."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from essm_train.run.finiteness import local


class WeightAverage:
    """Exponential moving average of the weights, in fp32 or better; shard by shard where they are sharded.

    The arithmetic is torch's; its `AveragedModel` would hold a copy of the whole model, sharded or compiled as it is.
    Early averages are not biased to the initial weights: the decay of update n is min(decay, (1 + n) / (10 + n)).
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay, self.updates = decay, 0
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        wide = [torch.promote_types(p.dtype, torch.float32) for p in self.parameters]
        self.average = [p.detach().to(dtype, copy=True) for p, dtype in zip(self.parameters, wide)]

    @torch.no_grad()
    def update(self) -> None:
        """After an optimizer step."""
        self.updates += 1
        update = get_ema_multi_avg_fn(min(self.decay, (1 + self.updates) / (10 + self.updates)))
        update(self.average, [p.to(mean.dtype) for p, mean in zip(self.parameters, self.average)], self.updates)

    def replace(self, replaced: Iterable[tuple[nn.Parameter, nn.Parameter]]) -> None:
        """Follow (old, new) Parameters of the model: an average in old coordinates says nothing in new ones, so it
        begins again at the new value."""
        places = {id(p): i for i, p in enumerate(self.parameters)}
        for old, new in replaced:
            if (i := places.get(id(old))) is not None:
                self.parameters[i] = new
                self.average[i] = new.detach().to(self.average[i].dtype, copy=True)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model with averaged weights; its own come back afterwards."""
        trained = [p.detach().clone() for p in self.parameters]
        self._copy(self.average)
        try:
            yield
        finally:
            self._copy(trained)

    @torch.no_grad()
    def _copy(self, values: Iterable[Tensor]) -> None:
        for parameter, value in zip(self.parameters, values):
            parameter.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """This process's part."""
        return {"updates": self.updates, "average": [local(t) for t in self.average]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From what `state_dict` gave on the process of the same rank."""
        self.updates = state["updates"]
        for average, saved in zip(self.average, state["average"], strict=True):
            local(average).copy_(saved)
