# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Where proposals come from: the model's own recurrence, or a latent beside any causal backbone of transformers.

    z0_{t+1} = lam z_t + exp(gamma) B (W x_{t+1} + b),    lam = exp(-exp(nu) + i exp(theta))     (LRU, Orvieto et al.)

z_t is the state that was committed, after refinement, as pairs of real numbers [Re, Im], (B, 2n). Beside another
backbone h = backbone(W_x x + W_z z), and z0 = Retract(W_p h). With feedback the committed z enters the next input, and
the backbone runs step by step; its cache is cut from the graph after each of them: gradients go through z from step to
step. Without feedback the backbone reads a sequence that begins at once.
Letters: B batch, L sequence, F input features, H width of the recurrence, n modes, d width of a latent.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel
from transformers import initialization as init

from .cache_states import CACHE

Propose = Callable[[int, Tensor], Tensor]  # (t, committed z (B, d)) -> proposal (B, d)


class ElasticStateRecurrence(nn.Module):
    """Weights `nu_log`, `theta_log`, `gamma_log` (n,), `B` (n, H, 2), and the linear encoder `embed_features`."""

    has_spectral_budget = False

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        n = config.latent_size // 2
        self.embed_features = nn.Linear(config.num_input_features, config.hidden_size)
        self.nu_log, self.theta_log, self.gamma_log = (
            nn.Parameter(torch.empty(n, dtype=torch.float32)) for _ in range(3)
        )
        self.B = nn.Parameter(torch.empty(n, config.hidden_size, 2))

    def start(self, features: Tensor, real: Tensor | None, cache: Any, spectral_budget: Any) -> Propose:
        """Reads (B, L, F). The committed state is all there is: the other arguments are not read."""
        dtype = torch.promote_types(self.nu_log.dtype, torch.float32)
        modulus, angle = (-self.nu_log.to(dtype).exp()).exp(), self.theta_log.to(dtype).exp()
        re, im = modulus * angle.cos(), modulus * angle.sin()
        weight = self.gamma_log.to(dtype).exp()[:, None, None] * self.B.to(dtype)
        u = self.embed_features(features.to(self.embed_features.weight.dtype)).to(dtype)
        drive = u @ weight.movedim(2, 0).flatten(0, 1).mT  # (B, L, 2n)

        def propose(t: int, z: Tensor) -> Tensor:
            x, y = z.chunk(2, 1)
            return torch.cat([re * x - im * y, im * x + re * y], 1) + drive[:, t]

        return propose

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """|lam|^2 uniform in [r_min^2, r_max^2], phase uniform in (0, max_phase), B as published."""
        low, high = self.config.r_min**2, self.config.r_max**2
        squares = torch.empty_like(self.nu_log, dtype=torch.float32).uniform_() * (high - low) + low
        squares = squares.clamp(1e-8, 1 - 2e-7)  # in fp32 whatever the weights are: bf16 would round many to 1
        phases = torch.empty_like(self.theta_log).uniform_() * self.config.max_phase
        init.copy_(self.nu_log, (-0.5 * squares.log()).log())
        init.copy_(self.theta_log, phases.clamp(min=1e-8).log())
        init.copy_(self.gamma_log, 0.5 * torch.log1p(-squares))
        init.normal_(self.B, std=(2 * self.config.hidden_size) ** -0.5)


def detach(value: Any, seen: set[int]) -> Any:
    """A cache of any class without the graph of its tensors, in lists, dicts and layers too."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {key: detach(held, seen) for key, held in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(detach(held, seen) for held in value)
    if id(value) not in seen and hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)):
        seen.add(id(value))
        for name, held in vars(value).items():
            if isinstance(held, (Tensor, dict, list, tuple)):
                setattr(value, name, detach(held, seen))
    return value


class ElasticStateLatent(nn.Module):
    """`backbone`, and the linear maps `embed_features`, `feedback` (if there is one) and `proposal`."""

    def __init__(self, config: Any):
        super().__init__()
        self.backbone = AutoModel.from_config(config.backbone_config, dtype=torch.get_default_dtype())
        backbone = config.backbone_config = self.backbone.config  # one object: sizes that change are saved
        self.embed_features = nn.Linear(config.num_input_features, backbone.hidden_size)
        self.feedback = nn.Linear(config.latent_size, backbone.hidden_size, bias=False) if config.feedback else None
        self.proposal = nn.Linear(backbone.hidden_size, config.latent_size)
        arguments = inspect.signature(self.backbone.forward).parameters
        self.has_spectral_budget = "spectral_budget" in arguments
        names = [name for name in (CACHE, "cache_params") if name in arguments]
        if not names:
            raise ValueError(f"a backbone needs {CACHE} or cache_params, {type(self.backbone).__name__} has none")
        self.cache_name = names[0]

    def start(self, features: Tensor, real: Tensor | None, cache: Any, spectral_budget: Any) -> Propose:
        """Reads (B, L, F); proposals are not retracted yet.

        Args:
            real: None, as all are. cache: a `StateCache`, whose backbone is replaced, or None.
            spectral_budget: the backbone's, or None for its default.
        Raises:
            ValueError: positions that are not real; training with feedback of a backbone that writes in place.
        """
        if real is not None:
            raise ValueError("attention_mask with zeros needs the model's own recurrence, without backbone_config")
        in_place = getattr(self.backbone, "_is_stateful", False) and type(self.backbone).__module__.startswith(
            "transformers.models"
        )
        if self.training and self.feedback is not None and in_place:
            raise ValueError(
                f"{type(self.backbone).__name__} writes its state in place, which gradients cannot follow from step to "
                "step: train with feedback=False"
            )
        extra = {} if spectral_budget is None else {"spectral_budget": spectral_budget}
        u = self.embed_features(features.to(self.embed_features.weight.dtype))
        past = None if cache is None else cache.backbone

        def run(inputs: Tensor, keep: bool) -> Tensor:
            nonlocal past
            if not len(inputs):  # which attention of the library cannot read
                return self.proposal(inputs.to(self.proposal.weight.dtype))
            given = {self.cache_name: past, "use_cache": keep, **extra}
            outputs = self.backbone(inputs_embeds=inputs, return_dict=True, **given)
            past = getattr(outputs, self.cache_name, None) if keep else None
            if torch.is_grad_enabled() and past is not None:
                past = detach(past, set())
            if cache is not None:
                cache.backbone = past
            return self.proposal(outputs.last_hidden_state.to(self.proposal.weight.dtype))

        feedback = self.feedback
        if feedback is None and (past is None or u.shape[1] == 1):
            proposals = run(u, cache is not None)
            return lambda t, z: proposals[:, t]

        def propose(t: int, z: Tensor) -> Tensor:  # also of a longer piece: not every recurrence continues one
            entered = u[:, t] if feedback is None else u[:, t] + feedback(z.to(feedback.weight.dtype))
            return run(entered[:, None], True)[:, 0]

        return propose
