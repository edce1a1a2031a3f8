# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The models that ES-SSM is compared with, by one config and behind one pair of heads, at matched parameter counts.

    config = matched_baseline("mamba2", 2_700_000, hidden_size=128, num_hidden_layers=4)
    model = BaselineForCausalLM(config)

Transformer, Mamba and Mamba-2 are the library's, S4D is in s4d.py, the two convolutional networks are here. All but
TC-ResNet read the same embedding or linear encoder, end in the same heads and get the same dropout after each
sub-layer, so that what differs are the blocks. They run over whole sequences: there is no cache, no budget and no
generation.
Letters: B batch, L sequence, D width, F input features.
"""

from __future__ import annotations

import functools
import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    EuroBertConfig,
    EuroBertModel,
    LlamaConfig,
    LlamaModel,
    Mamba2Config,
    Mamba2Model,
    MambaConfig,
    MambaModel,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput, SequenceClassifierOutput
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.utils.generic import can_return_tuple
from transformers.utils.import_utils import is_mamba_ssm_available

from essm_train.baselines.s4d import S4DMixer, S4DModel

ARCHITECTURES = ("transformer", "mamba", "mamba2", "s4d", "cnn", "tc_resnet")
CAUSAL = ("transformer", "mamba", "mamba2", "s4d")  # those with a language model

# Inner width over D, and state per channel (per head for Mamba-2), as published.
_EXPANSION = {"transformer": 8 / 3, "mamba": 2, "mamba2": 2, "s4d": 4, "cnn": 2, "tc_resnet": 1}
_STATE_SIZE = {"mamba": 16, "mamba2": 128, "s4d": 64}
_CNN_KERNEL = 9


class BaselineConfig(PreTrainedConfig):
    r"""
    Configuration of a baseline.

    Args:
        architecture (`str`): one of `ARCHITECTURES`. "transformer" is Llama's block (rotary positions, SwiGLU), causal
            as a language model and bidirectional as a classifier; "cnn" and "tc_resnet" only classify.
        hidden_size (`int`): model width D. Of "tc_resnet" the channels of the last block: 48 is TC-ResNet8, 72 is
            TC-ResNet8-1.5, and the other blocks keep the paper's proportions 16 : 24 : 32 : 48.
        num_hidden_layers (`int`): number of blocks; "tc_resnet" always has three.
        intermediate_size (`int`, *optional*): inner width, by default in the published proportion to D: of the SwiGLU
            (transformer), of the mixer (mamba, mamba2), of the feed-forward layer (s4d) or of the convolutions (cnn).
            Not used by "tc_resnet".
        state_size (`int`, *optional*): N of "mamba" (16), "mamba2" (128) and "s4d" (64).
        num_input_features (`int`, *optional*): F of continuous inputs, instead of token ids.
        max_position_embeddings (`int`): longest sequence that is meant, by the transformer alone.
        dropout (`float`): rate after each sub-layer, as in ES-SSM; of "tc_resnet" before the classifier, as published.
        classifier_pooling (`str`): "mean" over real positions or "last" real position.

    Raises:
        ValueError: a field out of range.
    """

    model_type = "essm_baseline"

    architecture: str = "transformer"
    vocab_size: int = 259
    hidden_size: int = 256
    num_hidden_layers: int = 8
    intermediate_size: int = None  # type: ignore[assignment]
    state_size: int = None  # type: ignore[assignment]
    num_input_features: int | None = None
    max_position_embeddings: int = 4096
    dropout: float = 0.0
    classifier_pooling: str = "mean"
    initializer_range: float = 0.02
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    use_cache: bool = False
    pad_token_id: int | None = 256
    bos_token_id: int | None = 257
    eos_token_id: int | list[int] | None = 258

    def __post_init__(self, **kwargs: Any) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ValueError(f"architecture must be one of {ARCHITECTURES}, got {self.architecture!r}")
        minimum = {"vocab_size": 1, "hidden_size": 2, "num_hidden_layers": 1, "max_position_embeddings": 1}
        self._check_integers(minimum)
        if self.intermediate_size is None:
            step = self.inner_step
            self.intermediate_size = max(step, round(_EXPANSION[self.architecture] * self.hidden_size / step) * step)
        if self.state_size is None:
            self.state_size = _STATE_SIZE.get(self.architecture, 0)
        super().__post_init__(**kwargs)
        self._check_integers({"intermediate_size": 1, "state_size": 2 if self.architecture in _STATE_SIZE else 0})
        if self.num_input_features is not None:
            self._check_integers({"num_input_features": 1})
        multiples = {
            "transformer": ("hidden_size", 2, "rotary positions turn pairs of numbers"),
            "mamba2": ("intermediate_size", self.head_dim, "it consists of heads"),
            "s4d": ("state_size", 2, "it consists of conjugate pairs"),
        }
        if self.architecture in multiples:
            name, divisor, reason = multiples[self.architecture]
            if getattr(self, name) % divisor:
                raise ValueError(
                    f"{name} of {self.architecture!r} must be a multiple of {divisor} ({reason}), "
                    f"got {getattr(self, name)}"
                )
        if self.architecture == "tc_resnet" and self.num_input_features is None:
            raise ValueError("architecture 'tc_resnet' needs num_input_features: its channels are frequency bands")
        if self.classifier_pooling not in ("mean", "last"):
            raise ValueError(f"classifier_pooling must be 'mean' or 'last', got {self.classifier_pooling!r}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be a number in [0, 1), got {self.dropout!r}")

    def _check_integers(self, minimum: dict[str, int]) -> None:
        for name, least in minimum.items():
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")

    @property
    def head_dim(self) -> int:
        """Width of an attention head: even, a divisor of D, as near to 64 as can be. Of a Mamba-2 head: 64 or 32."""
        if self.architecture == "mamba2":
            return 64 if self.hidden_size >= 256 else 32
        even = [d for d in range(2, self.hidden_size + 1, 2) if self.hidden_size % d == 0]
        return min(even, key=lambda d: abs(math.log(d / 64)), default=1)

    @property
    def inner_step(self) -> int:
        """What inner widths are multiples of, by choice: whole heads, or 8 for the matrix units of accelerators."""
        return self.head_dim if self.architecture == "mamba2" else 8


@strict  # or the base class would check the type of `expand`
class _FreeWidthMamba2Config(Mamba2Config):
    """Mamba2Config whose inner width need not be a whole multiple of D: `expand` is their exact ratio."""

    expand: Any = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.expand = Fraction(self.num_heads * self.head_dim, self.hidden_size)
        super().__post_init__(**kwargs)


def make_backbone(config: BaselineConfig, causal: bool) -> nn.Module:
    """The network between encoder and head.

    Args:
        causal: of the transformer: whether positions see only what is before them. All others are what they are.
    Returns:
        A module called with `inputs_embeds` (B, L, D) and `attention_mask` (B, L) or None, without parameters that
        this call does not use.
    """
    common = {
        "vocab_size": 1,  # their embedding goes, see below
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "initializer_range": config.initializer_range,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "use_cache": False,
    }
    inner, D, eps = config.intermediate_size, config.hidden_size, config.norm_eps
    backbone: PreTrainedModel
    if config.architecture == "transformer":
        heads = {"num_attention_heads": D // config.head_dim}
        sizes = {"intermediate_size": inner, "max_position_embeddings": config.max_position_embeddings}
        if causal:
            backbone = LlamaModel(LlamaConfig(**common, **sizes, **heads, rms_norm_eps=eps))
        else:  # the same blocks without the causal mask
            backbone = EuroBertModel(EuroBertConfig(**common, **sizes, **heads, rms_norm_eps=eps, mask_token_id=0))
        sublayers = [sublayer for layer in backbone.layers for sublayer in (layer.self_attn, layer.mlp)]
    elif config.architecture == "mamba":
        mamba = MambaConfig(**common, state_size=config.state_size, layer_norm_epsilon=eps)
        mamba.intermediate_size = inner  # the mixer reads this, and `expand` allows whole multiples of D only
        backbone = MambaModel(mamba)
        for i, layer in enumerate(backbone.layers):
            layer.mixer = ChunkedMambaMixer(mamba, i, initialize_mixer_weights=False)
        sublayers = [layer.mixer for layer in backbone.layers]
    elif config.architecture == "mamba2":
        heads = {"num_heads": inner // config.head_dim, "head_dim": config.head_dim, "n_groups": 1}
        sizes = {"state_size": config.state_size, "chunk_size": 64}  # chunks only affect speed and memory
        backbone = Mamba2Model(_FreeWidthMamba2Config(**common, **sizes, **heads, layer_norm_epsilon=eps))
        sublayers = [layer.mixer for layer in backbone.layers]
    elif config.architecture == "s4d":
        return S4DModel(D, config.num_hidden_layers, config.state_size, inner, config.dropout, eps)
    elif config.architecture == "cnn":
        return CNNModel(D, config.num_hidden_layers, inner, config.dropout, eps)
    else:
        return TCResNet(config.num_input_features or 0, D)
    backbone.set_input_embeddings(nn.Identity())
    if config.dropout:
        for sublayer in sublayers:
            sublayer.register_forward_hook(functools.partial(_drop_output, config.dropout))
    return backbone


def _drop_output(rate: float, module: nn.Module, inputs: Any, output: Any) -> Any:
    """A forward hook: dropout on what a sub-layer adds to the residual stream, which the library does not have."""
    if isinstance(output, tuple):
        return (F.dropout(output[0], rate, module.training), *output[1:])
    return F.dropout(output, rate, module.training)


# ---------------------------------------------------------------------------------------------------------------------
# Mamba without CUDA kernels: the library walks through the L positions, with a backward pass of order L^2.


def selective_scan(u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """h_l = exp(dt_l A) h_{l-1} + dt_l B_l u_l, y_l = C_l h_l, in 2 sqrt(L) steps (Gu and Dao 2023, Algorithm 2).

    Chunks of m ~ sqrt(L) positions advance side by side from h = 0; then the states at their ends are carried over.

    Args:
        u, dt: (b, L, I). A: (I, N), negative. B, C: (b, L, N).
    Returns:
        (b, L, I).
    """
    L = u.shape[1]
    m = math.isqrt(L - 1) + 1
    chunks = math.ceil(L / m)
    u, dt, B, C = (F.pad(x, (0, 0, 0, chunks * m - L)).unflatten(1, (chunks, m)) for x in (u, dt, B, C))
    decay = (dt[..., None] * A).exp()  # (b, chunks, m, I, N)
    inputs = (dt * u)[..., None] * B[..., None, :]
    states = [inputs[:, :, 0]]
    for a, x in zip(decay.unbind(2)[1:], inputs.unbind(2)[1:]):
        states.append(a * states[-1] + x)
    h = torch.stack(states, 2)
    since_start = (dt.cumsum(2)[..., None] * A).exp()  # decay of what a chunk started with
    starts = [torch.zeros_like(h[:, 0, 0])]
    for a, x in zip(since_start[:, :-1, -1].unbind(1), h[:, :-1, -1].unbind(1)):
        starts.append(a * starts[-1] + x)
    h = h + since_start * torch.stack(starts, 1)[:, :, None]
    return (h * C[..., None, :]).sum(-1).flatten(1, 2)[:, :L]


class ChunkedMambaMixer(MambaMixer):
    """The library's mixer; where its CUDA kernels are not installed, with `selective_scan`."""

    def forward(
        self,
        hidden_states: Tensor,
        cache_params: Any = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """(B, L, D) -> (B, L, D)."""
        if hidden_states.is_cuda and is_mamba_ssm_available():
            return super().forward(hidden_states, cache_params, attention_mask, **kwargs)
        u = hidden_states
        real = None if attention_mask is None else attention_mask[..., None].to(u.dtype)
        u = u if real is None else u * real
        u, gate = self.in_proj(u).chunk(2, -1)
        u = self.act(self.conv1d(u.mT)[..., : u.shape[1]]).mT
        u = u if real is None else u * real
        dt, B, C = self.x_proj(u).split([self.time_step_rank, self.ssm_state_size, self.ssm_state_size], -1)
        dt = F.softplus(self.dt_proj(dt).float())
        y = selective_scan(u.float(), dt, -self.A_log.float().exp(), B.float(), C.float()) + self.D.float() * u
        return self.out_proj((y * F.silu(gate)).to(hidden_states.dtype))


# ---------------------------------------------------------------------------------------------------------------------
# Convolutional networks


class CNNLayer(GradientCheckpointingLayer):
    """(B, L, D) -> (B, L, D): x + W GELU(convolution over 9 positions of LayerNorm(x)), positions on both sides."""

    def __init__(self, hidden_size: int, intermediate_size: int, dropout: float, eps: float):
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size, eps=eps)
        self.conv = nn.Conv1d(hidden_size, intermediate_size, _CNN_KERNEL, padding=_CNN_KERNEL // 2)
        self.out = nn.Linear(intermediate_size, hidden_size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_states: Tensor, padding: Tensor | None = None) -> Tensor:
        """`padding` (B, L, 1), True where there is nothing, reads as the zeros beyond the ends."""
        x = self.norm(hidden_states)
        if padding is not None:
            x = x.masked_fill(padding, 0.0)
        return hidden_states + self.dropout(self.out(F.gelu(self.conv(x.mT).mT)))


class CNNModel(nn.Module):
    """A residual stack of 1D convolutions and a last LayerNorm; a position sees 4 more on each side per layer."""

    def __init__(self, hidden_size: int, num_hidden_layers: int, intermediate_size: int, dropout: float, eps: float):
        super().__init__()
        self.layers = nn.ModuleList(
            CNNLayer(hidden_size, intermediate_size, dropout, eps) for _ in range(num_hidden_layers)
        )
        self.norm = nn.LayerNorm(hidden_size, eps=eps)

    def forward(self, inputs_embeds: Tensor, attention_mask: Tensor | None = None) -> BaseModelOutput:
        """(B, L, D) and (B, L), 1 for real positions -> last_hidden_state (B, L, D)."""
        padding = None if attention_mask is None else ~attention_mask.bool()[..., None]
        hidden_states = inputs_embeds
        for layer in self.layers:
            hidden_states = layer(hidden_states, padding)
        return BaseModelOutput(last_hidden_state=self.norm(hidden_states))


class TemporalConv(nn.Module):
    """Convolution over time without bias, then batch normalisation over real positions, which leaves padding zero.

    A stride of 2 keeps positions 0, 2, 4, ..
    """

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, stride: int = 1):
        super().__init__()
        self.conv = nn.Conv1d(in_channels, out_channels, kernel_size, stride, kernel_size // 2, bias=False)
        self.norm = nn.BatchNorm1d(out_channels)

    def forward(self, x: Tensor, real: Tensor | None) -> Tensor:
        """(B, C_in, L) -> (B, C_out, ceil(L / stride)); `real` is bool, (B, ceil(L / stride)), or None."""
        x = self.conv(x)
        if real is None:
            return self.norm(x)
        y = torch.zeros_like(x.mT)
        y[real] = self.norm(x.mT[real]).to(y.dtype)
        return y.mT


class TCResNetBlock(nn.Module):
    """Two temporal convolutions over 9 positions beside a convolution over one; halves the length."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.first = TemporalConv(in_channels, out_channels, 9, stride=2)
        self.second = TemporalConv(out_channels, out_channels, 9)
        self.shortcut = TemporalConv(in_channels, out_channels, 1, stride=2)

    def forward(self, x: Tensor, real: Tensor | None) -> Tensor:
        """(B, C_in, L) -> (B, C_out, ceil(L / 2)); `real` is of the output."""
        y = self.second(F.relu(self.first(x, real)), real)
        return F.relu(y + F.relu(self.shortcut(x, real)))


class TCResNet(nn.Module):
    """TC-ResNet8 (Choi et al. 2019): frequency bands are channels, and everything is a convolution over time."""

    def __init__(self, num_input_features: int, hidden_size: int):
        super().__init__()
        channels = [max(1, hidden_size * c // 48) for c in (16, 24, 32, 48)]
        self.first = TemporalConv(num_input_features, channels[0], 3)
        self.layers = nn.ModuleList(TCResNetBlock(*pair) for pair in itertools.pairwise(channels))

    def forward(self, input_features: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(B, L, F) and (B, L) or None -> (B, ceil(L / 8), D) and which of these are real, bool, or None."""
        x, real = input_features.mT, None if attention_mask is None else attention_mask.bool()
        if real is not None:
            x = x.masked_fill(~real[:, None], 0.0)
        x = F.relu(self.first(x, real))
        for block in self.layers:
            real = None if real is None else real[:, ::2]
            x = block(x, real)
        return x.mT, real


# ---------------------------------------------------------------------------------------------------------------------
# Encoder and heads


class BaselineEncoder(nn.Module):
    """Token ids (B, L) or features (B, L, F) to hidden states: embedding or linear encoder, then the backbone."""

    def __init__(self, config: BaselineConfig, causal: bool):
        super().__init__()
        self.config = config
        width = config.num_input_features
        if width is None:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        elif config.architecture != "tc_resnet":
            self.embed_features = nn.Linear(width, config.hidden_size)
        self.backbone = make_backbone(config, causal)

    def forward(
        self, input_ids: Tensor | None, input_features: Tensor | None, attention_mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """
        Args:
            attention_mask: (B, L), 1 for real positions, or None.
        Returns:
            (B, L, D), of "tc_resnet" (B, ceil(L / 8), D), and the mask of these, or None.
        """
        width = self.config.num_input_features
        given, other = (input_ids, input_features) if width is None else (input_features, input_ids)
        if given is None or other is not None:
            wanted = "input_ids (B, L)" if width is None else f"input_features (B, L, {width})"
            raise ValueError(f"this model reads {wanted} and nothing else")
        if given.ndim != (2 if width is None else 3) or (width is not None and given.shape[-1] != width):
            wanted = "input_ids must have shape (B, L)" if width is None else f"input_features must be (B, L, {width})"
            raise ValueError(f"{wanted}, got {tuple(given.shape)}")
        if attention_mask is not None and attention_mask.shape != given.shape[:2]:
            raise ValueError(f"attention_mask must be {tuple(given.shape[:2])}, got {tuple(attention_mask.shape)}")
        if width is None:
            hidden_states = self.embed_tokens(given)
        elif self.config.architecture == "tc_resnet":
            return self.backbone(given.to(next(self.backbone.parameters()).dtype), attention_mask)
        else:
            hidden_states = self.embed_features(given.to(self.embed_features.weight.dtype))
        outputs = self.backbone(inputs_embeds=hidden_states, attention_mask=attention_mask)
        return outputs.last_hidden_state, attention_mask


class BaselinePreTrainedModel(PreTrainedModel):
    config_class = BaselineConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True

    def __init__(self, config: BaselineConfig, causal: bool):
        super().__init__(config)
        self.model = BaselineEncoder(config, causal)

    def post_init(self) -> None:
        super().post_init()
        # What FSDP wraps; it refuses names of classes that a model does not have.
        self._no_split_modules = {
            type(layer).__name__ for layer in self.model.backbone.get_submodule("layers").children()
        }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Of everything but the library's backbones, which initialise themselves (with our initializer_range)."""
        super()._init_weights(module)
        if isinstance(module, S4DMixer):
            module.reset_state_space()
        elif isinstance(module, TemporalConv):
            init.xavier_uniform_(module.conv.weight)


def _refuse_cache(use_cache: bool | None) -> None:
    if use_cache:
        raise ValueError(f"use_cache must be False or None, got {use_cache}: baselines run over whole sequences only")


class BaselineForCausalLM(BaselinePreTrainedModel):
    """A causal baseline with a language-model head that is tied to its embedding."""

    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: BaselineConfig):
        if config.architecture not in CAUSAL or config.num_input_features is not None:
            raise ValueError(
                f"a language model has an architecture of {CAUSAL} and num_input_features None, "
                f"got {config.architecture!r} and {config.num_input_features}"
            )
        super().__init__(config, causal=True)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        num_items_in_batch: Tensor | None = None,
    ) -> CausalLMOutput:
        """
        Args:
            input_ids: (B, L) int64. attention_mask: (B, L), 1 for real positions.
            labels: (B, L) int64 next-token targets before shifting, -100 to ignore.
            num_items_in_batch: () what the summed loss is divided by, instead of the number of targets.
        Returns:
            CausalLMOutput with logits (B, L, vocab_size) and, with labels, the mean cross-entropy in nats.
        """
        _refuse_cache(use_cache)
        hidden_states, _ = self.model(input_ids, None, attention_mask)
        logits = self.lm_head(hidden_states)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, num_items_in_batch=num_items_in_batch
            )
        return CausalLMOutput(loss=loss, logits=logits)


class BaselineForSequenceClassification(BaselinePreTrainedModel):
    """A baseline that pools its real positions and classifies; reads token ids or, by config, continuous features."""

    accepts_loss_kwargs = False  # the library's regression and multi-label losses ignore num_items_in_batch

    def __init__(self, config: BaselineConfig):
        super().__init__(config, causal=False)
        self.num_labels = config.num_labels
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        input_features: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
    ) -> SequenceClassifierOutput:
        """
        Args:
            input_ids: (B, L) int64, or input_features: (B, L, F). attention_mask: (B, L), 1 for real positions.
            labels: (B,) int64 classes, or floats for regression and multi-label problems.
        Returns:
            SequenceClassifierOutput with logits (B, num_labels) and, with labels, the loss.
        """
        _refuse_cache(use_cache)
        hidden_states, real = self.model(input_ids, input_features, attention_mask)
        pooled = pool(hidden_states, real, self.config.classifier_pooling)
        if self.config.architecture == "tc_resnet":
            pooled = F.dropout(pooled, self.config.dropout, self.training)
        logits = self.score(pooled)
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def pool(hidden_states: Tensor, real: Tensor | None, how: str) -> Tensor:
    """(B, L, D) -> (B, D): the "mean" of the positions where `real` (B, L) is not 0, or the "last" of them."""
    if real is None:
        return hidden_states.mean(1) if how == "mean" else hidden_states[:, -1]
    real = real.to(hidden_states.device).bool()
    if how == "mean":
        total = hidden_states.masked_fill(~real[..., None], 0.0).sum(1)
        return total / real.sum(1, keepdim=True).clamp(min=1).to(total.dtype)
    last = (real * torch.arange(real.shape[1], device=real.device)).amax(1)
    return hidden_states[torch.arange(len(last), device=last.device), last]


AutoConfig.register(BaselineConfig.model_type, BaselineConfig, exist_ok=True)
AutoModelForCausalLM.register(BaselineConfig, BaselineForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(BaselineConfig, BaselineForSequenceClassification, exist_ok=True)


# ---------------------------------------------------------------------------------------------------------------------
# Sizes


ModelClass = type[BaselineForCausalLM] | type[BaselineForSequenceClassification]


def count_parameters(config: BaselineConfig, model_class: ModelClass) -> int:
    """Parameters of that model, a tied matrix counted once; allocates nothing and draws no random numbers."""
    with torch.device("meta"):
        return sum(p.numel() for p in model_class(config).parameters())


class _Sizes(NamedTuple):
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int | None = None


def matched_baseline(
    architecture: str,
    target_parameters: int,
    *,
    hidden_size: int = 256,
    num_hidden_layers: int = 8,
    model_class: ModelClass = BaselineForCausalLM,
    tolerance: float = 0.05,
    **fields: Any,
) -> BaselineConfig:
    """A config with that many parameters, of the shape nearest to the one asked for.

    First the inner width gives way, between half and twice its published proportion to D. Where that is not enough,
    width, depth and inner width do together, width and depth by a factor of 4 at most: the nearest in log distance.
    "tc_resnet" has one size, and neither of `hidden_size` and `num_hidden_layers` matters to it.

    Args:
        target_parameters: of the model to compare with, all of them.
        model_class: what the parameters are counted of, `BaselineForCausalLM` or `BaselineForSequenceClassification`.
        tolerance: largest relative difference.
        fields: of `BaselineConfig`.
    Raises:
        ValueError: no such model, with the closest one named; or `fields` that cannot be.
    """
    if "intermediate_size" in fields:
        raise ValueError(f"intermediate_size is what is searched for, got {fields['intermediate_size']}")
    if target_parameters < 1 or not tolerance >= 0:
        raise ValueError(
            f"target_parameters must be at least 1 and tolerance at least 0, got {target_parameters} and {tolerance}"
        )

    def make(sizes: _Sizes) -> BaselineConfig:
        return BaselineConfig(architecture=architecture, **fields, **sizes._asdict())

    def count(sizes: _Sizes) -> int:
        return count_parameters(make(sizes), model_class)

    def error(parameters: int) -> float:
        return abs(parameters / target_parameters - 1)

    asked = _Sizes(hidden_size, num_hidden_layers)
    make(asked)  # raises for fields that cannot be
    if architecture == "tc_resnet":
        candidates = _one_size(count, target_parameters)
    else:
        candidates = _three_sizes(make, count, target_parameters, asked)
    best: tuple[float, _Sizes] | None = None  # distance from what was asked for
    closest: tuple[int, _Sizes] | None = None  # parameters
    for parameters, sizes in candidates:
        if best is not None and _distance(sizes, asked) >= best[0]:
            break  # and so are all that follow
        if closest is None or error(parameters) < error(closest[0]):
            closest = parameters, sizes
        if error(parameters) <= tolerance:
            if architecture == "tc_resnet" or sizes[:2] == asked[:2]:
                return make(sizes)
            published = make(sizes._replace(intermediate_size=None)).intermediate_size
            distance = _distance(sizes, asked) + math.log((sizes.intermediate_size or 1) / published) ** 2
            if best is None or distance < best[0]:
                best = distance, sizes
    if best is not None:
        return make(best[1])
    assert closest is not None
    raise ValueError(
        f"no {architecture!r} near hidden_size {hidden_size} and num_hidden_layers {num_hidden_layers} has "
        f"{target_parameters:,} parameters within {tolerance:.1%}; the closest has {closest[0]:,}: "
        f"{closest[1]._asdict()}"
    )


def _distance(sizes: _Sizes, asked: _Sizes) -> float:
    """Squared log distance of width and depth."""
    return sum(math.log(size / wanted) ** 2 for size, wanted in zip(sizes[:2], asked[:2]))


def _one_size(count: Callable[[_Sizes], int], target: int) -> Iterator[tuple[int, _Sizes]]:
    """Parameters and size of the two TC-ResNets around the target, the closer one first."""
    widths = range(2, 4096)
    i = bisect_left(widths, target, key=lambda width: count(_Sizes(width, 3)))
    around = [(count(sizes), sizes) for sizes in (_Sizes(width, 3) for width in widths[max(0, i - 1) : i + 1])]
    yield from sorted(around, key=lambda found: abs(found[0] - target))


def _three_sizes(
    make: Callable[[_Sizes], BaselineConfig], count: Callable[[_Sizes], int], target: int, asked: _Sizes
) -> Iterator[tuple[int, _Sizes]]:
    """Parameters and sizes of every width and depth, those asked for first, each at its best inner width.

    Parameters are fixed + layers (per_layer + per_inner inner), which three models of a width determine.
    """
    hidden_size, num_layers, _ = asked
    spacing = max(8, hidden_size // 16 // 8 * 8)
    widths = {hidden_size} | set(range(spacing, 4 * hidden_size + 1, spacing))
    widths = {D for D in widths if hidden_size <= 4 * D}
    depths = range(math.ceil(num_layers / 4), 4 * num_layers + 1)

    @functools.cache
    def law(D: int) -> tuple[int, int, int]:
        inner = make(_Sizes(D, 1)).intermediate_size
        one, two, wide = (count(_Sizes(D, *sizes)) for sizes in ((1, inner), (2, inner), (1, 2 * inner)))
        per_inner = (wide - one) // inner
        return 2 * one - two, two - one - per_inner * inner, per_inner

    shapes = (_Sizes(D, layers) for D in widths for layers in depths)
    for D, layers, _ in sorted(shapes, key=lambda sizes: _distance(sizes, asked)):
        config = make(_Sizes(D, layers))
        step, published = config.inner_step, config.intermediate_size
        fixed, per_layer, per_inner = law(D)
        wanted = ((target - fixed) / layers - per_layer) / per_inner
        lowest, highest = math.ceil(published / 2 / step), 2 * published // step
        inner = step * min(max(round(wanted / step), lowest), highest)
        yield fixed + layers * (per_layer + per_inner * inner), _Sizes(D, layers, inner)


__all__ = [
    "ARCHITECTURES",
    "BaselineConfig",
    "BaselineForCausalLM",
    "BaselineForSequenceClassification",
    "count_parameters",
    "matched_baseline",
]
