# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Context parallelism: sequences spread over processes, exact up to rounding.

A segment of m positions acts on the state before it as one fixed matrix, x' = (A^m)^T x + s, with s the state that its
inputs leave behind from zero. So each process computes the s of its own segments, which is cheap, one all_gather of
these (N, D) states a layer gives every process the state before its segments, and the operator runs once, from there.
The backward pass gathers the gradients of those states once and carries them the other way.

    with context_parallel(model, group):
        loss = model(**shard_batch(batch, group)).loss
"""

from .batches import gather_sequence, shard_batch
from .model_context import context_parallel
from .sequence_shard import SequenceShard

__all__ = ["SequenceShard", "context_parallel", "gather_sequence", "shard_batch"]
