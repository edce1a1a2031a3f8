# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Train an ES-SSM classifier of sequences with budget dropout, then measure its accuracy at every budget.

`--help` lists every argument.
"""

from essm_train.commands.train_classification import run

if __name__ == "__main__":
    run()
