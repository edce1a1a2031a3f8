# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The weights of a run: their exponential average, whether they are finite, and the folder they are saved in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import PreTrainedModel

from essm_train.run.checkpoints import publishing


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor that may be sharded (a DTensor under FSDP2)."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class WeightAverage:
    """Exponential moving average of the weights, in fp32 or better; shard by shard where they are sharded.

    The arithmetic is torch's; its `AveragedModel` would hold a copy of the whole model, sharded or compiled as it is.
    Early averages are not biased to the initial weights: the decay of update n is min(decay, (1 + n) / (10 + n)).
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay, self.updates = decay, 0
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self.average = [p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True) for p in self.parameters]

    @torch.no_grad()
    def update(self) -> None:
        """After an optimizer step."""
        self.updates += 1
        update = get_ema_multi_avg_fn(min(self.decay, (1 + self.updates) / (10 + self.updates)))
        update(self.average, [p.to(mean.dtype) for p, mean in zip(self.parameters, self.average)], self.updates)

    def replace(self, replaced: Iterable[tuple[nn.Parameter, nn.Parameter]]) -> None:
        """Follow (old, new) Parameters of the model. An average in old coordinates says nothing in new ones, so it
        begins again at the new value."""
        places = {id(p): i for i, p in enumerate(self.parameters)}
        for old, new in replaced:
            if (i := places.get(id(old))) is not None:
                self.parameters[i] = new
                self.average[i] = new.detach().to(self.average[i].dtype, copy=True)

    @contextmanager
    @torch.no_grad()
    def applied(self) -> Iterator[None]:
        """The model with averaged weights; its own come back afterwards."""
        trained = [p.detach().clone() for p in self.parameters]
        try:
            self._set(self.average)
            yield
        finally:
            self._set(trained)

    def _set(self, values: list[Tensor]) -> None:
        for module in self.sharded:  # or what is still gathered keeps other values
            module.reshard()
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


def non_finite(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, average: Iterable[Tensor]
) -> list[str]:
    """Which of weights, averaged weights and optimizer state hold NaN or infinity, on any process. All must call it.

    The loss of an update is computed before its step, so a finite loss says nothing about the weights that it leaves.

    Args:
        average: tensors of the weights' average, shard by shard; empty without one.
    """
    buffers = [  # those that are saved: the others may well hold -inf, as masks do
        buffer
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    ]
    parts = {
        "the weights": [*model.parameters(), *buffers],
        "the averaged weights": [*average],
        "the optimizer's state": [
            v for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v)
        ],
    }
    broken = torch.zeros(len(parts), dtype=torch.int64, device=accelerator.device)
    with torch.no_grad():
        for i, tensors in enumerate(parts.values()):
            for tensor in map(local, tensors):
                if tensor.is_floating_point() or tensor.is_complex():
                    broken[i] += (~tensor.isfinite().all()).to(broken.device)
    return [name for name, count in zip(parts, accelerator.reduce(broken, "sum").tolist()) if count]


def save_model(
    accelerator: Accelerator,
    model: nn.Module,
    network: PreTrainedModel,
    folder: Path,
    save_beside: Callable[[Path], object],
) -> None:
    """Publish a loadable folder: weights gathered from all processes, code, and what is saved beside. All must call it.

    Args:
        model: the network as Accelerate wraps it.
    """
    state = accelerator.get_state_dict(model)
    with publishing(accelerator, folder) as temporary:
        if accelerator.is_main_process:
            cls = next(c for c in type(network).__mro__ if not c.__module__.startswith("torch."))  # not FSDP2's own
            with torch.device("meta"):  # draws no random numbers
                copy = cls(network.config)
            copy.load_state_dict({name: value.cpu() for name, value in state.items()}, assign=True)
            copy.tie_weights()
            copy.generation_config = getattr(network, "generation_config", None)
            copy.save_pretrained(temporary)
            save_beside(temporary)
