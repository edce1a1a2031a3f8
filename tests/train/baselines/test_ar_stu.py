# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""AR-STU's mixer against its equation in plain loops, fp64, and its models on padded, packed and saved rows."""

import pytest
import torch
from helpers import assert_close, pad, random_ids, random_model, tiny_config
from operators import relative_error
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from essm_train.baselines.ar_stu import (
    ARSTUForCausalLM,
    ARSTUForPairClassification,
    ARSTUForSequenceClassification,
    ARSTUMixer,
)
from essm_train.baselines.sizes import matched_variant
from modeling_essm.mixer_essm import LayerCall
from modeling_essm.spectral_basis import spectral_basis

VARIANTS = {
    "both": {},
    "shift": {"ar_feature_shift": 2},
    "released": {"ar_negative_filters": False, "ar_feature_shift": 2, "gating": "none"},
}
variants = pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
K, L = 5, 19
TOLERANCE = 1e-5  # the recurrence reproduces the filters to 4e-6 (test_spectral_basis.py)


def make_mixer(fields):
    """Width 16, H = 512, C = 8, in fp64; weights so large that every term shows in the outputs."""
    mixer = random_model(ARSTUForCausalLM, num_hidden_layers=1, **fields).double().model.layers[0].mixer
    with torch.no_grad():
        mixer.output_mixing.mul_(4)
        if mixer.negative:
            mixer.channel_mixing_negative.mul_(4)
    return mixer


def by_loops(mixer, u):
    """Outputs (B, L, D), one step after another, as the module's equation has them."""
    phi, gates = torch.from_numpy(spectral_basis(512).filters(K)), mixer.gates(u, K)
    ys = []
    for t in range(L):
        y = u[:, t] @ mixer.skip.weight.T
        for k in range(K):
            for j in range(t - mixer.shift + 1):
                y = y + gates[:, t, k, None] * phi[j, k] * (u[:, t - mixer.shift - j] @ mixer.channel_mixing[k])
                if mixer.negative:
                    M = mixer.channel_mixing_negative[k]
                    y = y + gates[:, t, k, None] * (-1) ** j * phi[j, k] * (u[:, t - mixer.shift - j] @ M)
        for i in (1, 2):
            if t >= i:
                y = y + u[:, t - i] @ mixer.input_mixing[i - 1] + ys[t - i] @ mixer.output_mixing[i - 1]
        ys.append(y)
    return torch.stack(ys, 1)


@variants
def test_outputs_and_gradients_are_those_of_the_equation(fields):
    mixer, generator = make_mixer(fields), torch.Generator().manual_seed(3)
    u = torch.randn(2, L, 16, generator=generator, dtype=torch.float64).requires_grad_()
    leaves = {"u": u} | dict(mixer.named_parameters())
    outputs, expected = mixer(u, LayerCall(K)), by_loops(mixer, u)
    assert relative_error(outputs, expected) < TOLERANCE
    w = torch.randn(outputs.shape, generator=generator, dtype=torch.float64)
    actual, exact = (torch.autograd.grad((y * w).sum(), [*leaves.values()]) for y in (outputs, expected))
    for name, a, b in zip(leaves, actual, exact):
        assert float(b.norm()) > 0 and relative_error(a, b) < TOLERANCE, name


@torch.no_grad()
@variants
def test_rows_are_what_they_are_alone(fields):
    """Padded, with a budget for each, and packed one behind the other; at a budget as with fewer channels."""
    model, ids, lengths, rows = random_model(ARSTUForCausalLM, **fields), random_ids(3, 21), [21, 13, 2], [4, 32, 9]
    alone = [model(ids[i : i + 1, :n], spectral_budget=k).logits[0] for i, (n, k) in enumerate(zip(lengths, rows))]
    for side in ("left", "right"):
        padded, mask = pad(ids, lengths, side)
        logits = model(padded, attention_mask=mask, spectral_budget=torch.tensor(rows)).logits
        for i in range(3):
            assert_close(logits[i][mask[i].bool()], alone[i])
    packed = model(ids.view(1, -1), cu_seqlens=torch.tensor([0, 21, 42, 63]), spectral_budget=9).logits
    assert_close(packed[0], model(ids, spectral_budget=9).logits.flatten(0, 1))


@pytest.mark.parametrize("cls", [ARSTUForCausalLM, ARSTUForSequenceClassification, ARSTUForPairClassification])
def test_an_ar_stu_is_as_large_as_an_es_ssm_and_is_found_by_its_type(cls, tmp_path):
    config = tiny_config(cls.config_class, hidden_size=32, block="paper", gating="none", num_labels=2)
    model = cls(matched_variant(config, cls)).eval()
    base = cls.__bases__[1]
    elastic = base(tiny_config(base.config_class, hidden_size=32, block="paper", num_labels=2))
    assert abs(model.num_parameters() / elastic.num_parameters() - 1) <= 0.03
    model.save_pretrained(tmp_path)
    auto = AutoModelForCausalLM if cls is ARSTUForCausalLM else AutoModelForSequenceClassification
    loaded, ids = auto.from_pretrained(tmp_path).eval(), torch.arange(24).view(3, 2, 4)
    ids = ids if cls is ARSTUForPairClassification else ids.flatten(1)
    with torch.no_grad():
        outputs = [each(ids, use_cache=False, spectral_budget=K).logits for each in (model, loaded) for K in (4, 32)]
    assert not list(tmp_path.glob("*.py")) and type(loaded) is cls
    assert torch.equal(outputs[0], outputs[2]) and not torch.equal(outputs[0], outputs[1])


def test_what_it_is_not():
    with pytest.raises(Exception, match='block must be "paper" in AR-STU'):
        ARSTUForCausalLM.config_class(block="elastic")
    with pytest.raises(ValueError, match="AR-STU runs on whole sequences"):
        random_model(ARSTUForCausalLM)(random_ids(1, 5), use_cache=True)


def test_layers_that_attend_stay():
    kinds = ["linear_attention", "full_attention"] * 2
    model = random_model(ARSTUForCausalLM, layer_types=kinds, num_hidden_layers=4, num_attention_heads=2, head_dim=8)
    kept = [isinstance(getattr(layer, "mixer", None), ARSTUMixer) for layer in model.model.layers]
    assert kept == [True, False] * 2
