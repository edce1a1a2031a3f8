# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""ES-SSM for transformers: blocks around mixer or attention, model, language-model and classification heads.

One set of weights runs at any spectral budget K, chosen per call. The mixer of Eq. (7-8) lives in `mixer_essm`, the
numerics in `spectral_ops`; `spectral_budget` says what a budget means, and `cache_essm` what is kept between calls.
Letters: B batch, L sequence, D width, F input features, K budget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast, SequenceClassifierOutput
from transformers.models.auto import modeling_auto
from transformers.utils import ModelOutput, logging
from transformers.utils.generic import can_return_tuple

from .attention_essm import AttentionCall, ESSMAttention, attention_call
from .cache_essm import CACHE, ESSMCache, ESSMCacheLayer, check_cache, check_room, stamp_rows, the_cache
from .configuration_essm import ESSMConfig
from .elastic_essm import ESSMElasticMixer
from .generation_essm import ElasticGenerationMixin
from .loading_essm import ElasticPreTrainedModel
from .mixer_essm import ESSMSpectralMixer, LayerCall, at_unit_scale, beyond, loudness, prefix_linear, quieter_by_channel
from .packing import PACKING_ARGUMENTS, Packing, close_up, pool, read_packing, reorder
from .spectral_budget import SPECTRAL_LAYER, ResolvedBudget, SpectralBudget, is_hybrid, spectral_layers
from .spectral_constants import is_transformed

logger = logging.get_logger(__name__)


# ---------------------------------------------------------------------------------------------------------------------
# What models return.


class _Name(str):
    """The name of an output, which carries the budget to outputs that are built anew from items, as Accelerate does."""

    budget: Any = None


@dataclass
class _ElasticOutput(ModelOutput):
    """`items()` leaves spectral_budget out: Trainers gather and concatenate all items, which must be tensors then."""

    spectral_budget: Any = None

    def __post_init__(self) -> None:
        source = getattr(self, fields(self)[0].name)
        super().__post_init__()
        if isinstance(source, Mapping):
            self.spectral_budget = getattr(next(iter(source), None), "budget", None)

    def items(self):
        named = [(name, value) for name, value in super().items() if name != "spectral_budget"]
        if torch.compiler.is_compiling():  # which takes no names but plain ones
            return named
        named = [(_Name(name), value) for name, value in named]
        for name, _ in named:
            name.budget = self.spectral_budget
        return named

    def __getitem__(self, key):  # which the library reads from items()
        return self.spectral_budget if key == "spectral_budget" else super().__getitem__(key)


@dataclass
class ESSMModelOutput(_ElasticOutput, BaseModelOutputWithPast):
    """last_hidden_state (B, L, D); past_key_values (`cache` from transformers 5.24 on), an ESSMCache, if asked for;
    hidden_states, (B, L, D) each with the embeddings first, if asked for; spectral_budget, the budget that ran: one int
    per layer, or (B,) when rows differ."""


@dataclass
class ESSMCausalLMOutput(_ElasticOutput, CausalLMOutputWithPast):
    """loss (), the mean cross-entropy in nats, with labels; logits (B, L or logits_to_keep, vocab_size); the rest as in
    `ESSMModelOutput`."""


@dataclass
class ESSMSequenceClassifierOutput(_ElasticOutput, SequenceClassifierOutput):
    """loss () with labels; logits (B, num_labels); the rest as in `ESSMModelOutput`."""


# ---------------------------------------------------------------------------------------------------------------------
# Blocks.


class ESSMFeatureEmbedding(nn.Linear):
    """Continuous features to hidden states: (B, L, F) -> (B, L, D).

    With one input feature the bias is initialised like the weight; otherwise the next norm would reduce the input to
    its sign. Several features tell more by their ratios, and start without a bias.
    """


class ESSMFeedForward(nn.Module):
    """(B, L, D) -> (B, L, D) through one hidden layer, in the paper's block."""

    def __init__(self, config: Any, width: int):
        super().__init__()
        self.up = nn.Linear(config.hidden_size, width)
        self.down = nn.Linear(width, config.hidden_size)
        self.act = ACT2FN[config.hidden_act]
        self.dropout = nn.Dropout(config.activation_dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(self.act(self.up(x))))


class ESSMElasticFeedForward(nn.Module):
    """(B, L, D) -> (B, L, D): sum_{j<=K} down_j (silu(a_j) b_j) with a_j, b_j = up_j x, `units` each for a channel."""

    def __init__(self, config: Any, units: int, channels: int = 1):
        super().__init__()
        self.units = units
        self.up = at_unit_scale(nn.Linear(config.hidden_size, 2 * units * channels, bias=False))
        self.down = quieter_by_channel(nn.Linear(units * channels, config.hidden_size, bias=False), channels)
        self.dropout = nn.Dropout(config.activation_dropout)

    def forward(self, x: Tensor, budget: int = 1, rows: Tensor | None = None) -> Tensor:
        """What the first K channels give; `rows` (B,) has the K of each row where they differ."""
        up = prefix_linear(self.up, x, 2 * budget * self.units)
        gate, value = up.unflatten(-1, (budget, 2, self.units)).unbind(-2)
        hidden = self.dropout(F.silu(gate) * value)
        if rows is not None:
            hidden = hidden.masked_fill(beyond(rows, budget)[..., None], 0.0)
        return prefix_linear(self.down, hidden.flatten(-2))


class _Block(GradientCheckpointingLayer):
    """What the blocks share: dropout."""

    def __init__(self, config: ESSMConfig):
        super().__init__()
        self.dropout = nn.Dropout(config.dropout)
        self.stochastic_depth = config.stochastic_depth

    def add(self, hidden_states: Tensor, branch: Tensor) -> Tensor:
        """The residual sum, in training after dropout of the branch's elements and of whole samples."""
        if self.training:
            branch = self.dropout(branch)
            if self.stochastic_depth:
                keep = 1.0 - self.stochastic_depth
                kept = torch.rand(branch.shape[0], 1, 1, device=branch.device) < keep
                branch = branch * kept.to(branch.dtype) / keep
        return hidden_states + branch


class ESSMElasticLayer(_Block):
    """Residual block whose leading channels a budget runs: x + mixer(norm(x)); then, if asked, x + ffn(norm(x))."""

    def __init__(self, config: Any, capacity: int):
        super().__init__(config)
        self.input_norm = nn.RMSNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mixer = ESSMElasticMixer(config, capacity)
        if units := config.intermediate_size // config.num_spectral_channels:
            self.ffn_norm = nn.RMSNorm(config.hidden_size, eps=config.layer_norm_eps)
            self.ffn = ESSMElasticFeedForward(config, units, capacity)

    def forward(self, hidden_states: Tensor, call: LayerCall, cache: ESSMCacheLayer | None = None) -> Tensor:
        hidden_states = self.add(hidden_states, self.mixer(self.input_norm(hidden_states), call, cache))
        if not hasattr(self, "ffn"):
            return hidden_states
        return self.add(hidden_states, self.ffn(self.ffn_norm(hidden_states), call.budget, call.rows))


class ESSMLayer(_Block):
    """The paper's pre-norm residual block: LayerNorm -> mixer -> +, LayerNorm -> feed-forward -> +."""

    def __init__(self, config: Any, capacity: int):
        super().__init__(config)
        self.input_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mixer = ESSMSpectralMixer(config, capacity)
        self.ffn_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.ffn = ESSMFeedForward(config, config.intermediate_size)

    def forward(self, hidden_states: Tensor, call: LayerCall, cache: ESSMCacheLayer | None = None) -> Tensor:
        mixed = self.mixer(self.input_norm(hidden_states), call, cache)
        hidden_states = self.add(hidden_states, mixed)
        return self.add(hidden_states, self.ffn(self.ffn_norm(hidden_states)))


class ESSMAttentionLayer(_Block):
    """Residual block of a hybrid around attention, with the norms and the feed-forward layer of the spectral ones.

    x + attention(norm(x)); then, if they have one, x + ffn(norm(x)).
    """

    def __init__(self, config: ESSMConfig, kind: str):
        super().__init__(config)
        paper = config.block == "paper"
        norm = nn.LayerNorm if paper else nn.RMSNorm
        self.input_norm = norm(config.hidden_size, eps=config.layer_norm_eps)
        self.self_attn = ESSMAttention(config, kind)
        if not paper:
            for projection in (self.self_attn.q_proj, self.self_attn.k_proj, self.self_attn.v_proj):
                at_unit_scale(projection)
        if width := config.attention_intermediate_size:
            self.ffn_norm = norm(config.hidden_size, eps=config.layer_norm_eps)
            self.ffn = (ESSMFeedForward if paper else ESSMElasticFeedForward)(config, width)

    def forward(self, hidden_states: Tensor, call: AttentionCall, cache: Any) -> Tensor:
        hidden_states = self.add(hidden_states, self.self_attn(self.input_norm(hidden_states), call, cache))
        if not hasattr(self, "ffn"):
            return hidden_states
        return self.add(hidden_states, self.ffn(self.ffn_norm(hidden_states)))


# ---------------------------------------------------------------------------------------------------------------------
# What a call may give: arguments are checked before any compute, and each error names value and legal range.


def refuse_unsupported(kwargs: dict[str, Any]) -> None:
    """Extra arguments pass silently, as the library's losses need; those that would change the result must not."""
    for name, value in kwargs.items():
        if "budget" in name or name.startswith("spectral"):
            raise TypeError(f"unknown argument {name!r}; the budget of a call is spectral_budget")
        if value is not None and name.startswith(("seq_", "cu_seq")) and name not in PACKING_ARGUMENTS:
            raise ValueError(f"unknown argument {name!r}; packed sequences are described by {PACKING_ARGUMENTS}")


def check_inputs(
    config: Any, input_ids: Tensor | None, inputs_embeds: Tensor | None, features: Tensor | None
) -> tuple[int, int]:
    """B and L. Raises ValueError unless there is one input, of the kind, shape and dtype that the model reads."""
    given = [x for x in (input_ids, inputs_embeds, features) if x is not None]
    if len(given) != 1:
        raise ValueError("give exactly one of input_ids, inputs_embeds and input_features")
    shape, features_width = tuple(given[0].shape), config.num_input_features
    if inputs_embeds is not None or features is not None:
        name, width = "inputs_embeds", config.hidden_size
        if features is not None:
            name, width = "input_features", features_width
        if width is None:
            raise ValueError("this model reads input_ids; input_features need config.num_input_features")
        if len(shape) != 3 or shape[-1] != width:
            raise ValueError(f"{name} must have shape (B, L, {width}), got {shape}")
    elif features_width is not None:
        raise ValueError(f"this model reads input_features of shape (B, L, {features_width}), got input_ids")
    elif len(shape) != 2 or given[0].dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"input_ids must be int64 or int32 integers of shape (B, L), got {given[0].dtype} of shape {shape}"
        )
    if shape[1] == 0:
        raise ValueError(f"a sequence needs at least one position, got shape {shape[:2]}")
    return shape[0], shape[1]


def check_token_ids(input_ids: Tensor, vocab_size: int, training: bool) -> None:
    """Raises ValueError for ids outside the vocabulary; training does not wait for an accelerator to tell."""
    if torch.compiler.is_compiling() or input_ids.numel() == 0 or (training and input_ids.device.type != "cpu"):
        return
    if is_transformed() or input_ids.is_meta or isinstance(input_ids, FakeTensor):  # which have no value to read
        return
    low, high = torch.aminmax(input_ids)
    if low < 0 or high >= vocab_size:
        raise ValueError(f"input_ids must be in [0, {vocab_size - 1}], got values from {int(low)} to {int(high)}")


def check_mask(attention_mask: Tensor | None, B: int, L: int, past: int) -> None:
    """Raises ValueError for a mask of another shape; not in a compiled graph, which does not know `past`."""
    if attention_mask is None or torch.compiler.is_compiling():
        return
    if tuple(attention_mask.shape) not in ((B, L), (B, past + L)):
        raise ValueError(
            f"attention_mask must have shape ({B}, {L}), or ({B}, {past + L}) with the cached positions, "
            f"got {tuple(attention_mask.shape)}"
        )


def check_state_lengths(state_lengths: Tensor, B: int, L: int, cache: Any, attention_mask: Tensor | None) -> None:
    """Raises ValueError for lengths that are no integers in [0, L], whose range a compiled graph does not look at."""
    if attention_mask is not None or cache is None or state_lengths.shape != (B,):
        raise ValueError(
            f"state_lengths must have shape ({B},) and come with a cache and without attention_mask, "
            f"got shape {tuple(state_lengths.shape)}"
        )
    if torch.compiler.is_compiling() or not state_lengths.numel():
        return
    if state_lengths.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"state_lengths must be integers in [0, {L}], got {state_lengths.dtype}")
    low, high = torch.aminmax(state_lengths)
    if low < 0 or high > L:
        raise ValueError(f"state_lengths must be integers in [0, {L}], got values from {int(low)} to {int(high)}")


def wants_cache(model: Any, use_cache: bool | None, cache: Any, packing: Packing | None) -> bool:
    """Whether the call returns a cache. Raises ValueError where it cannot have one."""
    if packing is not None:
        if use_cache or cache is not None:
            raise ValueError(
                "packed sequences leave no single state: call with use_cache=False, without past_key_values"
            )
        return False
    if use_cache is None:
        use_cache = model.config.use_cache and not model.training
    recomputing = model.training and model.gradient_checkpointing and torch.is_grad_enabled()
    if recomputing and (use_cache or cache is not None):
        raise ValueError(
            "gradient checkpointing runs layers twice, which would advance the cache twice: "
            "train with use_cache=False and without past_key_values"
        )
    return use_cache


def warn_once_of(config: Any, budget: ResolvedBudget, num_tokens: int) -> None:
    """Tell of a sequence beyond filter_length, and of budgets that were never trained."""
    if torch.compiler.is_compiling():
        return
    if num_tokens > config.filter_length:
        logger.warning_once(
            f"a sequence has passed filter_length {config.filter_length}: beyond it the recurrence is no "
            "longer the trained convolution. Train with a filter_length at least as long as your sequences."
        )
    if config.trained_budgets is not None:
        unseen = sorted({*(budget.of_rows or budget.layers)} - {*config.trained_budgets})
        if unseen:
            logger.warning_once(
                f"spectral_budget {unseen} was never trained; trained budgets: {sorted(config.trained_budgets)}"
            )


# ---------------------------------------------------------------------------------------------------------------------
# Models.


class ESSMPreTrainedModel(ElasticPreTrainedModel):
    config_class = ESSMConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = _supports_flash_attn = True
    _is_stateful = True
    _can_compile_fullgraph = True

    def __init__(self, config: ESSMConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        self._supports_sdpa = self._supports_flash_attn = is_hybrid(config)  # nothing else attends
        if config.num_input_features is not None:
            self.main_input_name = "input_features"  # what Trainers count and pass to metrics

    def train(self, mode: bool = True):
        """As in torch; warns once of weights in 16 bits, which forget small updates."""
        if mode and any(p.requires_grad and p.dtype in (torch.bfloat16, torch.float16) for p in self.parameters()):
            logger.warning_once(
                "weights in 16 bits are put into training, which rounds small updates away: load the model with "
                "dtype=torch.float32 and train in mixed precision (bf16=True)"
            )
        return super().train(mode)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.initializer_range
        if isinstance(module, nn.Linear):
            unit = getattr(module, "starts_at_unit_scale", False)
            init.normal_(module.weight, mean=0.0, std=module.in_features**-0.5 if unit else std)
            if channels := getattr(module, "sums_channels", 0):
                factors = loudness(channels).repeat_interleave(module.in_features // channels)
                init.copy_(module.weight, module.weight * factors.to(module.weight))
            if isinstance(module, ESSMFeatureEmbedding) and module.in_features == 1:
                init.normal_(module.bias, mean=0.0, std=std)
            elif module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            given = self.config.embedding_initializer_range
            init.normal_(module.weight, mean=0.0, std=std if given is None else given)
        elif isinstance(module, (ESSMSpectralMixer, ESSMElasticMixer)):
            module.init_weights(std)
        else:  # norms
            super()._init_weights(module)


class ESSMModel(ESSMPreTrainedModel):
    """Embedding, blocks and final norm; token ids, embeddings or continuous features in, hidden states out."""

    def __init__(self, config: ESSMConfig):
        super().__init__(config)
        config.validate_layers()  # a rotary embedding set later is one that cached keys bear, too
        if config.num_input_features is None:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        else:
            self.embed_features = ESSMFeatureEmbedding(config.num_input_features, config.hidden_size)
        block = ESSMLayer if config.block == "paper" else ESSMElasticLayer
        self.embedding_dropout = nn.Dropout(config.embedding_dropout)
        layers: list[_Block] = [block(config, capacity) for capacity in config.capacities]
        for i, kind in enumerate(config.layer_types or ()):
            if kind != SPECTRAL_LAYER:
                layers.insert(i, ESSMAttentionLayer(config, kind))
        self._no_split_modules = sorted({type(layer).__name__ for layer in layers})  # sharding looks for each of them
        if config.stochastic_depth_ramp:
            for i, layer in enumerate(layers):
                layer.stochastic_depth *= i / max(1, len(layers) - 1)
        self.layers = nn.ModuleList(layers)
        self.spectral_layers, self.is_hybrid = spectral_layers(config), is_hybrid(config)
        norm = nn.LayerNorm if config.block == "paper" else nn.RMSNorm
        self.norm = norm(config.hidden_size, eps=config.layer_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module | None:
        return getattr(self, "embed_tokens", None)

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
        position_ids: Tensor | None = None,
        seq_idx: Tensor | None = None,
        cache: ESSMCache | None = None,
        **kwargs: Any,
    ) -> ESSMModelOutput:
        """
        Args:
            input_ids: (B, L) int64 or int32 in [0, vocab_size). Or inputs_embeds: (B, L, D), input_features: (B, L, F).
            attention_mask: (B, L) or (B, past + L), 1 for real positions. Masked positions are skipped, wherever they
                stand and wherever pieces are cut: they change neither other outputs nor the state. Outputs there are
                undefined. The part for cached positions is not read.
            past_key_values: ESSMCache to continue from; updated in place. Or cache, its name in transformers 5.24.
            spectral_budget: K: int in [1, capacity], one per spectral layer, a (B,) integer tensor, a preset or B such.
            state_lengths: (B,) int64 in [0, L]: after how many positions the cache is left; outputs cover all.
            position_ids, seq_idx, cu_seqlens, cu_seq_lens_q: where the sequences of a packed row begin, as collators
                say it, see `read_packing`; each is computed as if alone, without a cache.
        Raises:
            ValueError: a bad budget, token ids out of range (decoding steps and training on an accelerator do not look
                at them), not exactly one input, a cache without room or for packed sequences, or a bad packing.
        """
        refuse_unsupported(kwargs)
        config, cache = self.config, the_cache(cache, past_key_values)
        B, L = check_inputs(config, input_ids, inputs_embeds, input_features)
        budget = config.resolve_budget(spectral_budget, batch_size=B)
        if cache is not None:
            check_cache(cache, config, B)
            check_room(cache, self.spectral_layers, budget)
        compiling = torch.compiler.is_compiling()  # then the count of tokens, which each step changes, is not read
        past = 0 if cache is None or compiling else cache.get_seq_length()
        check_mask(attention_mask, B, L, past)
        mask = None if attention_mask is None else attention_mask[:, -L:].bool()
        embeddings = self.embedding_dropout(self._embed(input_ids, inputs_embeds, input_features, mask, cache))
        real = None if mask is None else mask.to(embeddings.device)
        closed = None if real is None else close_up(real)
        told = {**kwargs, "position_ids": position_ids, "seq_idx": seq_idx}
        packing = None if L == 1 else read_packing(told, B, L, real, closed)
        warn_once_of(config, budget, past + L if packing is None else packing.longest)
        use_cache = wants_cache(self, use_cache, cache, packing)
        if use_cache and cache is None:
            cache = ESSMCache(config)
        if cache is not None:
            stamp_rows(cache, self.spectral_layers, budget)

        hidden_states, padding, lengths, place = embeddings, None, None, None
        if real is not None:
            padding = ~real[..., None]
            if closed is not None:
                order, place, lengths = closed
                hidden_states, padding = reorder(embeddings, order), reorder(padding, order)
                lengths = None if cache is None else lengths
        if state_lengths is not None:
            check_state_lengths(state_lengths, B, L, cache, attention_mask)
            lengths = state_lengths.to(embeddings.device)
        rows = None if budget.rows is None else budget.rows.to(embeddings.device)
        wanted = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        each: list[Tensor] | None = [] if wanted else None
        caches = [None] * len(self.layers) if cache is None else cache.layers
        call = LayerCall(max(budget.layers), rows, padding, lengths, packing)
        hidden_states = self.run_layers(hidden_states, budget.layers, caches, call, each)
        if each is not None:
            each.append(hidden_states)
        if place is not None:
            each = each and [reorder(states, place) for states in each]
            hidden_states = reorder(hidden_states, place) if each is None else each[-1]
        if cache is not None:
            cache.advance(L if state_lengths is None or B == 0 else int(state_lengths.max()))
        return ESSMModelOutput(
            last_hidden_state=hidden_states,
            hidden_states=None if each is None else (embeddings, *each),
            spectral_budget=budget.report(),
            **{CACHE: cache if use_cache else None},
        )

    def _embed(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        features: Tensor | None,
        mask: Tensor | None,
        cache: ESSMCache | None,
    ) -> Tensor:
        """(B, L, D) from the one input that is given; numbers at masked positions, NaN too, are not read."""
        if input_ids is None:
            given: Any = inputs_embeds if features is None else features.to(self.embed_features.weight.dtype)
            if mask is not None:
                given = given.masked_fill(~mask.to(given.device)[..., None], 0.0)
            return given if features is None else self.embed_features(given)
        if cache is None or input_ids.shape[1] > 1:  # a decoding step reads no value of a tensor
            check_token_ids(input_ids, self.config.vocab_size, self.training)
        return self.embed_tokens(input_ids)

    def run_layers(
        self,
        hidden_states: Tensor,
        budgets: Sequence[int],
        caches: Sequence[ESSMCacheLayer | None],
        call: LayerCall | None = None,
        each: list[Tensor] | None = None,
    ) -> Tensor:
        """Blocks and final norm with everything resolved: (B, L, D) -> (B, L, D).

        Args:
            budgets: K of each spectral layer. caches: the state of each layer, updated in place, or None.
            call: what else the layers are told, by default nothing; its budget is that of each layer in turn.
            each: takes the outputs of all blocks but the last.
        """
        call = call or LayerCall(max(budgets))
        attention = None
        if self.is_hybrid:
            attention = attention_call(self.config, hidden_states, caches, call.lengths, call.packing)
        calls = {} if call.rows is not None and self.config.spectral_capacities else {call.budget: call}
        spectral = dict(zip(self.spectral_layers, budgets))
        for i, (layer, cache) in enumerate(zip(self.layers, caches)):
            if i not in spectral:
                hidden_states = layer(hidden_states, attention, cache)
            else:
                if (K := spectral[i]) not in calls:
                    calls[K] = replace(call, budget=K, rows=None if call.rows is None else call.rows.clamp(max=K))
                hidden_states = layer(hidden_states, calls[K], cache)
            if each is not None and i + 1 < len(self.layers):
                each.append(hidden_states)
        return self.norm(hidden_states)


class ESSMForCausalLM(ESSMPreTrainedModel, ElasticGenerationMixin):
    """ES-SSM with a language-model head. Without attention `generate(ids, spectral_budget=6)` takes constant memory."""

    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: ESSMConfig):
        super().__init__(config)
        if config.num_input_features is not None:
            raise ValueError(
                f"ESSMForCausalLM reads token ids: num_input_features must be None, got {config.num_input_features}"
            )
        self.model = ESSMModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.loss_type = "ForCausalLM"  # the library reads it off the name of a class
        self.post_init()
        self.generation_config._from_model_config = False  # or loading it again would drop a spectral_budget set on it
        self.decoding_steps: Any = None  # single steps compiled ahead, by the package's `decoding`

    def _get_name(self) -> str:
        return "ESSMForCausalLM"  # of derived classes too, FSDP2's among them: the library's Trainer knows this name

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
        position_ids: Tensor | None = None,  # Trainer drops columns of data that no argument is named after
        seq_idx: Tensor | None = None,
        cache: ESSMCache | None = None,
        **kwargs: Any,
    ) -> ESSMCausalLMOutput:
        """
        Args:
            labels: (B, L) int64 next-token targets before shifting, -100 to ignore (in packed rows also the first of
                every sequence, which collators see to).
            logits_to_keep: only the last that many positions (0: all), or (T,) positions.
            The rest as in `ESSMModel.forward`.
        """
        refuse_unsupported(kwargs)
        cache = the_cache(cache, past_key_values)
        packing = {name: kwargs.pop(name) for name in PACKING_ARGUMENTS if name in kwargs}
        packing |= {} if position_ids is None else {"position_ids": position_ids}
        packing |= {} if seq_idx is None else {"seq_idx": seq_idx}
        if self.decoding_steps and not packing and cache is not None and input_ids is not None:
            hidden = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
            others = (attention_mask, inputs_embeds, labels, hidden, state_lengths)
            if use_cache is not False and all(argument is None or argument is False for argument in others):
                spectral_budget = self.config.resolve_budget(spectral_budget, batch_size=len(input_ids))
                if (output := self.decoding_steps.run(self, input_ids, cache, spectral_budget)) is not None:
                    return output
        inputs = input_ids, attention_mask, inputs_embeds, None, cache, use_cache, output_hidden_states
        outputs = self.model(*inputs, spectral_budget, state_lengths, return_dict=True, **packing)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, keep])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return ESSMCausalLMOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            spectral_budget=outputs.spectral_budget,
            **{CACHE: getattr(outputs, CACHE)},
        )

    def step(
        self, input_ids: Tensor, budgets: Sequence[int], states: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """One token as a function of tensors alone, for compiled and exported programs.

        Args:
            input_ids: (B, 1). budgets: K of each spectral layer. states: as `ESSMCache.states`.
        Returns:
            logits (B, vocab_size), and the states after the token.
        """
        cache = ESSMCache(self.config)
        cache.set_states(states)
        hidden_states = self.model.run_layers(self.model.embed_tokens(input_ids), budgets, cache.layers)
        return self.lm_head(hidden_states[:, 0]), cache.states


class ESSMForSequenceClassification(ESSMPreTrainedModel):
    """ES-SSM that pools its real positions and classifies; reads token ids or, by config, continuous features."""

    accepts_loss_kwargs = False  # the library's regression and multi-label losses ignore num_items_in_batch

    def __init__(self, config: ESSMConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = ESSMModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.loss_type = "ForSequenceClassification"
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
        """
        refuse_unsupported(kwargs)
        for name in ("past_key_values", "cache", "state_lengths"):
            if kwargs.get(name) is not None:
                raise ValueError(f"a classifier reads whole rows, and takes no {name}")
        B, L = check_inputs(self.config, input_ids, inputs_embeds, input_features)
        real = None if attention_mask is None else attention_mask.bool()
        if read_packing(kwargs, B, L, real, None if real is None else close_up(real)) is not None:
            raise ValueError("a classifier pools whole rows: packed sequences have no place in it; pad them instead")
        inputs = input_ids, attention_mask, inputs_embeds, input_features, None, False, output_hidden_states
        outputs = self.model(*inputs, spectral_budget, return_dict=True)
        logits = self.score(pool(outputs.last_hidden_state, attention_mask, self.config.classifier_pooling))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config, **kwargs)
        return ESSMSequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, spectral_budget=outputs.spectral_budget
        )


# Trainers (label smoothing), evaluation harnesses and model cards look class names up in these tables.
modeling_auto.MODEL_MAPPING_NAMES["essm"] = "ESSMModel"
modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["essm"] = "ESSMForCausalLM"
modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES["essm"] = "ESSMForSequenceClassification"

__all__ = ["ESSMForCausalLM", "ESSMForSequenceClassification", "ESSMModel", "ESSMPreTrainedModel"]
