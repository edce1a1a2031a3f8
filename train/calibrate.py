# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Which budget for this machine? Quality of a saved model at every budget, its speed and memory here. `--help` lists
every argument."""

from essm_train.commands.calibrate import run

if __name__ == "__main__":
    run()
