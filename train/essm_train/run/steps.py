# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The plain pieces of training: parameter groups, optimizers, the learning rate, one update.

`update` is where an optimizer steps in training. `essm_train.run.loop` calls it under Accelerate, with checkpoints and
validation around it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel, get_scheduler
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from modeling_essm.loading_essm import channel_parameters


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """AdamW's groups. Matrices decay; norms, biases and embeddings (with the tied head) do not, nor what its author
    marked `_no_weight_decay`, as the state matrices of Mamba. Trainer's groups decay embeddings."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    parameters = [p for p in model.parameters() if p.requires_grad]
    exempt = [p.ndim < 2 or id(p) in embeddings or getattr(p, "_no_weight_decay", False) for p in parameters]
    decayed = [p for p, is_exempt in zip(parameters, exempt) if not is_exempt]
    others = [p for p, is_exempt in zip(parameters, exempt) if is_exempt]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def adamw(
    model: nn.Module,
    learning_rate: float | Tensor,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    capturable: bool = False,
) -> torch.optim.AdamW:
    """AdamW over `parameter_groups`, fused where the device has it; `capturable` in a CUDA graph, as torch's is."""
    fused = next(model.parameters()).device.type in ("cpu", "cuda", "mps", "xpu")
    groups = parameter_groups(model, weight_decay)
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=fused, capturable=capturable)


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) for the matrices of linear layers of
    `model.base_model`, AdamW for all else, embeddings and heads included; one learning rate and weight decay for both.

    A matrix (m, n) moves by lr * 0.2 sqrt(max(m, n)) times its orthogonalized Nesterov momentum: by the RMS of AdamW's
    steps (Liu et al. 2025, arXiv 2502.16982). So what an update did not train moves on as fast, along its old momentum.
    What `slices` tells apart are matrices of their own: in a whole one the gradients of later channels change the
    direction in which the first ones move.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        learning_rate: float | Tensor,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        capturable: bool = False,
    ) -> None:
        self._rest = adamw(model, learning_rate, weight_decay, betas, capturable)
        decayed = self._rest.param_groups[0]
        linear = {id(m.weight) for m in model.base_model.modules() if isinstance(m, nn.Linear)}
        matrices = [p for p in decayed["params"] if id(p) in linear]
        decayed["params"] = [p for p in decayed["params"] if id(p) not in linear]
        apart = slices(model)
        groups: dict[Any, dict[str, Any]] = {}
        for p in matrices:
            of_its_own = apart.get(id(p), (0, ()))
            group = {"params": [], "weight_decay": weight_decay, "momentum": 0.95, "slices": of_its_own}
            groups.setdefault(of_its_own, group)["params"].append(p)
        super().__init__([*groups.values(), *self._rest.param_groups], {"lr": learning_rate})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups[:-2]:  # other objects after load_state_dict, as the state is
            beta, (dim, sizes) = group["momentum"], group["slices"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                if "momentum_buffer" not in (state := self.state[p]):
                    state["momentum_buffer"] = torch.zeros_like(p)
                momentum = state["momentum_buffer"]
                momentum.lerp_(p.grad, 1 - beta)
                pieces = whole(p.grad.lerp(momentum, beta)).split(sizes or p.shape[dim], dim)
                moves: list[Tensor] = []
                for shape, alike in itertools.groupby(pieces, lambda piece: piece.shape):
                    moves += (orthogonalized(torch.stack([*alike])) * (0.2 * math.sqrt(max(shape)))).unbind()
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(torch.cat(moves, dim) * group["lr"])  # a graph on CUDA has no number for add_'s alpha
        self._rest.state, self._rest.param_groups = self.state, self.param_groups[-2:]
        self._rest.step()


def slices(model: PreTrainedModel) -> dict[int, tuple[int, tuple[int, ...]]]:
    """Weights that hold several matrices, by id: the dimension along which these lie, and their sizes there.

    The channels of an ES-SSM; z, x, B, C and dt of Mamba-2, if it is nested with a matrix for each share of its heads.
    """
    found = {}
    if hasattr(model.config, "capacities"):
        for _, block, _, _, p in channel_parameters(model):
            dim = len(block) - 1
            found[id(p)] = dim, (block[dim],) * (p.shape[dim] // block[dim])
    for mixer in model.modules():
        if isinstance(mixer, Mamba2Mixer):
            shares = getattr(mixer, "capacity", 1)
            units, state = (mixer.intermediate_size // shares,) * shares, mixer.n_groups * mixer.ssm_state_size
            found[id(mixer.in_proj.weight)] = 0, (*units, *units, state, state, mixer.num_heads)
            found[id(mixer.out_proj.weight)] = 1, units
    return found


def whole(tensor: Tensor) -> Tensor:
    """The tensor, gathered to every process if it is a shard of FSDP2."""
    if isinstance(tensor, DTensor):
        return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
    return tensor


def orthogonalized(matrices: Tensor) -> Tensor:
    """About U V^T of each matrix U S V^T in (B, m, n): five Newton-Schulz steps with Jordan's coefficients bring
    singular values that are not tiny to between 0.68 and 1.14. In bfloat16 on CUDA, else in fp32: most CPUs multiply
    bfloat16 slowly."""
    x = matrices.to(torch.bfloat16 if matrices.device.type == "cuda" else torch.float32)
    x = x.mT if (tall := x.size(1) > x.size(2)) else x  # the smaller Gram matrix
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return (x.mT if tall else x).to(matrices.dtype)


def make_optimizer(model: Any, args: Any) -> torch.optim.Optimizer:
    """The optimizer that RunArguments ask for."""
    make = Muon if args.optimizer == "muon" else adamw
    return make(model, args.learning_rate, args.weight_decay, (0.9, args.adam_beta2))


def make_scheduler(
    optimizer: torch.optim.Optimizer,
    warmup_steps: int,
    plan: Sequence[Sequence[int]],
    name: str = "cosine",
    own: Mapping[str, Any] | None = None,
) -> torch.optim.lr_scheduler.LambdaLR:
    """A schedule of transformers, once more for every time that a run is extended; it steps once per update.

    Args:
        plan: first update and end of the run as it was started and of each extension. name: of `get_scheduler`.
        own: its arguments for this schedule alone, such as {"num_decay_steps": 100} for "warmup_stable_decay".

    Raises:
        ValueError: the warm-up and those updates of decay are more than an end leaves.
    """
    decay = dict(own or {}).get("num_decay_steps", 0)
    stand_in = torch.optim.SGD([torch.zeros(1)], optimizer.defaults["lr"])  # get_scheduler changes what it is given
    rate: Callable[[int], float] | None = None
    for first, end in plan:
        if decay and warmup_steps + decay > end - first:
            given = f"{warmup_steps} + {decay}"
            raise ValueError(
                f"warmup_steps + decay_steps must be at most the {end - first} updates to come, got {given}"
            )
        schedule = get_scheduler(name, stand_in, warmup_steps, end - first, dict(own or {})).lr_lambdas[0]
        rate = schedule if rate is None else _extended(rate, first, schedule, warmup_steps)
    assert rate is not None
    return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


def _extended(
    earlier: Callable[[int], float], first: int, schedule: Callable[[int], float], warmup_steps: int
) -> Callable[[int], float]:
    """Share of the peak rate at update n: `earlier` until `first`, a rise r + (1 - r) (n - first) / warmup_steps from
    r, where it stands, then the schedule of n - first."""
    start = earlier(first)

    def rate(update: int) -> float:
        if update < first:
            return earlier(update)
        if update < first + warmup_steps:
            return start + (1 - start) * (update - first) / warmup_steps
        return schedule(update - first)

    return rate


def check_finite(loss: Tensor, norm: Tensor) -> None:
    """Raises FloatingPointError unless loss and gradient norm are finite; waits for the device."""
    if not math.isfinite(float(loss + norm)):
        raise FloatingPointError(f"loss is {float(loss)}, gradient norm {float(norm)}")


def update(
    optimizer: torch.optim.Optimizer,
    losses: Iterable[Tensor],
    parameters: Iterable[Tensor],
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    max_grad_norm: float = 1.0,
    *,
    backward: Callable[[Tensor], object] = torch.autograd.backward,
    clip: Callable[..., Tensor] = nn.utils.clip_grad_norm_,
    check: Callable[[Tensor, Tensor], object] = check_finite,
) -> Tensor:
    """One step of the optimizer, and of the learning rate, on the clipped gradient of the sum of the losses.

    Args:
        losses: () tensors. The next one is drawn after the backward pass of the one before, so a generator holds one
            graph at a time, and what it does around its `yield` holds in that backward pass too.
        backward, clip: those of an Accelerator, where there is one.
        check: is given the sum of the losses and the gradient norm before the step. What it raises prevents the step.
    Returns:
        The gradient norm before clipping, ().
    """
    total: Tensor | float = 0.0
    for loss in losses:
        backward(loss)
        total = total + loss.detach()
    norm = clip(parameters, max_grad_norm)
    check(torch.as_tensor(total), norm)
    optimizer.step()
    if scheduler is not None:
        scheduler.step()
    optimizer.zero_grad()
    return norm
