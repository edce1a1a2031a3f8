# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The one list of tensors that are divided into channels is the whole one."""

import torch
from helpers import random_ids, random_model, variants

from modeling_essm.channels import channel_capacity, channel_parameters, num_parameters_per_channel, spectral_mixers


@variants
def test_the_list_is_what_a_capacity_changes(variant):
    large, small = (random_model(num_spectral_channels=K, **variant).state_dict() for K in (7, 5))
    listed = {name for name in large if channel_capacity(name, (7, 5)) is not None}
    assert listed == {name for name in large if large[name].shape != small[name].shape}
    for name in listed:
        assert len(large[name]) == 7 and channel_capacity(name, (7, 5)) == (7 if ".0." in name else 5)


@variants
def test_a_mixer_has_the_tensors_of_the_file(variant):
    model = random_model(num_spectral_channels=7, **variant)
    listed = {name for name in model.state_dict() if channel_capacity(name, (7, 7)) is not None}
    values = [value for mixer in spectral_mixers(model) for _, _, value in channel_parameters(mixer)]
    assert {id(value) for name, value in model.named_parameters() if name in listed} == set(map(id, values))
    assert sum(map(num_parameters_per_channel, spectral_mixers(model))) * 7 == sum(value.numel() for value in values)


@variants
def test_gradients_end_at_the_budget(variant):
    model = random_model(num_spectral_channels=7, **variant)
    model(random_ids(2, 9), labels=random_ids(2, 9), spectral_budget=3).loss.backward()
    for mixer in spectral_mixers(model):
        for _, name, value in channel_parameters(mixer):
            assert not value.grad[3:].any() and (name != "channel_mixing" or value.grad[:3].any())
    assert torch.isfinite(model.model.norm.weight.grad).all()
