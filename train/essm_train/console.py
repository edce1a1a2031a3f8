# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""How a command runs: it reads its arguments before it imports torch, and ends with one line where a user can help."""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from huggingface_hub.errors import HFValidationError, StrictDataclassError

# Before torch: threads that wait spin for microseconds, then sleep.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

_EXTRAS = dict.fromkeys(("onnx", "onnxruntime", "onnxscript"), "export")  # that bring a module; "train" the others
_EXTRAS |= {"torchao": "quantization", "executorch": "executorch"}


class Failed(RuntimeError):
    """What was asked for did not succeed, and its message says all: no traceback."""


def command(
    main: Callable[..., object] | str, arguments: type | None = None, positional: str = ""
) -> Callable[..., None]:
    """What a console script calls: `main` with the parsed arguments, if it has any, and its errors as one line.

    Args:
        main: or "module:function", which is imported once the arguments are right.
        positional: as of `parse_arguments`.
    """

    def run(argv: Sequence[str] | None = None) -> None:
        def call() -> None:
            given: Any = argv
            target: Any = main
            if arguments is not None:
                from essm_train.arguments import parse_arguments

                given = parse_arguments(arguments, argv, positional)
            if isinstance(target, str):
                module, _, name = target.partition(":")
                target = getattr(importlib.import_module(module), name)
            target(given)

        run_script(call)

    return run


def run_script(main: Callable[[], object]) -> None:
    """Run `main`; an error of arguments, data, numbers or files becomes `error: ...` on stderr and exit code 1.

    Where several processes fail alike, one says so. Python's development mode (`python -X dev`, PYTHONDEVMODE=1) keeps
    the traceback.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal or file that lacks a character ends no run
            stream.reconfigure(errors="backslashreplace")
    try:
        main()
    except ModuleNotFoundError as error:
        if sys.flags.dev_mode or (error.name or "").startswith(("essm_train", "modeling_essm")):
            raise
        extra = _EXTRAS.get(str(error.name).partition(".")[0], "train")
        _end(f"{error.name} is not installed, this command needs pip install 'modeling-essm[{extra}]'")
    except (ValueError, OSError, FloatingPointError, RuntimeError, StrictDataclassError) as error:
        lost = _is_lost_peer(error)
        if sys.flags.dev_mode or (isinstance(error, RuntimeError) and not (lost or isinstance(error, Failed))):
            raise
        text = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error.__cause__ or error, HFValidationError):  # the library's OSError names it as its cause
            text = f"there is no such folder, and no such name on the Hub: {text}"
        _end(f"lost another process of this run: {text}" if lost and not isinstance(error, ConnectionError) else text)


def _is_lost_peer(error: BaseException) -> bool:
    if "torch.distributed" not in sys.modules:
        return False
    from essm_train.run.checkpoints import is_lost_peer

    return is_lost_peer(error)


def _end(text: str) -> None:
    """Exit with 1, and say why unless another process of this run has said the same."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        is_first = int(os.environ.get("RANK", 0)) == 0  # all have the same arguments
    else:
        try:
            is_first = distributed.distributed_c10d._get_default_store().add(f"error: {text}", 1) == 1
        except (RuntimeError, ValueError):  # gone with the process that held it
            is_first = True
    if is_first:
        print(f"error: {text}", file=sys.stderr)
    sys.exit(1)
