# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""AR-STU (Agarwal et al., arXiv 2312.06837) as an ES-SSM of the paper's block whose mixer has three terms more:

    y(t) = ES-SSM(u)(t) + sum_k alpha_k sigma_k^{1/4} M^-_k (phi^-_k * u)(t) + sum_i M^u_i u(t-i) + sum_i M^y_i y(t-i)

with negative filters phi^-_k(tau) = (-1)^tau phi_k(tau) and i = 1, 2. It is a baseline of the paper's tables: it trains
and is evaluated at any budget, on whole sequences, without a cache. Letters: B batch, L sequence, D width, K budget.
"""

from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers import initialization as init
from transformers.models.auto import modeling_auto

from essm_train.pairs import ESSMForPairClassification, ESSMPairConfig
from modeling_essm import ESSMConfig, ESSMForCausalLM, ESSMForSequenceClassification
from modeling_essm.mixer_essm import ESSMSpectralMixer, LayerCall
from modeling_essm.modeling_essm import ESSMPreTrainedModel
from modeling_essm.spectral_budget import spectral_layers

_ORDER = 2  # of the autoregression: u and y of the last two steps


@strict
class ARSTUConfig(ESSMConfig):
    r"""
    An `ESSMConfig` of the paper's block, and which terms AR-STU has.

    Args:
        ar_negative_filters (`bool`): whether there are negative filters, with M_k of their own; the code that AR-STU's
            authors released has none.
        ar_feature_shift (`int`): steps by which the features lag: 0, or 2 as in AR-STU's paper and code.
    """

    model_type = "ar_stu"
    auto_classes: ClassVar = {}  # no remote code: AutoModel finds these classes where `essm_train` is installed

    ar_negative_filters: bool = True
    ar_feature_shift: Literal[0, 2] = 0
    use_cache: bool = False

    def validate_block(self) -> None:
        """AR-STU is defined with dense M_k."""
        if self.block != "paper":
            raise ValueError(f'block must be "paper" in AR-STU, got {self.block!r}')


class ARSTUMixer(ESSMSpectralMixer):
    """The mixer of the module's docstring."""

    def __init__(self, config: ARSTUConfig, capacity: int):
        super().__init__(config, capacity)
        D = config.hidden_size
        self.negative, self.shift = config.ar_negative_filters, config.ar_feature_shift
        if self.negative:
            self.channel_mixing_negative = nn.Parameter(torch.empty(capacity, D, D))
        self.input_mixing = nn.Parameter(torch.empty(_ORDER, D, D))  # u(t-1), u(t-2); u(t) is the skip term
        self.output_mixing = nn.Parameter(torch.empty(_ORDER, D, D))  # y(t-1), y(t-2)

    @torch.no_grad()
    def init_weights(self, std: float) -> None:
        super().init_weights(std)
        if self.negative:
            init.normal_(self.channel_mixing_negative, mean=0.0, std=1e-3)
        init.normal_(self.input_mixing, mean=0.0, std=std)
        init.zeros_(self.output_mixing)

    def forward(self, u: Tensor, call: LayerCall, cache: Any = None) -> Tensor:
        """(B, L, D) -> (B, L, D). Raises ValueError with a cache: AR-STU keeps no states."""
        if cache is not None:
            raise ValueError("AR-STU runs on whole sequences: call it with use_cache=False, without past_key_values")
        if call.padding is not None:
            u = u.masked_fill(call.padding, 0.0)
        if call.packing is not None:
            return call.packing.apply(self, u, call)
        gates, L = self.gates(u, call.budget, call.rows), u.shape[1]

        def late(x: Tensor, steps: int) -> Tensor:
            return F.pad(x, (0, 0, steps, 0))[:, :L]

        x = late(u, self.shift)  # features of a delayed input are delayed features
        y = self.operator(x, gates, self.channel_mixing, algorithm=self.algorithm)[0] + self.skip(u)
        if self.negative:  # phi^-_k is phi_k on an input modulated by (-1)^t
            sign = 1.0 - 2.0 * (torch.arange(1, L + 1, device=u.device, dtype=u.dtype)[:, None] % 2)
            y = y + self.operator(x * sign, gates, self.channel_mixing_negative, algorithm=self.algorithm)[0] * sign
        for i, M in enumerate(self.input_mixing, 1):
            y = y + late(u, i) @ M
        return linear_feedback(y, self.output_mixing)


def linear_feedback(v: Tensor, mixing: Tensor) -> Tensor:
    """y(t) = v(t) + y(t-1) mixing[0] + y(t-2) mixing[1] from silence, all t in log2(L) matrix products.

    (B, L, D) and (2, D, D) -> (B, L, D).
    """
    L, D = v.shape[1:]
    identity = torch.eye(D, dtype=v.dtype, device=v.device)
    # z(t) = [y(t), y(t-1)] = z(t-1) P + [v(t), 0]
    P = torch.cat([torch.cat([mixing[0], identity], 1), torch.cat([mixing[1], torch.zeros_like(identity)], 1)], 0)
    z = F.pad(v, (0, D))
    for j in range(L.bit_length()):
        z = z + F.pad(z @ P, (0, 0, 1 << j, 0))[:, :L]
        P = P @ P
    return z[:, :, :D]


class _ARSTU(ESSMPreTrainedModel):
    """Gives every layer of a new ES-SSM its AR-STU mixer."""

    config_class = ARSTUConfig

    def __init__(self, config: ARSTUConfig):
        super().__init__(config)
        for i, capacity in zip(spectral_layers(config), config.capacities):
            self.model.layers[i].mixer = ARSTUMixer(config, capacity)
        self.post_init()


class ARSTUForCausalLM(_ARSTU, ESSMForCausalLM):
    """`ESSMForCausalLM` with the mixers of AR-STU; it does not generate."""


class ARSTUForSequenceClassification(_ARSTU, ESSMForSequenceClassification):
    """`ESSMForSequenceClassification` with the mixers of AR-STU."""


@strict
class ARSTUPairConfig(ARSTUConfig, ESSMPairConfig):
    """An `ARSTUConfig` for the encoder of both documents, with the head's width."""

    model_type = "ar_stu_pair"


class ARSTUForPairClassification(_ARSTU, ESSMForPairClassification):
    """`ESSMForPairClassification` with the mixers of AR-STU."""

    config_class = ARSTUPairConfig


_HEADS = (ARSTUForCausalLM, ARSTUForSequenceClassification, ARSTUForPairClassification)
for _cls in (ARSTUConfig, ARSTUPairConfig, *_HEADS):
    _cls._auto_class = None  # their code is not copied beside a checkpoint
AutoConfig.register("ar_stu", ARSTUConfig, exist_ok=True)
modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["ar_stu"] = "ARSTUForCausalLM"  # Trainers look here
AutoModelForCausalLM.register(ARSTUConfig, ARSTUForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(ARSTUConfig, ARSTUForSequenceClassification, exist_ok=True)
AutoConfig.register("ar_stu_pair", ARSTUPairConfig, exist_ok=True)
AutoModelForSequenceClassification.register(ARSTUPairConfig, ARSTUForPairClassification, exist_ok=True)
