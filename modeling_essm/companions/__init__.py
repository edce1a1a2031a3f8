# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Companions of the elastic model: diagonal state spaces, their pruning after training and truncation during it."""
