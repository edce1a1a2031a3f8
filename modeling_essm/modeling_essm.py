# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""ES-SSM for transformers: gate and mixer (Eq. 7-8), pre-norm block, model, language-model and classification heads.

One set of weights runs at any spectral budget K, chosen per call. The numerics live in `spectral_ops`; what a budget
means in `spectral_budget`; what is kept between calls in `cache_essm`. Letters: B batch, L sequence, D width, K budget.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import ModelOutput, logging
from transformers.utils.generic import can_return_tuple

from .cache_essm import ESSMCache, ESSMCacheLayer, ESSMStaticCache, check_cache, check_room
from .compiled_decoding import BACKENDS, CompiledSteps
from .configuration_essm import ESSMConfig
from .deployment import ElasticPreTrainedModel
from .packing import PACKING_ARGUMENTS, Packing, close_up, read_packing, reorder
from .quantization import dequantize, is_quantized
from .short_convolution import short_convolution
from .spectral_budget import SpectralBudget, StepBudgets, rows_of_samples
from .spectral_constants import state_dtype
from .spectral_ops import SpectralOperator
from .speculative import Speculation, check_speculation, speculative_decode

logger = logging.get_logger(__name__)

_GATE_EPS = 1e-6  # eps of Eq. (8)
_GATE_BIAS = 1.0  # any nonzero constant starts the gate at equal weights; zero would amplify noise to unit scale


class _ElasticOutput(ModelOutput):
    """`items()` leaves spectral_budget out: Trainers gather and concatenate all items, which must be tensors then."""

    attentions = None  # which generate(output_attentions=True) collects

    def items(self):
        return [(name, value) for name, value in super().items() if name != "spectral_budget"]

    def __getitem__(self, key):  # which the library reads from items()
        return self.spectral_budget if key == "spectral_budget" else super().__getitem__(key)


@dataclass
class ESSMModelOutput(_ElasticOutput):
    """
    Args:
        last_hidden_state: (B, L, D).
        past_key_values: ESSMCache after the last position, if asked for.
        hidden_states: tuple of (B, L, D), embeddings first, if asked for.
        spectral_budget: the budget that ran, one int per layer, or (B,) when rows differ.
    """

    last_hidden_state: Tensor | None = None
    past_key_values: ESSMCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    spectral_budget: Any = None


@dataclass
class ESSMCausalLMOutput(_ElasticOutput):
    """
    Args:
        loss: () mean cross-entropy in nats, with labels.
        logits: (B, L or logits_to_keep, vocab_size).
        past_key_values, hidden_states, spectral_budget: as in `ESSMModelOutput`.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: ESSMCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    spectral_budget: Any = None


@dataclass
class ESSMSequenceClassifierOutput(_ElasticOutput):
    """
    Args:
        loss: () with labels. logits: (B, num_labels).
        hidden_states, spectral_budget: as in `ESSMModelOutput`.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    spectral_budget: Any = None


class ESSMFeatureEmbedding(nn.Linear):
    """Continuous features to hidden states: (B, L, F) -> (B, L, D).

    Of a single feature the bias starts as large as the weight: without one, the norm that follows would keep nothing
    of it but its sign. Several features tell more by their ratios, and start without a bias.
    """


class ESSMPrefixLinear(nn.Module):
    """Scores of the first channels only: (.., D_in), n -> (.., n), or (.., n, G) for G heads; reads n of the weights.

    Not an nn.Linear, which tools replace by layers that know nothing of n. The mixer initialises it.
    """

    def __init__(self, in_features: int, channels: int, heads: int = 1):
        super().__init__()
        shape = (channels,) if heads == 1 else (channels, heads)
        self.weight = nn.Parameter(torch.empty(*shape, in_features))
        self.bias = nn.Parameter(torch.empty(*shape))

    def forward(self, x: Tensor, num_outputs: int) -> Tensor:
        weight, bias = self.weight[:num_outputs], self.bias[:num_outputs]
        scores = F.linear(x, weight.view(-1, weight.shape[-1]), bias.flatten())
        return scores if bias.ndim == 1 else scores.unflatten(-1, bias.shape)


def _at_unit_scale(linear: nn.Linear) -> nn.Linear:
    """Marked to start at 1 / sqrt(its inputs) in the gated block, where it reads what a norm has scaled."""
    linear.starts_at_unit_scale = True  # type: ignore[assignment]
    return linear


class ESSMScale(nn.Module):
    """A factor for each channel of the width: (.., D) -> (.., D)."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class ESSMSpectralMixer(nn.Module):
    """Eq. (7-8): y(t) = D u(t) + sum_{k<=K} alpha_k(t) sigma_k^{1/4} M_k (phi_k * u)(t); channels > K are not read.

    With `gating="none"` alpha is 1, Eq. (6). With `ar_order=2` the terms of AR-STU (Agarwal et al. 2023) are added:
    negative filters (-1)^tau phi_k, direct terms in u(t-0..2) and feedback of y(t-1), y(t-2).

    In the gated block u is SiLU of a short causal convolution of the input, the matrix D is diagonal, M_k consists of
    blocks of `mixing_size` on the diagonal, and each of `num_heads` groups of the width has an alpha of its own.
    """

    def __init__(self, config: ESSMConfig, capacity: int):
        super().__init__()
        D, K, D_g, d = config.inner_size, capacity, config.gate_hidden_size, config.mixing_size
        self.operator = SpectralOperator(config.filter_length, config.state_margin, config.chunk_size)
        self.algorithm, self.scaling_exponent = config.spectral_algorithm, config.scaling_exponent
        self.gated, self.ar_order = config.gating == "softmax", config.ar_order
        self.taps, self.num_heads = config.conv_kernel_size, config.num_heads
        self.skip = nn.Linear(D, D, bias=False) if config.block == "paper" else ESSMScale(D)
        self.mixing_heads = None if d == D else (D // d, d)
        self.channel_mixing = nn.Parameter(torch.empty(K, D, d))  # blocks of M_k one below the other
        if self.taps:
            self.convolution = nn.Parameter(torch.empty(self.taps, D))  # the last row is that of u(t)
        if self.gated:
            self.gate_in = nn.Linear(D, D_g) if config.block == "paper" else _at_unit_scale(nn.Linear(D, D_g))
            self.gate_out = ESSMPrefixLinear(D_g, K, self.num_heads)
            self.gate_act = ACT2FN[config.hidden_act]
        if self.ar_order:
            self.channel_mixing_negative = nn.Parameter(torch.empty(K, D, D))
            self.input_mixing = nn.Parameter(torch.empty(self.ar_order, D, D))  # u(t-1), u(t-2); u(t) is the skip term
            self.output_mixing = nn.Parameter(torch.empty(self.ar_order, D, D))  # y(t-1), y(t-2)

    def channel_parameters(self) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
        """Weights whose first dimension is the channel: (module, attribute, value)."""
        yield self, "channel_mixing", self.channel_mixing
        if self.gated:
            yield self.gate_out, "weight", self.gate_out.weight
            yield self.gate_out, "bias", self.gate_out.bias
        if self.ar_order:
            yield self, "channel_mixing_negative", self.channel_mixing_negative

    def num_parameters_per_channel(self) -> int:
        """Weights that only one spectral channel reads."""
        return sum(value.numel() // len(value) for _, _, value in self.channel_parameters())

    def truncate(self, capacity: int) -> None:
        """Keep the first channels only, and free the others."""
        for module, name, value in list(self.channel_parameters()):
            kept = value.detach()[:capacity].clone()
            setattr(module, name, nn.Parameter(kept, requires_grad=value.requires_grad))

    def gates(self, u: Tensor, budget: int, rows: Tensor | None = None) -> Tensor:
        """alpha_k(t) sigma_k^{1/4} of Eq. (7-8), normalised over the active prefix only.

        Args:
            u: (B, L, D). budget: K, the largest of any row. rows: (B,) K of each row, or None.
        Returns:
            (B, L, K), or (B, L, K, G) for G heads, in u's dtype; zero beyond a row's own K.
        """
        scale = self.operator.sigma(budget, self.scaling_exponent, u)
        heads = () if self.num_heads == 1 or not self.gated else (1,)
        scale = scale.view(budget, *heads)
        inactive = None
        if rows is not None:
            inactive = torch.arange(budget, device=u.device) >= rows[:, None]
            inactive = inactive.view(-1, 1, budget, *heads)
        if not self.gated:
            gates = scale.expand(*u.shape[:2], budget)
            return gates if inactive is None else gates.masked_fill(inactive, 0.0)
        s = self.gate_out(self.gate_act(self.gate_in(u)), budget)
        s = s.to(state_dtype(s.dtype))
        K: Tensor | int = budget if rows is None else rows.view(-1, 1, 1, *heads)
        if inactive is not None:
            s = s.masked_fill(inactive, 0.0)
        s = s * (K**0.5 / (torch.linalg.vector_norm(s, dim=2, keepdim=True) + _GATE_EPS))
        if inactive is not None:
            s = s.masked_fill(inactive, -math.inf)
        return s.softmax(2).to(u.dtype) * scale

    def operator_inputs(self, u: Tensor) -> Tensor:
        """What gates and operator read of a whole sequence (B, L, D): in the gated block its convolution."""
        return self._convolve(u, None, None)[0] if self.taps else u

    def forward(
        self,
        u: Tensor,
        budget: int,
        rows: Tensor | None = None,
        lengths: Tensor | None = None,
        cache: ESSMCacheLayer | None = None,
    ) -> Tensor:
        """(B, L, D) -> (B, L, D), reading and updating the layer's state; `lengths` (B,) as in `SpectralOperator`."""
        past = {} if cache is None else {name: t.to(u.device) for name, t in cache.tensors.items()}
        convolved = {}
        if self.taps:
            u, convolved["convolution"] = self._convolve(u, past.get("convolution"), lengths)
        gates = self.gates(u, budget, rows)
        num_states = None
        if cache is not None:
            num_states = cache.num_states or self.operator.num_states(max(budget, cache.state_budget or 0))
        mixing: Tensor = self.channel_mixing
        if self.mixing_heads is not None:
            if is_quantized(mixing):
                mixing = dequantize(mixing, budget, u.dtype)
            mixing = mixing.unflatten(1, self.mixing_heads)
        y, features = self.operator(u, gates, mixing, past.get("features"), lengths, self.algorithm, num_states)
        y = y + self.skip(u)
        state = {"features": features} | convolved
        if self.ar_order:
            y, extra = self._autoregression(u, y, gates, lengths, past, num_states)
            state |= extra
        if cache is not None:
            cache.update(**state)
        return y

    def _convolve(self, u: Tensor, past: Tensor | None, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """SiLU of the causal convolution of each channel, and the last taps - 1 inputs (B, taps - 1, D).

        There is no bias: silence stays silence, so that left padding changes nothing.
        """
        p = self.taps - 1
        u_all = (
            u
            if p == 0
            else torch.cat([u.new_zeros(u.shape[0], p, u.shape[2]) if past is None else past.to(u.dtype), u], 1)
        )
        return F.silu(short_convolution(u_all, self.convolution.to(u.dtype))), _last_inputs(u_all, p, lengths)

    def _autoregression(self, u: Tensor, y: Tensor, gates: Tensor, lengths: Tensor | None, past: dict, num_states):
        """The terms of AR-STU, added to y. The filters (-1)^tau phi_k are phi_k on an input modulated by (-1)^t."""
        L, p = u.shape[1], self.ar_order
        sign = 1.0 - 2.0 * (torch.arange(1, L + 1, device=u.device, dtype=u.dtype)[:, None] % 2)  # (-1)^{t+1}, (L, 1)
        negative, features = self.operator(
            u * sign, gates, self.channel_mixing_negative, past.get("negative"), lengths, self.algorithm, num_states
        )
        last = torch.full((u.shape[0],), L, device=u.device) if lengths is None else lengths
        parity = torch.where(last % 2 == 1, -1.0, 1.0).to(features.dtype)[:, None, None]
        features = features * torch.where(last > 0, parity[:, 0, 0], 1.0)[:, None, None]
        u_past = past.get("inputs", u.new_zeros(u.shape[0], p, u.shape[2]))
        u_all = torch.cat([u_past, u], 1)  # u(t - i) stands at index t + p - i
        y = y + negative * sign
        for i in range(1, p + 1):
            y = y + u_all[:, p - i : p - i + L] @ self.input_mixing[i - 1]
        y_past = past.get("outputs", y.new_zeros(y.shape[0], p, y.shape[2]))
        # A symbolic length cannot bound a loop; an export covers every length up to H instead.
        symbolic = torch.compiler.is_exporting() and not isinstance(L, int)
        reach = self.operator.filter_length if symbolic else L
        y_all = _linear_feedback(y, y_past, self.output_mixing, reach)
        state = {
            "negative": features,
            "inputs": _last_inputs(u_all, p, lengths),
            "outputs": _last_inputs(y_all, p, lengths),
        }
        return y_all[:, p:], state


def _last_inputs(x: Tensor, p: int, lengths: Tensor | None) -> Tensor:
    """The p positions up to each row's last step: (B, p + L, D) that begins p positions before step 0 -> (B, p, D)."""
    if lengths is None:
        return x[:, x.shape[1] - p :].clone()  # or the state would hold all of x
    recent = lengths[:, None] + torch.arange(p, device=x.device)
    return x.gather(1, recent[..., None].expand(-1, -1, x.shape[2]))


def _linear_feedback(v: Tensor, past: Tensor, mixing: Tensor, reach: int) -> Tensor:
    """y(t) = v(t) + y(t-1) mixing[0] + y(t-2) mixing[1], all t in log2(L) matrix products.

    Args:
        v: (B, L, D). past: (B, 2, D), y(-2), y(-1). mixing: (2, D, D). reach: at least L.
    Returns:
        (B, 2 + L, D): past followed by y.
    """
    D = v.shape[-1]
    identity = torch.eye(D, dtype=v.dtype, device=v.device)
    # z(t) = [y(t), y(t-1)] = z(t-1) P + [v(t), 0]
    P = torch.cat([torch.cat([mixing[0], identity], 1), torch.cat([mixing[1], torch.zeros_like(identity)], 1)], 0)
    z = torch.cat([torch.cat([past[:, 1:], past[:, :1]], 2), F.pad(v, (0, D))], 1)  # z(-1), then inputs
    for j in range(reach.bit_length()):
        z = z + F.pad(z @ P, (0, 0, 1 << j, 0))[:, : z.shape[1]]
        P = P @ P
    return torch.cat([past[:, :1], z[:, :, :D]], 1)


class ESSMFeedForward(nn.Module):
    """(B, L, D) -> (B, L, D) through one hidden layer of width intermediate_size."""

    def __init__(self, config: ESSMConfig):
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class ESSMGatedFeedForward(nn.Module):
    """(B, L, D) -> (B, L, D) through a hidden layer of width intermediate_size, half of whose inputs are SiLU gates."""

    def __init__(self, config: ESSMConfig):
        super().__init__()
        self.up = _at_unit_scale(nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False))
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * value)


class _Block(GradientCheckpointingLayer):
    """What the two blocks share: how their mixer is run, and dropout."""

    mixer: ESSMSpectralMixer

    def __init__(self, config: ESSMConfig):
        super().__init__()
        self.dropout = nn.Dropout(config.dropout)
        self.stochastic_depth = config.stochastic_depth

    def _mix(
        self,
        u: Tensor,
        budget: int,
        rows: Tensor | None,
        padding: Tensor | None,
        lengths: Tensor | None,
        cache: ESSMCacheLayer | None,
        packing: Packing | None,
    ) -> Tensor:
        if padding is not None:  # after norms and biases, so that padding is silence to the operator
            u = u.masked_fill(padding, 0.0)
        if packing is None:
            return self.mixer(u, budget, rows, lengths, cache)
        return packing.apply(self.mixer, u, budget, rows)

    def _drop(self, branch: Tensor) -> Tensor:
        if not self.training:
            return branch
        branch = self.dropout(branch)
        if self.stochastic_depth:
            keep = 1.0 - self.stochastic_depth
            branch = branch * (torch.rand(branch.shape[0], 1, 1, device=branch.device) < keep).to(branch.dtype) / keep
        return branch


class ESSMGatedLayer(_Block):
    """Residual block of modern recurrent models around Eq. (7-8), with a gated feed-forward layer if one is asked for.

    z, v = in_proj(norm(x)); x + out_proj(norm(mixer(v)) * silu(z)).
    """

    def __init__(self, config: ESSMConfig, capacity: int):
        super().__init__(config)
        D, inner = config.hidden_size, config.inner_size
        self.mixer = ESSMSpectralMixer(config, capacity)
        self.input_norm = nn.RMSNorm(D, eps=config.layer_norm_eps)
        self.in_proj = _at_unit_scale(nn.Linear(D, 2 * inner, bias=False))
        self.mixer_norm = nn.RMSNorm(inner, eps=config.layer_norm_eps)
        self.out_proj = nn.Linear(inner, D, bias=False)
        if config.intermediate_size:
            self.ffn_norm = nn.RMSNorm(D, eps=config.layer_norm_eps)
            self.ffn = ESSMGatedFeedForward(config)

    def forward(
        self,
        hidden_states: Tensor,
        budget: int,
        rows: Tensor | None = None,
        padding: Tensor | None = None,
        lengths: Tensor | None = None,
        cache: ESSMCacheLayer | None = None,
        packing: Packing | None = None,
    ) -> Tensor:
        z, v = self.in_proj(self.input_norm(hidden_states)).chunk(2, -1)
        mixed = self._mix(v, budget, rows, padding, lengths, cache, packing)
        hidden_states = hidden_states + self._drop(self.out_proj(self.mixer_norm(mixed) * F.silu(z)))
        if not hasattr(self, "ffn"):
            return hidden_states
        return hidden_states + self._drop(self.ffn(self.ffn_norm(hidden_states)))


class ESSMLayer(_Block):
    """The paper's pre-norm residual block: LayerNorm -> mixer -> +, LayerNorm -> feed-forward -> +."""

    def __init__(self, config: ESSMConfig, capacity: int):
        super().__init__(config)
        self.input_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mixer = ESSMSpectralMixer(config, capacity)
        self.ffn_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.ffn = ESSMFeedForward(config)

    def forward(
        self,
        hidden_states: Tensor,
        budget: int,
        rows: Tensor | None = None,
        padding: Tensor | None = None,
        lengths: Tensor | None = None,
        cache: ESSMCacheLayer | None = None,
        packing: Packing | None = None,
    ) -> Tensor:
        mixed = self._mix(self.input_norm(hidden_states), budget, rows, padding, lengths, cache, packing)
        hidden_states = hidden_states + self._drop(mixed)
        return hidden_states + self._drop(self.ffn(self.ffn_norm(hidden_states)))


class ESSMPreTrainedModel(ElasticPreTrainedModel):
    config_class = ESSMConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _is_stateful = True
    _can_compile_fullgraph = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.initializer_range
        if isinstance(module, nn.Linear):
            unit = getattr(module, "starts_at_unit_scale", False)
            init.normal_(module.weight, mean=0.0, std=module.in_features**-0.5 if unit else std)
            if isinstance(module, ESSMFeatureEmbedding) and module.in_features == 1:
                init.normal_(module.bias, mean=0.0, std=std)
            elif module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            own = self.config.embedding_initializer_range
            init.normal_(module.weight, mean=0.0, std=std if own is None else own)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, (nn.RMSNorm, ESSMScale)):
            init.ones_(module.weight)
        elif isinstance(module, ESSMSpectralMixer):
            d = self.config.mixing_size
            init.normal_(module.channel_mixing, mean=0.0, std=1e-3 if self.config.block == "paper" else d**-0.5)
            if module.taps:
                init.uniform_(module.convolution, -(module.taps**-0.5), module.taps**-0.5)
            if module.gated:
                unit = getattr(module.gate_in, "starts_at_unit_scale", False)
                init.normal_(module.gate_out.weight, mean=0.0, std=module.gate_in.out_features**-0.5 if unit else std)
                init.constant_(module.gate_out.bias, _GATE_BIAS)
            if module.ar_order:
                init.normal_(module.channel_mixing_negative, mean=0.0, std=1e-3)
                init.normal_(module.input_mixing, mean=0.0, std=std)
                init.zeros_(module.output_mixing)

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        if attn_implementation not in (None, "eager"):
            raise ValueError(
                f"attn_implementation must be None or 'eager', got {attn_implementation!r}: ES-SSM has no attention. "
                "How its convolution is computed is config.spectral_algorithm"
            )
        return "eager"


def _refuse_unsupported(kwargs: dict[str, Any]) -> None:
    """Extra arguments pass silently, as the library's losses need; those that would change the result must not."""
    for name, value in kwargs.items():
        if "budget" in name or name.startswith("spectral"):
            raise TypeError(f"unknown argument {name!r}; the budget of a call is spectral_budget")
        if value is not None and name.startswith(("seq_", "cu_seq")) and name not in PACKING_ARGUMENTS:
            raise ValueError(f"unknown argument {name!r}; packed sequences are described by {PACKING_ARGUMENTS}")


def _check_state_lengths(state_lengths: Tensor, L: int) -> None:
    """Raises ValueError for lengths that are no integers in [0, L]; a compiled graph does not wait for the device."""
    if torch.compiler.is_compiling():
        return
    integers = f"state_lengths must be integers in [0, {L}], got"
    if state_lengths.is_floating_point() or state_lengths.is_complex() or state_lengths.dtype == torch.bool:
        raise ValueError(f"{integers} {state_lengths.dtype}")
    if state_lengths.numel():
        low, high = torch.aminmax(state_lengths.long())
        if low < 0 or high > L:
            raise ValueError(f"{integers} values from {int(low)} to {int(high)}")


class ESSMModel(ESSMPreTrainedModel):
    """Embedding, blocks and final norm; token ids, embeddings or continuous features in, hidden states out."""

    def __init__(self, config: ESSMConfig):
        super().__init__(config)
        if config.num_input_features is None:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        else:
            self.embed_features = ESSMFeatureEmbedding(config.num_input_features, config.hidden_size)
        block = ESSMLayer if config.block == "paper" else ESSMGatedLayer
        self._no_split_modules = [block.__name__]  # sharding looks for each that is named
        self.layers = nn.ModuleList(block(config, capacity) for capacity in config.capacities)
        self.operator = SpectralOperator(config.filter_length, config.state_margin, config.chunk_size)
        norm = nn.LayerNorm if config.block == "paper" else nn.RMSNorm
        self.norm = norm(config.hidden_size, eps=config.layer_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module | None:
        return getattr(self, "embed_tokens", None)

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embed_tokens = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        input_features: Tensor | None = None,
        past_key_values: ESSMCache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        spectral_budget: SpectralBudget = None,
        state_lengths: Tensor | None = None,
        **kwargs: Any,
    ) -> ESSMModelOutput:
        """
        Args:
            input_ids: (B, L) int64 or int32 in [0, vocab_size). Or inputs_embeds: (B, L, D), input_features: (B, L, F).
            attention_mask: (B, L) or (B, past + L), 1 for real positions. A position with 0 does not exist, wherever it
                stands and wherever pieces are cut: real ones come out as if they alone made up the row, and the state
                does not advance on others. The output there is that of the last real position before it in this call;
                where there is none, it means nothing. What is said of cached positions is not read: a state does not
                forget them.
            past_key_values: ESSMCache to continue from; updated in place.
            spectral_budget: K: int in [1, capacity], one int per layer, a (B,) integer tensor or a preset name.
            state_lengths: (B,) int64 in [0, L]: after how many of the positions the cache is left; outputs are of all.
            position_ids, seq_idx, cu_seqlens, cu_seq_lens_q: where the sequences of a packed row begin, as collators
                say it, see `read_packing`; each is computed as if it were alone, without a cache.
        Returns:
            ESSMModelOutput.
        Raises:
            ValueError: a bad budget, token ids out of range (not checked on an accelerator in training and single
                steps, where the check would wait for the device), not exactly one input, a cache without room or for
                packed sequences, state_lengths out of range (not checked in a compiled graph), or a bad description
                of packed sequences.
        """
        _refuse_unsupported(kwargs)
        hidden_states = self._embed(input_ids, inputs_embeds, input_features)
        B, L, _ = hidden_states.shape
        config = self.config
        budget = config.resolve_budget(spectral_budget, batch_size=B)
        if past_key_values is not None:
            check_cache(past_key_values, config, B)
        compiling = torch.compiler.is_compiling()  # then the count of tokens, which each step changes, is not read
        past = 0 if past_key_values is None or compiling else past_key_values.get_seq_length()
        if attention_mask is not None and tuple(attention_mask.shape) not in ((B, L), (B, past + L)) and not compiling:
            raise ValueError(
                f"attention_mask must have shape ({B}, {L}), or ({B}, {past + L}) with the cached positions, "
                f"got {tuple(attention_mask.shape)}"
            )
        packing = None
        if kwargs:
            mask = None if attention_mask is None else attention_mask[:, -L:].bool()
            packing = read_packing(kwargs, B, L, mask)
        if packing is not None:
            if use_cache or past_key_values is not None:
                raise ValueError(
                    "packed sequences leave no single state: call with use_cache=False, without past_key_values"
                )
            use_cache = False
        self._warn_once(budget, past + L if packing is None else packing.longest)
        if output_hidden_states is None:
            output_hidden_states = config.output_hidden_states
        if use_cache is None:
            use_cache = config.use_cache and not self.training
        recomputing = self.training and self.gradient_checkpointing and torch.is_grad_enabled()
        if recomputing and (use_cache or past_key_values is not None):
            raise ValueError(
                "gradient checkpointing runs layers twice, which would advance the cache twice: "
                "train with use_cache=False and without past_key_values"
            )
        if use_cache and past_key_values is None:
            past_key_values = ESSMCache(config)
        if past_key_values is not None:
            check_room(past_key_values, budget.layers, budget.rows, self.operator)

        padding, lengths, place = None, None, None
        embeddings = hidden_states
        if attention_mask is not None:
            real = attention_mask[:, -L:].to(hidden_states.device).bool()
            closed = close_up(real, keep_leading=past_key_values is None or past_key_values.batch_size is None)
            kept = torch.full((B,), L, device=real.device)
            if closed is not None:
                order, place, kept = closed
                hidden_states, real = reorder(hidden_states, order), real.gather(1, order)
            padding = ~real[..., None]
            if past_key_values is not None:
                lengths = kept
        if state_lengths is not None:
            if attention_mask is not None or past_key_values is None or state_lengths.shape != (B,):
                raise ValueError(
                    f"state_lengths must have shape ({B},) and come with a cache and without attention_mask, "
                    f"got shape {tuple(state_lengths.shape)}"
                )
            _check_state_lengths(state_lengths, L)
            lengths = state_lengths.to(hidden_states.device)
        rows = None if budget.rows is None else budget.rows.to(hidden_states.device)

        all_hidden_states: tuple[Tensor, ...] | None = (embeddings,) if output_hidden_states else None
        for i, layer in enumerate(self.layers):
            cache = None if past_key_values is None else past_key_values.layers[i]
            K = budget.layers[i]
            own = rows if rows is None or config.spectral_capacities is None else rows.clamp(max=K)
            hidden_states = layer(hidden_states, K, own, padding, lengths, cache, packing)
            if all_hidden_states is not None and i + 1 < len(self.layers):
                all_hidden_states += (hidden_states if place is None else reorder(hidden_states, place),)
        hidden_states = self.norm(hidden_states)
        if place is not None:
            hidden_states = reorder(hidden_states, place)
        if all_hidden_states is not None:
            all_hidden_states += (hidden_states,)
        if past_key_values is not None:
            past_key_values.advance(L if state_lengths is None or B == 0 else int(state_lengths.max()))
        return ESSMModelOutput(
            last_hidden_state=hidden_states,
            past_key_values=past_key_values if use_cache else None,
            hidden_states=all_hidden_states,
            spectral_budget=budget.report(),
        )

    def _embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None, features: Tensor | None) -> Tensor:
        if sum(x is not None for x in (input_ids, inputs_embeds, features)) != 1:
            raise ValueError("give exactly one of input_ids, inputs_embeds and input_features")
        width = self.config.num_input_features
        if inputs_embeds is not None:
            D = self.config.hidden_size
            if inputs_embeds.ndim != 3 or inputs_embeds.shape[-1] != D:
                raise ValueError(f"inputs_embeds must have shape (B, L, {D}), got {tuple(inputs_embeds.shape)}")
            hidden_states = inputs_embeds
        elif features is not None:
            if width is None:
                raise ValueError("this model reads input_ids; input_features need config.num_input_features")
            if features.ndim != 3 or features.shape[-1] != width:
                raise ValueError(f"input_features must have shape (B, L, {width}), got {tuple(features.shape)}")
            hidden_states = self.embed_features(features.to(self.embed_features.weight.dtype))
        elif input_ids is not None and width is None:
            if input_ids.ndim != 2 or input_ids.dtype not in (torch.int64, torch.int32):
                raise ValueError(
                    "input_ids must be int64 or int32 integers of shape (B, L), "
                    f"got {input_ids.dtype} of shape {tuple(input_ids.shape)}"
                )
            self._check_token_ids(input_ids)
            hidden_states = self.embed_tokens(input_ids)
        else:
            raise ValueError(f"this model reads input_features of shape (B, L, {width}), got input_ids")
        if hidden_states.shape[1] == 0:
            raise ValueError(f"a sequence needs at least one position, got shape {tuple(hidden_states.shape[:2])}")
        return hidden_states

    def _check_token_ids(self, input_ids: Tensor) -> None:
        """Raises ValueError for ids outside the vocabulary; on an accelerator only where a synchronisation is cheap."""
        if torch.compiler.is_compiling() or input_ids.numel() == 0:
            return
        if input_ids.device.type == "cpu" or (input_ids.shape[1] > 1 and not self.training):
            low, high = torch.aminmax(input_ids)
            if low < 0 or high >= self.config.vocab_size:
                raise ValueError(
                    f"input_ids must be in [0, {self.config.vocab_size - 1}], got values from {int(low)} to {int(high)}"
                )

    def _warn_once(self, budget: Any, num_tokens: int) -> None:
        if torch.compiler.is_compiling():
            return
        if num_tokens > self.config.filter_length:
            logger.warning_once(
                f"a sequence has passed filter_length {self.config.filter_length}: beyond it the recurrence is no "
                "longer the trained convolution. Train with a filter_length at least as long as your sequences."
            )
        trained = self.config.trained_budgets
        if trained is not None:
            ran = set(budget.layers) if budget.rows is None else set(budget.rows.tolist())
            unseen = sorted(ran - set(trained))
            if unseen:
                logger.warning_once(f"spectral_budget {unseen} was never trained; trained budgets: {sorted(trained)}")


def _check_prompt_mask(generation_config: Any, model_kwargs: dict) -> None:
    """Raises ValueError where a prompt padded on the right would be read in pieces: its last may hold no real token."""
    mask, in_pieces = model_kwargs.get("attention_mask"), None
    if generation_config.prefill_chunk_size is not None:
        in_pieces = "prefill_chunk_size"
    elif isinstance(model_kwargs.get("spectral_budget"), Speculation):
        in_pieces = "draft_budget"
    if mask is not None and in_pieces and not bool(mask[:, -1].all()):
        rows = (mask[:, -1] == 0).nonzero().flatten().tolist()
        raise ValueError(f"{in_pieces} needs prompts padded on the left, but attention_mask ends with 0 in rows {rows}")


class ESSMForCausalLM(ESSMPreTrainedModel, GenerationMixin):
    """ES-SSM with a language-model head. `generate(ids, spectral_budget=6)` decodes at constant memory."""

    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: ESSMConfig):
        super().__init__(config)
        if config.num_input_features is not None:
            raise ValueError(
                f"ESSMForCausalLM reads token ids: num_input_features must be None, got {config.num_input_features}"
            )
        self.model = ESSMModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
        self.generation_config._from_model_config = False  # or loading it again would drop a spectral_budget set on it
        self._compiled_steps = CompiledSteps()

    def compile_decoding(
        self,
        budgets: Sequence[SpectralBudget] = (None,),
        batch_size: int = 1,
        state_budget: SpectralBudget = None,
        backend: str = "inductor",
    ) -> ESSMForCausalLM:
        """Compile single decoding steps ahead, for `forward` and `generate` to use; half a minute a budget.

        Args:
            budgets: those to compile, each as in `spectral_budget` (but no rows); others go on running eagerly.
            batch_size: B of the steps. state_budget: that of the caches, if larger than the budget that runs.
            backend: of torch.compile: "inductor", or "aot_eager" and "eager", which need no compiler and save little.
        Returns:
            this model.
        Raises:
            ValueError: a bad budget, batch size or backend, or quantised weights. RuntimeError: no C++ compiler.
        """
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size must be an integer of at least 1, got {batch_size!r}")
        resolved = [self.config.resolve_budget(budget) for budget in budgets]
        if any(budget.rows is not None for budget in resolved):
            raise ValueError("a compiled step has one budget for all rows: compile those that rows differ in eagerly")
        if getattr(self, "is_quantized", False):
            raise ValueError("quantised weights are not compiled: a quantised model decodes eagerly")
        if self.training:
            raise ValueError("decoding is compiled in evaluation mode: call model.eval() first")
        for budget in resolved:
            self._compiled_steps.add(self, budget.layers, batch_size, state_budget, backend)
        return self

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: ESSMCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        spectral_budget: SpectralBudget = None,
        logits_to_keep: int | Tensor = 0,
        state_lengths: Tensor | None = None,
        **kwargs: Any,
    ) -> ESSMCausalLMOutput:
        """
        Args:
            labels: (B, L) int64 next-token targets before shifting, -100 to ignore (in packed rows also the first of
                every sequence, which collators see to).
            logits_to_keep: only the last that many positions (0: all), or (T,) positions.
            The rest as in `ESSMModel.forward`.
        Returns:
            ESSMCausalLMOutput.
        """
        _refuse_unsupported(kwargs)
        packing = {name: kwargs.pop(name) for name in PACKING_ARGUMENTS if name in kwargs}
        if self._compiled_steps and not packing and input_ids is not None and past_key_values is not None:
            others = (attention_mask, inputs_embeds, labels, output_hidden_states, state_lengths)
            if all(argument is None or argument is False for argument in others):
                output = self._compiled_step(input_ids, past_key_values, spectral_budget)
                if output is not None:
                    return output
        outputs: ESSMModelOutput = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            spectral_budget=spectral_budget,
            state_lengths=state_lengths,
            return_dict=True,
            **packing,
        )
        assert outputs.last_hidden_state is not None
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, keep])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return ESSMCausalLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            spectral_budget=outputs.spectral_budget,
        )

    def _compiled_step(
        self, input_ids: Tensor, cache: ESSMCache, spectral_budget: SpectralBudget
    ) -> ESSMCausalLMOutput | None:
        """One token by a compiled step, after the checks of the eager one; None where none fits."""
        if input_ids.ndim != 2 or input_ids.shape[1] != 1 or not cache.get_seq_length():
            return None
        if self.training or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return None
        B = input_ids.shape[0]
        budget = self.config.resolve_budget(spectral_budget, batch_size=B)
        if budget.rows is not None:
            return None
        check_cache(cache, self.config, B)
        self.model._check_token_ids(input_ids)
        logits = self._compiled_steps.run(self, input_ids, cache, budget.layers)
        if logits is None:
            return None
        self.model._warn_once(budget, cache.get_seq_length() + 1)
        cache.advance(1)
        return ESSMCausalLMOutput(logits=logits, past_key_values=cache, spectral_budget=budget.report())

    def _prepare_generation_config(self, generation_config: Any, **kwargs: Any) -> tuple[Any, dict]:
        """Let the call's budget win over GenerationConfig's, and pass whichever is set on to `forward`.

        `generate(.., step_budgets=..)` takes a budget per step instead of `spectral_budget`: a list, whose last entry
        holds for all further steps, or a function of the step. Step 0 reads the prompt and gives the first token. The
        cache has room for the largest entry of a list; of a function it has that of step 0, as always.

        `generate(.., draft_budget=..)` drafts at that budget and verifies at `spectral_budget`, see `speculative`;
        `draft_length` fixes the tokens of a draft, which else adapts. The dictionary output tells the acceptance rate.
        """
        called, steps = kwargs.pop("spectral_budget", None), kwargs.pop("step_budgets", None)
        draft, draft_length = kwargs.pop("draft_budget", None), kwargs.pop("draft_length", None)
        generation_config, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)
        if steps is not None:
            if called is not None:
                raise ValueError(f"give spectral_budget or step_budgets, not both, got {called!r} and {steps!r}")
            if generation_config.prefill_chunk_size is not None:
                raise ValueError("step_budgets cannot be combined with prefill_chunk_size, whose calls are not steps")
            called = StepBudgets(steps, self.config)
        budget = called if called is not None else getattr(generation_config, "spectral_budget", None)
        if draft is not None:
            if steps is not None:
                raise ValueError("give draft_budget or step_budgets, not both")
            check_speculation(generation_config)
            budget = Speculation(budget, draft, draft_length)
        elif draft_length is not None:
            raise ValueError(f"draft_length={draft_length!r} needs draft_budget")
        if budget is not None:
            model_kwargs["spectral_budget"] = budget
        return generation_config, model_kwargs

    def _get_logits_processor(self, generation_config: Any, *args: Any, **kwargs: Any):
        """As in transformers; guidance, whose processor calls the model by itself, does so at the step's budget."""
        processors = super()._get_logits_processor(generation_config, *args, **kwargs)
        budget = (kwargs.get("model_kwargs") or {}).get("spectral_budget")
        for processor in processors:
            if isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor):
                processor.model = _AtBudget(self, budget)
        return processors

    def _sample(self, input_ids: Tensor, **kwargs: Any):
        """As in transformers, or speculative decoding where there is a draft_budget."""
        speculation = kwargs.get("spectral_budget")
        if not isinstance(speculation, Speculation):
            return super()._sample(input_ids, **kwargs)
        if kwargs["past_key_values"].get_seq_length() or kwargs.get("inputs_embeds") is not None:
            raise ValueError(
                "draft_budget starts from input_ids: give the whole text, no past_key_values, no inputs_embeds"
            )
        names = ("logits_processor", "stopping_criteria", "generation_config", "attention_mask", "streamer")
        arguments = {name: kwargs[name] for name in names if name in kwargs}
        output = speculative_decode(self, input_ids, speculation, **arguments)
        return output if kwargs["generation_config"].return_dict_in_generate else output.sequences

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict:
        """As in transformers; after the prompt every position is real, and a step without a mask is cheaper."""
        if isinstance(budget := kwargs.get("spectral_budget"), StepBudgets):
            kwargs["spectral_budget"] = budget.at(input_ids, bool(is_first_iteration))
        inputs = super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length,
            inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )
        if next_sequence_length == 1 and not is_first_iteration:
            inputs.pop("attention_mask", None)
        return inputs

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict, *args: Any, **kwargs: Any):
        """An ESSMStaticCache, which steps are compiled with, for `cache_implementation="static"`; else an ESSMCache."""
        _check_prompt_mask(generation_config, model_kwargs)
        kind = generation_config.cache_implementation
        if kind not in (None, "static"):
            logger.warning_once(f"cache_implementation={kind!r} is ignored: the state of an ES-SSM has a constant size")
        if generation_config.use_cache is not False and model_kwargs.get("past_key_values") is None:
            budget = model_kwargs.get("spectral_budget")
            room = budget.room() if isinstance(budget, StepBudgets) else None
            cache_class = ESSMStaticCache if kind == "static" else ESSMCache
            model_kwargs["past_key_values"] = cache_class(self.config, state_budget=room)

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
        """The (B, L) mask itself: there is no attention to make a 4-D one for."""
        return attention_mask


class _AtBudget:
    """A model as classifier-free guidance calls it, once a step; `budget` as the calls of `generate` have it."""

    def __init__(self, model: ESSMForCausalLM, budget: SpectralBudget | StepBudgets):
        self.model, self.budget, self.step = model, budget, 0

    def __call__(self, input_ids: Tensor, use_cache: bool, past_key_values: ESSMCache | None, **kwargs: Any):
        budget = self.budget
        if isinstance(budget, StepBudgets):
            if use_cache and past_key_values is None:
                past_key_values = ESSMCache(self.model.config, state_budget=budget.room())
            budget = budget.of_step(self.step)
        self.step += 1
        budget = rows_of_samples(budget, len(input_ids))
        return self.model(
            input_ids, use_cache=use_cache, past_key_values=past_key_values, spectral_budget=budget, **kwargs
        )


class ESSMForSequenceClassification(ESSMPreTrainedModel):
    """ES-SSM that pools its real positions and classifies; reads token ids or, by config, continuous features."""

    accepts_loss_kwargs = False  # the library's regression and multi-label losses ignore num_items_in_batch

    def __init__(self, config: ESSMConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = ESSMModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        input_features: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        spectral_budget: SpectralBudget = None,
        **kwargs: Any,
    ) -> ESSMSequenceClassifierOutput:
        """
        Args:
            labels: (B,) int64 classes, or floats for regression and multi-label problems.
            The rest as in `ESSMModel.forward`.
        Returns:
            ESSMSequenceClassifierOutput.
        """
        _refuse_unsupported(kwargs)
        outputs: ESSMModelOutput = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            input_features=input_features,
            use_cache=False,
            output_hidden_states=output_hidden_states,
            spectral_budget=spectral_budget,
            return_dict=True,
        )
        assert outputs.last_hidden_state is not None
        B, L = outputs.last_hidden_state.shape[:2]
        if read_packing(kwargs, B, L, None if attention_mask is None else attention_mask.bool()) is not None:
            raise ValueError("a classifier pools whole rows: packed sequences have no place in it; pad them instead")
        logits = self.score(self._pool(outputs.last_hidden_state, attention_mask))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config, **kwargs)
        return ESSMSequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, spectral_budget=outputs.spectral_budget
        )

    def _pool(self, hidden_states: Tensor, attention_mask: Tensor | None) -> Tensor:
        """(B, L, D) -> (B, D) over the real positions."""
        if attention_mask is None:
            return hidden_states.mean(1) if self.config.classifier_pooling == "mean" else hidden_states[:, -1]
        real = attention_mask.to(hidden_states.device).bool()
        if self.config.classifier_pooling == "mean":
            total = hidden_states.masked_fill(~real[..., None], 0.0).sum(1)
            return total / real.sum(1, keepdim=True).clamp(min=1).to(total.dtype)
        last = (real * torch.arange(real.shape[1], device=real.device)).amax(1)
        return hidden_states[torch.arange(real.shape[0], device=real.device), last]


__all__ = ["ESSMForCausalLM", "ESSMForSequenceClassification", "ESSMModel", "ESSMPreTrainedModel"]
