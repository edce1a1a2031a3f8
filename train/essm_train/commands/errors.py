# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What the scripts do with errors that a user can mend: one line, and exit code 1."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from tqdm import tqdm


def command(main: Callable[..., object], arguments: type | None = None) -> Callable[[], None]:
    """What a console command or a script calls: `run_script` of `main`, which takes those arguments, if any."""

    def run() -> None:
        if arguments is None:
            run_script(main)
        else:
            from transformers import HfArgumentParser

            run_script(lambda: main(*HfArgumentParser(arguments).parse_args_into_dataclasses()))

    return run


def run_script(main: Callable[[], object]) -> None:
    """Run `main`; an error of arguments, data, numbers or files becomes `error: ...` on stderr and exit code 1.

    Of several processes that fail alike, one says so. Python's development mode (`python -X dev`, PYTHONDEVMODE=1)
    keeps the traceback.
    """
    try:
        main()
    except (ValueError, OSError, FloatingPointError, RuntimeError) as error:
        from essm_train.run.checkpoints import is_lost_peer  # with torch, which commands that make data do without

        lost = is_lost_peer(error)
        if sys.flags.dev_mode or (isinstance(error, RuntimeError) and not lost):
            raise
        text = " ".join(str(error).split()) or type(error).__name__
        if lost and not isinstance(error, ConnectionError):
            text = f"lost another process of this run: {text}"
        if _is_first_to_say(text):
            tqdm.write(f"error: {text}", file=sys.stderr)
        sys.exit(1)


def _is_first_to_say(text: str) -> bool:
    """Whether no other process of this run has failed with that text."""
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):  # all have the same arguments
        return int(os.environ.get("RANK", 0)) == 0
    try:
        return distributed.distributed_c10d._get_default_store().add(f"error: {text}", 1) == 1
    except (RuntimeError, ValueError):  # gone with the process that held it
        return True
