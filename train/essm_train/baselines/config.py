# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""One configuration for all baselines."""

from __future__ import annotations

import math
from typing import Any

from transformers import PreTrainedConfig

ARCHITECTURES = ("transformer", "mamba", "mamba2", "matmamba", "s4", "s4d", "cnn", "tc_resnet")
CAUSAL = ("transformer", "mamba", "mamba2", "matmamba", "s4", "s4d")  # those with a language model
# Inner width over D, and state per channel (per head for Mamba-2), as published.
_EXPANSION = {"transformer": 8 / 3, "mamba": 2, "mamba2": 2, "matmamba": 2, "s4": 4, "s4d": 4, "cnn": 2, "tc_resnet": 1}
_STATE_SIZE = {"mamba": 16, "mamba2": 128, "matmamba": 128, "s4": 64, "s4d": 64}


class BaselineConfig(PreTrainedConfig):
    r"""
    Configuration of a baseline.

    Args:
        architecture (`str`): one of `ARCHITECTURES`. "transformer" is Llama's block (rotary positions, SwiGLU), causal
            as a language model and bidirectional as a classifier; "matmamba" is Mamba-2 with nested heads; "cnn" and
            "tc_resnet" only classify.
        hidden_size (`int`): model width D; for "tc_resnet" the channels of the last block, 48 in TC-ResNet8.
        num_hidden_layers (`int`): number of blocks; "tc_resnet" always has three.
        intermediate_size (`int`, *optional*): inner width of the SwiGLU (transformer), the mixer (mamba, mamba2,
            matmamba), the feed-forward layer (s4, s4d) or the convolutions (cnn); by default in the published
            proportion to D.
        num_spectral_channels (`int`, *optional*): capacity K̄ of "matmamba" (8), whose budget K runs the leading K / K̄
            of its heads; 1 for all others.
        state_size (`int`, *optional*): N of "mamba" (16), "mamba2", "matmamba" (128), "s4" and "s4d" (64).
        num_input_features (`int`, *optional*): F of continuous inputs, instead of token ids.
        head_hidden_size (`int`, *optional*): makes a classifier of pairs; the width of its head's hidden layer.
        max_position_embeddings (`int`): longest sequence that the transformer is meant for and that "s4" reads.
        dropout (`float`): rate after each sub-layer, as in ES-SSM; for "tc_resnet" before the classifier, as published.
        embedding_dropout (`float`): rate on what is embedded, as in ES-SSM; "tc_resnet" embeds nothing.
        classifier_pooling (`str`): "mean" over real positions or "last" real position.

    Raises:
        ValueError: an unknown architecture, or a width that it cannot have.
    """

    model_type = "essm_baseline"

    architecture: str = "transformer"
    vocab_size: int = 259
    hidden_size: int = 256
    num_hidden_layers: int = 8
    intermediate_size: int = None  # type: ignore[assignment]
    num_spectral_channels: int = None  # type: ignore[assignment]
    state_size: int = None  # type: ignore[assignment]
    num_input_features: int | None = None
    head_hidden_size: int | None = None
    max_position_embeddings: int = 4096
    dropout: float = 0.0
    embedding_dropout: float = 0.0
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
        nested = self.architecture == "matmamba"
        if self.num_spectral_channels is None:
            self.num_spectral_channels = 8 if nested else 1
        if self.num_spectral_channels < 1 or (self.num_spectral_channels > 1 and not nested):
            legal = "at least 1" if nested else f"1 for {self.architecture!r}"
            raise ValueError(f"num_spectral_channels must be {legal}, got {self.num_spectral_channels}")
        if self.intermediate_size is None:
            step = self.inner_step
            self.intermediate_size = max(step, round(_EXPANSION[self.architecture] * self.hidden_size / step) * step)
        if self.state_size is None:
            self.state_size = _STATE_SIZE.get(self.architecture, 0)
        super().__post_init__(**kwargs)
        multiples = {"transformer": ("hidden_size", 2), "mamba2": ("intermediate_size", self.head_dim)}
        multiples |= {"matmamba": ("intermediate_size", self.num_spectral_channels)}
        multiples |= dict.fromkeys(("s4", "s4d"), ("state_size", 2))  # conjugate pairs
        name, divisor = multiples.get(self.architecture, ("hidden_size", 1))
        if (value := getattr(self, name)) % divisor:
            raise ValueError(f"{name} of {self.architecture!r} must be a multiple of {divisor}, got {value}")
        if self.architecture == "tc_resnet" and self.num_input_features is None:
            raise ValueError("architecture 'tc_resnet' needs num_input_features: its channels are frequency bands")

    @property
    def head_dim(self) -> int:
        """Width of an attention head: even, a divisor of D, as near to 64 as can be; of a Mamba-2 head, 64 or 32,
        nested a divisor of the smallest size's inner width, as near to that as can be."""
        if self.architecture == "mamba2":
            return self.inner_step
        whole, wanted, step = self.hidden_size, 64, 2
        if self.architecture == "matmamba":
            whole, wanted, step = self.intermediate_size // self.num_spectral_channels, self.inner_step, 1
        divisors = [d for d in range(step, whole + 1, step) if whole % d == 0]
        return min(divisors, key=lambda d: abs(math.log(d / wanted)), default=1)

    @property
    def inner_step(self) -> int:
        """What inner widths are multiples of, by choice: Mamba-2's heads, or 8 for the matrix units of accelerators."""
        return (64 if self.hidden_size >= 256 else 32) if self.architecture in ("mamba2", "matmamba") else 8

    @property
    def trained_budgets(self) -> list[int] | None:
        """The sizes that "matmamba" trains: the capacity and the powers of two below it. None for the others."""
        capacity = self.num_spectral_channels
        nested = self.architecture == "matmamba"
        return [*(1 << i for i in range((capacity - 1).bit_length())), capacity] if nested else None
