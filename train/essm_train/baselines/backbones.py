# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The networks between encoder and head: Transformer, Mamba and Mamba-2 are the library's, the others this package's.

Letters: B batch, L sequence, D width.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

import torch.nn.functional as F
import transformers
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from essm_train.baselines.config import BaselineConfig
from essm_train.baselines.convolutions import CNNLayer, TCResNet
from essm_train.baselines.mamba import ChunkedMambaMixer, by_chunks
from essm_train.baselines.s4 import S4Mixer
from essm_train.baselines.s4d import S4DMixer, StateSpaceLayer


@strict  # or the base class would check the type of `expand`
class _FreeWidthMamba2Config(transformers.Mamba2Config):
    """Mamba2Config whose inner width need not be a whole multiple of D: `expand` is their exact ratio."""

    expand: Any = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.expand = Fraction(self.num_heads * self.head_dim, self.hidden_size)
        super().__post_init__(**kwargs)


class ResidualStack(nn.Module):
    """Layers of this package, S4DLayer or CNNLayer, and a last LayerNorm; called as the library's backbones are."""

    def __init__(self, layers: Iterable[nn.Module], hidden_size: int, eps: float):
        super().__init__()
        self.layers, self.norm = nn.ModuleList(layers), nn.LayerNorm(hidden_size, eps=eps)

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
        causal: of the transformer: whether positions see only what is before them. All others are what they are.
    Returns:
        A module called with `inputs_embeds` (B, L, D) and `attention_mask` (B, L) or None, without parameters that
        this call does not use.
    """
    common = {name: getattr(config, name) for name in ("hidden_size", "num_hidden_layers", "initializer_range")}
    common |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    common |= {"vocab_size": 1, "use_cache": False}  # their embedding goes, see below
    inner, D, eps = config.intermediate_size, config.hidden_size, config.norm_eps
    backbone: transformers.PreTrainedModel
    if config.architecture == "transformer":
        sizes = {"intermediate_size": inner, "max_position_embeddings": config.max_position_embeddings}
        fields = common | sizes | {"num_attention_heads": D // config.head_dim, "rms_norm_eps": eps}
        if causal:
            backbone = transformers.LlamaModel(transformers.LlamaConfig(**fields))
        else:  # the same blocks without the causal mask
            backbone = transformers.EuroBertModel(transformers.EuroBertConfig(**fields, mask_token_id=0))
        sublayers = [sublayer for layer in backbone.layers for sublayer in (layer.self_attn, layer.mlp)]
    elif config.architecture == "mamba":
        mamba = transformers.MambaConfig(**common, state_size=config.state_size, layer_norm_epsilon=eps)
        mamba.intermediate_size = inner  # the mixer reads this, and `expand` allows whole multiples of D only
        backbone = transformers.MambaModel(mamba)
        for i, layer in enumerate(backbone.layers):
            layer.mixer = ChunkedMambaMixer(mamba, i, initialize_mixer_weights=False)
        sublayers = [layer.mixer for layer in backbone.layers]
    elif config.architecture == "mamba2":
        heads = {"num_heads": inner // config.head_dim, "head_dim": config.head_dim, "n_groups": 1}
        sizes = {"state_size": config.state_size, "chunk_size": 64}  # chunks only affect speed and memory
        mamba2 = _FreeWidthMamba2Config(**common, **sizes, **heads, layer_norm_epsilon=eps)
        backbone = by_chunks(transformers.Mamba2Model(mamba2))
        sublayers = [layer.mixer for layer in backbone.layers]
    elif config.architecture in ("s4", "s4d"):
        make: Any = S4DMixer
        if config.architecture == "s4":
            make = functools.partial(S4Mixer, max_length=config.max_position_embeddings)
        mixers = [make(D, config.state_size) for _ in range(config.num_hidden_layers)]
        return ResidualStack([StateSpaceLayer(mixer, D, inner, config.dropout, eps) for mixer in mixers], D, eps)
    elif config.architecture == "cnn":
        return ResidualStack([CNNLayer(D, inner, config.dropout, eps) for _ in range(config.num_hidden_layers)], D, eps)
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
