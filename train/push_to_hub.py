# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Push a finished run, with its card, to the Hub. `--help` lists every argument."""

from essm_train.commands.push_to_hub import run

if __name__ == "__main__":
    run()
