# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Every task, its data, and its arguments for a training script. `--help` lists every argument."""

from essm_train.commands.list_tasks import run

if __name__ == "__main__":
    run()
