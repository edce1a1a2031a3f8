# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What an ES-SSM can do after training: load a prefix, shrink, choose and distribute budgets, carry its profile."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME, logging

from .budget_allocation import allocate_spectral_budget, spectral_mixers
from .budget_profile import BudgetProfile, choose_budget, load_profile, origin_of, write_text
from .prefix_loading import (
    HUB_ARGUMENTS,
    SpectralCapacity,
    budget_fits,
    read_metadata,
    read_prefix,
    resolve_capacity,
    truncated_config,
)
from .quantization import INSTALL, dequantize, is_quantized, register_formats, resolve_quantization, weight_bytes
from .remote_code import code_files, derived_class, prune_auto_map
from .spectral_budget import SpectralBudget

logger = logging.get_logger(__name__)


class ElasticPreTrainedModel(PreTrainedModel):
    """The part of `ESSMPreTrainedModel` that does not compute."""

    _budget_profile: BudgetProfile | None = None
    _origin: tuple[str, dict[str, Any] | None] | None = None  # see `origin_of`

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Any,
        *args: Any,
        spectral_capacity: SpectralCapacity | None = None,
        quantization_config: Any = None,
        **kwargs: Any,
    ):
        """As in transformers, or the first channels alone, or with small weights.

        Args:
            spectral_capacity: an int, or one per layer: of every channel tensor only that many slices are read. The
                result is an ordinary model of that capacity, equal to the whole one at that budget.
            quantization_config: "int8" or "int4", see `quantization`, or a config as in transformers. A checkpoint
                that was saved quantised loads without it.
        Raises:
            ValueError: a damaged checkpoint, a capacity above the checkpoint's, or an unknown name.
            ImportError: quantised weights without torchao.
        """
        source = pretrained_model_name_or_path
        if (derived := derived_class(cls, source, kwargs)) is not None:
            ours = {"spectral_capacity": spectral_capacity, "quantization_config": quantization_config}
            kwargs |= {name: value for name, value in ours.items() if value is not None}
            return derived.from_pretrained(source, *args, **kwargs)
        if quantization_config is not None:
            kwargs["quantization_config"] = resolve_quantization(quantization_config)
        register_formats()  # which a checkpoint may hold
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
        except RuntimeError as error:
            if "conversion" not in str(error):
                raise
            raise ValueError(
                f"the quantised weights of {str(source)!r} do not fit {cls.__name__}: load them as the class that was "
                "saved, and take its .model for the part without a head"
            ) from error
        except ModuleNotFoundError as error:
            if str(error.name).partition(".")[0] == "torchao":
                raise ImportError(INSTALL) from error
            raise
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model._origin = origin_of(source, kwargs, model.config)
        for parameter in filter(is_quantized, model.parameters()):
            parameter.requires_grad_(False)
        for name, tensor in model.state_dict().items():
            if tensor.is_meta or not tensor.is_floating_point():
                continue
            if not torch.isfinite(dequantize(tensor) if is_quantized(tensor) else tensor).all():
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
        capacities = resolve_capacity(spectral_capacity, config.capacities)
        files = where | {"variant": kwargs.pop("variant", None)}
        weights = read_prefix(source, capacities, files)
        for name in HUB_ARGUMENTS:
            kwargs.pop(name, None)
        config = truncated_config(config, capacities)
        if getattr(config, "quantization_config", None) is None:
            loaded = super().from_pretrained(None, *args, config=config, state_dict=weights, **kwargs)
        else:  # transformers reads what the tensors mean from the file alone
            with tempfile.TemporaryDirectory() as folder:
                save_file(weights, os.path.join(folder, SAFE_WEIGHTS_NAME), metadata=read_metadata(source, files))
                config.to_json_file(os.path.join(folder, CONFIG_NAME))
                loaded = super().from_pretrained(folder, *args, config=config, **kwargs)
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
            ValueError: a capacity out of range, weights that Accelerate has offloaded, or a PEFT adapter of them.
        """
        capacities = resolve_capacity(spectral_capacity, self.config.capacities)
        mixers = spectral_mixers(self)
        if any(hasattr(module, "parameter_name") for module in self.modules()):  # PEFT's layer around raw weights
            raise ValueError("an adapter of channel weights cannot be cut: call merge_and_unload() first")
        if any(value.is_meta for mixer in mixers for _, _, value in mixer.channel_parameters()):
            raise ValueError("offloaded weights cannot be cut in memory: load the checkpoint with spectral_capacity")
        for mixer, capacity in zip(mixers, capacities):
            mixer.truncate(capacity)
        config = truncated_config(self.config, capacities)
        for module in self.modules():
            if isinstance(module, ElasticPreTrainedModel):
                module.config = config
        self._forget_generation_budget()
        self._budget_profile = None
        return self

    def train(self, mode: bool = True):
        """As in torch; ValueError for quantised weights, of which only norms, biases and embeddings would learn."""
        if mode and getattr(self, "is_quantized", False):
            raise ValueError(
                "a quantised model cannot be trained: train in full precision, save, and load the result with "
                "quantization_config"
            )
        return super().train(mode)

    def get_memory_footprint(self, return_buffers: bool = True) -> int:
        """Bytes of the weights as they are held, quantised or not; there are no buffers."""
        return sum(weight_bytes(parameter) for parameter in self.parameters())

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
        """As in transformers, with the budget profile; a file in the place of the folder, or adapters, are an error."""
        if os.path.isfile(save_directory):
            raise NotADirectoryError(f"save_directory must be a folder, got the file {str(save_directory)!r}")
        if not getattr(self, "_hf_peft_config_loaded", False) and any(hasattr(m, "base_layer") for m in self.modules()):
            raise ValueError(
                "PEFT's adapters are still in this model: save the PeftModel, or merge them. merge_and_unload() leaves "
                "those inside a mixer that has one itself: call it a second time"
            )
        if getattr(self, "is_quantized", False):  # transformers cannot undo what it did to load torchao's tensors
            kwargs["save_original_format"] = False
        wrapped = type(self)  # under FSDP2 a class of torch, whose code would be saved in the place of this one's
        self.__class__ = next(cls for cls in wrapped.__mro__ if not cls.__module__.startswith("torch."))
        try:
            code = code_files(self)
            prune_auto_map(self.config, code, save_directory)
            super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)
        finally:
            self.__class__ = wrapped
        if not is_main_process:
            return
        for name, text in code.items():  # transformers leaves out the files of classes that the saved one derives from
            path = Path(save_directory) / name
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                write_text(path, text)
        try:
            profile = self.budget_profile
        except ValueError as error:  # trained on, perhaps
            logger.warning_once(f"no budget profile is saved: {error}")
            return
        if profile is not None:
            profile.save(save_directory)
