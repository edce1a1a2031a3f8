# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""A saved ES-SSM as programs that need no Python: ONNX or ExecuTorch. `--help` lists every argument."""

from essm_train.commands.export import run

if __name__ == "__main__":
    run()
