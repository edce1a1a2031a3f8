# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The library's Mamba mixers by chunks: equal to the library's own, and to the recurrences that they stand for."""

import copy
import functools
import math

import pytest
import torch
from helpers import assert_close, randomise
from transformers import DynamicCache, Mamba2Config
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from essm_train.baselines.config import BaselineConfig
from essm_train.baselines.mamba import ChunkedMamba2Mixer, by_chunks, chunked_scan
from essm_train.baselines.models import BaselineForCausalLM


@pytest.mark.parametrize("length", [1, 2, 12, 17])
def test_the_chunked_mamba_is_the_librarys(length):
    """Outputs and gradients, with padding. fp32, and two orders of summation."""
    config = BaselineConfig(architecture="mamba", hidden_size=16, num_hidden_layers=1)
    layer = randomise(BaselineForCausalLM(config)).eval().model.backbone.layers[0].mixer
    assert type(layer) is not MambaMixer
    library = MambaMixer(layer.config, 0)
    library.load_state_dict(layer.state_dict())
    found = [outputs_and_gradients(model, length, 16) for model in (library, layer)]
    for expected, actual in zip(*found):
        assert_close(actual, expected, atol=2e-5 * max(1.0, expected.abs().max().item()))


@pytest.mark.parametrize("limit", [(0.0, math.inf), (0.05, 0.2)])
@pytest.mark.parametrize("length", [1, 17, 64, 130])
def test_the_chunked_mamba2_is_the_librarys(length, limit):
    """Outputs and gradients of three heads, chunks of 64, as above."""
    library, layer = both_mamba2(time_step_limit=limit)
    found = [outputs_and_gradients(model, length, 12) for model in (library, layer)]
    for expected, actual in zip(*found):
        assert_close(actual, expected, atol=2e-5 * max(1.0, expected.abs().max().item()))


def test_what_is_left_to_the_library():
    """Groups of heads with B and C of their own, and calls with a cache, bit for bit."""
    x = torch.randn(2, 9, 12, generator=torch.Generator().manual_seed(0))
    library, layer = both_mamba2(n_groups=3)
    assert torch.equal(layer(x), library(x))
    library, layer = both_mamba2()
    outputs = []
    for model in (library, layer):
        cache = DynamicCache(config=model.whole_config)
        outputs.append([model(x, cache), model(x[:, :1], cache)])
    for expected, actual in zip(*outputs):
        assert torch.equal(actual, expected)


def both_mamba2(**fields):
    """The library's mixer and ours in its place, with the same weights."""
    sizes = {
        "hidden_size": 12,
        "num_heads": 3,
        "head_dim": 8,
        "state_size": 5,
        "chunk_size": 64,
        "num_hidden_layers": 1,
    }
    config = Mamba2Config(**{"n_groups": 1} | sizes | fields)
    library = randomise(Mamba2Mixer(config, 0)).eval()
    library.whole_config = config
    ours = by_chunks(copy.deepcopy(library))
    assert type(library) is Mamba2Mixer and type(ours) is ChunkedMamba2Mixer
    return library, ours


def outputs_and_gradients(model, length, width):
    """Of a sum of squares, one row padded on the right and one on the left."""
    inputs = torch.randn(2, length, width, generator=torch.Generator().manual_seed(0)).requires_grad_()
    mask = torch.ones(2, length, dtype=torch.int64)
    mask[0, max(1, length - 5) :] = mask[1, : length // 4] = 0
    y = model(inputs, attention_mask=mask)
    y.square().sum().backward()
    return [y, inputs.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("length", [1, 7, 8, 21])
def test_a_chunked_scan_is_its_recurrence(length):
    """Outputs and gradients in fp64; rounding is 1e-15 of numbers of size 10, in sums of 20."""
    draw = functools.partial(torch.randn, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x, B, C = draw(2, length, 3, 4), draw(2, length, 5), draw(2, length, 5)
    log_decay = -draw(2, length, 3).exp()
    found = []
    for chunk_size in (8, None):
        inputs = [t.clone().requires_grad_() for t in (x, log_decay, B, C)]
        if chunk_size:
            y = chunked_scan(*inputs, chunk_size)
        else:
            state, outputs, (u, a, b, c) = 0.0, [], inputs
            for t in range(length):
                state = a[:, t, :, None, None].exp() * state + u[:, t, ..., None] * b[:, t, None, None]
                outputs.append((state * c[:, t, None, None]).sum(-1))
            y = torch.stack(outputs, 1)
        found.append([y, *torch.autograd.grad(y.square().sum(), inputs)])
    for actual, expected in zip(*found):
        assert_close(actual, expected, atol=1e-11)


def test_a_chunked_scan_forgets_at_once_and_then_slowly():
    """Sums of a are 1e4 from the first step on: in fp32 their differences would be off by 1e-3."""
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    x, B, C = draw(2, 16, 3, 4), draw(2, 16, 5), draw(2, 16, 5)
    log_decay = torch.full((2, 16, 3), -0.1).index_fill(1, torch.tensor([0]), -1e4)
    expected = chunked_scan(x.double(), log_decay.double(), B.double(), C.double(), 16)
    assert_close(chunked_scan(x, log_decay, B, C, 16), expected.float(), atol=2e-6 * expected.abs().max().item())
