# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Companions of the elastic model: diagonal state spaces, their pruning after training and truncation during it.

Importing this, which `import modeling_essm` does not do, makes the Auto classes know the companions' models.
"""

from . import diagonal_ssm

__all__ = ["diagonal_ssm"]
