# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Decoding steps compiled ahead, one for every budget asked for: `compile_decoding(model, budgets=[4, 32])`.

A small model spends more time between the operations of a step than in them. Here a step is a function of tensors
alone, states in and states out, and torch.compile turns it into one call: C++ on a CPU (which needs a compiler), a CUDA
graph on a GPU. `ESSMForCausalLM.forward` takes it for one token with a cache and without mask or gradients.

For a single row on a CPU linear layers become sums of products in C++ too. Weights that come from memory stream through
those at 20 GB/s and more; BLAS's product of a matrix and a vector gets 10.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.utils import logging

from ..cache_essm import CACHE, ESSMCache, check_cache
from ..modeling_essm import ESSMCausalLMOutput, check_token_ids, warn_once_of
from ..spectral_budget import ResolvedBudget, SpectralBudget, is_hybrid
from ..spectral_constants import _has_reduced_products

logger = logging.get_logger(__name__)

BACKENDS = ("inductor", "aot_eager", "eager")
# Relative l2 errors that rounding explains. Eager steps of the released sizes differ by 3e-2 in bf16, 5e-3 in fp16 and
# 4e-6 in fp32 from steps in a wider dtype. The difference of two such errors is 1.4 times as large, and twice that is
# allowed. A step that leaves out a term is further off.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_States = dict[str, Tensor]


def compile_decoding(
    model: Any,
    budgets: Sequence[SpectralBudget] = (None,),
    batch_size: int = 1,
    state_budget: SpectralBudget = None,
    backend: str = "inductor",
) -> Any:
    """Compile single decoding steps ahead, for `forward` and `generate` to use; half a minute a budget.

    Args:
        model: ESSMForCausalLM.
        budgets: those to compile, each as in `spectral_budget` (but no rows); others go on running eagerly.
        batch_size: B of the steps. state_budget: that of the caches, if larger than the budget that runs.
        backend: of torch.compile: "inductor", or "aot_eager" and "eager", which need no compiler and save little.
    Returns:
        the model.
    Raises:
        ValueError: a bad budget, batch size or backend, a hybrid, or quantised weights.
        RuntimeError: no C++ compiler, or a compiled step whose results are not those of the eager one.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size must be an integer of at least 1, got {batch_size!r}")
    if isinstance(budgets, str) or not isinstance(budgets, Sequence):
        raise ValueError(f"budgets must be a list of budgets, got {budgets!r}")
    resolved = [model.config.resolve_budget(budget) for budget in budgets]
    if any(budget.rows is not None for budget in resolved):
        raise ValueError("a compiled step has one budget for all rows; rows of different budgets decode eagerly")
    if is_hybrid(model.config):
        raise ValueError(
            "a hybrid is not compiled ahead: the keys of its attention layers grow with every token, so each length "
            "would need its own step; it decodes eagerly"
        )
    if getattr(model, "is_quantized", False):
        raise ValueError("quantised weights are not compiled: a quantised model decodes eagerly")
    if model.training:
        raise ValueError("decoding is compiled in evaluation mode: call model.eval() first")
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # inside PEFT's
    if not isinstance(inner.decoding_steps, CompiledSteps):
        inner.decoding_steps = CompiledSteps()
    for budget in resolved:
        inner.decoding_steps.add(inner, budget.layers, batch_size, state_budget, backend)
    return model


class CompiledSteps:
    """The compiled steps of a model, found by budget and by the shapes of its states. Copies of a model start empty."""

    def __init__(self) -> None:
        self._steps: dict[Any, Callable] = {}
        self._structure: list[tuple[dict, str, Any]] = []
        self._switches: list[tuple[Any, Any, Any]] = []
        self._where: tuple[torch.dtype, torch.device] | None = None

    def __bool__(self) -> bool:
        return bool(self._steps)

    def __reduce__(self):
        return CompiledSteps, ()

    @torch.no_grad()
    def add(self, model: Any, layers: tuple[int, ...], batch_size: int, state_budget: Any, backend: str) -> None:
        """Compile the step of one budget: K of each layer. Arguments and errors as of `compile_decoding`."""
        if not self._is_current(model):
            self._steps.clear()
        ids = torch.arange(1, 1 + batch_size, device=model.device)[:, None] % model.config.vocab_size
        cache = ESSMCache(model.config, state_budget)
        compiled, self._steps = self._steps, {}  # none runs meanwhile
        try:
            eager = [model(ids, past_key_values=cache, spectral_budget=list(layers)).logits[:, 0] for _ in range(2)]
        finally:
            self._steps = compiled
        program = _compile(model.device.type, backend)
        states = {name: torch.zeros_like(tensor) for name, tensor in cache.states.items()}
        key = _key(layers, states)
        try:
            for expected in eager:  # two, since a CUDA graph is recorded at the second call
                logits, states = _call(program, model, layers, ids, states)
                _check(logits, expected, "logits", model)
        except Exception as error:
            if "compiler" in str(error).lower():
                raise RuntimeError(f"compile_decoding needs a C++ compiler, or eager decoding: {error}") from error
            raise
        for name, tensor in cache.states.items():
            _check(states[name], tensor, f"states {name}", model)
        self._steps[key] = program
        self._structure, self._switches, self._where = list(_structure(model)), list(_switches(model)), _where(model)

    def run(self, model: Any, input_ids: Tensor, cache: Any, budget: ResolvedBudget) -> ESSMCausalLMOutput | None:
        """What `ESSMForCausalLM.forward` returns for one token, by its compiled step; None if no step fits.

        Args:
            input_ids: (B, 1). cache: ESSMCache that has read a prompt, updated in place.
        Raises:
            ValueError: as the eager step.
        """
        if tuple(input_ids.shape[1:]) != (1,) or not getattr(cache, "batch_size", None) or budget.rows is not None:
            return None
        if model.training or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return None
        if torch.is_autocast_enabled(input_ids.device.type):
            return None
        if any(layer.filled is not None for layer in cache.layers):
            return None
        states = cache.states
        program = self._steps.get(_key(budget.layers, states))
        if program is None:
            if any(layers == budget.layers and shapes[0][0][0] == len(input_ids) for layers, shapes in self._steps):
                logger.warning_once(
                    "a compiled step is unused: the states of this cache have another shape or dtype. Steps are eager. "
                    "A cache with room for a larger budget needs compile_decoding(.., state_budget=that budget)"
                )
            return None
        if not self._is_current(model):
            self._steps.clear()
            logger.warning_once("the model has changed since compile_decoding, and decodes eagerly: call it again")
            return None
        check_cache(cache, model.config, len(input_ids))
        if input_ids.device.type == "cpu":  # compiled code would count negative ids from the end
            check_token_ids(input_ids, model.config.vocab_size, model.training)
        logits, states = _call(program, model, budget.layers, input_ids, states)
        cache.set_states(states)
        warn_once_of(model.config, budget, cache.get_seq_length() + 1)
        cache.advance(1)
        return ESSMCausalLMOutput(logits=logits[:, None], spectral_budget=budget.report(), **{CACHE: cache})

    def _is_current(self, model: Any) -> bool:
        """Whether modules and parameters are those that were compiled. The compiled code itself does not check."""
        if self._where != _where(model):
            return False
        same = all(holder.get(name) is value for holder, name, value in self._structure)
        return same and all(read(held) == value for read, held, value in self._switches)


def _structure(model: Any):
    for module in model.modules():
        yield vars(module), "forward", vars(module).get("forward")
        for holder in (module._modules, module._parameters):
            for name, value in holder.items():
                yield holder, name, value


def _switches(model: Any):
    """What else decides what a module computes: its hooks, and which of PEFT's adapters are on, with what they have."""
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            yield tuple, hooks, tuple(hooks)
        if hasattr(module, "merged_adapters"):
            yield _adapters, module, _adapters(module)


def _adapters(module: Any) -> str:
    return str((module.active_adapters, module.disable_adapters, module.merged_adapters))


def _where(model: Any) -> tuple[torch.dtype, torch.device]:
    weight = model.lm_head.weight
    return weight.dtype, weight.device


def _key(layers: tuple[int, ...], states: _States) -> Any:
    """Budgets, shapes, strides and dtypes. A new layout falls back to the eager step instead of being compiled."""
    return layers, tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in states.values())


def _check(actual: Tensor, expected: Tensor, what: str, model: Any) -> None:
    """Raises RuntimeError unless a compiled step's result is the eager one's up to rounding."""
    dtype, device = _where(model)
    if dtype == torch.float32 and _has_reduced_products(device.type):
        dtype = torch.bfloat16
    error, size = (actual.double() - expected.double()).norm(), expected.double().norm()
    if not error <= _TOLERANCES[dtype] * size:  # true of NaN too
        raise RuntimeError(
            f"the compiled step is wrong: its {what} differ from the eager step's by {float(error / size):.1e} of "
            f"their size, where rounding explains {_TOLERANCES[dtype]:.0e}; decode eagerly, or with another backend"
        )


def _run(model: Any, layers: tuple[int, ...], input_ids: Tensor, states: _States) -> tuple[Tensor, _States]:
    return model.step(input_ids, layers, states)


def _compile(device_type: str, backend: str) -> Callable:
    # torch keeps compiled code by code object, so every step gets a new one. Its guards look at input tensors only;
    # `_is_current` looks at the rest, in a tenth of the time.
    run = types.FunctionType(_run.__code__.replace(), _run.__globals__, _run.__name__)
    options: dict[str, Any] = {"guard_filter_fn": torch.compiler.keep_tensor_guards_unsafe}
    compiler: Any = backend
    if backend == "inductor" and device_type == "cuda":
        options["triton.cudagraphs"] = True
    elif backend == "inductor":
        compiler = _inductor_on_cpu
    return torch.compile(run, backend=compiler, fullgraph=True, dynamic=False, options=options)


def _call(program: Callable, model: Any, layers: tuple[int, ...], input_ids: Tensor, states: _States):
    # A compiled step is tied to the strides of tensors and to inference mode. So every call is made outside of that
    # mode; states that a prompt left in it are copied.
    with torch.inference_mode(False), torch.no_grad():
        input_ids = input_ids.to(torch.int64, copy=True, memory_format=torch.contiguous_format)
        states = {name: tensor.clone() if tensor.is_inference() else tensor for name, tensor in states.items()}
        if input_ids.device.type != "cuda":
            return program(model, layers, input_ids, states)
        torch.compiler.cudagraph_mark_step_begin()
        logits, states = program(model, layers, input_ids, states)  # in memory that the next replay writes into
        return logits.clone(), {name: tensor.clone() for name, tensor in states.items()}


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
