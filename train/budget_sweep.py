# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Quality and speed of one model at every spectral budget. `--help` lists every argument."""

from essm_train.commands.budget_sweep import run

if __name__ == "__main__":
    run()
