# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What a trained model uses: gates, reach, cost. `--help` lists every argument."""

from essm_train.commands.analyze import run

if __name__ == "__main__":
    run()
