# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Decoding steps compiled ahead, one for every budget asked for: `compile_decoding(model, budgets=[4, 32])`.

A step of a small model spends more time between its operations than in them. Here it is a function of tensors alone,
states in and states out, that torch.compile turns into one call: C++ on a CPU (which needs a compiler), a CUDA graph on
a GPU. `ESSMForCausalLM.forward` takes it where it fits: one token, a cache, no mask, no gradients. States are returned
new, never written into, as in the eager step.

For a single row on a CPU linear layers become sums of products in C++ too: weights that come from memory stream through
those at 20 GB/s and more where BLAS's product of a matrix and a vector gets 10.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.utils import logging

from ..cache_essm import ESSMCache, check_cache
from ..inputs_essm import check_token_ids, warn_once_of
from ..outputs_essm import ESSMCausalLMOutput
from ..spectral_budget import ResolvedBudget, SpectralBudget, is_hybrid
from ..spectral_constants import _has_reduced_products

logger = logging.get_logger(__name__)

BACKENDS = ("inductor", "aot_eager", "eager")
# Relative l2 errors up to which two steps are the same one, rounded in another order. Eager steps of the released sizes
# in bf16 are 3e-2 from fp32 ones, in fp16 5e-3, and fp32 ones 4e-6 from fp64: eight, five and thirty rounding units of
# their dtype. Of two such errors the difference is 1.4 times as large; twice that is allowed. What leaves out or
# mistakes a term is further off.
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
        ValueError: a bad budget, batch size or backend, a hybrid or quantised weights. RuntimeError: no C++ compiler,
            or a compiled step that computes something else than the eager one.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size must be an integer of at least 1, got {batch_size!r}")
    resolved = [model.config.resolve_budget(budget) for budget in budgets]
    if any(budget.rows is not None for budget in resolved):
        raise ValueError("a compiled step has one budget for all rows: compile those that rows differ in eagerly")
    if is_hybrid(model.config):
        raise ValueError(
            "a hybrid is not compiled ahead: the keys of its attention layers grow with every token, and each length "
            "would need a step of its own; it decodes eagerly"
        )
    if getattr(model, "is_quantized", False):
        raise ValueError("quantised weights are not compiled: a quantised model decodes eagerly")
    if model.training:
        raise ValueError("decoding is compiled in evaluation mode: call model.eval() first")
    if not isinstance(model.decoding_steps, CompiledSteps):
        model.decoding_steps = CompiledSteps()
    for budget in resolved:
        model.decoding_steps.add(model, budget.layers, batch_size, state_budget, backend)
    return model


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
            RuntimeError: no C++ compiler, or a step that computes something else than the eager one.
        """
        if not self._is_current(model):
            self._steps.clear()
        ids = torch.arange(1, 1 + batch_size, device=model.device)[:, None] % model.config.vocab_size
        cache = ESSMCache(model.config, state_budget)
        eager = [model(ids, past_key_values=cache, spectral_budget=list(layers)).logits[:, 0] for _ in range(2)]
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
        self._structure, self._where = list(_structure(model)), _where(model)

    def run(self, model: Any, input_ids: Tensor, cache: Any, budget: ResolvedBudget) -> ESSMCausalLMOutput | None:
        """What `ESSMForCausalLM.forward` returns for one token, by its compiled step; None where none fits.

        Args:
            input_ids: (B, 1). cache: ESSMCache that has read a prompt, updated in place.
        Raises:
            ValueError: as the eager step.
        """
        if tuple(input_ids.shape[1:]) != (1,) or not getattr(cache, "batch_size", None) or budget.rows is not None:
            return None
        if model.training or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return None
        if any(layer.filled is not None for layer in cache.layers):
            return None
        states = cache.states
        program = self._steps.get(_key(budget.layers, states))
        if program is None:
            return None
        if not self._is_current(model):
            self._steps.clear()
            logger.warning_once("the model has changed since compile_decoding, and decodes eagerly: call it again")
            return None
        check_cache(cache, model.config, len(input_ids))
        check_token_ids(input_ids, model.config.vocab_size, model.training)
        logits, states = _call(program, model, budget.layers, input_ids, states)
        cache.set_states(states)
        warn_once_of(model.config, budget, cache.get_seq_length() + 1)
        cache.advance(1)
        return ESSMCausalLMOutput(logits=logits[:, None], past_key_values=cache, spectral_budget=budget.report())

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


def _key(layers: tuple[int, ...], states: _States) -> Any:
    """Of states laid out in another way there is no step, so that none is compiled again and again."""
    return layers, tuple((tensor.shape, tensor.stride()) for tensor in states.values())


def _check(actual: Tensor, expected: Tensor, what: str, model: Any) -> None:
    """Raises RuntimeError unless a compiled step's result is the eager one's up to rounding."""
    dtype, device = _where(model)
    if dtype == torch.float32 and _has_reduced_products(device.type):
        dtype = torch.bfloat16
    error, size = (actual.double() - expected.double()).norm(), expected.double().norm()
    if not error <= _TOLERANCES[dtype] * size:  # nor of NaN
        raise RuntimeError(
            f"the compiled step is wrong: its {what} differ from the eager step's by {float(error / size):.1e} of "
            f"their size, where rounding explains {_TOLERANCES[dtype]:.0e}; decode eagerly, or with another backend"
        )


def _run(model: Any, layers: tuple[int, ...], input_ids: Tensor, states: _States) -> tuple[Tensor, _States]:
    return model.step(input_ids, layers, states)


def _compile(device_type: str, backend: str) -> Callable:
    # Compiled code is kept by code object: a new one for every step. It then checks its input tensors alone; what else
    # could change is looked at by `_is_current`, at a tenth of the time.
    run = types.FunctionType(_run.__code__.replace(), _run.__globals__, _run.__name__)
    options: dict[str, Any] = {"guard_filter_fn": torch.compiler.keep_tensor_guards_unsafe}
    compiler: Any = backend
    if backend == "inductor" and device_type == "cuda":
        options["triton.cudagraphs"] = True
    elif backend == "inductor":
        compiler = _inductor_on_cpu
    return torch.compile(run, backend=compiler, fullgraph=True, dynamic=False, options=options)


def _call(program: Callable, model: Any, layers: tuple[int, ...], input_ids: Tensor, states: _States):
    # A compiled step sees a tensor's strides, and whether it is of inference mode or read in it. So every call is made
    # outside of that mode, on tensors like those of the first; only states that a prompt has left there are copied.
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
