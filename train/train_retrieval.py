# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Train a two-tower classifier of pairs of texts with budget dropout. `--help` lists every argument."""

from essm_train.commands.train_retrieval import run

if __name__ == "__main__":
    run()
