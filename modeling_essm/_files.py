# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Files that appear whole: written under a temporary name of their own, then moved into place."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[Path]:
    """A file to write that becomes `path` in one move. An interrupted writer leaves the old file and nothing else."""
    path = Path(path)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", suffix=path.suffix, dir=path.parent)
    os.close(handle)
    partial = Path(name)
    try:
        yield partial
        partial.chmod(0o666 & ~_umask())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: str | os.PathLike, text: str) -> None:
    """Give the file its new text in one move."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def _umask() -> int:
    """The process's mask; mkstemp ignores it and makes files private."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
