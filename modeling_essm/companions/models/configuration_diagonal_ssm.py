# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""DiagonalSSMConfig: everything that defines a diagonal state space model besides its weights."""

import math
from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .checks_states import SavedConfig, integer, number

# Which class each Auto class loads, from the files beside the weights.
AUTO_MAP = {
    "AutoConfig": "configuration_diagonal_ssm.DiagonalSSMConfig",
    "AutoModel": "modeling_diagonal_ssm.DiagonalSSMModel",
    "AutoModelForCausalLM": "modeling_diagonal_ssm.DiagonalSSMForCausalLM",
    "AutoModelForSequenceClassification": "modeling_diagonal_ssm.DiagonalSSMForSequenceClassification",
}
_STATE_SIZE = {"s5": 64, "lru": 64, "s4d": 32}
_INITIALIZATION = {"s5": "hippo", "lru": None, "s4d": "linear"}


@strict  # which checks types as long as annotations are types, and not text
class DiagonalSSMConfig(SavedConfig, PreTrainedConfig):
    r"""
    Configuration of a stack of diagonal linear recurrences: S5, S4D or LRU, in the residual block of S5 and LRU.

    Args:
        vocab_size (`int`): number of token ids.
        num_input_features (`int`, *optional*): width of continuous inputs, which a linear encoder reads instead of
            token ids.
        hidden_size (`int`): model width H.
        num_hidden_layers (`int`): number of blocks.
        parameterization (`str`): "s5" (Smith et al. 2023) and "lru" (Orvieto et al. 2023) have n modes that read all
            channels, "s4d" (Gu et al. 2022) n modes for each channel.
        state_size (`int`, *optional*): n of a new layer: stored modes, one of each conjugate pair in "s5" and "s4d".
            64 by default, in "s4d" 32.
        state_sizes (`list[int]`, *optional*): n of each layer where layers differ, as after pruning; 0 is a layer
            without modes, y = D u. Of "s4d" the largest n of a layer's channels.
        bidirectional (`bool`): whether a second C reads the recurrence that runs backwards; for classification.
        discretization (`str`): "zoh" or "bilinear", of "s5" and "s4d".
        initialization (`str`, *optional*): eigenvalues of new layers, "hippo", those of HiPPO-N, by default in "s5", or
            "linear", -1/2 + i pi k, by default in "s4d". Not of "lru".
        hippo_blocks (`int`): J of S5, HiPPO-N matrices on the diagonal of a new layer.
        clip_eigs (`bool`): of "s5", whether real parts stay below -1e-4, and with that the layer stable. Its authors
            leave it off in most tasks.
        dt_min, dt_max (`float`): range of the steps of new layers, log-uniform, in "s5" and "s4d".
        r_min, r_max, max_phase (`float`): range of |lam|, and of its phase, in new layers of "lru".
        dropout (`float`): rate after GELU and after the gated linear unit of each block.
        norm (`str`): "layer", or "batch" without weights as LRU has it: in training its statistics are over all real
            positions of the batch, so that outputs depend on later ones.
        layer_norm_eps (`float`): of both kinds of norm.
        initializer_range (`float`): standard deviation of new linear layers and embeddings.

    Raises:
        StrictDataclassError: a field of another type or out of range, or one that the parameterization does not have.
    """

    model_type = "diagonal_ssm"
    keys_to_ignore_at_inference: ClassVar = ["past_key_values", "cache"]

    vocab_size: int = integer(1, 259)
    num_input_features: int | None = integer(1)
    hidden_size: int = integer(1, 128)
    num_hidden_layers: int = integer(1, 4)
    parameterization: Literal["s5", "lru", "s4d"] = "s5"
    state_size: int | None = integer(0)
    state_sizes: list[int] | tuple[int, ...] | None = integer(0)
    bidirectional: bool = False
    discretization: Literal["zoh", "bilinear"] = "zoh"
    initialization: Literal["hippo", "linear"] | None = None
    hippo_blocks: int = integer(1, 1)
    clip_eigs: bool = True
    dt_min: float | int = number(0.001)
    dt_max: float | int = number(0.1)
    r_min: float | int = number(0.9, closed="[")
    r_max: float | int = number(0.999, high=1.0)
    max_phase: float | int = number(6.28, high=2 * math.pi, closed="]")
    dropout: float | int = number(0.0, high=1.0, closed="[")
    norm: Literal["layer", "batch"] = "layer"
    layer_norm_eps: float | int = number(1e-5)
    initializer_range: float | int = number(0.02)
    tie_word_embeddings: bool = True
    use_cache: bool = True
    pad_token_id: int | None = 256
    bos_token_id: int | None = 257
    eos_token_id: int | list[int] | None = 258

    def __post_init__(self, **kwargs: Any) -> None:
        for name, defaults in (("state_size", _STATE_SIZE), ("initialization", _INITIALIZATION)):
            if getattr(self, name) is None:
                setattr(self, name, defaults[self.parameterization])
        if self.state_sizes is None:
            self.state_sizes = [self.state_size] * self.num_hidden_layers  # type: ignore[list-item]
        self.state_sizes = list(self.state_sizes)
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            if self.vocab_size <= getattr(type(self), name) == getattr(self, name):
                setattr(self, name, None)  # those of bytes, in a smaller vocabulary
        kwargs["auto_map"] = AUTO_MAP | (kwargs.get("auto_map") or {})  # folders load through every Auto class
        super().__post_init__(**kwargs)

    def validate_fields(self) -> None:
        """Fields that have to fit each other."""
        sizes, layers = self.state_sizes, self.num_hidden_layers
        if sizes is None or len(sizes) != layers:
            raise ValueError(f"state_sizes must be a list of {layers} integers, one for each layer, got {sizes}")
        for low, high in (("dt_min", "dt_max"), ("r_min", "r_max")):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(f"{low} must be at most {high} = {getattr(self, high)}, got {getattr(self, low)}")
        if self.parameterization == "lru":
            for name, value in {"discretization": "zoh", "initialization": None, "hippo_blocks": 1}.items():
                if (given := getattr(self, name)) != value:
                    raise ValueError(f'{name} must be {value!r} with parameterization "lru", got {given!r}')


__all__ = ["DiagonalSSMConfig"]
