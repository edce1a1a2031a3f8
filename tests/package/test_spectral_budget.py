# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What each form of `spectral_budget` means, and what is refused."""

import numpy as np
import pytest
import torch
from helpers import captured_warnings, random_ids, random_model

from modeling_essm import ESSMConfig, ESSMForCausalLM, ESSMForSequenceClassification
from modeling_essm.spectral_budget import resolve_budget

PRESETS = {"phone": 4, "desk": 9, "laptop": [8, 16]}


def resolve(value, **kwargs):
    return resolve_budget(value, **{"capacities": (32, 32), "presets": PRESETS, **kwargs})


ACCEPTED = {
    "none": (None, (32, 32)),
    "int": (1, (1, 1)),
    "numpy": (np.uint8(6), (6, 6)),
    "list": ([3, 7], (3, 7)),
    "list-of-numpy": (tuple(np.array([3, 7])), (3, 7)),
    "tensor-0d": (torch.tensor(5, dtype=torch.int32), (5, 5)),
    "preset-int": ("phone", (4, 4)),
    "preset-list": ("laptop", (8, 16)),
}


@pytest.mark.parametrize("value, layers", ACCEPTED.values(), ids=ACCEPTED)
def test_accepted_forms(value, layers):
    budget = resolve(value)
    assert budget.layers == layers == budget.report() and budget.rows is None
    assert all(type(K) is int for K in budget.layers)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64], ids=str)
def test_row_budgets(dtype):
    budget = resolve(torch.tensor([3, 9, 5], dtype=dtype), batch_size=3)
    assert budget.layers == (9, 9)  # the widest row decides what is computed
    assert budget.rows.tolist() == [3, 9, 5] == budget.report().tolist()
    assert resolve(torch.tensor([4, 4], dtype=dtype), batch_size=2).rows is None


def test_names_of_rows_are_their_numbers():
    budget = resolve(["phone", "desk", "phone"], batch_size=3)
    assert budget.layers == (9, 9) and budget.rows.tolist() == [4, 9, 4]
    model, ids = random_model(budget_presets=PRESETS), random_ids(2, 5)
    named, given = (
        model.generate(ids, spectral_budget=rows, max_new_tokens=6, num_beams=2)
        for rows in (["phone", "desk"], torch.tensor([4, 9]))
    )
    assert torch.equal(named, given)


def test_none_means_the_default_then_the_capacity(tmp_path):
    assert resolve(None, default=6).layers == (6, 6) and resolve(5, default=6).layers == (5, 5)
    random_model(budget_presets=PRESETS).save_pretrained(tmp_path)
    loaded = ESSMForCausalLM.from_pretrained(tmp_path, spectral_budget="laptop")
    loaded.save_pretrained(tmp_path / "again")
    for model in (loaded, ESSMForCausalLM.from_pretrained(tmp_path / "again")):
        assert model(random_ids(1, 4)).spectral_budget == (8, 16)
    classifier = random_model(ESSMForSequenceClassification)
    assert classifier(random_ids(1, 4), spectral_budget=4).spectral_budget == (4, 4)
    assert ESSMConfig.from_pretrained(tmp_path).spectral_budget is None


REFUSED = {
    "zero": (0, r"integer in \[1, 32\], got 0"),
    "beyond-capacity": (33, r"integer in \[1, 32\], got 33"),
    "whole-float": (2.0, r"integer in \[1, 32\], got 2\.0"),
    "true": (True, r"integer in \[1, 32\], got True"),
    "unknown-preset": ("x", r"unknown spectral_budget preset 'x'; known presets: .*'phone'"),
    "unknown-preset-of-a-row": (["desk", "x", "desk"], r"unknown spectral_budget preset 'x'; known presets: .*'phone'"),
    "too-few-presets": (["desk", "phone"], r"names needs one for each of the 3 rows, got 2: \['desk', 'phone'\]"),
    "layers-of-a-row": (["desk", "laptop", "desk"], r"one budget for all layers, .*: \{'laptop': \[8, 16\]\}"),
    "short-list": ([1], r"each of the 2 spectral layers, got 1: \[1\]"),
    "empty-list": ([], r"each of the 2 spectral layers, got 0: \[\]"),
    "list-with-str": ([4, "phone"], r"integer in \[1, 32\], got 'phone'"),
    "list-with-tensor": ([4, torch.tensor([4, 4])], r"integer in \[1, 32\], got tensor\(\[4, 4\]\)"),
    "tensor-too-long": (torch.tensor([1, 2, 3, 4]), r"shape \(3,\), got \(4,\)"),
    "tensor-2d": (torch.ones(3, 1, dtype=torch.long), r"shape \(3,\), got \(3, 1\)"),
    "tensor-float": (torch.tensor([1.0, 2.0, 3.0]), r"integers in \[1, 32\], got dtype torch.float32"),
    "tensor-bool": (torch.tensor([True, True, False]), r"integers in \[1, 32\], got dtype torch.bool"),
    "tensor-low": (torch.tensor([0, 2, 3]), r"integers in \[1, 32\], got values from 0 to 3"),
    "tensor-high": (torch.tensor([1, 2, 33]), r"integers in \[1, 32\], got values from 1 to 33"),
    "tensor-0d-high": (torch.tensor(33), r"integer in \[1, 32\], got 33"),
}


@pytest.mark.parametrize("value, message", REFUSED.values(), ids=REFUSED)
def test_the_model_refuses_other_forms_before_any_compute(value, message):
    model = random_model(budget_presets=PRESETS)

    def never(*_):
        raise AssertionError("a layer ran")

    model.model.layers[0].register_forward_pre_hook(never)
    with pytest.raises(ValueError, match=message):
        model(random_ids(3, 4), spectral_budget=value)


@pytest.mark.parametrize("budget", [5, [4, 5], torch.tensor([5, 8])], ids=["int", "list", "rows"])
def test_untrained_budgets_warn_once(budget):
    model, unknown, ids = random_model(trained_budgets=[4, 8, 32]), random_model(), random_ids(2, 4)
    with captured_warnings() as messages:
        for trained in (4, [8, 4], None, torch.tensor([4, 8])):
            model(ids, spectral_budget=trained)
        unknown(ids, spectral_budget=budget)
        assert messages == []
        for _ in range(3):
            model(ids, spectral_budget=budget)
    assert messages == ["spectral_budget [5] was never trained; trained budgets: [4, 8, 32]"]
