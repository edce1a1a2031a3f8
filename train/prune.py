# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""A trained state-space model made smaller without training. `--help` lists every argument."""

from essm_train.commands.prune import run

if __name__ == "__main__":
    run()
