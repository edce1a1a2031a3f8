# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""How a budget goes through `generate`: one for the call, or with `step_budgets` one for every step.

The budget of a call is resolved once, and every step gets the result.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import transformers
from torch import Tensor
from transformers import GenerationMixin
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor
from transformers.utils import logging

from .cache_essm import CACHE, ESSMCache, ESSMStaticCache, the_cache
from .spectral_budget import SpectralBudget, of_each_layer, rows_of_samples, spectral_layers

logger = logging.get_logger(__name__)
# Earlier ones read what a cache has again.
_CHUNKS_GO_ON = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 21)


class StepBudgets:
    """A budget for every step of `generate`; step 0 reads the prompt.

    Args:
        steps: a list of budgets in any of their forms, the last of which holds for all further steps, or a function
            from the step to a budget. config: what resolves a budget.
    Attributes:
        largest: the largest budget of each layer; None for a function, whose budgets are not known before.
        of_rows: the largest budget of each row; None where no step has budgets of rows.
        now: the budget of the step that runs.
    Raises:
        ValueError: an empty list, or a bad budget in it.
    """

    def __init__(self, steps: Callable[[int], SpectralBudget] | Sequence[SpectralBudget], config: Any):
        if not callable(steps) and (not isinstance(steps, (list, tuple)) or not steps):
            raise ValueError(f"step_budgets must be a function of the step or a list of budgets, got {steps!r}")
        self.steps, self.prompt_length, self.samples = steps, 0, 1
        self.now: SpectralBudget = None
        resolved = [] if callable(steps) else [config.resolve_budget(step) for step in steps]
        self.largest = [max(layer) for layer in zip(*(step.layers for step in resolved))] or None
        rows = max((len(step.of_rows) for step in resolved if step.of_rows), default=0)
        by_step = [step.of_rows or (max(step.layers),) * rows for step in resolved]
        self.of_rows = [max(row) for row in zip(*by_step)] or None

    def make_cache(self, cache_class: type[Any], config: Any) -> Any:
        """An empty cache with room for these steps. A memory is written in each row up to its own largest budget."""
        cache = cache_class(config, self.largest)
        if self.of_rows and config.memory_key_size:
            for i, capacity in zip(spectral_layers(config), config.capacities):
                cache.layers[i].filled = [min(K, capacity) for K in self.of_rows for _ in range(self.samples)]
        return cache

    def at(self, input_ids: Tensor, is_first: bool) -> SpectralBudget:
        """The budget of the step that follows `input_ids`, all (B, L) tokens so far; of (b,) rows, for every beam."""
        if is_first:
            self.prompt_length = input_ids.shape[1]
        step = input_ids.shape[1] - self.prompt_length
        budget = self.steps(step) if callable(self.steps) else self.steps[min(step, len(self.steps) - 1)]
        self.now = rows_of_samples(budget, self.samples)
        return self.now


class ElasticGenerationMixin(GenerationMixin):
    """`generate` of a model that takes spectral_budget and keeps its state in an `ESSMCache`."""

    def _prepare_generation_config(self, generation_config: Any, **kwargs: Any) -> tuple[Any, dict]:
        """Let the call's budgets win over GenerationConfig's, and pass whichever are set on to `forward`.

        `generate(.., step_budgets=..)` takes a budget per step instead of `spectral_budget`: a list, whose last entry
        holds for all further steps, or a function of the step. Step 0 reads the prompt and gives the first token. The
        cache has room for the largest entry of a list; of a function it has that of step 0, as always. Without a cache
        every step reads the whole text at its own budget.
        """
        called, steps = kwargs.pop("spectral_budget", None), kwargs.pop("step_budgets", None)
        if (cache := the_cache(kwargs.pop("cache", None), kwargs.pop("past_key_values", None))) is not None:
            kwargs[CACHE] = cache
        generation_config, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)
        if steps is None and called is None:
            steps = getattr(generation_config, "step_budgets", None)
        if steps is not None:
            if called is not None:
                raise ValueError(f"give spectral_budget or step_budgets, not both, got {called!r} and {steps!r}")
            if generation_config.prefill_chunk_size is not None:
                raise ValueError("step_budgets cannot be combined with prefill_chunk_size, whose calls are not steps")
            return generation_config, model_kwargs | {"step_budgets": StepBudgets(steps, self.config)}
        budget = called if called is not None else getattr(generation_config, "spectral_budget", None)
        if budget is not None:  # as a tensor of no dimension the library could not repeat it for beams
            if isinstance(budget, Tensor) and not budget.ndim:
                budget = max(of_each_layer(budget, self.config.capacities))
            model_kwargs["spectral_budget"] = budget
        return generation_config, model_kwargs

    def _prepare_generated_length(self, generation_config: Any, has_default_max_length: bool, **kwargs: Any):
        """As in transformers, but its default number of new tokens is not cut at `filter_length`: the text goes on."""
        if has_default_max_length and generation_config.max_new_tokens is None:
            generation_config.max_new_tokens = generation_config.max_length
        return super()._prepare_generated_length(
            generation_config=generation_config, has_default_max_length=has_default_max_length, **kwargs
        )

    def _extract_generation_mode_kwargs(
        self, custom_generate: Any, kwargs: dict, synced_gpus: Any, assistant_model: Any, streamer: Any
    ) -> dict[str, Any]:
        """As in transformers; a callable that names tokenizer or streamer gets them too, which the library drops."""
        given = {"tokenizer": kwargs.get("tokenizer"), "streamer": streamer}
        found = super()._extract_generation_mode_kwargs(custom_generate, kwargs, synced_gpus, assistant_model, streamer)
        if callable(custom_generate):
            names = inspect.signature(custom_generate).parameters
            found |= {name: value for name, value in given.items() if name in names and value is not None}
        return found

    def _expand_inputs_for_generation(self, *args: Any, **kwargs: Any):  # type: ignore[override]
        """As in transformers; the budget, then of all beams and samples, is resolved here for all steps."""
        input_ids, model_kwargs = super()._expand_inputs_for_generation(*args, **kwargs)
        given = [x for x in (model_kwargs.get("inputs_embeds"), input_ids) if x is not None]
        if (budget := model_kwargs.get("spectral_budget")) is not None:
            if not isinstance(budget, Tensor):  # which the library has repeated
                budget = rows_of_samples(budget, kwargs.get("expand_size", 1))
            model_kwargs["spectral_budget"] = self.config.resolve_budget(budget, batch_size=len(given[-1]))
        if (steps := model_kwargs.get("step_budgets")) is not None:
            steps.samples = kwargs.get("expand_size", 1)
        return input_ids, model_kwargs

    def _prefill(self, input_ids: Tensor, generation_config: Any, model_kwargs: dict, *args: Any, **kwargs: Any):
        """As in transformers; a cache that has read all of the prompt is an error."""
        embeds, mask = model_kwargs.get("inputs_embeds"), model_kwargs.get("attention_mask")
        length, cache = (input_ids if embeds is None else embeds).shape[1], model_kwargs.get(CACHE)
        held = 0 if cache is None else cache.get_seq_length()
        # New tokens alone come with the mask of all, of which newer libraries keep the length where it masks nothing.
        covered = getattr(generation_config, "_mask_length", 0) if mask is None else mask.shape[1]
        if held and held >= max(length, covered):
            raise ValueError(
                f"past_key_values has read {held} positions, but the prompt has {length}: generate needs the text that "
                "the cache has read and at least one token more, or new tokens alone and the mask of all"
            )
        return super()._prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)

    def _get_logits_processor(self, generation_config: Any, *args: Any, **kwargs: Any):
        """As in transformers; guidance, whose processor calls the model by itself, does so at the step's budget."""
        processors = super()._get_logits_processor(generation_config, *args, **kwargs)
        model_kwargs = kwargs.get("model_kwargs") or {}
        steps, budget = model_kwargs.get("step_budgets"), model_kwargs.get("spectral_budget")

        def at_budget(input_ids: Tensor, use_cache: bool, **options: Any) -> Any:
            if steps is not None and use_cache and options[CACHE] is None:
                options[CACHE] = steps.make_cache(ESSMCache, self.config)
            options["spectral_budget"] = budget if steps is None else steps.now
            return self(input_ids, use_cache=use_cache, **options)

        for processor in processors:
            if isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor):
                processor.model = at_budget
        return processors

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool | None = False,
        step_budgets: StepBudgets | None = None,
        **kwargs: Any,
    ) -> dict:
        """As in transformers; after the prompt every position is real, and a step without a mask is cheaper."""
        if step_budgets is not None:
            kwargs["spectral_budget"] = step_budgets.at(input_ids, bool(is_first_iteration))
        inputs = super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length,
            inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )
        if next_sequence_length == 1 and not is_first_iteration:
            inputs.pop("attention_mask", None)
        return inputs

    def _prepare_position_ids_for_generation(self, *args: Any, **kwargs: Any) -> None:
        """None: a model without absolute positions has no use for them, and they would say where sequences begin."""

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict, *args: Any, **kwargs: Any):
        """An ESSMStaticCache, which steps are compiled with, for `cache_implementation="static"`; else an ESSMCache."""
        if generation_config.prefill_chunk_size is not None:
            if model_kwargs.get("inputs_embeds") is not None:
                raise ValueError("prefill_chunk_size reads input_ids in pieces, and inputs_embeds only whole: give one")
            check_left_padding("prefill_chunk_size", model_kwargs.get("attention_mask"))
            cache = model_kwargs.get(CACHE)
            if cache is not None and cache.get_seq_length() and not _CHUNKS_GO_ON:
                raise ValueError(
                    "a cache that has read tokens goes on with prefill_chunk_size from transformers 5.21 on, this is "
                    f"{transformers.__version__}: leave prefill_chunk_size out"
                )
        kind = generation_config.cache_implementation
        if kind not in (None, "static"):
            logger.warning_once(f"cache_implementation={kind!r} is ignored: the cache of an ES-SSM is an ESSMCache")
        if generation_config.use_cache is not False and model_kwargs.get(CACHE) is None:
            steps = model_kwargs.get("step_budgets")
            cache_class = ESSMStaticCache if kind == "static" else ESSMCache
            new = cache_class(self.config) if steps is None else steps.make_cache(cache_class, self.config)
            model_kwargs[CACHE] = new

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
        """The (B, L) mask itself, of which the model makes what its layers need."""
        return attention_mask


def check_left_padding(name: str, mask: Tensor | None) -> None:
    """Raises ValueError where a prompt padded on the right would be read in pieces: its last may hold no real token."""
    if mask is not None and not bool(mask[:, -1].all()):
        rows = (mask[:, -1] == 0).nonzero().flatten().tolist()
        raise ValueError(f"{name} needs prompts padded on the left, but attention_mask ends with 0 in rows {rows}")
