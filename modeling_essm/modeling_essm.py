# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""ES-SSM for transformers: blocks around mixer or attention, model, language-model and classification heads.

One set of weights runs at any spectral budget K, chosen per call. The mixer of Eq. (7-8) lives in `mixer_spectral`, the
numerics in `spectral_ops`; what a budget means in `spectral_budget`; what is kept between calls in `cache_essm`.
Letters: B batch, L sequence, D width, K budget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.generic import can_return_tuple

from .attention_essm import AttentionCall, ESSMAttention, attention_call
from .cache_essm import ESSMCache, check_cache, check_room, layers_with, operator_of, states_of
from .cache_layers import ESSMCacheLayer
from .configuration_essm import ESSMConfig
from .feed_forward_essm import ESSMFeedForward, ESSMGatedFeedForward
from .generation_essm import ElasticGenerationMixin
from .inputs_essm import (
    check_inputs,
    check_mask,
    check_state_lengths,
    check_token_ids,
    refuse_unsupported,
    wants_cache,
    warn_once_of,
)
from .loading_essm import ElasticPreTrainedModel
from .mixer_spectral import ESSMScale, ESSMSpectralMixer, at_unit_scale
from .outputs_essm import ESSMCausalLMOutput, ESSMModelOutput, ESSMSequenceClassifierOutput
from .packing import PACKING_ARGUMENTS, Packing, closed_rows, pool, read_packing, reorder
from .spectral_budget import SPECTRAL_LAYER, SpectralBudget, is_hybrid, spectral_layers


class ESSMFeatureEmbedding(nn.Linear):
    """Continuous features to hidden states: (B, L, F) -> (B, L, D).

    Of a single feature the bias starts as large as the weight: without one, the norm that follows would keep nothing
    of it but its sign. Several features tell more by their ratios, and start without a bias.
    """


class _Block(GradientCheckpointingLayer):
    """What the blocks share: how their mixer is run, and dropout."""

    mixer: ESSMSpectralMixer

    def __init__(self, config: ESSMConfig):
        super().__init__()
        self.dropout = nn.Dropout(config.dropout)
        self.stochastic_depth = config.stochastic_depth

    def _mix(
        self,
        u: Tensor,
        budget: int,
        rows: Tensor | None = None,
        padding: Tensor | None = None,
        lengths: Tensor | None = None,
        cache: ESSMCacheLayer | None = None,
        packing: Packing | None = None,
    ) -> Tensor:
        """The mixer on (B, L, D); arguments as in `ESSMModel.run_layers`, those of this layer."""
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
        self.in_proj = at_unit_scale(nn.Linear(D, 2 * inner, bias=False))
        self.mixer_norm = nn.RMSNorm(inner, eps=config.layer_norm_eps)
        self.out_proj = nn.Linear(inner, D, bias=False)
        if config.intermediate_size:
            self.ffn_norm = nn.RMSNorm(D, eps=config.layer_norm_eps)
            self.ffn = ESSMGatedFeedForward(config)

    def forward(self, hidden_states: Tensor, budget: int, *where: Any) -> Tensor:
        z, v = self.in_proj(self.input_norm(hidden_states)).chunk(2, -1)
        mixed = self._mix(v, budget, *where)
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

    def forward(self, hidden_states: Tensor, budget: int, *where: Any) -> Tensor:
        mixed = self._mix(self.input_norm(hidden_states), budget, *where)
        hidden_states = hidden_states + self._drop(mixed)
        return hidden_states + self._drop(self.ffn(self.ffn_norm(hidden_states)))


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
        if config.intermediate_size:
            self.ffn_norm = norm(config.hidden_size, eps=config.layer_norm_eps)
            self.ffn = ESSMFeedForward(config) if paper else ESSMGatedFeedForward(config)

    def forward(self, hidden_states: Tensor, call: AttentionCall, cache: Any) -> Tensor:
        hidden_states = hidden_states + self._drop(self.self_attn(self.input_norm(hidden_states), call, cache))
        if not hasattr(self, "ffn"):
            return hidden_states
        return hidden_states + self._drop(self.ffn(self.ffn_norm(hidden_states)))


class ESSMPreTrainedModel(ElasticPreTrainedModel):
    config_class = ESSMConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True  # of a hybrid's attention layers
    _supports_flash_attn = True
    _supports_attention_backend = True
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
            given = self.config.embedding_initializer_range
            init.normal_(module.weight, mean=0.0, std=std if given is None else given)
        elif isinstance(module, ESSMScale):
            init.ones_(module.weight)
        elif isinstance(module, ESSMSpectralMixer):
            module.init_weights(std)
        else:  # norms
            super()._init_weights(module)


class ESSMModel(ESSMPreTrainedModel):
    """Embedding, blocks and final norm; token ids, embeddings or continuous features in, hidden states out."""

    def __init__(self, config: ESSMConfig):
        super().__init__(config)
        if config.num_input_features is None:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        else:
            self.embed_features = ESSMFeatureEmbedding(config.num_input_features, config.hidden_size)
        block = ESSMLayer if config.block == "paper" else ESSMGatedLayer
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
        self.operator, self.is_hybrid = operator_of(config), is_hybrid(config)
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
            spectral_budget: K: int in [1, capacity], one int per spectral layer, a (B,) integer tensor or a preset.
            state_lengths: (B,) int64 in [0, L]: after how many of the positions the cache is left; outputs are of all.
            position_ids, seq_idx, cu_seqlens, cu_seq_lens_q: where the sequences of a packed row begin, as collators
                say it, see `read_packing`; each is computed as if alone, without a cache. Or packing: a `Packing`.
        Returns:
            ESSMModelOutput.
        Raises:
            ValueError: a bad budget, token ids out of range (not checked on an accelerator in training and single
                steps, where the check would wait for the device), not exactly one input, a cache without room or for
                packed sequences, state_lengths out of range (not checked in a compiled graph), or a bad packing.
        """
        refuse_unsupported(kwargs)
        hidden_states = embeddings = self.embedding_dropout(self._embed(input_ids, inputs_embeds, input_features))
        B, L, _ = hidden_states.shape
        config, cache = self.config, past_key_values
        budget = config.resolve_budget(spectral_budget, batch_size=B)
        if cache is not None:
            check_cache(cache, config, B)
        compiling = torch.compiler.is_compiling()  # then the count of tokens, which each step changes, is not read
        past = 0 if cache is None or compiling else cache.get_seq_length()
        check_mask(attention_mask, B, L, past)
        mask = None if attention_mask is None else attention_mask[:, -L:].bool()
        packing = kwargs.get("packing") or (read_packing(kwargs, B, L, mask, not self.is_hybrid) if kwargs else None)
        warn_once_of(config, budget, past + L if packing is None else packing.longest)
        if output_hidden_states is None:
            output_hidden_states = config.output_hidden_states
        use_cache = wants_cache(self, use_cache, cache, packing)
        if use_cache and cache is None:
            cache = ESSMCache(config)
        if cache is not None:
            check_room(cache, budget.layers, budget.rows, self.operator)

        padding, lengths, place = None, None, None
        if mask is not None:
            fresh, real = cache is None or cache.batch_size is None, mask.to(hidden_states.device)
            keep_leading = fresh and not self.is_hybrid  # attention wants real positions first
            hidden_states, padding, lengths, place = closed_rows(hidden_states, real, keep_leading)
            lengths = None if cache is None else lengths
        if state_lengths is not None:
            check_state_lengths(state_lengths, B, L, cache, attention_mask)
            lengths = state_lengths.to(hidden_states.device)
        rows = None if budget.rows is None else budget.rows.to(hidden_states.device)
        each: list[Tensor] | None = [] if output_hidden_states else None
        caches = [None] * len(self.layers) if cache is None else cache.layers
        hidden_states = self.run_layers(hidden_states, budget.layers, caches, rows, padding, lengths, packing, each)
        if each is not None:
            each.append(hidden_states)
        if place is not None:
            each = each and [reorder(states, place) for states in each]
            hidden_states = reorder(hidden_states, place) if each is None else each[-1]
        if cache is not None:
            cache.advance(L if state_lengths is None or B == 0 else int(state_lengths.max()))
        return ESSMModelOutput(
            last_hidden_state=hidden_states,
            past_key_values=cache if use_cache else None,
            hidden_states=None if each is None else (embeddings, *each),
            spectral_budget=budget.report(),
        )

    def _embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None, features: Tensor | None) -> Tensor:
        """(B, L, D) of the one input that is given."""
        check_inputs(self.config, input_ids, inputs_embeds, features)
        if inputs_embeds is not None:
            return inputs_embeds
        if features is not None:
            return self.embed_features(features.to(self.embed_features.weight.dtype))
        assert input_ids is not None
        check_token_ids(input_ids, self.config.vocab_size, self.training)
        return self.embed_tokens(input_ids)

    def run_layers(
        self,
        hidden_states: Tensor,
        budgets: Sequence[int],
        caches: Sequence[ESSMCacheLayer | None],
        rows: Tensor | None = None,
        padding: Tensor | None = None,
        lengths: Tensor | None = None,
        packing: Packing | None = None,
        each: list[Tensor] | None = None,
    ) -> Tensor:
        """Blocks and final norm with everything resolved: (B, L, D) -> (B, L, D).

        Args:
            budgets: K of each spectral layer. caches: the state of each layer, updated in place, or None.
            rows: (B,) K of each row, or None. padding: (B, L, 1) bool, or None. lengths: (B,) as in `SpectralOperator`.
            each: takes the outputs of all blocks but the last.
        """
        call = attention_call(self.config, hidden_states, caches, lengths, packing) if self.is_hybrid else None
        budget_of = dict(zip(spectral_layers(self.config), budgets))
        for i, (layer, cache) in enumerate(zip(self.layers, caches)):
            if (K := budget_of.get(i)) is None:
                hidden_states = layer(hidden_states, call, cache)
            else:
                held = rows if rows is None or self.config.spectral_capacities is None else rows.clamp(max=K)
                hidden_states = layer(hidden_states, K, held, padding, lengths, cache, packing)
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
        self.post_init()
        self.generation_config._from_model_config = False  # or loading it again would drop a spectral_budget set on it
        self.decoding_steps: Any = None  # single steps compiled ahead, by the package's `decoding`

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
        refuse_unsupported(kwargs)
        packing = {name: kwargs.pop(name) for name in PACKING_ARGUMENTS if name in kwargs}
        if self.decoding_steps and not packing and past_key_values is not None and input_ids is not None:
            others = (attention_mask, inputs_embeds, labels, output_hidden_states, state_lengths)
            if all(argument is None or argument is False for argument in others):
                spectral_budget = self.config.resolve_budget(spectral_budget, batch_size=len(input_ids))
                if (output := self.decoding_steps.run(self, input_ids, past_key_values, spectral_budget)) is not None:
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

    def step(
        self, input_ids: Tensor, budgets: Sequence[int], states: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """One token as a function of tensors alone, for compiled and exported programs.

        Args:
            input_ids: (B, 1). budgets: K of each spectral layer. states: as `ESSMCache.states`.
        Returns:
            logits (B, vocab_size), and the states after the token.
        """
        caches = layers_with(states, budgets, self.config)
        hidden_states = self.model.run_layers(self.model.embed_tokens(input_ids), budgets, caches)
        return self.lm_head(hidden_states[:, 0]), states_of(caches)


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
        refuse_unsupported(kwargs)
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
        logits = self.score(pool(outputs.last_hidden_state, attention_mask, self.config.classifier_pooling))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config, **kwargs)
        return ESSMSequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, spectral_budget=outputs.spectral_budget
        )


__all__ = ["ESSMForCausalLM", "ESSMForSequenceClassification", "ESSMModel", "ESSMPreTrainedModel"]
