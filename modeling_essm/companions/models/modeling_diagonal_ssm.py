# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Diagonal state space models for transformers: residual block, model, language-model and classification heads.
Letters: B batch, L sequence, H width, F input features, n modes.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast, SequenceClassifierOutput
from transformers.models.auto import modeling_auto
from transformers.utils.generic import can_return_tuple

from .cache_states import CACHE, StateCache
from .checks_states import check_cache, check_inputs, check_mode, read_mask, refuse_packing, the_cache
from .configuration_diagonal_ssm import DiagonalSSMConfig
from .mixer_diagonal import MIXERS, DiagonalMixer


def make_norm(config: DiagonalSSMConfig) -> nn.Module:
    if config.norm == "layer":
        return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
    return nn.BatchNorm1d(config.hidden_size, eps=config.layer_norm_eps, affine=False)


def normalised(norm: nn.Module, x: Tensor, real: Tensor | None) -> Tensor:
    """(B, L, H) after its norm; the statistics of a batch are those of the positions that are real (B, L)."""
    if isinstance(norm, nn.LayerNorm):
        return norm(x)
    if real is None or not norm.training:
        return norm(x.flatten(0, 1)).view_as(x)
    return torch.zeros_like(x).index_put((real,), norm(x[real]))


class DiagonalSSMLayer(GradientCheckpointingLayer):
    """Residual block: x + drop(GLU(W drop(GELU(mixer(norm(x))))))."""

    def __init__(self, config: DiagonalSSMConfig, state_size: int):
        super().__init__()
        self.norm = make_norm(config)
        self.mixer = MIXERS[config.parameterization](config, state_size)
        self.mix = nn.Linear(config.hidden_size, 2 * config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden_states: Tensor, state: Tensor | None, real: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(B, L, H) to (B, L, H) and the state after it; state and real as of `DiagonalMixer.forward`."""
        y, state = self.mixer(normalised(self.norm, hidden_states, real), state, real)
        branch = F.glu(self.mix(self.dropout(F.gelu(y))), dim=-1)
        return hidden_states + self.dropout(branch), state


class DiagonalSSMPreTrainedModel(PreTrainedModel):
    config_class = DiagonalSSMConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar = ["DiagonalSSMLayer"]
    _is_stateful = True
    _supports_context_parallel = False  # a state is not handed from process to process

    def __init__(self, config: DiagonalSSMConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        # The poles: what bf16 rounds off of them moves every later state.
        self._keep_in_fp32_modules_strict = {*MIXERS[config.parameterization].pole_names}
        if config.num_input_features is not None:
            self.main_input_name = "input_features"  # what Trainers count and pass to metrics

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, DiagonalMixer):
            module.reset_parameters()
        else:
            super()._init_weights(module)

    @property
    def mixers(self) -> list[DiagonalMixer]:
        """The mixer of each layer."""
        return [module for module in self.modules() if isinstance(module, DiagonalMixer)]

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """As in transformers; the configuration tells the sizes that the mixers have now. Raises ValueError for a mixer
        that several layers share, which a checkpoint cannot hold."""
        if len(self.mixers) != self.config.num_hidden_layers:
            what = f"{len(self.mixers)} mixers, the model has {self.config.num_hidden_layers} layers"
            raise ValueError(f"each layer needs a mixer of its own to be saved, got {what}")
        self.config.state_sizes = [mixer.state_size for mixer in self.mixers]
        super().save_pretrained(*args, **kwargs)


class DiagonalSSMModel(DiagonalSSMPreTrainedModel):
    """Embedding, blocks and final norm; token ids, embeddings or continuous features in, hidden states out."""

    def __init__(self, config: DiagonalSSMConfig):
        super().__init__(config)
        if config.num_input_features is None:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        else:
            self.embed_features = nn.Linear(config.num_input_features, config.hidden_size)
        self.layers = nn.ModuleList(DiagonalSSMLayer(config, n) for n in config.state_sizes or ())
        self.norm = make_norm(config)
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
        past_key_values: StateCache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        cache: StateCache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """
        Args:
            input_ids: (B, L) int64 or int32 in [0, vocab_size). Or inputs_embeds: (B, L, H), input_features: (B, L, F).
            attention_mask: (B, L) or (B, past + L), 1 for real positions. Masked positions are skipped, wherever they
                are: they change neither other outputs nor the state. An output there is that of the last real position
                before it in this call, and undefined where there is none.
            past_key_values: StateCache to continue from; updated in place. Or cache, its name in transformers 5.24.
        Returns:
            BaseModelOutputWithPast: last_hidden_state (B, L, H), past_key_values if asked for, hidden_states a tuple of
            (B, L, H), embeddings first, if asked for.
        Raises:
            ValueError: token ids out of range (checked on a CPU), not exactly one input, a mask or a cache that does
                not fit, a cache for a bidirectional model, packed sequences, or gradient checkpointing with batch norm.
        """
        config, cache = self.config, the_cache(cache, past_key_values)
        recomputes = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        if recomputes and config.norm == "batch":
            raise ValueError('gradient checkpointing would move the running statistics of norm="batch" twice')
        B, L = check_inputs(config, input_ids, inputs_embeds, input_features)
        made_for = {name: getattr(config, name) for name in ("model_type", "parameterization", "hidden_size")}
        made_for["state_sizes"] = [layer.mixer.state_size for layer in self.layers]  # type: ignore[misc, union-attr]
        if cache is not None:
            check_cache(cache, made_for, B)
            if config.norm == "batch":
                check_mode(self, 'norm="batch" mixes rows')
        real = read_mask(attention_mask, B, L, 0 if cache is None else cache.get_seq_length())
        refuse_packing(kwargs, B, L, real)
        if input_ids is not None:
            inputs_embeds = self.embed_tokens(input_ids)
        else:
            given: Any = inputs_embeds
            if input_features is not None:
                given = input_features.to(self.embed_features.weight.dtype)
            if real is not None:  # what stands there, NaN too, is not read
                given = given.masked_fill(~real.to(given.device)[..., None], 0.0)
            inputs_embeds = given if input_features is None else self.embed_features(given)
        hidden_states = inputs_embeds
        if config.bidirectional and (use_cache or cache is not None):
            raise ValueError("a bidirectional model reads whole sequences: use_cache=False, without past_key_values")
        if use_cache is None:
            use_cache = config.use_cache and not self.training and not config.bidirectional
        if use_cache and cache is None:
            cache = StateCache()
        if output_hidden_states is None:
            output_hidden_states = config.output_hidden_states
        place = None
        if real is not None:
            real = real.to(hidden_states.device)
            order, place = real_last(real)
            hidden_states, real = reorder(hidden_states, order), real.gather(1, order)
        each, states = [], []
        for i, layer in enumerate(self.layers):
            before = cache.states[i] if cache is not None and cache.states else None
            hidden_states, state = layer(hidden_states, before, real)
            states.append(state)
            if output_hidden_states and i + 1 < len(self.layers):
                each.append(hidden_states)
        each.append(normalised(self.norm, hidden_states, real))
        if place is not None:
            each = [reorder(x, place) for x in each]
        if cache is not None:
            cache.update(states, L, made_for)
        return BaseModelOutputWithPast(
            last_hidden_state=each[-1],
            hidden_states=(inputs_embeds, *each) if output_hidden_states else None,
            **{CACHE: cache if use_cache else None},
        )


class DiagonalSSMForCausalLM(DiagonalSSMPreTrainedModel, GenerationMixin):
    """A causal diagonal model with a language-model head; `generate` decodes at constant memory."""

    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: DiagonalSSMConfig):
        super().__init__(config)
        if config.num_input_features is not None or config.bidirectional:
            raise ValueError(
                "a language model reads token ids in one direction: num_input_features must be None and bidirectional "
                f"False, got {config.num_input_features} and {config.bidirectional}"
            )
        self.model = DiagonalSSMModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: StateCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: StateCache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """
        Args:
            labels: (B, L) int64 next-token targets before shifting, -100 to ignore.
            logits_to_keep: only the last that many positions (0: all), or (T,) positions.
            The rest as in `DiagonalSSMModel.forward`.
        Returns:
            CausalLMOutputWithPast: loss () in nats with labels, logits (B, L or logits_to_keep, vocab_size).
        """
        given = {"cache": the_cache(cache, past_key_values), "use_cache": use_cache, "return_dict": True}
        given["output_hidden_states"] = output_hidden_states
        outputs = self.model(input_ids, attention_mask, inputs_embeds, **kwargs | given)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, keep])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss, logits, getattr(outputs, CACHE), outputs.hidden_states)

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict, *args: Any, **kwargs: Any):
        """A StateCache, whatever kind the library would make."""
        if generation_config.prefill_chunk_size is not None and model_kwargs.get("inputs_embeds") is not None:
            raise ValueError("prefill_chunk_size reads input_ids in pieces, and inputs_embeds only whole: give one")
        if generation_config.use_cache is not False and model_kwargs.get(CACHE) is None:
            model_kwargs[CACHE] = StateCache()

    def _prefill(self, input_ids: Tensor, generation_config: Any, model_kwargs: dict, *args: Any, **kwargs: Any):
        """As in transformers; a cache that has read all of the prompt is an error."""
        embeds, mask, cache = (model_kwargs.get(name) for name in ("inputs_embeds", "attention_mask", CACHE))
        length, held = (input_ids if embeds is None else embeds).shape[1], 0
        if cache is not None:
            held = cache.get_seq_length()
        # New tokens alone come with the mask of all, of which newer libraries keep the length where it masks nothing.
        covered = getattr(generation_config, "_mask_length", 0) if mask is None else mask.shape[1]
        if held and held >= max(length, covered):
            raise ValueError(
                f"past_key_values has read {held} positions, and the prompt has {length}: generate needs the text that "
                "the cache has read and at least one token more, or new tokens alone and the mask of all"
            )
        return super()._prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
        """The (B, L) mask itself."""
        return attention_mask


class DiagonalSSMForSequenceClassification(DiagonalSSMPreTrainedModel):
    """A diagonal model that averages its real positions and classifies; reads token ids or continuous features."""

    accepts_loss_kwargs = False  # the library's regression and multi-label losses ignore num_items_in_batch

    def __init__(self, config: DiagonalSSMConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = DiagonalSSMModel(config)
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
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """
        Args:
            labels: (B,) int64 classes, or floats for regression and multi-label problems.
            The rest as in `DiagonalSSMModel.forward`.
        Returns:
            SequenceClassifierOutput: loss () with labels, logits (B, num_labels).
        """
        given = {"use_cache": False, "output_hidden_states": output_hidden_states, "return_dict": True}
        outputs = self.model(input_ids, attention_mask, inputs_embeds, input_features, **kwargs | given)
        logits = self.score(_mean_of_real(outputs.last_hidden_state, attention_mask))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config, **kwargs)
        return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


def _mean_of_real(hidden_states: Tensor, real: Tensor | None) -> Tensor:
    """(B, L, H) -> (B, H): the mean of the positions where `real` (B, L) is not 0; zero of a row without any."""
    if real is None:
        return hidden_states.mean(1)
    real = real.to(hidden_states.device).bool()
    wide = torch.promote_types(hidden_states.dtype, torch.float32)  # fp16 ends at 65504, as a sum and as a count
    total = hidden_states.masked_fill(~real[..., None], 0.0).sum(1, dtype=wide)
    return (total / real.sum(1, keepdim=True).clamp(min=1)).to(hidden_states.dtype)


def real_last(real: Tensor) -> tuple[Tensor, Tensor]:
    """How to bring the real positions of each row (B, L) bool to its end, in their order, and back.

    Returns:
        order (B, L) int64: the position that goes to each place. place (B, L): where each position has gone; one that
        is not real is where the last real one before it is, or at the beginning if there is none.
    """
    L = real.shape[1]
    order = real.long().argsort(dim=1, stable=True)
    place = L - real.sum(1, keepdim=True) + real.cumsum(1) - 1
    return order, place.clamp(min=0)


def reorder(x: Tensor, place: Tensor) -> Tensor:
    """(B, L, H) with the position that place (B, L) names at each."""
    return x.gather(1, place[..., None].expand_as(x))


# Trainers (label smoothing), evaluation harnesses and model cards look class names up in these tables.
modeling_auto.MODEL_MAPPING_NAMES["diagonal_ssm"] = "DiagonalSSMModel"
modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["diagonal_ssm"] = "DiagonalSSMForCausalLM"
modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES["diagonal_ssm"] = "DiagonalSSMForSequenceClassification"
