# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""One configuration for all baselines."""

from __future__ import annotations

import math
from typing import Any

from transformers import PreTrainedConfig

ARCHITECTURES = ("transformer", "mamba", "mamba2", "s4", "s4d", "cnn", "tc_resnet")
CAUSAL = ("transformer", "mamba", "mamba2", "s4", "s4d")  # those with a language model
# Inner width over D, and state per channel (per head for Mamba-2), as published.
_EXPANSION = {"transformer": 8 / 3, "mamba": 2, "mamba2": 2, "s4": 4, "s4d": 4, "cnn": 2, "tc_resnet": 1}
_STATE_SIZE = {"mamba": 16, "mamba2": 128, "s4": 64, "s4d": 64}


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
            (transformer), of the mixer (mamba, mamba2), of the feed-forward layer (s4, s4d) or of the
            convolutions (cnn).
            Not used by "tc_resnet".
        state_size (`int`, *optional*): N of "mamba" (16), "mamba2" (128), "s4" and "s4d" (64).
        num_input_features (`int`, *optional*): F of continuous inputs, instead of token ids.
        max_position_embeddings (`int`): longest sequence that the transformer is meant for and that "s4" reads.
        dropout (`float`): rate after each sub-layer, as in ES-SSM; of "tc_resnet" before the classifier, as published.
        embedding_dropout (`float`): rate on what is embedded, as in ES-SSM; of "tc_resnet", which embeds nothing, 0.
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
        self._check_integers(vocab_size=1, hidden_size=2, num_hidden_layers=1, max_position_embeddings=1)
        if self.intermediate_size is None:
            step = self.inner_step
            self.intermediate_size = max(step, round(_EXPANSION[self.architecture] * self.hidden_size / step) * step)
        if self.state_size is None:
            self.state_size = _STATE_SIZE.get(self.architecture, 0)
        super().__post_init__(**kwargs)
        self._check_integers(intermediate_size=1, state_size=2 if self.architecture in _STATE_SIZE else 0)
        if self.num_input_features is not None:
            self._check_integers(num_input_features=1)
        pairs = ("state_size", 2)  # conjugate ones
        multiples = {"transformer": ("hidden_size", 2), "mamba2": ("intermediate_size", self.head_dim)}
        name, divisor = (multiples | {"s4": pairs, "s4d": pairs}).get(self.architecture, ("hidden_size", 1))
        if getattr(self, name) % divisor:
            raise ValueError(
                f"{name} of {self.architecture!r} must be a multiple of {divisor}, got {getattr(self, name)}"
            )
        if self.architecture == "tc_resnet" and self.num_input_features is None:
            raise ValueError("architecture 'tc_resnet' needs num_input_features: its channels are frequency bands")
        if self.classifier_pooling not in ("mean", "last"):
            raise ValueError(f"classifier_pooling must be 'mean' or 'last', got {self.classifier_pooling!r}")
        for name in ("dropout", "embedding_dropout"):
            if not 0.0 <= (rate := getattr(self, name)) < 1.0:
                raise ValueError(f"{name} must be a number in [0, 1), got {rate!r}")
        if self.architecture == "tc_resnet" and self.embedding_dropout:
            raise ValueError(f"embedding_dropout of 'tc_resnet', which embeds nothing: 0, got {self.embedding_dropout}")

    def _check_integers(self, **minimum: int) -> None:
        for name, least in minimum.items():
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")

    @property
    def head_dim(self) -> int:
        """Width of an attention head: even, a divisor of D, as near to 64 as can be; of a Mamba-2 head, 64 or 32."""
        if self.architecture == "mamba2":
            return 64 if self.hidden_size >= 256 else 32
        even = [d for d in range(2, self.hidden_size + 1, 2) if self.hidden_size % d == 0]
        return min(even, key=lambda d: abs(math.log(d / 64)), default=1)

    @property
    def inner_step(self) -> int:
        """What inner widths are multiples of, by choice: whole heads, or 8 for the matrix units of accelerators."""
        return self.head_dim if self.architecture == "mamba2" else 8


class BaselinePairConfig(BaselineConfig):
    r"""
    Configuration of a baseline that reads both documents of a pair.

    Args:
        head_hidden_size (`int`, *optional*): width of the hidden layer of the head, `hidden_size` by default.
    """

    model_type = "essm_baseline_pair"

    head_hidden_size: int = None  # type: ignore[assignment]

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.head_hidden_size is None:
            self.head_hidden_size = self.hidden_size
        self._check_integers(head_hidden_size=1)
