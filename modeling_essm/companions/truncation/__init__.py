# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Balanced truncation of recurrences, of models, and of models in training (CompreSSM)."""
