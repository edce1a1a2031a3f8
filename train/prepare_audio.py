# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Turn recordings of spoken words into log-mel frames. `--help` lists every argument."""

from essm_train.commands.prepare_audio import run

if __name__ == "__main__":
    run()
