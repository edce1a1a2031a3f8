# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Gate and mixer of the paper's block, Eq. (7-8), and what the elastic one shares with it.

Letters: B batch, L sequence, D width, K budget, N states.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.activations import ACT2FN

from .cache_essm import ESSMCacheLayer, operator_of
from .packing import Packing
from .spectral_constants import is_transformed, later_filters, root_of_filters

_GATE_EPS = 1e-6  # eps of Eq. (8)


@dataclass(frozen=True)
class LayerCall:
    """What a call says to a spectral layer beside its input and its cache.

    Attributes:
        budget: K, the largest of any row. rows: (B,) K of each row, or None where all run `budget`.
        padding: (B, L, 1) bool, true at masked positions, or None.
        lengths: (B,) int64 in [0, L], steps after which the state is taken, as in `SpectralOperator`; None for L.
        packing: where sequences begin in packed rows, or None.
    """

    budget: int
    rows: Tensor | None = None
    padding: Tensor | None = None
    lengths: Tensor | None = None
    packing: Packing | None = None

    def to(self, device: torch.device, non_blocking: bool = False) -> LayerCall:
        """The same on a layer's device: Accelerate's hooks move what has a `to`, and look into no dataclass."""
        tensors = {name: getattr(self, name) for name in ("rows", "padding", "lengths")}
        moved = {name: t.to(device, non_blocking=non_blocking) for name, t in tensors.items() if t is not None}
        return dataclasses.replace(self, **moved)


def prefix_linear(module: Any, x: Tensor, outputs: int | None = None) -> Tensor:
    """What a linear layer computes from its first inputs, those of x (.., n), for its first outputs.

    A plain nn.Linear reads that block of its weights alone. Whatever wraps, replaces or watches one (LoRA, torchao,
    hooks) is called with zeros appended to x, which is right everywhere.
    """
    if type(module) is nn.Linear and not _is_watched(module) and not hasattr(module.weight, "__tensor_flatten__"):
        weight, bias = module.weight, module.bias
        if x.shape[-1] < weight.shape[1]:
            weight = weight[:, : x.shape[-1]]
        if outputs is not None:
            weight = weight[:outputs]
        if bias is None and _are_few_rows(x, weight):
            return (weight @ x.flatten(0, -2).T).T.contiguous().unflatten(0, x.shape[:-1])
        return F.linear(x, weight, None if bias is None else bias[:outputs])
    return module(F.pad(x, (0, module.in_features - x.shape[-1])))[..., :outputs]


def _are_few_rows(x: Tensor, weight: Tensor) -> bool:
    """Whether W x^T is faster than x W^T: on a CPU, where BLAS copies W first for x (n, ..) of 2 to 6 rows."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.compiler.is_exporting():
        return False
    rows = x.numel() // x.shape[-1]
    return 1 < rows <= 6 and x.device.type == "cpu" and x.dtype == torch.float32 and weight.numel() >= 1 << 17


def _is_watched(module: nn.Module) -> bool:
    """Whether a call of the module does more than its class says: hooks, or a `forward` of its own as of Accelerate."""
    hooks = module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
    return bool(hooks) or "forward" in module.__dict__


def beyond(rows: Tensor, budget: int) -> Tensor:
    """(B, 1, K) bool: channels of the first K that a row of budget (B,) does not have."""
    return (torch.arange(budget, device=rows.device) >= rows[:, None])[:, None]


def at_unit_scale(linear: nn.Linear) -> nn.Linear:
    """Marks a layer of the elastic block that reads what a norm has scaled: it starts at 1 / sqrt(its inputs)."""
    linear.starts_at_unit_scale = True  # type: ignore[assignment]
    return linear


def quieter_by_channel(linear: nn.Linear, channels: int) -> nn.Linear:
    """Marks a layer that sums the outputs of channels: later ones start smaller, see `loudness`."""
    linear.sums_channels = channels  # type: ignore[assignment]
    return linear


def loudness(channels: int) -> Tensor:
    """(channels,) factors 1, 1, 1/2, 1/2, then four times 1/4, .. of what channels write at the start.

    So the channels of small budgets lead from the first update on: all sizes of one training end better.
    """
    return torch.tensor([min(1.0, 2.0 / (1 << (j - 1).bit_length())) for j in range(1, channels + 1)])


def softmax_gates(scores: Tensor, budget: int, rows: Tensor | None = None) -> Tensor:
    """alpha_k(t) of Eq. (8), normalised over the active prefix of channels only.

    Args:
        scores: (B, L, K, ..) of the first K channels. budget: K, the largest of any row. rows: (B,) K of each, or None.
    Returns:
        the same shape, in fp32 or better; zero beyond a row's own K.
    """
    if rows is None:
        return _normalised_softmax(scores, budget**0.5)
    heads = (1,) * (scores.ndim - 3)
    root = rows.to(torch.promote_types(scores.dtype, torch.float32)).sqrt().view(-1, 1, 1, *heads)
    return _normalised_softmax(scores, root, beyond(rows, budget).view(-1, 1, budget, *heads))


def nested_gates(scores: Tensor, filter_length: int) -> Tensor:
    """alpha_kj(t) of Eq. (8) for each head j over filters 1 to j: scores (B, L, K, K), filter before head, to the same.

    In fp32 or better; zero at later filters.
    """
    K, device, dtype = scores.shape[2], str(scores.device), torch.promote_types(scores.dtype, torch.float32)
    later = later_filters(filter_length, device)[:K, :K]
    return _normalised_softmax(scores, root_of_filters(filter_length, device, dtype)[:K], later)


def _normalised_softmax(scores: Tensor, root: Tensor | float, inactive: Tensor | None = None) -> Tensor:
    """Eq. (8) over dimension 2. root: of the number of active entries. inactive: true at the others, which become 0."""
    s = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if inactive is not None:
        s = s.masked_fill(inactive, 0.0)
    s = s * (root / (torch.linalg.vector_norm(s, dim=2, keepdim=True) + _GATE_EPS))
    return (s if inactive is None else s.masked_fill(inactive, -math.inf)).softmax(2)


class ESSMPrefixLinear(nn.Module):
    """Scores of the first channels only: (.., D_in), n -> (.., n); reads n rows of the weights.

    It is no nn.Linear, because tools replace those by layers that know nothing of n. The mixer initialises it.
    """

    def __init__(self, in_features: int, channels: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, in_features))
        self.bias = nn.Parameter(torch.empty(channels))

    def forward(self, x: Tensor, num_outputs: int) -> Tensor:
        return F.linear(x, self.weight[:num_outputs], self.bias[:num_outputs])


class ESSMSpectralMixer(nn.Module):
    """Eq. (7-8): y(t) = D u(t) + sum_{k<=K} alpha_k(t) sigma_k^{1/4} M_k (phi_k * u)(t); channels > K are not read.

    With `gating="none"` alpha is 1, Eq. (6).
    """

    def __init__(self, config: Any, capacity: int):
        super().__init__()
        D, D_g = config.hidden_size, config.gate_hidden_size
        self.operator = operator_of(config)
        self.algorithm, self.scaling_exponent = config.spectral_algorithm, config.scaling_exponent
        self.gated, self.gate_bias = config.gating == "softmax", config.gate_bias  # 0 would amplify noise to unit scale
        self.skip = nn.Linear(D, D, bias=False)
        self.channel_mixing = nn.Parameter(torch.empty(capacity, D, D))
        if self.gated:
            self.gate_in = nn.Linear(D, D_g)
            self.gate_out = ESSMPrefixLinear(D_g, capacity)
            self.gate_act = ACT2FN[config.hidden_act]

    @torch.no_grad()
    def init_weights(self, std: float) -> None:
        """Start the weights that are no linear layer's."""
        init.normal_(self.channel_mixing, mean=0.0, std=1e-3)
        if self.gated:
            init.normal_(self.gate_out.weight, mean=0.0, std=std)
            init.constant_(self.gate_out.bias, self.gate_bias)

    def gates(self, u: Tensor, budget: int, rows: Tensor | None = None) -> Tensor:
        """alpha_k(t) sigma_k^{1/4} of Eq. (7-8): (B, L, D) to (B, L, K) in u's dtype; zero beyond a row's own K.

        Args:
            budget: K, the largest of any row. rows: (B,) K of each row, or None.
        """
        sigma = self.operator.sigma(budget, self.scaling_exponent, u)
        if not self.gated:
            gates = sigma.expand(*u.shape[:2], budget)
            return gates if rows is None else gates.masked_fill(beyond(rows, budget), 0.0)
        alpha = softmax_gates(self.gate_out(self.gate_act(self.gate_in(u)), budget), budget, rows).to(u.dtype)
        return alpha * sigma if self.scaling_exponent else alpha

    def forward(self, u: Tensor, call: LayerCall, cache: ESSMCacheLayer | None = None) -> Tensor:
        """(B, L, D) -> (B, L, D), reading and updating the layer's state."""
        if call.padding is not None:  # after norms and biases, so that padding is silence to the operator
            u = u.masked_fill(call.padding, 0.0)
        if call.packing is not None:
            return call.packing.apply(self, u, call)
        gates, num_states, state = self.gates(u, call.budget, call.rows), None, None
        if cache is not None:
            num_states = self.operator.num_states(max(call.budget, cache.state_budget or 0))
            state = cache.tensors.get("features")
            if state is not None:
                num_states, state = state.shape[1], state.to(u.device)
        y, features = self.operator(u, gates, self.channel_mixing, state, call.lengths, self.algorithm, num_states)
        if cache is not None:
            cache.update(features=features)
        return y + self.skip(u)


def causal_convolution(x: Tensor, taps: Tensor, past: Tensor | None, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """The short convolution of each column, and the inputs that its next step still reads.

    Args:
        x: (B, L, n). taps: (p + 1, >= n). past: (B, p, n) inputs before x, or None. lengths: as of `LayerCall`.
    Returns:
        (B, L, n) and (B, p, n), in x's dtype.
    """
    B, p, n = x.shape[0], len(taps) - 1, x.shape[2]
    x = torch.cat([x.new_zeros(B, p, n) if past is None else past.to(x), x], 1)
    return short_convolution(x, taps[:, :n].to(x.dtype)), last_steps(x, p, lengths)


def last_steps(x: Tensor, p: int, lengths: Tensor | None) -> Tensor:
    """The p positions up to each row's last step: (B, p + L, D) that begins p positions before step 0 -> (B, p, D)."""
    if lengths is None:
        return x[:, x.shape[1] - p :].clone(memory_format=torch.contiguous_format)  # or the state would hold all of x
    recent = lengths[:, None] + torch.arange(p, device=x.device)
    return x.gather(1, recent[..., None].expand(-1, -1, x.shape[2]))


# ---------------------------------------------------------------------------------------------------------------------
# The short causal convolution. Autograd would make a zero-filled gradient for every tap's slice of the input, which
# takes five times as long as the gradients written out here. A compiler, torch.func, forward-mode AD and second
# derivatives get plain operations.


def short_convolution(u: Tensor, taps: Tensor) -> Tensor:
    """y(t) = sum_i taps[i] u(t + i), so that the last tap is that of the present step.

    Args:
        u: (B, p + L, D), L >= 1, begins p steps before y. taps: (p + 1, D), in u's dtype.
    Returns:
        (B, L, D), in the same dtype.
    """
    compiling = torch.compiler.is_compiling()
    if not compiling and u.shape[1] == len(taps):  # a single step, the shortest way
        return (u * taps).sum(1, keepdim=True)
    if compiling or is_transformed(u, taps):
        return _plain_convolution(u, taps)
    return _ShortConvolution.apply(u, taps)


def _plain_convolution(u: Tensor, taps: Tensor) -> Tensor:
    L = u.shape[1] - len(taps) + 1
    y = u[:, :L] * taps[0]
    for i in range(1, len(taps)):
        y.addcmul_(u[:, i : i + L], taps[i])
    return y


class _ShortConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u: Tensor, taps: Tensor) -> Tensor:
        ctx.save_for_backward(u, taps)
        return _plain_convolution(u, taps)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        u, taps = ctx.saved_tensors
        of_u, of_taps = ctx.needs_input_grad
        if torch.is_grad_enabled():  # the gradient is to be differentiated itself
            wanted = [t for t in (u, taps) if t.requires_grad]
            found = iter(torch.autograd.grad(_plain_convolution(u, taps), wanted, dy, create_graph=True))
            return next(found) if of_u else None, next(found) if of_taps else None
        L, p = dy.shape[1], len(taps) - 1
        du, dtaps = None, None
        if of_u:
            du = torch.zeros_like(u)
            for i in range(p + 1):
                du[:, i : i + L].addcmul_(dy, taps[i])
        if of_taps:
            dtaps, product = torch.empty_like(taps), torch.empty_like(dy)
            for i in range(p + 1):
                torch.sum(torch.mul(dy, u[:, i : i + L], out=product), (0, 1), out=dtaps[i])
        return du, dtaps
