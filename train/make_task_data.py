# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Make the data of generated tasks: ListOps, Pathfinder. `--help` lists every argument."""

from essm_train.commands.make_task_data import run

if __name__ == "__main__":
    run()
