# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Files that appear whole: written under a temporary name of their own, then moved into place."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[Path]:
    """A file to write that becomes `path` in one move. An interrupted writer leaves the old file and nothing else.

    Raises:
        OSError: as the block does; of a full disk, which names no file, with `path` as its `filename`.
    """
    path = Path(path)
    partial = path.with_name(f".partial-{secrets.token_hex(4)}-{path.name}")
    try:
        yield partial
        partial.replace(path)
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise
    except SafetensorError as error:
        raise OSError(f"cannot write {path}: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: str | os.PathLike, text: str) -> None:
    """Give the file its new text in one move."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")
