# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Runs a function on several gloo ranks, each a process of its own."""

import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from apart import start


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
