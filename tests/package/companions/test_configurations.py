# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Configurations of the companions' models: defaults that follow from other fields, and fields that are refused."""

import math
import re

import pytest
import transformers
from elastic_states import tiny
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from modeling_essm import companions
from modeling_essm.companions import DiagonalSSMConfig, ElasticStateConfig


def test_defaults():
    config = DiagonalSSMConfig()
    assert (config.parameterization, config.initialization, config.state_sizes) == ("s5", "hippo", [64] * 4)
    config = DiagonalSSMConfig(parameterization="s4d", num_hidden_layers=2)
    assert (config.initialization, config.state_size, config.state_sizes) == ("linear", 32, [32, 32])
    assert DiagonalSSMConfig(parameterization="lru").initialization is None
    assert DiagonalSSMConfig(num_hidden_layers=2, state_sizes=(0, 7)).state_sizes == [0, 7]
    again = DiagonalSSMConfig.from_dict(config.to_dict())
    assert again.to_dict() == config.to_dict()


def test_fields_beside_a_dictionary_are_checked():
    fields = DiagonalSSMConfig(state_size=5).to_dict()
    assert DiagonalSSMConfig.from_dict(fields, state_size=9).state_sizes == [9] * 4
    assert DiagonalSSMConfig.from_dict(fields, num_hidden_layers=2).state_sizes == [5] * 2
    with pytest.raises(StrictDataclassError, match="state_sizes must be a list of 4 integers"):
        DiagonalSSMConfig.from_dict(fields, state_sizes=[1, 2])
    with pytest.raises(StrictDataclassError, match="latent_size must be even without backbone_config"):
        ElasticStateConfig.from_dict(tiny().to_dict(), latent_size=7)
    assert ElasticStateConfig.from_dict(tiny().to_dict(), latent_size=4).latent_size == 4


@pytest.mark.parametrize(
    ("make", "fields", "message"),
    [
        (DiagonalSSMConfig, {"parameterization": "s6"}, "expected one of ('s5', 'lru', 's4d'), got s6"),
        (DiagonalSSMConfig, {"hidden_size": 0}, "must be an integer in [1, 16777216], got 0"),
        (DiagonalSSMConfig, {"state_size": 4.0}, "state_size"),
        (DiagonalSSMConfig, {"state_sizes": [4, 4]}, "state_sizes must be a list of 4 integers"),
        (DiagonalSSMConfig, {"state_sizes": []}, "state_sizes must be a list of 4 integers"),
        (DiagonalSSMConfig, {"state_sizes": [4, 4, 4, -1]}, "must be an integer in [0, 16777216], got -1"),
        (DiagonalSSMConfig, {"bidirectional": 1}, "bidirectional"),
        (DiagonalSSMConfig, {"dropout": 1.0}, "must be a number in [0, 1), got 1.0"),
        (DiagonalSSMConfig, {"dropout": math.nan}, "must be a number in [0, 1), got nan"),
        (DiagonalSSMConfig, {"dt_min": 0.2}, "dt_min must be at most dt_max = 0.1, got 0.2"),
        (DiagonalSSMConfig, {"max_phase": 7.0}, "must be a number in (0, 6.28319], got 7.0"),
        (DiagonalSSMConfig, {"parameterization": "lru", "discretization": "bilinear"}, "discretization must be 'zoh'"),
        (tiny, {"metric": "cholesk"}, "got cholesk"),
        (tiny, {"latent_size": 5}, "latent_size must be even without backbone_config"),
        (tiny, {"latent_size": "6"}, "latent_size"),
        (tiny, {"step_size": 1.5}, "must be a number in (0, 1], got 1.5"),
        (tiny, {"trust_radius": 0}, "must be a number in (0, inf), got 0"),
        (tiny, {"objective": 3}, "objective"),
    ],
)
def test_bad_fields(make, fields, message):
    with pytest.raises(StrictDataclassError, match=re.escape(message)):
        make(**fields)


@pytest.mark.parametrize("given", [{"hidden_size": 4}, {"model_type": "nothing"}])
def test_bad_backbones(given):
    with pytest.raises(ValueError, match=r"with model_type|one that transformers knows, got 'nothing'"):
        tiny(backbone_config=given)


def test_names():
    """All are there, also what is imported when it is asked for, and none is the library's."""
    assert all(getattr(companions, name).__name__ == name for name in companions.__all__)
    names = set(companions.__all__)
    assert not names & set(dir(transformers)) and not [name for name in names if name.startswith(("Esm", "EssmE"))]
    assert type(AutoConfig.for_model("elastic_state")) is ElasticStateConfig
