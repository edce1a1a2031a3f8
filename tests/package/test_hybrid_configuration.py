# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What a configuration with attention layers may hold."""

import pytest
from helpers import tiny_config

from modeling_essm import ESSMConfig

L_, S_, F_ = "linear_attention", "sliding_attention", "full_attention"

BAD = {
    "no-spectral": ({"layer_types": [F_, F_]}, "layer_types must hold 'linear_attention'"),
    "too-few": ({"layer_types": [L_]}, "for each of the 2 layers, got 1"),
    "no-window": ({"layer_types": [L_, S_]}, "sliding_window must be an integer of at least 2"),
    "window-1": ({"layer_types": [L_, S_], "sliding_window": 1}, r"sliding_window must be .*\[2, "),
    "odd-head": ({"layer_types": [L_, F_], "head_dim": 7}, "head_dim must be even.*got 7"),
    "groups": (
        {"layer_types": [L_, F_], "num_attention_heads": 4, "num_key_value_heads": 3},
        "must divide .* 4, got 3",
    ),
    "rope": ({"layer_types": [L_, F_], "rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters must be"),
    "yarn": ({"layer_types": [L_, F_], "rope_parameters": {"rope_type": "yarn"}}, "rope_parameters: .*factor"),
    **{
        f"{name} {value}": (
            {"layer_types": [L_, F_], "rope_parameters": {"rope_type": "linear", "factor": 2.0, name: value}},
            "rope_parameters must be .*rope_theta positive, factor at least 1",
        )
        for name, value in (
            *(("rope_theta", value) for value in (0.0, -1.0, float("nan"), float("inf"), "a", None)),
            *(("factor", value) for value in (0.0, 0.5, "x")),
            ("partial_rotary_factor", 0.5),
        )
    },
    "too-many-heads": (
        {"layer_types": [L_, F_], "hidden_size": 16, "num_attention_heads": 16},
        r"got 0 \(hidden_size 16, num_attention_heads 16\)",
    ),
    "dropout": ({"layer_types": [L_, F_], "attention_dropout": 1.0}, "attention_dropout must be"),
    "capacities": (
        {"layer_types": [L_, F_], "spectral_capacities": [32, 32]},
        "spectral_capacities must be.*1 integers",
    ),
}


@pytest.mark.parametrize(("fields", "message"), BAD.values(), ids=BAD)
def test_bad_configurations(fields, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(**fields)


def test_defaults_and_other_sizes():
    config = ESSMConfig(num_hidden_layers=2, layer_types=[L_, F_], hidden_size=200)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (3, 3, 66)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    wider = ESSMConfig.from_dict(config.to_dict(), hidden_size=300)
    assert (wider.num_attention_heads, wider.head_dim, wider.capacities) == (3, 100, (32,))
    with pytest.raises(ValueError, match="for each of the 3 layers, got 2"):
        ESSMConfig.from_dict(config.to_dict(), num_hidden_layers=3)
    plain = ESSMConfig()
    assert plain.rope_parameters is None and plain.num_attention_heads is None
    assert not {"head_dim", "rope_parameters", "sliding_window", "attention_dropout"} & plain.to_diff_dict().keys()
