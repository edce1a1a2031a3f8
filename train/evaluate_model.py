# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Any checkpoint on any task at every budget: quality, retention, speed, memory, active parameters.

`--help` lists every argument.
"""

from essm_train.commands.evaluate_model import run

if __name__ == "__main__":
    run()
