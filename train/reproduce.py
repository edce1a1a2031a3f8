# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The paper's tables, and our own questions, over seeds. `--help` lists every argument."""

from essm_train.commands.reproduce import run

if __name__ == "__main__":
    run()
