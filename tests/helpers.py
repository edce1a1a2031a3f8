# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Shared builders: tiny configs, models whose every parameter matters, masks, and losses by hand."""

import contextlib
import logging
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

from modeling_essm import ESSMCache, ESSMConfig, ESSMForCausalLM

ROOT = Path(__file__).parents[1]
COMMANDS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
SHA = "0123456789abcdef0123456789abcdef01234567"
# What differs in code: both blocks, no gate, and attention layers between spectral ones.
VARIANTS = {
    "paper": {},
    "no-gate": {"gating": "none"},
    "elastic": {"block": "elastic", "head_size": 4, "conv_kernel_size": 3, "intermediate_size": 128},
    "memory": {"block": "elastic", "head_size": 8, "memory_key_size": 2, "memory_value_size": 4, "gating": "softmax"},
}
L_, S_, F_ = "linear_attention", "sliding_attention", "full_attention"
HYBRID = {
    "num_hidden_layers": 4,
    "layer_types": [L_, S_, L_, F_],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "sliding_window": 5,
}
ALL_VARIANTS = VARIANTS | {"hybrid": HYBRID | VARIANTS["memory"]}
all_variants = pytest.mark.parametrize("variant", ALL_VARIANTS.values(), ids=ALL_VARIANTS)
# Without a gate a layer differs in nothing but its gates: budgets of rows, their gradients and what is cut.
WITH_GATES = {name: fields for name, fields in ALL_VARIANTS.items() if name != "no-gate"}
variants = pytest.mark.parametrize("variant", WITH_GATES.values(), ids=WITH_GATES)
BLOCKS = [VARIANTS["paper"], VARIANTS["elastic"], VARIANTS["memory"]]
blocks = pytest.mark.parametrize("block", BLOCKS, ids=["paper", "elastic", "memory"])


def tiny_config(cls=ESSMConfig, **fields) -> ESSMConfig:
    """Two layers of width 16 that still hold all 32 channels; fields override."""
    defaults = {"hidden_size": 16, "num_hidden_layers": 2, "filter_length": 512, "chunk_size": 8}
    defaults |= {"gate_hidden_size": 32 if fields.get("block") == "elastic" else 8}
    return cls(**(defaults | fields))


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Move every parameter away from its initial value, so that no zero, one or constant hides a mistake.

    channel_mixing gets a standard deviation of 0.05, or 0.2 with heads: large enough for every channel to show in the
    logits. AR-STU's output_mixing gets 0.02, which keeps its feedback stable.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        if "channel_mixing" in name:
            parameter.copy_((0.05 if parameter.ndim == 3 else 0.2) * noise)
        elif "output_mixing" in name:
            parameter.copy_(0.02 * noise)
        elif name.endswith(("in_proj.weight", "out_proj.weight")):
            parameter.copy_(0.5 * noise)
        else:
            parameter.add_(0.1 * noise)
    return model


def random_model(cls=ESSMForCausalLM, seed: int = 0, **fields):
    """A tiny model of class `cls` in eval mode with random weights."""
    torch.manual_seed(seed)
    return randomise(cls(tiny_config(cls.config_class, **fields)), seed).eval()


def level_model(seed: int = 2, **fields) -> ESSMForCausalLM:
    """With so small an exponent late channels count as much as early ones, and decoding differs at K = 1, 3, 8, 32."""
    return random_model(seed=seed, **{"scaling_exponent": 0.02, **fields})


def random_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    """Byte ids (B, L), int64."""
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))


def assert_close(actual: torch.Tensor, expected: torch.Tensor, atol: float = 2e-5) -> None:
    """Equal up to fp32 rounding: logits are of size 1, and two orders of summation differ by 2e-6 here."""
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=atol)


@torch.no_grad()
def filled(model, ids, K=None, cache=None) -> ESSMCache:
    """A cache, by default a new one, that has read ids at budget K."""
    cache = ESSMCache(model.config) if cache is None else cache
    model(ids, past_key_values=cache, spectral_budget=K)
    return cache


def trainer_arguments(folder, cls=None, **fields):
    """Of a Trainer that is quiet, in fp32 on the CPU, and saves nothing; fields override."""
    from transformers import TrainingArguments

    settings = {"report_to": [], "use_cpu": True, "bf16": False, "disable_tqdm": True, "save_strategy": "no"}
    return (cls or TrainingArguments)(output_dir=str(folder), **settings | fields)


@contextlib.contextmanager
def captured_warnings():
    """List of messages that the package logs as warnings, each logged for the first time again."""
    from transformers.utils import logging as library_logging

    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("modeling_essm")
    library_logging.warning_once.cache_clear()
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


# The beginning of a process that must do without this package.
BLOCK = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "modeling_essm":
            raise ModuleNotFoundError(f"No module named {name!r} (refused)", name=name)

sys.meta_path.insert(0, Refuse())
try:
    import modeling_essm
    raise SystemExit("modeling_essm is importable: this process proves nothing")
except ModuleNotFoundError:
    pass
"""


def run_alone(code: str, folder: Path, *arguments: str) -> None:
    """Run code in that folder, in a process that must do without this package, offline with a cache of its own."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "PYTHON", "TRANSFORMERS_"))}
    env |= {"HF_HOME": str(folder / "hf_home"), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-I", "-c", BLOCK + code, *arguments]
    child = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=500)
    assert child.returncode == 0, child.stderr[-4000:]


def hub_snapshot(cache: Path, name: str, sha: str = SHA) -> Path:
    """The folder of a repository's files in a Hub cache, as a download leaves it behind; `main` points there."""
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text(sha)
    return repository / "snapshots" / sha


def pad(ids, lengths, side):
    """Rows cut to `lengths` and padded to the full width with pad ids: (ids, mask)."""
    L = ids.shape[1]
    position = torch.arange(L)[None]
    lengths = torch.tensor(lengths)[:, None]
    mask = position >= L - lengths if side == "left" else position < lengths
    padded = torch.full_like(ids, 256)
    padded[mask] = torch.cat([row[:n] for row, n in zip(ids, lengths.flatten().tolist())])
    return padded, mask.long()


def random_masks(B, L, generator):
    """(B, L) bool: holes anywhere, a left-padded row, a right-padded one, one of a single token; none all masked."""
    mask = torch.rand(B, L, generator=generator) < torch.rand(B, 1, generator=generator)
    n = int(torch.randint(1, L, (), generator=generator))
    mask[0], mask[1], mask[2] = torch.arange(L) >= n, torch.arange(L) < n, torch.arange(L) == n
    mask[:, int(torch.randint(L, (), generator=generator))] |= ~mask.any(1)
    return mask[torch.randperm(B, generator=generator)]


def losses_by_hand(model, inputs, budgets, weight, num_items=None) -> list[torch.Tensor]:
    """The losses of an update, position by position, for a language model whose inputs hold labels (B, L)."""
    losses, teacher = [], None
    scored = [(b, t) for b, t in np.ndindex(*inputs["labels"].shape) if t and inputs["labels"][b, t] != -100]
    count = len(scored) if num_items is None else num_items
    for K in budgets:
        logits = model(inputs["input_ids"], spectral_budget=K).logits.double()
        logp = logits.log_softmax(-1)
        cross_entropy = -sum(logp[b, t - 1, inputs["labels"][b, t]] for b, t in scored) / count
        if teacher is None:
            teacher, loss = logp.detach(), cross_entropy
        else:
            kl = sum((teacher[b, t - 1].exp() * (teacher[b, t - 1] - logp[b, t - 1])).sum() for b, t in scored) / count
            loss = (1 - weight) * cross_entropy + weight * kl
        losses.append(loss / len(budgets))
    return losses
