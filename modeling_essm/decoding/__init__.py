# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Decoding beyond `generate`: compiled steps, drafts, a running batch, a deadline, conversations on disk."""

from .compiled_steps import compile_decoding
from .continuous_batching import ContinuousBatch
from .deadline import DeadlineBudget
from .speculation import speculate
from .states_on_disk import load_cache, save_cache

__all__ = ["ContinuousBatch", "DeadlineBudget", "compile_decoding", "load_cache", "save_cache", "speculate"]
