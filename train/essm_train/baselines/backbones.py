# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The networks between encoder and head: Transformer, Mamba and Mamba-2 of the library, the others of this package."""

from __future__ import annotations

import functools
from fractions import Fraction
from typing import Any

import torch.nn.functional as F
import transformers
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from essm_train.baselines.config import BaselineConfig
from essm_train.baselines.convolutions import CNNLayer, TCResNet
from essm_train.baselines.mamba import ChunkedMambaMixer, by_chunks, nest
from essm_train.baselines.state_spaces import StateSpaceLayer


@strict  # or the base class would check the type of `expand`
class _FreeWidthMamba2Config(transformers.Mamba2Config):
    """Mamba2Config whose inner width need not be a whole multiple of D: `expand` is their exact ratio."""

    expand: Any = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.expand = Fraction(self.num_heads * self.head_dim, self.hidden_size)
        super().__post_init__(**kwargs)

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"expand": float(self.expand)}  # which JSON has


class ResidualStack(nn.Module):
    """Layers of this package and a last LayerNorm; called as the library's backbones are."""

    def __init__(self, config: BaselineConfig):
        super().__init__()
        layer: Any = CNNLayer if config.architecture == "cnn" else StateSpaceLayer
        self.layers = nn.ModuleList(layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)

    def forward(self, inputs_embeds: Tensor, attention_mask: Tensor | None = None) -> BaseModelOutput:
        """(B, L, D) and (B, L), 1 for real positions -> last_hidden_state (B, L, D)."""
        padding = None if attention_mask is None else ~attention_mask.bool()[..., None]
        hidden_states = inputs_embeds
        for layer in self.layers:
            hidden_states = layer(hidden_states, padding)
        return BaseModelOutput(last_hidden_state=self.norm(hidden_states))


def make_backbone(config: BaselineConfig, causal: bool) -> nn.Module:
    """The network between encoder and head.

    Args:
        causal: whether a transformer's positions see only what is before them. All others are what they are.
    Returns:
        A module called with `inputs_embeds` (B, L, D) and `attention_mask` (B, L) or None, without parameters that
        this call does not use.
    """
    if config.architecture == "tc_resnet":
        return TCResNet(config.num_input_features or 0, config.hidden_size)
    if config.architecture in ("cnn", "s4", "s4d"):
        return ResidualStack(config)
    inner, eps = config.intermediate_size, config.norm_eps
    common = {name: getattr(config, name) for name in ("hidden_size", "num_hidden_layers", "initializer_range")}
    common |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    common |= {"vocab_size": 1, "use_cache": False}  # their embedding goes, see below
    backbone: transformers.PreTrainedModel
    if config.architecture == "transformer":
        common |= {"intermediate_size": inner, "max_position_embeddings": config.max_position_embeddings}
        common |= {"num_attention_heads": config.hidden_size // config.head_dim, "rms_norm_eps": eps}
        if causal:
            backbone = transformers.LlamaModel(transformers.LlamaConfig(**common))
        else:  # the same blocks without the causal mask
            backbone = transformers.EuroBertModel(transformers.EuroBertConfig(**common, mask_token_id=0))
        sublayers = [sublayer for layer in backbone.layers for sublayer in (layer.self_attn, layer.mlp)]
    elif config.architecture == "mamba":
        mamba = transformers.MambaConfig(**common, state_size=config.state_size, layer_norm_epsilon=eps)
        mamba.intermediate_size = inner  # the mixer reads this, and `expand` allows whole multiples of D only
        backbone = transformers.MambaModel(mamba)
        for i, layer in enumerate(backbone.layers):
            layer.mixer = ChunkedMambaMixer(mamba, i, initialize_mixer_weights=False)
        sublayers = [layer.mixer for layer in backbone.layers]
    else:
        common |= {"num_heads": inner // config.head_dim, "head_dim": config.head_dim, "n_groups": 1}
        common |= {"state_size": config.state_size, "chunk_size": 64}  # chunks only affect speed and memory
        backbone = by_chunks(transformers.Mamba2Model(_FreeWidthMamba2Config(**common, layer_norm_epsilon=eps)))
        if config.architecture == "matmamba":
            nest(backbone, config.num_spectral_channels)
        sublayers = [layer.mixer for layer in backbone.layers]
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
