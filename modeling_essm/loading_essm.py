# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Loads, saves and truncates checkpoints, whole or a prefix of the channels.

A budget is a prefix, in memory and in the file: `channel_blocks` says which dimensions of which tensors are divided
into channels. So a model of capacity 6 is the leading block of each of these tensors, and computes what the large one
computes at budget 6. A budget reads all other tensors whole.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Union

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    cached_file,
    find_adapter_config_file,
    logging,
)

from .spectral_budget import SpectralBudget, is_hybrid, of_each_layer, spectral_layers

logger = logging.get_logger(__name__)

SpectralCapacity = Union[int, str, Sequence[int]]
# Arguments of from_pretrained that say where files are, for `cached_file`.
_WHERE = (
    *("cache_dir", "force_download", "proxies", "token"),
    *("local_files_only", "revision", "subfolder", "_commit_hash"),
)
_WRAPPED = re.compile(r"(base_layer|original_module|modules_to_save\.\w+)\.")  # by PEFT


class ElasticPreTrainedModel(PreTrainedModel):
    """Loads, saves and truncates checkpoints."""

    _origin: tuple[str, dict[str, Any]] | None = None  # folder or Hub name, and arguments of `cached_file`

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
            spectral_capacity: an int, one per layer or a preset: only that many slices of every channel tensor are
                read. The result is an ordinary model of that capacity, equal to the whole one at that budget.
        Raises:
            ValueError: a damaged checkpoint, or a capacity above the checkpoint's.
        """
        source = pretrained_model_name_or_path
        where = {name: kwargs[name] for name in _WHERE if kwargs.get(name) is not None}
        try:
            if spectral_capacity is None:
                loaded = super().from_pretrained(source, *args, **kwargs)
            else:
                loaded = cls._load_prefix(source, spectral_capacity, where, *args, **kwargs)
        except SafetensorError as error:
            raise ValueError(
                f"a safetensors file of {str(source)!r} is truncated or corrupt ({error}); "
                "fetch or save the checkpoint again"
            ) from error
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        if source is not None:  # a folder stays where it is when the working directory changes
            kept: dict[str, Any] = {k: where[k] for k in ("cache_dir", "local_files_only", "subfolder") if k in where}
            revision = getattr(model.config, "_commit_hash", None) or where.get("revision")
            kept["revision"] = getattr(revision, "resolved", revision)  # the library may have found out the commit
            model._origin = (os.path.abspath(source) if os.path.isdir(source) else str(source), kept)
        _warn_of_edited_code(source)
        for name, tensor in model.state_dict().items():
            plain = not tensor.is_meta and tensor.is_floating_point() and not hasattr(tensor, "qdata")
            if plain and not torch.isfinite(tensor).all():
                raise ValueError(
                    f"{name} of checkpoint {str(source)!r} contains NaN or infinite values; "
                    "use a checkpoint from before the training diverged"
                )
        return loaded

    @classmethod
    def _load_prefix(
        cls, source: Any, spectral_capacity: SpectralCapacity, where: Mapping[str, Any], *args: Any, **kwargs: Any
    ):
        if kwargs.get("state_dict") is not None or source is None:
            raise ValueError("spectral_capacity reads a prefix of a checkpoint: give its folder or name, no state_dict")
        if (kwargs.get("adapter_kwargs") or {}).get("_adapter_model_path") or find_adapter_config_file(source, **where):
            raise ValueError("an adapter cannot be cut: load it whole, merge it, and then truncate the model")
        kwargs = {name: value for name, value in kwargs.items() if name not in _WHERE}
        config = kwargs.pop("config", None)
        if hasattr(config, "capacities"):  # an Auto class puts what it was given there
            stored = cls.config_class.from_pretrained(source, **where).spectral_budget
            asked = config.spectral_budget if config.spectral_budget != stored else None
        else:  # none, or where it is
            fields = {f.name for f in dataclasses.fields(cls.config_class)} - {"dtype"}
            fields |= {"num_labels", *cls.config_class.attribute_map}
            given = {name: kwargs.pop(name) for name in fields & set(kwargs)}
            config = cls.config_class.from_pretrained(source if config is None else config, **where, **given)
            asked = given.get("spectral_budget")
        if getattr(config, "quantization_config", None) is not None:
            raise ValueError("spectral_capacity reads plain weights: load a quantised checkpoint whole")
        capacities = _capacities(spectral_capacity, config)
        held = dict(zip(spectral_layers(config), capacities))
        weights = read_prefix(source, held, config, variant=kwargs.pop("variant", None), **where)
        tied = getattr(cls, "_tied_weights_keys", None) or {} if config.tie_word_embeddings else {}
        weights |= {
            name: weights[other] for name, other in tied.items() if other in weights
        }  # offloaded ones need both
        config = truncated_config(config, capacities)
        config.resolve_budget(asked)  # one that was asked for has to fit; a stored one was dropped
        loaded = super().from_pretrained(None, *args, config=config, state_dict=weights, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.name_or_path = model.config._name_or_path = str(source)
        if model.can_generate() and kwargs.get("generation_config") is None:
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

        On a CPU it does so bit for bit where a channel's slice of each layer is a multiple of 16 bytes, as 4 numbers in
        fp32; others are rounded anew in single steps. Optimizers and caches made before hold the former weights and
        states.
        Args:
            spectral_capacity: an int, one per layer or a preset, at most what a layer holds.
        Returns:
            this model.
        Raises:
            ValueError: a capacity out of range, weights that Accelerate has offloaded, or a PEFT adapter of them;
                quantised weights whose groups are not those of channels. The model then stays whole.
        """
        capacities = _capacities(spectral_capacity, self.config)
        held = dict(zip(spectral_layers(self.config), capacities))
        found = list(channel_parameters(self))
        if len(found) < len(list(channel_parameters(self, adapted=True))):
            raise ValueError("an adapter of channel weights cannot be cut: call merge_and_unload() first")
        if any(value.is_meta for _, _, _, _, value in found):
            raise ValueError("offloaded weights cannot be cut in memory: load the checkpoint with spectral_capacity")
        kept = [_cut(value.detach(), leading(block, held[layer])) for layer, block, _, _, value in found]
        for (_, _, module, name, value), part in zip(found, kept):
            setattr(module, name, nn.Parameter(part, requires_grad=value.requires_grad))
            if isinstance(module, nn.Linear) and name == "weight":
                module.out_features, module.in_features = part.shape
        config = truncated_config(self.config, capacities)
        for module in self.modules():
            if isinstance(getattr(module, "config", None), type(config)):  # models and attention layers
                module.config = config
        self._forget_generation_budget()
        return self

    def num_active_parameters(self, spectral_budget: SpectralBudget = None) -> int:
        """Parameters that a call at that budget reads (of (B,) budgets, the largest). ValueError for a bad one."""
        budgets = self.config.resolve_budget(spectral_budget)
        read = dict(zip(spectral_layers(self.config), budgets.layers))
        idle = sum(v.numel() - v[leading(block, read[i])].numel() for i, block, _, _, v in channel_parameters(self))
        return sum(parameter.numel() for parameter in self.parameters()) - idle

    def save_pretrained(self, save_directory: Any, is_main_process: bool = True, **kwargs: Any) -> None:
        """As in transformers; a file in the place of the folder, or PEFT adapters, are an error."""
        if os.path.isfile(save_directory):
            raise NotADirectoryError(f"save_directory must be a folder, got the file {str(save_directory)!r}")
        if not getattr(self, "_hf_peft_config_loaded", False) and any(hasattr(m, "base_layer") for m in self.modules()):
            raise ValueError(
                "PEFT's adapters are still in this model: save the PeftModel, or merge them. merge_and_unload() leaves "
                "those inside a mixer that has one itself: call it a second time"
            )
        self.config.auto_map = dict(self.config.auto_classes)  # the files that are copied beside the weights
        with _as_unsharded_class(self):
            super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)
        if is_main_process:
            self.save_beside(save_directory)

    def _upload_modified_files(self, working_dir: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, which calls it inside of `save_pretrained(.., push_to_hub=True)`."""
        self.save_beside(working_dir)
        return super()._upload_modified_files(working_dir, *args, **kwargs)

    def save_beside(self, folder: Any) -> None:
        """Save what belongs to these weights: the installed package's budget profile."""

    def _forget_generation_budget(self) -> None:
        """Drop budgets of generation_config that are beyond the capacity."""
        for name in ("spectral_budget", "step_budgets"):
            given = getattr(getattr(self, "generation_config", None), name, None)
            if given is None or callable(given):  # a function's budgets are not known before
                continue
            budgets = given if name == "step_budgets" and isinstance(given, (list, tuple)) else [given]
            if not all(budget_fits(K, self.config) for K in budgets):
                setattr(self.generation_config, name, None)


def _warn_of_edited_code(source: Any) -> None:
    """Tell of code beside the weights that differs from this, which runs and is saved in its place."""
    folder, here = Path(str(source)), Path(__file__).parent
    others = sorted(
        path.name
        for path in folder.glob("*_essm.py")  # in a clone of Windows lines end otherwise
        if (own := here / path.name).exists() and own.read_bytes().splitlines() != path.read_bytes().splitlines()
    )
    if others:
        logger.warning_once(
            f"the code beside the weights in {str(source)!r}, edited or of another version, is not run: {here} is, and "
            f"is saved with the model. Different: {', '.join(others)}. To run that code, load it with "
            "trust_remote_code=True in a process that does not import modeling_essm"
        )


@contextlib.contextmanager
def _as_unsharded_class(model: Any) -> Iterator[None]:
    """The model as the class whose code is saved: FSDP2 puts one of torch before it, a user may have derived one."""
    sharded = type(model)
    own = [cls for cls in sharded.__mro__ if not cls.__module__.startswith("torch.")]
    named = next(cls for cls in own if "_auto_class" in vars(cls))  # the library copies the files of this one
    model.__class__ = own[0] if named is PreTrainedModel else named
    try:
        yield
    finally:
        model.__class__ = sharded


# ---------------------------------------------------------------------------------------------------------------------
# A prefix of the channels.


def channel_blocks(config: Any) -> dict[str, tuple[int, ...]]:
    """By name within a layer, how many entries of its leading dimensions belong to a channel; 0: of one not divided."""
    if config.block == "paper":  # the second is in AR-STU's mixer
        names = ("channel_mixing", "channel_mixing_negative", "gate_out.weight", "gate_out.bias")
        return {f"mixer.{name}": (1,) for name in names}
    d, m, w = config.head_size, config.memory_key_size, config.head_size - config.memory_value_size
    f, g = (size // config.num_spectral_channels for size in (config.intermediate_size, config.gate_hidden_size))
    blocks = {"in_proj.weight": (2 * (d + m),), "convolution": (0, d + 2 * m), "out_proj.weight": (0, d), "norm": (d,)}
    blocks |= {"gate_in.weight": (g,), "gate_in.bias": (g,), "gate_weight": (1, 1, g), "gate_offset": (1, 1)}
    blocks |= {"channel_mixing": (1, w), "skip": (w,), "memory.offset": (2 * m,)}
    feed_forward = {"ffn.up.weight": (2 * f,), "ffn.down.weight": (0, f)}
    return {f"mixer.{name}": block for name, block in blocks.items()} | feed_forward


def leading(block: Sequence[int], channels: int) -> tuple[slice, ...]:
    """The part of a tensor that belongs to the first channels."""
    return tuple(slice(size * channels if size else None) for size in block)


def _cut(value: torch.Tensor, part: tuple[slice, ...]) -> torch.Tensor:
    """A copy of a part. ValueError for quantised weights that have none of their own: groups of them share a scale."""
    plain = type(value) is torch.Tensor
    if plain and value.is_floating_point():
        return value[part].clone(memory_format=torch.contiguous_format)
    with contextlib.suppress(AssertionError, AttributeError, NotImplementedError, RuntimeError, ValueError):
        cut = value[part].clone(memory_format=torch.contiguous_format)
        if not plain and torch.equal(cut.dequantize(), value.dequantize()[part]):
            return cut
    raise ValueError(
        f"weights {tuple(value.shape)} of {type(value).__name__} ({value.dtype}) cannot be cut: cut the model first, "
        "with spectral_capacity or truncate, then quantise it"
    )


def layer_of(name: str) -> tuple[int, str]:
    """The layer of a tensor of that name in a checkpoint, and its name within; -1 for one outside of layers."""
    _, _, inside = name.rpartition("layers.")
    layer, _, rest = inside.partition(".")
    return (int(layer), rest) if layer.isdigit() else (-1, name)


def channel_parameters(
    model: Any, adapted: bool = False
) -> Iterator[tuple[int, tuple[int, ...], nn.Module, str, nn.Parameter]]:
    """The weights that are divided into channels: layer, block, module, attribute and value.

    Those that PEFT adapts are among them if asked for.
    """
    blocks, spectral = channel_blocks(model.config), {*spectral_layers(model.config)}
    for name, value in model.named_parameters():
        layer, inside = layer_of(name)
        inside = _WRAPPED.sub("", inside) if adapted else inside
        if layer in spectral and inside in blocks:
            path, _, attribute = name.rpartition(".")
            yield layer, blocks[inside], model.get_submodule(path), attribute, value


def _capacities(value: SpectralCapacity, config: Any) -> tuple[int, ...]:
    """Channels of each layer."""
    if isinstance(value, str):
        return config.resolve_budget(value).layers
    return of_each_layer(value, config.capacities, "spectral_capacity")


def truncated_config(config: Any, capacities: Sequence[int]) -> Any:
    """A copy of an ESSMConfig with these capacities; defaults and presets that no longer fit are left out."""
    small = copy.deepcopy(config)
    small.num_spectral_channels = max(capacities)
    small.spectral_capacities = None if len(set(capacities)) == 1 else list(capacities)
    if config.block != "paper":
        for name in ("intermediate_size", "gate_hidden_size"):
            setattr(small, name, getattr(config, name) // config.num_spectral_channels * max(capacities))
    if small.trained_budgets is not None:
        small.trained_budgets = [K for K in small.trained_budgets if budget_fits(K, small)]
    if small.budget_presets is not None:
        small.budget_presets = {name: K for name, K in small.budget_presets.items() if budget_fits(K, small)}
    if not budget_fits(small.spectral_budget, small):
        logger.warning_once(
            f"spectral_budget {small.spectral_budget} of the configuration does not fit {list(capacities)} channels: "
            "the smaller model has no default budget, and runs all that it has"
        )
        small.spectral_budget = None
    return small


def budget_fits(budget: Any, config: Any) -> bool:
    """Whether a stored budget is one that the model of that config can run."""
    try:
        config.resolve_budget(budget)
    except ValueError:
        return False
    return True


def read_prefix(source: Any, capacities: Mapping[int, int], config: Any, **where: Any) -> dict[str, torch.Tensor]:
    """The weights of a safetensors checkpoint, but only the first `capacities` of its channels, by layer.

    Args:
        source: folder or Hub name. config: that of the whole model. where: arguments of `cached_file`, and `variant`.
    Returns:
        tensors by their names in the checkpoint, on the CPU, in its dtypes.
    Raises:
        ValueError: no safetensors file. OSError: a shard is not there. SafetensorError: a file is damaged.
    """
    weights: dict[str, torch.Tensor] = {}
    blocks = channel_blocks(config)
    for path in _weight_files(source, **where):
        with safe_open(path, framework="pt") as file:
            for name in list(file.keys()):
                layer, inside = layer_of(name)
                whole = layer not in capacities or inside not in blocks
                kept = () if whole else leading(blocks[inside], capacities[layer])
                weights[name] = file.get_tensor(name) if whole else file.get_slice(name)[kept].contiguous()
    return weights


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
    with open(index, encoding="utf-8") as file:
        try:
            names = sorted(set(json.load(file)["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is not an index of a sharded checkpoint: {error!r}") from error
    return [str(cached_file(source, os.path.basename(name), **where)) for name in names]
