# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Train an ES-SSM language model with budget dropout, then measure it at every budget.

`--help` lists every argument.
"""

from essm_train.commands.train_clm import run

if __name__ == "__main__":
    run()
