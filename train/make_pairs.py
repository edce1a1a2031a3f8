# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Pairs of passages of books, in the place of Retrieval's files. `--help` lists every argument."""

from essm_train.commands.make_pairs import run

if __name__ == "__main__":
    run()
