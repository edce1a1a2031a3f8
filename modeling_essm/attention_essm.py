# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Attention layers of a hybrid: grouped-query attention with rotary positions, through the library's interface.

Rows come with their real positions first and leave the cache with them last (`ESSMAttentionCacheLayer`). So the real
keys of a row, old and new, follow one another, masks and windows of the library hold as they are, and the only keys to
hide are those before the first real one. Letters: B batch, L sequence, T keys, D width, H heads, d width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    causal_mask_function,
    packed_sequence_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, eager_attention_forward

from .cache_essm import ESSMAttentionCacheLayer
from .packing import Packing
from .spectral_budget import SPECTRAL_LAYER


@dataclass(frozen=True)
class AttentionCall:
    """What all attention layers share in a call.

    Attributes:
        implementation: name in the library's interface. masks: what it takes as one, for each kind of layer.
        cos, sin: (B or 1, L, d) rotary factors. read: (B,) how many positions of each row a cache keeps; None: all.
        packing: what kernels of variable length read of packed sequences.
    """

    implementation: str
    masks: dict[str, Any]
    cos: Tensor
    sin: Tensor
    read: Tensor | None
    packing: dict[str, Any]


def attention_call(
    config: Any, x: Tensor, caches: Sequence[Any], read: Tensor | None = None, packing: Packing | None = None
) -> AttentionCall:
    """What the attention layers of a call need to know.

    Args:
        x: (B, L, D) hidden states, real positions first. caches: one for each layer, or None.
        read: (B,) int64 in [0, L], or None.
    """
    B, L, _ = x.shape
    first = {kind: config.layer_types.index(kind) for kind in {*config.layer_types} - {SPECTRAL_LAYER}}
    masks = {kind: _mask(config, kind, x, caches[i], packing) for kind, i in first.items()}
    options: dict[str, Any] = {}
    positions = torch.arange(L, device=x.device)[None]
    if (cache := caches[min(first.values())]) is not None and cache.tensors:
        positions = positions + cache.tensors["lengths"].to(x.device)[:, None]
    if packing is not None:
        positions = packing.positions(B, L).to(x.device)
        offsets = F.pad(packing.first, (0, 1), value=B * L).to(x.device, torch.int32)
        options = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
        options |= dict.fromkeys(("max_length_q", "max_length_k"), packing.longest)
    cos, sin = rotary_factors(config, positions, x.dtype)
    return AttentionCall(config._attn_implementation, masks, cos, sin, read, options)


def _mask(config: Any, kind: str, x: Tensor, cache: Any, packing: Packing | None) -> Any:
    """The mask of all layers of one kind in the form that the implementation takes, which may be None."""
    B, L, _ = x.shape
    T, real = L, None
    if cache is not None and cache.tensors:
        held = cache.tensors["keys"].shape[2]
        T += held
        if cache.is_ragged:
            places = torch.arange(held, device=x.device) - held
            real = F.pad(places >= -cache.tensors["lengths"].to(x.device)[:, None], (0, L), value=True)
    function, window = causal_mask_function, None
    if kind == "sliding_attention" and (torch.compiler.is_compiling() or config.sliding_window < T):
        window = config.sliding_window
        function = sliding_window_causal_mask_function(window)
    if packing is not None:
        function = and_masks(function, packed_sequence_mask_function(packing.sequences(B, L).to(x.device)))
    make = ALL_MASK_ATTENTION_FUNCTIONS.get(config._attn_implementation)
    if make is None:  # an implementation of the user's that needs none
        return None
    return make(
        batch_size=B,
        q_length=L,
        kv_length=T,
        q_offset=T - L,
        kv_offset=0,
        mask_function=function,
        attention_mask=real,
        local_size=window,
        allow_is_causal_skip=packing is None and real is None,
        dtype=x.dtype,
        config=config,
        device=x.device,
    )


def rotary_factors(config: Any, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin (.., d) of the angles of positions (..), each frequency theta^(-2i/d) twice, computed in fp32."""
    kind, theta, d = config.rope_parameters["rope_type"], config.rope_parameters["rope_theta"], config.head_dim
    if kind == "default":
        frequencies, scale = theta ** (torch.arange(0, d, 2, device=positions.device).float() / -d), 1.0
    else:
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, positions.device)
    angles = positions[..., None].float() * frequencies
    angles = torch.cat([angles, angles], -1)
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


class ESSMAttention(nn.Module):
    """Causal grouped-query attention with rotary positions, over all positions or a sliding window: (B, L, D) to it."""

    is_causal = True

    def __init__(self, config: Any, kind: str):
        super().__init__()
        D, d = config.hidden_size, config.head_dim
        self.config, self.kind, self.head_dim = config, kind, d
        self.sliding_window = config.sliding_window if kind == "sliding_attention" else None
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.dropout = config.attention_dropout
        self.q_proj = nn.Linear(D, config.num_attention_heads * d, bias=False)
        self.k_proj = nn.Linear(D, config.num_key_value_heads * d, bias=False)
        self.v_proj = nn.Linear(D, config.num_key_value_heads * d, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * d, D, bias=False)

    def forward(self, x: Tensor, call: AttentionCall, cache: ESSMAttentionCacheLayer | None = None) -> Tensor:
        """(B, L, D) -> (B, L, D), reading and extending the layer's keys and values."""
        H, held = self.config.num_attention_heads, self.config.num_key_value_heads
        projections = (self.q_proj, H), (self.k_proj, held), (self.v_proj, held)
        query, key, value = (f(x).unflatten(-1, (heads, self.head_dim)).transpose(1, 2) for f, heads in projections)
        cos, sin = call.cos.to(x.device), call.sin.to(x.device)
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        if cache is not None:
            key, value = cache.extend(key, value, call.read, self.sliding_window)
        if not torch.compiler.is_compiling() and not len(x):  # the library's functions take no empty batch
            return self.o_proj(query.transpose(1, 2).flatten(2, 3))
        mask = call.masks[self.kind]
        output, _ = ALL_ATTENTION_FUNCTIONS.get_interface(call.implementation, eager_attention_forward)(
            self,
            query,
            key,
            value,
            mask if mask is None else mask.to(x.device),
            dropout=self.dropout if self.training else 0.0,
            scaling=self.head_dim**-0.5,
            sliding_window=self.sliding_window,
            **call.packing,
        )
        return self.o_proj(output.flatten(2))
