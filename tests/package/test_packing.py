# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Packed equals separate: outputs, losses and gradients, however the boundaries are told and wherever they fall."""

import pytest
import torch
from datasets import Dataset
from helpers import assert_close, random_ids, random_model, trainer_arguments, variants
from transformers import DataCollatorWithFlattening, Trainer, default_data_collator

from modeling_essm import ESSMCache, ESSMForSequenceClassification
from modeling_essm.mixer_essm import LayerCall
from modeling_essm.packing import Packing

# chunk_size is 8: lengths that end before, on and after a chunk, and starts at every offset in one
LENGTHS = [7, 9, 1, 1, 16, 23, 40, 3, 8, 64, 2]


def described(how: str, lengths: list[int]) -> dict[str, torch.Tensor]:
    """The boundaries of one packed row, as collators tell them."""
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    if how == "position_ids":
        return {how: torch.cat([torch.arange(n) for n in lengths])[None]}
    if how == "seq_idx":
        return {how: torch.cat([torch.full((n,), i % 2) for i, n in enumerate(lengths)])[None].int()}
    return {how: offsets.int()}


WAYS = pytest.mark.parametrize("how", ["position_ids", "seq_idx", "cu_seqlens"])


@variants
def test_packed_equals_separate(variant):
    """Logits, loss and gradients."""
    model, L, budget = random_model(**variant), sum(LENGTHS), [5, 20]
    ids = random_ids(1, L)
    labels, count, total, separate = ids.clone(), L - len(LENGTHS), 0.0, []
    labels[0, torch.tensor([0, *LENGTHS[:-1]]).cumsum(0)] = -100
    outputs = model(ids, labels=labels, spectral_budget=budget, **described("cu_seqlens", LENGTHS))
    outputs.loss.backward()
    packed = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for part in ids.split(LENGTHS, 1):
        alone = model(part, labels=part if part.shape[1] > 1 else None, spectral_budget=budget, use_cache=False)
        separate.append(alone.logits.detach())
        if alone.loss is not None:
            own = alone.loss * (part.shape[1] - 1) / count
            own.backward()
            total += own.item()
    assert_close(outputs.logits, torch.cat(separate, 1))
    assert outputs.loss.item() == pytest.approx(total, abs=1e-5)
    for name, p in model.named_parameters():
        torch.testing.assert_close(packed[name], p.grad, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


@variants
def test_several_rows_budgets_and_padding(variant):
    """Rows with boundaries of their own, a budget each, and one padded on the left."""
    model, ids = random_model(**variant), random_ids(3, 24)
    lengths = [[5, 19], [24], [4, 8, 12]]  # the last row: 4 of padding
    mask = torch.ones(3, 24, dtype=torch.long)
    mask[2, :4] = 0
    position_ids = torch.stack([described("position_ids", n)["position_ids"][0] for n in lengths])
    position_ids[2, :4] = 1  # what clients write next to padding
    rows = torch.tensor([2, 32, 7])
    with torch.no_grad():
        packed = model(ids, attention_mask=mask, position_ids=position_ids, spectral_budget=rows).logits
        for i, K in enumerate(rows.tolist()):
            alone = [model(part, spectral_budget=K).logits for part in ids[i : i + 1].split(lengths[i], 1)]
            start = 4 if i == 2 else 0
            assert_close(packed[i : i + 1, start:], torch.cat(alone, 1)[:, start:])


@WAYS
def test_masked_positions_inside_packed_sequences(how):
    """Each sequence is what its real tokens alone are; one without any is gone."""
    model, lengths = random_model(), [9, 3, 12, 16]
    ids, mask = random_ids(1, 40), torch.rand(1, 40, generator=torch.Generator().manual_seed(0)) < 0.7
    mask[0, [0, 8, 11, 12, 39]] = False  # at ends of sequences too
    if how != "position_ids":
        mask[0, 9:12] = False
    with torch.no_grad():
        packed = model(ids, attention_mask=mask.long(), **described(how, lengths)).logits
        parts = zip(ids.split(lengths, 1), mask.split(lengths, 1))
        alone = [model(part[:, own[0]]).logits for part, own in parts if own.any()]
        assert_close(packed[mask], torch.cat(alone, 1)[0])


@torch.no_grad()
def test_position_ids_that_go_on_over_masked_positions():
    """One sequence with a hole, however a client counts over it: nothing begins there."""
    model, ids = random_model(), random_ids(1, 20)
    mask = torch.ones(1, 20, dtype=torch.long)
    mask[0, :2] = mask[0, 8:11] = mask[0, 18:] = 0
    expected, by_mask = model(ids[:, mask[0].bool()]).logits[0], mask.cumsum(1) - 1
    for position_ids in (torch.arange(20)[None], by_mask, by_mask.masked_fill(mask == 0, 1)):
        actual = model(ids, attention_mask=mask, position_ids=position_ids, use_cache=True).logits
        assert_close(actual[mask.bool()], expected)


@torch.no_grad()
def test_ordinary_position_ids_change_nothing():
    model, ids, count = random_model(), random_ids(2, 19), torch.arange(19)[None]
    plain = model(ids).logits
    for ordinary in (
        {"position_ids": count},
        {"position_ids": 5 + count.expand(2, -1)},
        {"seq_idx": torch.zeros(2, 19)},
    ):
        assert torch.equal(model(ids, **ordinary).logits, plain)
    mask = (count >= 3).long().expand(2, -1)  # next to padding, position_ids say nothing
    beside = torch.where(mask.bool(), count - 3, 1)
    padded = model(ids, attention_mask=mask, position_ids=beside, use_cache=True)
    assert padded.past_key_values is not None
    assert torch.equal(padded.logits, model(ids, attention_mask=mask, use_cache=True).logits)
    cache = model(ids, position_ids=count).past_key_values
    step = model(ids[:, :1], past_key_values=cache, position_ids=torch.tensor([[19]])).logits
    assert_close(step, model(torch.cat([ids, ids[:, :1]], 1)).logits[:, -1:])


def test_the_work_stays_in_bounds():
    """Sequences of similar length share a call, and less than half of what is computed is padding."""
    lengths = torch.randint(1, 300, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    starts = torch.zeros(1, sum(lengths), dtype=torch.bool)
    starts[0, torch.tensor(lengths[:-1]).cumsum(0)] = True
    packing = Packing(starts)
    assert len(packing.groups) <= 9 and packing.longest == max(lengths)
    computed = sum(index.numel() for index, _ in packing.groups)
    assert sum(lengths) <= computed < 2 * sum(lengths)
    assert sum(len(index) for index, _ in packing.groups) == 200
    u = torch.randn(1, sum(lengths), 3)
    assert torch.equal(packing.apply(lambda x, call: 2 * x, u, LayerCall(1)), 2 * u)


@pytest.mark.parametrize("options", [{}, {"return_flash_attn_kwargs": True}, {"return_seq_idx": True}], ids=str)
def test_the_librarys_collator(options):
    """A batch without padding has the loss of the padded one."""
    texts = [random_ids(1, n, seed=n)[0] for n in (5, 19, 8, 8)]
    batch = DataCollatorWithFlattening(return_tensors="pt", **options)([{"input_ids": t.tolist()} for t in texts])
    padded = torch.nn.utils.rnn.pad_sequence(texts, True, -100)
    with torch.no_grad():
        call = {"attention_mask": (padded >= 0).long(), "labels": padded}
        assert_close(random_model()(**batch).loss, random_model()(padded.clamp(min=0), **call).loss)


@pytest.mark.parametrize("how", ["position_ids", "seq_idx"])
def test_a_trainer_keeps_what_tells_of_packing(how, tmp_path):
    """It drops columns of data that no argument of the model is named after."""
    model, ids, packed = random_model(), random_ids(1, 12), described(how, [5, 7])
    row = {"input_ids": ids[0].tolist(), "labels": ids[0].tolist(), how: packed[how][0].tolist()}
    trainer = Trainer(model, trainer_arguments(tmp_path), data_collator=default_data_collator)
    with torch.no_grad():
        expected = model(ids, labels=ids, **packed).loss
    assert trainer.evaluate(Dataset.from_list([row]))["eval_loss"] == pytest.approx(float(expected), rel=1e-5)


def test_a_default_device_is_not_that_of_places():
    with torch.device("meta"):
        places = Packing(torch.zeros(1, 8, dtype=torch.bool, device="cpu"))
        assert places.sequences(1, 8).device == places.positions(1, 8).device == torch.device("cpu")


OFFSETS = r"cu_seqlens must be ascending integers from 0 to 8, of one row, got"
BAD = {
    "short": ({"cu_seqlens": torch.tensor([0, 4]), "input_ids": random_ids(1, 8)}, OFFSETS),
    "standing": ({"cu_seqlens": torch.tensor([0, 4, 4, 8]), "input_ids": random_ids(1, 8)}, OFFSETS),
    "fractions": ({"cu_seqlens": torch.tensor([0, 4.7, 8]), "input_ids": random_ids(1, 8)}, OFFSETS),
    "shape": ({"position_ids": torch.zeros(2, 5)}, r"position_ids must have shape \(2, 8\), got \(2, 5\)"),
    "rows": ({"cu_seqlens": torch.tensor([0, 8])}, r"from 0 to 8, of one row, got \[0, 8\] for 2"),
    "mask": (
        {"position_ids": torch.arange(8).repeat(2, 1), "attention_mask": torch.ones(2, 5, dtype=torch.long)},
        r"attention_mask must have shape \(2, 8\), .* got \(2, 5\)",
    ),
    "disagree": (
        {"seq_idx": torch.tensor([[0] * 4 + [1] * 4] * 2), "position_ids": torch.arange(8).repeat(2, 1)},
        "position_ids and seq_idx describe different sequences",
    ),
}


@pytest.mark.parametrize("arguments, message", BAD.values(), ids=BAD.keys())
def test_bad_descriptions(arguments, message):
    with pytest.raises(ValueError, match=message):
        random_model()(**{"input_ids": random_ids(2, 8)} | arguments)


def test_a_cache_and_a_classifier_are_refused():
    model, ids, packed = random_model(), random_ids(1, 8), described("seq_idx", [3, 5])
    for kept in ({"use_cache": True}, {"past_key_values": ESSMCache(model.config)}):
        with pytest.raises(ValueError, match="packed sequences leave no single state"):
            model(ids, **packed, **kept)
    assert model(ids, **packed).past_key_values is None
    classifier = random_model(ESSMForSequenceClassification)
    classifier.model.forward = None  # it is not called
    with pytest.raises(ValueError, match="a classifier pools whole rows"):
        classifier(ids, **packed)
