# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What an ES-SSM can do after training: load a prefix, shrink, choose and distribute budgets, carry its profile."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging

from .budget_allocation import allocate_spectral_budget, spectral_mixers
from .budget_profile import BudgetProfile, choose_budget, load_profile
from .prefix_loading import (
    HUB_ARGUMENTS,
    SpectralCapacity,
    budget_fits,
    read_prefix,
    resolve_capacity,
    truncated_config,
)
from .spectral_budget import SpectralBudget

logger = logging.get_logger(__name__)


class ElasticPreTrainedModel(PreTrainedModel):
    """The part of `ESSMPreTrainedModel` that does not compute."""

    _budget_profile: BudgetProfile | None = None

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Any,
        *args: Any,
        spectral_capacity: SpectralCapacity | None = None,
        **kwargs: Any,
    ):
        """As in transformers, or the first channels alone.

        Args:
            spectral_capacity: an int, or one per layer: of every channel tensor only that many slices are read. The
                result is an ordinary model of that capacity, equal to the whole one at that budget.
        Raises:
            ValueError: a damaged checkpoint, or a capacity above the checkpoint's.
        """
        source = pretrained_model_name_or_path
        try:
            if spectral_capacity is None:
                loaded = super().from_pretrained(source, *args, **kwargs)
            else:
                loaded = cls._load_prefix(source, spectral_capacity, *args, **kwargs)
        except SafetensorError as error:
            raise ValueError(
                f"a safetensors file of {str(source)!r} is truncated or corrupt ({error}); "
                "fetch or save the checkpoint again"
            ) from error
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        for name, tensor in model.state_dict().items():
            if not tensor.is_meta and tensor.is_floating_point() and not torch.isfinite(tensor).all():
                raise ValueError(
                    f"{name} of checkpoint {str(source)!r} contains NaN or infinite values; "
                    "use a checkpoint from before the training diverged"
                )
        return loaded

    @classmethod
    def _load_prefix(cls, source: Any, spectral_capacity: SpectralCapacity, *args: Any, **kwargs: Any):
        if kwargs.get("state_dict") is not None or source is None:
            raise ValueError("spectral_capacity reads a prefix of a checkpoint: give its folder or name, no state_dict")
        where = {name: kwargs[name] for name in HUB_ARGUMENTS if kwargs.get(name) is not None}
        config = kwargs.pop("config", None)
        if not hasattr(config, "capacities"):  # none, or where it is
            fields = {f.name for f in dataclasses.fields(cls.config_class)} - {"dtype"}
            given = {name: kwargs.pop(name) for name in fields & set(kwargs)}
            config = cls.config_class.from_pretrained(source if config is None else config, **where, **given)
        if getattr(config, "quantization_config", None) is not None:
            raise ValueError(f"spectral_capacity cannot cut a quantised checkpoint; load {str(source)!r} whole")
        capacities = resolve_capacity(spectral_capacity, config.capacities)
        files = {"variant": kwargs.pop("variant", None)}
        weights = read_prefix(source, capacities, where | files)
        for name in HUB_ARGUMENTS:
            kwargs.pop(name, None)
        config = truncated_config(config, capacities)
        loaded = super().from_pretrained(None, *args, config=config, state_dict=weights, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.name_or_path = model.config._name_or_path = str(source)
        if model.can_generate():
            with contextlib.suppress(OSError):  # it has none
                model.generation_config = GenerationConfig.from_pretrained(source, **where)
            model._forget_generation_budget()
        return loaded

    def truncate(self, spectral_capacity: SpectralCapacity):
        """Keep the first channels only, in memory; the model equals the former one at that budget.

        Optimizers and caches made before hold the former weights and states.
        Args:
            spectral_capacity: an int, or one per layer, at most what a layer holds.
        Returns:
            this model.
        Raises:
            ValueError: a capacity out of range.
        """
        capacities = resolve_capacity(spectral_capacity, self.config.capacities)
        for mixer, capacity in zip(spectral_mixers(self), capacities):
            mixer.truncate(capacity)
        config = truncated_config(self.config, capacities)
        for module in self.modules():
            if isinstance(module, ElasticPreTrainedModel):
                module.config = config
        self._forget_generation_budget()
        self._budget_profile = None
        return self

    def allocate_spectral_budget(
        self,
        total: int,
        method: str | None = None,
        calibration: Iterable[Mapping[str, Tensor]] | None = None,
        min_budget: int = 2,
    ) -> list[int]:
        """Distribute `total` channels over the layers, and make the list the default budget of this model's config.

        See `budget_allocation.allocate_spectral_budget` for arguments and errors.
        """
        budgets = allocate_spectral_budget(self, total, method, calibration, min_budget)
        self.config.spectral_budget = budgets
        return budgets

    @property
    def budget_profile(self) -> BudgetProfile | None:
        """Quality, speed and memory at every budget, as measured by train/calibrate.py; None if that was not done.

        Read once from where the model was loaded from. Raises ValueError for a damaged profile or another model's.
        """
        if self._budget_profile is None:
            self._budget_profile = load_profile(self)
        return self._budget_profile

    def choose_budget(
        self,
        *,
        max_latency_ms: float | None = None,
        max_quality_drop: float | None = None,
        phase: str | None = None,
        batch_size: int = 1,
        device: str | torch.device | None = None,
    ) -> int:
        """The budget that keeps to limits of time, quality or both, by `budget_profile`.

        See `budget_profile.choose_budget` for arguments and errors.
        """
        limits = {"max_latency_ms": max_latency_ms, "max_quality_drop": max_quality_drop}
        return choose_budget(
            self, profile=self.budget_profile, phase=phase, batch_size=batch_size, device=device, **limits
        )

    def _forget_generation_budget(self) -> None:
        """Drop a budget of generation_config that is beyond the capacity."""
        budget = getattr(getattr(self, "generation_config", None), "spectral_budget", None)
        if budget is not None and not budget_fits(budget, self.config):
            self.generation_config.spectral_budget = None

    def num_active_parameters(self, spectral_budget: SpectralBudget = None) -> int:
        """Parameters that a call at that budget reads (of (B,) budgets, the largest). ValueError for a bad one."""
        budgets = self.config.resolve_budget(spectral_budget)
        idle = sum(
            (held - K) * mixer.num_parameters_per_channel()
            for K, held, mixer in zip(budgets.layers, self.config.capacities, spectral_mixers(self))
        )
        return sum(parameter.numel() for parameter in self.parameters()) - idle

    def save_pretrained(self, save_directory: Any, is_main_process: bool = True, **kwargs: Any) -> None:
        """As in transformers, with the budget profile; a file in the place of the folder is an error."""
        if os.path.isfile(save_directory):
            raise NotADirectoryError(f"save_directory must be a folder, got the file {str(save_directory)!r}")
        super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)
        if not is_main_process:
            return
        try:
            profile = self.budget_profile
        except ValueError as error:  # trained on, perhaps
            logger.warning_once(f"no budget profile is saved: {error}")
            return
        if profile is not None:
            profile.save(save_directory)
