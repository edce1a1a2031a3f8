# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What the tests of `modeling_essm.parallel` run on several gloo ranks, each a process of its own."""

import tempfile
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from apart import start
from helpers import random_ids, random_model
from operators import make_inputs, reachable_state, relative_error
from torch.utils._python_dispatch import TorchDispatchMode

from modeling_essm.parallel import SequenceShard, context_parallel, gather_sequence, shard_batch
from modeling_essm.parallel.batches import shard_positions
from modeling_essm.spectral_ops import SpectralOperator

# Lengths of the documents of two rows of 48: ends inside of segments, at their ends and right after their starts.
B, L = 2, 48
DOCUMENTS = ([5, 8, 35], [24, 1, 23])
POSITIONS = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in DOCUMENTS])


def _on_rank(rank: int, ranks: int, folder: str, function, arguments: tuple) -> None:
    torch.set_num_threads(1)
    meeting, patience = f"file://{folder}/meeting", timedelta(seconds=120)  # for a rank that raises and leaves
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks, timeout=patience)
    torch.save(function(dist.group.WORLD, *arguments), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def on_ranks(ranks: int, function, *arguments) -> list:
    """function(group, *arguments) on that many gloo ranks: what each returns."""
    with tempfile.TemporaryDirectory() as folder:
        processes = [start(_on_rank, (rank, ranks, folder, function, arguments)) for rank in range(ranks)]
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [0] * ranks
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def operator_errors(group, order: str, cases: list[tuple]) -> list[dict[str, float]]:
    """Of each case (K, dtype, packed, heads): relative errors of y and of all gradients against one process."""
    return [_operator_errors(group, order, *case) for case in cases]


def _operator_errors(group, order, K, dtype, packed, heads) -> dict[str, float]:
    operator = SpectralOperator(1024, chunk_size=8)
    u, gates, M = make_inputs(B, L, K, D=6, E=6, dtype=dtype)
    if heads:  # 3 heads of width 2, which share their gates
        M, gates = M[:, :, :2].reshape(K, 3, 2, 2), gates[..., None]
    inputs = (u, gates, M, reachable_state(operator, K, 6, B, dtype))
    positions = POSITIONS if packed else torch.arange(L).expand(B, L)
    weights = torch.randn(B, L, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    u, gates, M, state = whole = [t.clone().requires_grad_() for t in inputs]
    rows = []
    for row in range(B):
        at = 0
        for n in DOCUMENTS[row] if packed else (L,):
            place = slice(row, row + 1), slice(at, at + n)
            rows.append(operator(u[place], gates[place], M, None if at else state[place[:1]])[0][0])
            at += n
    expected = torch.cat(rows).view(B, L, -1)
    (expected.double() * weights).sum().backward()

    mine = shard_positions(L, group.rank(), group.size(), order)
    parts = [inputs[0][:, mine], inputs[1][:, mine], *inputs[2:]]
    parts = [t.clone().requires_grad_() for t in parts]
    shard = SequenceShard(positions[:, mine], group, order if packed else None)
    y = shard.operate(operator, *parts)
    (y.double() * weights[:, mine]).sum().backward()
    for t in parts[2:]:
        dist.all_reduce(t.grad)
    errors = {"y": relative_error(y.detach(), expected.detach()[:, mine])}
    for name, part, t in zip(("du", "dgates", "dM", "dx0"), parts, whole):
        errors[name] = relative_error(part.grad, t.grad[:, mine] if name in ("du", "dgates") else t.grad)
    return errors


def _batch(packed: bool) -> dict[str, torch.Tensor]:
    ids = random_ids(B, L)
    labels = ids.clone()
    labels[0, 3:9] = -100  # so that parts differ in how many positions are scored
    if not packed:
        return {"input_ids": ids, "labels": labels}
    return {"input_ids": ids, "labels": labels.masked_fill(POSITIONS == 0, -100), "position_ids": POSITIONS.clone()}


def model_errors(group, order: str, variant: dict, packed: bool, checkpointing: bool = False) -> dict[str, float]:
    """Of logits, loss and the gradient of each parameter, against one process, at a budget for each row."""
    model = random_model(**variant).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    batch, budget = _batch(packed), torch.tensor([5, 20])
    expected = model(**batch, use_cache=False, spectral_budget=budget)
    expected.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    with context_parallel(model, group, order if packed else None):
        outputs = model(**shard_batch(batch, group, order), spectral_budget=budget)
    outputs.loss.backward()
    loss = outputs.loss.detach()
    for t in (loss, *(p.grad for p in model.parameters())):
        dist.all_reduce(t)
        t /= group.size()
    errors = {name: relative_error(p.grad, gradients[name]) for name, p in model.named_parameters()}
    logits = gather_sequence(outputs.logits, group, order)
    return errors | {
        "logits": relative_error(logits, expected.logits.detach()),
        "loss": relative_error(loss, expected.loss.detach()),
    }


def autocast_error(group) -> float:
    """Of logits in bf16, against one process."""
    model, batch = random_model(block="gated", mixing_size=2, inner_size=16), _batch(False)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(**batch, use_cache=False).logits
        with context_parallel(model, group):
            logits = model(**shard_batch(batch, group)).logits
            logits.float().sum().backward()
    return relative_error(gather_sequence(logits, group), expected.detach())


class Collectives(TorchDispatchMode):
    """Counts all that is sent while it is active."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.namespace in ("c10d", "_c10d_functional")
        return func(*args, **(kwargs or {}))


def counts(group, variant: dict, packed: bool) -> dict[str, int]:
    """Collectives forward and backward, and runs of the operator, of one call."""
    model, batch = random_model(**variant).train(), shard_batch(_batch(packed), group)
    forward, backward = Collectives(), Collectives()
    run = SpectralOperator.__call__
    with context_parallel(model, group), mock.patch.object(SpectralOperator, "__call__", autospec=True) as operator:
        operator.side_effect = run
        with forward:
            loss = model(**batch).loss
        with backward:
            loss.backward()
    return {
        "forward": forward.count,
        "backward": backward.count,
        "operator": operator.call_count,
    }


def torch_context_parallel_error(group) -> float:
    """Of logits where torch's own `context_parallel`, which Accelerate calls, has cut and reordered the batch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel as torch_context_parallel

    model, ids = random_model(block="gated", mixing_size=2, inner_size=16), random_ids(B, L)
    mesh = init_device_mesh("cpu", (group.size(),))
    positions = torch.arange(L).repeat(B, 1)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        with (
            torch_context_parallel(mesh, buffers=[ids, positions], buffer_seq_dims=[1, 1]),
            context_parallel(model, mesh),
        ):
            assert positions[0, -1] == (L - 1 if group.rank() == 0 else L - 1 - L // 4)  # head-tail
            logits = model(ids, position_ids=positions).logits
    return relative_error(gather_sequence(logits, group, "head_tail"), expected)


def _said(model, group, cases: dict[str, dict], call: dict) -> dict[str, str]:
    """The error of each case's call, with these changes."""
    said = {}
    with context_parallel(model, group):
        for name, changes in cases.items():
            try:
                model(**call | changes)
            except ValueError as error:
                said[name] = str(error)
    return said


def refusals_of_one(group) -> dict[str, str]:
    """What is said, on this rank, of calls of which only the second rank's are wrong; then one call works."""
    model, ids = random_model(block="gated", mixing_size=2, inner_size=16), random_ids(2, 8)
    positions = (torch.arange(8)[None] + 8 * group.rank()).expand(2, 8)
    cases = {
        "no position_ids": {"position_ids": None},
        "shape of position_ids": {"position_ids": positions[:, 1:]},
        "seq_idx": {"seq_idx": torch.zeros(2, 8)},
        "cache": {"use_cache": True},
        "state_lengths": {"state_lengths": torch.tensor([3, 3])},
        "no inputs": {"input_ids": None},
        "dtype of inputs": {"input_ids": ids.float()},
        "token ids": {"input_ids": ids + 999},
        "budget out of range": {"spectral_budget": 33},
        "a budget for too many rows": {"spectral_budget": torch.tensor([3, 4, 5])},
    }
    call = {"input_ids": ids, "position_ids": positions}
    said = _said(model, group, cases if group.rank() == 1 else {name: {} for name in cases}, call)
    rows = {"budgets of rows": {"spectral_budget": torch.tensor([[5, 20], [20, 5]][group.rank()])}}
    rows |= {"rows and none": {"spectral_budget": torch.tensor([5, 20]) if group.rank() else 20}}
    rows |= {"the same in two forms": {"spectral_budget": torch.tensor([20, 20]) if group.rank() else 20}}
    return said | _said(model, group, rows, call)


def refusals(group) -> dict[str, str]:
    """What is said, on this rank, of calls that cannot work."""
    model, ids = random_model(block="gated", mixing_size=2, inner_size=16), random_ids(1, 8)
    positions = torch.arange(8)[None] + 8 * group.rank()
    cases = {
        "no position_ids": {"position_ids": None},
        "another shape of position_ids": {"position_ids": positions[:, 1:]},
        "seq_idx": {"seq_idx": torch.zeros(1, 8)},
        "cache": {"use_cache": True},
        "state_lengths": {"state_lengths": torch.tensor([3])},
        "padding on one rank": {"attention_mask": torch.ones(1, 8) * (group.rank() == 0)},
        "other budgets": {"spectral_budget": 3 + group.rank()},
        "other shapes": {"input_ids": ids[:, : 8 - group.rank()], "position_ids": positions[:, : 8 - group.rank()]},
        "short segments": {"input_ids": ids[:, :2], "position_ids": torch.arange(2)[None] + 2 * group.rank()},
        "two orders": {"position_ids": positions % 8 if group.rank() == 0 else positions % 4},
    }
    said = _said(model, group, cases, {"input_ids": ids, "position_ids": positions})
    model.train().model.layers[0].stochastic_depth = 0.1
    try:
        with context_parallel(model, group):
            model(ids, position_ids=positions)
    except ValueError as error:
        said["stochastic depth"] = str(error)
    return said
