# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Decoding steps compiled ahead, one for every budget asked for: `model.compile_decoding(budgets=[4, 32])`.

A step of a small model spends more time between its operations than in them. Here it is a function of tensors alone,
states in and states out, that torch.compile turns into one call: C++ on a CPU (which needs a compiler), a CUDA graph on
a GPU. `ESSMForCausalLM.forward` takes it where it fits: one token, a cache, no mask, no gradients. States are returned
new, never written into, as in the eager step.

For a single row on a CPU linear layers become sums of products in C++ too: weights that come from memory stream through
those at 20 GB/s and more where BLAS's product of a matrix and a vector gets 10.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.utils import logging

from .cache_essm import ESSMCache, ESSMCacheLayer

logger = logging.get_logger(__name__)

BACKENDS = ("inductor", "aot_eager", "eager")
_States = list[list[Tensor]]


class CompiledSteps:
    """The compiled steps of a model, found by budget and by the shapes of its states. Copies of a model start empty."""

    def __init__(self) -> None:
        self._steps: dict[Any, Callable] = {}
        self._structure: list[tuple[dict, str, Any]] = []
        self._where: tuple[torch.dtype, torch.device] | None = None

    def __bool__(self) -> bool:
        return bool(self._steps)

    def __reduce__(self):
        return CompiledSteps, ()

    @torch.no_grad()
    def add(self, model: Any, layers: tuple[int, ...], batch_size: int, state_budget: Any, backend: str) -> None:
        """Compile the step of one budget.

        Args:
            model: ESSMForCausalLM. layers: K of each layer. state_budget: the room of the caches to come; None: K.
        Raises:
            RuntimeError: no C++ compiler.
        """
        if not self._is_current(model):
            self._steps.clear()
        ids = torch.zeros(batch_size, 1, dtype=torch.int64, device=model.device)
        cache = ESSMCache(model.config, state_budget)
        eager = model(ids, past_key_values=cache, spectral_budget=list(layers)).logits
        step = _compile(model.device.type, backend)
        names, states = _read(cache)
        try:
            for _ in range(2):  # a CUDA graph is recorded at the second call
                logits, _ = _call(step, model, layers, names, ids, _zeros_like(states))
        except Exception as error:
            if "compiler" in str(error).lower():
                raise RuntimeError(f"compile_decoding needs a C++ compiler, or eager decoding: {error}") from error
            raise
        torch.testing.assert_close(logits, eager, rtol=1e-2, atol=1e-2 * float(eager.abs().max()))
        self._steps[_key(layers, states)] = step
        self._structure, self._where = list(_structure(model)), _where(model)

    @torch.no_grad()
    def run(self, model: Any, input_ids: Tensor, cache: Any, layers: tuple[int, ...]) -> Tensor | None:
        """Logits (B, 1, vocab_size) of one step, the cache's states replaced; None where no step fits.

        Args:
            input_ids: (B, 1). cache: ESSMCache that has read a prompt. layers: K of each layer.
        """
        if any(layer.room is not None for layer in cache.layers):
            return None
        names, states = _read(cache)
        step = self._steps.get(_key(layers, states))
        if step is None:
            return None
        if not self._is_current(model):
            self._steps.clear()
            logger.warning_once("the model has changed since compile_decoding, and decodes eagerly: call it again")
            return None
        logits, states = _call(step, model, layers, names, input_ids, states)
        for layer, tensors in zip(cache.layers, states):
            layer.update(**dict(zip(names, tensors)))
        return logits

    def _is_current(self, model: Any) -> bool:
        """Whether modules and parameters are those that were compiled: the compiled code itself no longer looks."""
        if self._where != _where(model):
            return False
        return all(holder.get(name) is value for holder, name, value in self._structure)


def _structure(model: Any):
    for module in model.modules():
        for holder in (module._modules, module._parameters):
            for name, value in holder.items():
                yield holder, name, value


def _where(model: Any) -> tuple[torch.dtype, torch.device]:
    weight = model.lm_head.weight
    return weight.dtype, weight.device


def _read(cache: Any) -> tuple[list[str], _States]:
    return list(cache.layers[0].tensors), [list(layer.tensors.values()) for layer in cache.layers]


def _zeros_like(states: _States) -> _States:
    return [[torch.zeros_like(tensor) for tensor in layer] for layer in states]


def _key(layers: tuple[int, ...], states: _States) -> Any:
    return layers, tuple(layer[0].shape for layer in states if layer)


def _compile(device_type: str, backend: str) -> Callable:
    # Compiled code is kept by code object: a new one for every step. It then checks its input tensors alone; what else
    # could change is looked at by `_is_current`, at a tenth of the time.
    step = types.FunctionType(_step.__code__.replace(), _step.__globals__, _step.__name__)
    options: dict[str, Any] = {"guard_filter_fn": torch.compiler.keep_tensor_guards_unsafe}
    compiler: Any = backend
    if backend == "inductor" and device_type == "cuda":
        options["triton.cudagraphs"] = True
    elif backend == "inductor":
        compiler = _inductor_on_cpu
    return torch.compile(step, backend=compiler, fullgraph=True, dynamic=False, options=options)


def _inductor_on_cpu(graph: torch.fx.GraphModule, inputs: list[Tensor], **_: Any) -> Any:
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target in (F.linear, torch._C._nn.linear):
            x = node.args[0].meta["example_value"]
            if x.numel() == x.shape[-1]:
                node.target = _row_product
    graph.recompile()
    # Inputs of products are computed once, not again for every output.
    with config.patch({"cpp_wrapper": True, "realize_opcount_threshold": 0, "realize_reads_threshold": 0}):
        return compile_fx(graph, inputs)


def _row_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer of a single row (.., D_in): (.., D_out)."""
    y = (x.reshape(1, -1) * weight).sum(-1).view(*x.shape[:-1], -1)
    return y if bias is None else y + bias


def _call(step: Callable, model: Any, layers: tuple[int, ...], names: list[str], ids: Tensor, states: _States):
    if ids.device.type != "cuda":
        return step(model, layers, names, ids, states)
    torch.compiler.cudagraph_mark_step_begin()
    logits, states = step(model, layers, names, ids, states)  # in memory that the next replay writes into
    return logits.clone(), [[tensor.clone() for tensor in layer] for layer in states]


def _step(model: Any, layers: tuple[int, ...], names: list[str], input_ids: Tensor, states: _States):
    """One token: (B, 1) ids and the states of each layer to logits (B, 1, vocab_size) and the states after it."""
    hidden_states = model.model.embed_tokens(input_ids)
    after = []
    for layer, K, tensors in zip(model.model.layers, layers, states):
        cache = ESSMCacheLayer(K)
        cache.update(**dict(zip(names, tensors)))
        hidden_states = layer(hidden_states, K, cache=cache)
        after.append([cache.tensors[name] for name in names])
    return model.lm_head(model.model.norm(hidden_states)), after
