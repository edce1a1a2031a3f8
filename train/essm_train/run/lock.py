# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""One run at a time in a folder: the second one is refused instead of deleting what the first one writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from filelock import FileLock, Timeout
from tqdm import tqdm

LOCK = ".lock"


@contextmanager
def alone_in(accelerator: Accelerator, folder: Path) -> Iterator[None]:
    """Hold the folder's lock, for all processes of the run; the main process takes it. All must call it.

    The operating system frees it when that process ends, however it ends; the empty file stays.

    Raises:
        ValueError: (on all processes) another run holds it.
    """
    lock, taken = FileLock(folder / LOCK), [False]
    if accelerator.is_main_process:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            taken = [True]
        except OSError as error:  # a file system without locks
            tqdm.write(f"{folder} cannot be locked ({error}): make sure that no other run uses it")
    broadcast_object_list(taken)
    if taken[0]:
        raise ValueError(
            f"output_dir {str(folder)!r} is in use by another run, which has not ended: wait for it, end it, or choose "
            "another output_dir"
        )
    try:
        yield
    finally:
        lock.release()
