# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Loads, saves and truncates checkpoints: whole, a prefix of the channels, or with small weights; with their code.

A budget is a prefix, in memory and in the file (`channels`): a model of capacity 6 is the first 6 slices of each
channel tensor, and computes what the large one computes at budget 6. Beside the weights lie the files of this folder,
which are the code of the model, and the budget profile.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Union

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import GenerationConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file, logging

from .channels import (
    channel_capacity,
    channel_parameters,
    num_parameters_per_channel,
    spectral_mixers,
    truncate_channels,
)
from .quantized_weights import INSTALL, dequantize, essm_quantization, is_quantized, register_formats, weight_bytes
from .spectral_budget import SpectralBudget, is_hybrid, of_each_layer, spectral_layers

logger = logging.get_logger(__name__)

SpectralCapacity = Union[int, Sequence[int]]
PROFILE_NAME = "budget_profile.json"  # quality and speed at every budget, as `budgets` measures and reads it
# Arguments of from_pretrained that say where files are, for `cached_file`.
HUB_ARGUMENTS = (
    *("cache_dir", "force_download", "proxies", "token", "local_files_only", "revision", "subfolder"),
    *("repo_type", "user_agent", "_commit_hash"),
)


class ElasticPreTrainedModel(PreTrainedModel):
    """Loads, saves and truncates checkpoints."""

    _origin: tuple[str, dict[str, Any]] | None = None  # see `_origin_of`

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
            quantization_config: "int8" or "int4", see `quantized_weights`, or a config as in transformers. A checkpoint
                that was saved quantised loads without it.
        Raises:
            ValueError: a damaged checkpoint, a capacity above the checkpoint's, or an unknown name.
            ImportError: quantised weights without torchao.
        """
        source = pretrained_model_name_or_path
        if quantization_config is not None:
            named = isinstance(quantization_config, str)
            kwargs["quantization_config"] = essm_quantization(quantization_config) if named else quantization_config
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
        model._origin = _origin_of(source, kwargs, model.config)
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
        where = {name: value for name in HUB_ARGUMENTS if (value := kwargs.pop(name, None)) is not None}
        config = kwargs.pop("config", None)
        if not hasattr(config, "capacities"):  # none, or where it is
            fields = {f.name for f in dataclasses.fields(cls.config_class)} - {"dtype"}
            given = {name: kwargs.pop(name) for name in fields & set(kwargs)}
            config = cls.config_class.from_pretrained(source if config is None else config, **where, **given)
        capacities = of_each_layer(spectral_capacity, config.capacities, "spectral_capacity")
        held = dict(zip(spectral_layers(config), capacities))
        weights, metadata = read_prefix(source, held, where | {"variant": kwargs.pop("variant", None)})
        config = truncated_config(config, capacities)
        if getattr(config, "quantization_config", None) is None:
            loaded = super().from_pretrained(None, *args, config=config, state_dict=weights, **kwargs)
        else:  # transformers reads what the tensors mean from the file alone
            with tempfile.TemporaryDirectory() as folder:
                save_file(weights, os.path.join(folder, SAFE_WEIGHTS_NAME), metadata=metadata)
                config.to_json_file(os.path.join(folder, CONFIG_NAME))
                loaded = super().from_pretrained(folder, *args, config=config, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.name_or_path = model.config._name_or_path = str(source)
        if model.can_generate():
            with contextlib.suppress(OSError):  # it has none
                model.generation_config = GenerationConfig.from_pretrained(source, **where)
            model._forget_generation_budget()
        return loaded

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        if is_hybrid(self.config):
            return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)
        if attn_implementation not in (None, "eager"):
            raise ValueError(
                f"attn_implementation must be None or 'eager', got {attn_implementation!r}: this model has no "
                "attention layers. How its convolution is computed is config.spectral_algorithm"
            )
        return "eager"

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
        capacities = of_each_layer(spectral_capacity, self.config.capacities, "spectral_capacity")
        mixers = spectral_mixers(self)
        if any(hasattr(module, "parameter_name") for module in self.modules()):  # PEFT's layer around raw weights
            raise ValueError("an adapter of channel weights cannot be cut: call merge_and_unload() first")
        if any(value.is_meta for mixer in mixers for _, _, value in channel_parameters(mixer)):
            raise ValueError("offloaded weights cannot be cut in memory: load the checkpoint with spectral_capacity")
        for mixer, capacity in zip(mixers, capacities):
            truncate_channels(mixer, capacity)
        config = truncated_config(self.config, capacities)
        for module in self.modules():
            if isinstance(module, ElasticPreTrainedModel):
                module.config = config
        self._forget_generation_budget()
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

    def _forget_generation_budget(self) -> None:
        """Drop a budget of generation_config that is beyond the capacity."""
        budget = getattr(getattr(self, "generation_config", None), "spectral_budget", None)
        if budget is not None and not budget_fits(budget, self.config):
            self.generation_config.spectral_budget = None

    def num_active_parameters(self, spectral_budget: SpectralBudget = None) -> int:
        """Parameters that a call at that budget reads (of (B,) budgets, the largest). ValueError for a bad one."""
        budgets = self.config.resolve_budget(spectral_budget)
        idle = sum(
            (held - K) * num_parameters_per_channel(mixer)
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
            code = {}
            if getattr(self.config, "auto_map", None) is not None:  # who took it away asks for the class by import
                code = _code_of(self.config)
                references = _references_to(self.config.auto_map, code, save_directory)
                self.config.auto_map = self.config.auto_classes | references
            super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)
        finally:
            self.__class__ = wrapped
        if not is_main_process:
            return
        for name, text in code.items():  # transformers leaves out the files of classes that the saved one derives from
            path = Path(save_directory) / name
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                write_text(path, text)
        if (profile := _profile_to_save(self)) is not None:
            write_text(Path(save_directory) / PROFILE_NAME, profile)


# ---------------------------------------------------------------------------------------------------------------------
# A prefix of the channels.


def truncated_config(config: Any, capacities: Sequence[int]) -> Any:
    """A copy of an ESSMConfig with these capacities; defaults and presets that no longer fit are left out."""
    small = copy.deepcopy(config)
    small.num_spectral_channels = max(capacities)
    small.spectral_capacities = None if len(set(capacities)) == 1 else list(capacities)
    if small.trained_budgets is not None:
        small.trained_budgets = [K for K in small.trained_budgets if budget_fits(K, small)]
    if small.budget_presets is not None:
        small.budget_presets = {name: K for name, K in small.budget_presets.items() if budget_fits(K, small)}
    if not budget_fits(small.spectral_budget, small):
        small.spectral_budget = None
    return small


def budget_fits(budget: Any, config: Any) -> bool:
    """Whether a stored budget is one that the model of that config can run."""
    try:
        config.resolve_budget(budget)
    except ValueError:
        return False
    return True


def read_prefix(
    source: Any, capacities: Mapping[int, int], where: Mapping[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The weights of a checkpoint, of channels only the first `capacities`, by layer; nothing else is read.

    Args:
        source: folder or Hub name of a safetensors checkpoint, in one file or in shards.
        where: those of HUB_ARGUMENTS that the caller gave, and `variant`.
    Returns:
        tensors by their names in the checkpoint, on the CPU, in its dtypes; and what its files say of them.
    Raises:
        ValueError: no safetensors file. OSError: a shard is not there. SafetensorError: a file is damaged.
    """
    weights: dict[str, torch.Tensor] = {}
    metadata: dict[str, str] = {}
    for path in _weight_files(source, **where):
        with safe_open(path, framework="pt") as file:
            metadata |= file.metadata() or {}
            for name in list(file.keys()):
                kept = channel_capacity(name, capacities)
                weights[name] = file.get_tensor(name) if kept is None else file.get_slice(name)[:kept]
    return weights, metadata


def _weight_files(source: Any, variant: str | None = None, **where: Any) -> list[str]:
    def find(name: str) -> str | None:
        stem, end = name.rsplit(".", 1)  # model.fp16.safetensors, and model.safetensors.index.fp16.json
        name = name if variant is None else f"{stem}.{variant}.{end}"
        return cached_file(source, name, **where, _raise_exceptions_for_missing_entries=False)

    if (single := find(SAFE_WEIGHTS_NAME)) is not None:
        return [single]
    if (index := find(SAFE_WEIGHTS_INDEX_NAME)) is None:
        raise ValueError(
            f"spectral_capacity reads a prefix of a safetensors checkpoint, and {str(source)!r} holds no "
            f"{SAFE_WEIGHTS_NAME}; load it whole and call model.truncate"
        )
    with open(index) as file:
        try:
            names = sorted(set(json.load(file)["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is not an index of a sharded checkpoint: {error!r}") from error
    return [str(cached_file(source, os.path.basename(name), **where)) for name in names]


# ---------------------------------------------------------------------------------------------------------------------
# Which weights.


def checksum(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of tensors, in the given order."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def weights_checksum(model: PreTrainedModel) -> str | None:
    """A checksum that tells whether two models have the same weights; None if some are offloaded or sharded.

    It is taken of the values rounded to bf16, and of the first channel where a tensor is divided into channels. So it
    is the same for a model that was cast between fp32 and bf16, or truncated, or read as a prefix.
    """
    layers = range(model.config.num_hidden_layers)
    tensors = model.state_dict()
    if any(tensor.is_meta or hasattr(tensor, "full_tensor") for tensor in tensors.values()):
        return None

    def rounded(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is not torch.Tensor and hasattr(tensor, "dequantize"):  # torchao's
            tensor = tensor.dequantize()
        tensor = tensor if channel_capacity(name, layers) is None else tensor[:1]
        return tensor.bfloat16() if tensor.is_floating_point() else tensor

    return checksum((name, rounded(name, tensor)) for name, tensor in sorted(tensors.items()))


# ---------------------------------------------------------------------------------------------------------------------
# Files.


def file_beside(model: Any, name: str) -> str | None:
    """The path of a file beside the weights that the model was loaded from, folder or Hub repository; None without one.

    The Hub is asked only for a model that was loaded from there, never for one from a folder or made in memory.
    """
    origin = getattr(model, "_origin", None)  # without one it was made in memory, perhaps from a saved configuration
    source, where = origin or (model.name_or_path, {})
    if origin is None and not os.path.isdir(source or ""):
        return None
    try:
        return cached_file(source, name, **where, _raise_exceptions_for_missing_entries=False)
    except (OSError, ValueError):  # no repository any more, or the Hub cannot be reached
        return None


def _origin_of(source: Any, arguments: Mapping[str, Any], config: Any) -> tuple[str, dict[str, Any]] | None:
    """Where `from_pretrained` reads a model, as `file_beside` finds it again whatever the working directory is then.

    Args:
        source, arguments: of from_pretrained. config: that of the loaded model.
    Returns:
        an absolute folder or a Hub name, and arguments of `cached_file`; None without a source.
    """
    if source is None:
        return None
    if os.path.exists(source):
        return os.path.abspath(os.path.join(source, arguments.get("subfolder") or "")), {}
    where = {name: arguments.get(name) for name in ("cache_dir", "local_files_only", "subfolder")}
    revision = getattr(config, "_commit_hash", None) or arguments.get("revision")
    where["revision"] = getattr(revision, "resolved", revision)  # transformers may have found out the commit
    return str(source), {name: value for name, value in where.items() if value is not None}


def _code_of(config: Any) -> dict[str, str]:
    """By name, the text of the files that hold the model's classes, and of what these import from beside them."""
    classes = {Path(__file__).with_name(f"{name.split('.')[0]}.py") for name in config.auto_classes.values()}
    files = classes.union(*(map(Path, get_relative_import_files(path)) for path in classes))
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(files)}


def _profile_to_save(model: Any) -> str | None:
    """The text of the budget profile beside the weights if it was measured on these weights; None otherwise."""
    path = file_beside(model, PROFILE_NAME)
    if path is None:
        return None
    try:
        text = Path(path).read_text(encoding="utf-8")
        measured = json.loads(text)["weights"]
    except (ValueError, KeyError, TypeError, RecursionError):  # damaged
        measured = None
    if measured is not None and measured == weights_checksum(model):
        return text
    logger.warning_once(f"no budget profile is saved: {path} was measured on other weights")
    return None


def _references_to(auto_map: Mapping[str, Any], names: Iterable[str], folder: str | os.PathLike) -> dict[str, Any]:
    """Of an auto_map the classes whose files are of those names, lie in the folder, or on the Hub."""
    kept = {}
    for auto, references in auto_map.items():
        each = references if isinstance(references, (list, tuple)) else [references]
        files = [f"{name.split('.')[0]}.py" for name in each if isinstance(name, str) and "--" not in name]
        if all(file in names or (Path(folder) / file).is_file() for file in files):
            kept[auto] = references
    return kept


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write that becomes `path` in one move: whoever is interrupted leaves the old file, and nothing else."""
    partial = path.with_name(f".partial-{path.name}")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Give the file its new text in one move."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")
