# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What a server does with states: take rows out, put rows together, give room back, keep them on disk."""

import copy
import json
import os

import pytest
import torch
from helpers import assert_close, mostly_slow_variants, random_ids, random_model, variants
from safetensors import safe_open
from safetensors.torch import save_file

from modeling_essm import ESSMCache
from modeling_essm.decoding import load_cache, save_cache
from modeling_essm.export import empty_states, export_programs


@torch.no_grad()
def filled(model, ids, K=None):
    cache = ESSMCache(model.config)
    model(ids, past_key_values=cache, use_cache=True, spectral_budget=K)
    return cache


@torch.no_grad()
def step(model, cache, token, K):
    """(B, V) logits after one token of every row."""
    return model(token, past_key_values=cache, use_cache=True, spectral_budget=K).logits[:, 0]


def states(cache):
    return [tensor for layer in cache.layers for tensor in layer.tensors.values()]


@variants
def test_merged_rows_equal_solo_runs(variant):
    """Rows of several budgets and lengths, decoded together and taken apart again."""
    model, budgets, lengths = random_model(**variant), [2, 32, 7], [5, 19, 12]
    prompts = [random_ids(1, n, seed=n) for n in lengths]
    solo = [filled(model, ids, K) for ids, K in zip(prompts, budgets)]
    merged = ESSMCache.merge([filled(model, ids, K) for ids, K in zip(prompts, budgets)])
    assert merged.batch_size == 3 and merged.get_seq_length() == 19
    tokens = random_ids(3, 10, seed=1)
    for t in range(5):
        together = step(model, merged, tokens[:, t : t + 1], torch.tensor(budgets))
        for i, K in enumerate(budgets):
            assert_close(together[i : i + 1], step(model, solo[i], tokens[i : i + 1, t : t + 1], K))
    # the middle row, which alone needed the room, leaves; another comes
    merged = merged.select([2, 0])
    assert merged.layers[0].num_states == solo[2].layers[0].num_states
    late = random_ids(1, 7, seed=3)
    merged = ESSMCache.merge([merged, filled(model, late, 4)])
    solo, budgets = [solo[2], solo[0], filled(model, late, 4)], [7, 2, 4]
    tokens = tokens[[2, 0, 1]]
    for t in range(5, 10):
        together = step(model, merged, tokens[:, t : t + 1], torch.tensor(budgets))
        for i, K in enumerate(budgets):
            assert_close(together[i : i + 1], step(model, solo[i], tokens[i : i + 1, t : t + 1], K))


def test_select_leaves_the_original_alone():
    model, ids = random_model(), random_ids(3, 9)
    cache = filled(model, ids, 8)
    before = [t.clone() for t in states(cache)]
    part = cache.select(torch.tensor([2, 0]))
    assert part.batch_size == 2 and part.get_seq_length() == 9
    expected = filled(model, ids[[2, 0]], 8)
    for actual, wanted in zip(states(part), states(expected)):
        assert_close(actual, wanted)
    step(model, part, ids[:2, :1], 8)
    assert all(torch.equal(a, b) for a, b in zip(states(cache), before)) and cache.get_seq_length() == 9


@pytest.mark.parametrize(
    "mask", [[True, False, True], torch.tensor([True, False, True]), torch.tensor([[True], [False], [True]])], ids=str
)
def test_select_by_a_mask(mask):
    cache = filled(random_model(), random_ids(3, 9), 8)
    assert all(torch.equal(a, b) for a, b in zip(states(cache.select(mask)), states(cache.select([0, 2]))))


def test_every_row_keeps_its_own_stamp():
    model = random_model()
    merged = ESSMCache.merge([filled(model, random_ids(1, 5), 3), filled(model, random_ids(2, 5), 20)])
    token, before = random_ids(3, 1), [t.clone() for t in states(merged)]
    for budget, row, K in ((torch.tensor([4, 20, 20]), 0, 4), (torch.tensor([3, 20, 21]), 2, 21), (4, 0, 4)):
        with pytest.raises(ValueError, match=rf"spectral_budget {K} needs .* in row {row} of layer 0"):
            step(model, merged, token, budget)
    assert all(torch.equal(a, b) for a, b in zip(states(merged), before))
    step(model, copy.deepcopy(merged), token, torch.tensor([3, 20, 2]))
    step(model, copy.deepcopy(merged), token, 3)
    # stamps travel with the rows
    merged.reorder_cache(torch.tensor([2, 2, 0]))
    with pytest.raises(ValueError, match="in row 2 of layer 0"):
        step(model, merged, token, torch.tensor([20, 20, 4]))
    merged.batch_repeat_interleave(2)
    with pytest.raises(ValueError, match="in row 4 of layer 0"):
        step(model, merged, random_ids(6, 1), 4)
    merged.reset()
    model(random_ids(2, 5), past_key_values=merged, use_cache=True)  # as new


@variants
def test_shrinking_a_running_cache(variant):
    model, ids = random_model(**variant), random_ids(2, 9)
    whole, small = filled(model, ids, 32), filled(model, ids, 32)
    assert small.shrink(5) is small
    assert small.num_bytes == filled(model, ids, 5).num_bytes < 0.6 * whole.num_bytes
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in states(small))  # freed, not hidden
    for t in range(4):
        assert_close(step(model, small, ids[:, t : t + 1], 5), step(model, whole, ids[:, t : t + 1], 5))
    with pytest.raises(ValueError, match="spectral_budget 6 needs 22 states in layer 0, but this cache holds 19"):
        step(model, small, ids[:, :1], 6)
    small.shrink([4, 2])
    assert [layer.num_states for layer in small.layers] == [16, 10]
    small.shrink(32)  # nothing to give back
    assert [layer.num_states for layer in small.layers] == [16, 10]
    merged = ESSMCache.merge([filled(model, ids, 3), whole]).shrink(8)
    step(model, merged, random_ids(4, 1), torch.tensor([3, 3, 8, 8]))
    with pytest.raises(ValueError, match="in row 1"):
        step(model, merged, random_ids(4, 1), torch.tensor([3, 4, 8, 8]))
    with pytest.raises(ValueError, match=r"\[1, 32\], got 33"):
        whole.shrink(33)


@variants
@pytest.mark.parametrize("length", [1, 9, 14])
def test_states_of_one_row_lie_as_their_shapes_say(variant, length):
    """A clone of a part keeps the whole's stride in a dimension of size 1, and compiled steps look at strides."""
    model = random_model(**variant)
    cache = filled(model, random_ids(1, length), 9)
    for held in (cache, cache.select([0]), copy.deepcopy(cache).shrink(5), cache):
        assert all(tensor.stride() == torch.empty(tensor.shape).stride() for tensor in states(held))
        step(model, held, random_ids(1, 1), 5)


def test_shrinking_makes_nothing_larger():
    """A budget above the room that a cache has, or has been asked to make, changes nothing; nor after a reset."""
    model, ids = random_model(), random_ids(2, 9)
    fresh = ESSMCache(model.config, state_budget=4).shrink(8)
    ran, plain = filled(model, ids, 4).shrink(8), ESSMCache(model.config).shrink(8)
    merged = ESSMCache.merge([filled(model, ids, 4), filled(model, ids, 8)]).shrink(20)
    step(model, merged, random_ids(4, 1), torch.tensor([4, 4, 8, 8]))
    ran.reset()
    for cache in (fresh, ran, plain):
        with torch.no_grad():
            model(ids, past_key_values=cache, spectral_budget=4)
        assert cache.num_bytes == filled(model, ids, 4).num_bytes
    roomy = ESSMCache(model.config, state_budget=20).shrink(8)
    step(model, roomy, ids[:, :1], 4)
    assert roomy.num_bytes == filled(model, ids, 8).num_bytes


@mostly_slow_variants
@pytest.mark.sampled(1)
def test_states_have_one_layout(variant, tmp_path):
    """The same named tensors in a cache, in its file and in an exported program."""
    model = random_model(**variant)
    cache, path = filled(model, random_ids(2, 9), 5), tmp_path / "cache"
    save_cache(cache, path, model)
    held, saved = cache.states, written(path)[1]
    program = export_programs(model, 5)["step"]
    assert held.keys() == saved.keys() and list(held) == list(empty_states(program, 2))
    assert all(torch.equal(saved[name], held[name]) for name in held)
    other = ESSMCache(model.config)
    other.set_states(held)
    token = random_ids(2, 1)
    logits, after = model.step(token, (5, 5), held)
    assert torch.equal(logits, step(model, other, token, 5))
    assert after.keys() == held.keys() and all(torch.equal(after[name], other.states[name]) for name in after)


def test_moving_between_devices():
    cache = filled(random_model(), random_ids(2, 9), 4)
    assert cache.to("meta") is cache and all(t.is_meta for t in states(cache))


# --- On disk


@variants
def test_a_saved_cache_goes_on_bit_for_bit(variant, tmp_path):
    model, path = random_model(**variant), tmp_path / "cache.safetensors"
    cache = ESSMCache.merge([filled(model, random_ids(1, 5), 3), filled(model, random_ids(2, 9), 20)])
    save_cache(cache, path, model)
    assert os.listdir(tmp_path) == [path.name]
    loaded = load_cache(path, model)
    assert loaded.get_seq_length() == 9 and loaded.batch_size == 3
    token, budgets = random_ids(3, 1), torch.tensor([2, 20, 5])
    with pytest.raises(ValueError, match="in row 0 of layer 0"):
        step(model, loaded, token, 4)
    assert torch.equal(step(model, loaded, token, budgets), step(model, cache, token, budgets))


def test_bf16_weights_keep_their_states(tmp_path):
    model = random_model().to(torch.bfloat16)
    cache = filled(model, random_ids(2, 9), 5)
    save_cache(cache, tmp_path / "cache", model)
    loaded = load_cache(tmp_path / "cache", model)
    assert [t.dtype for t in states(loaded)] == [t.dtype for t in states(cache)]
    assert all(torch.equal(a, b) for a, b in zip(states(loaded), states(cache)))


def test_a_saved_cache_of_another_model_is_refused(tmp_path):
    model, path = random_model(), tmp_path / "cache"
    save_cache(filled(model, random_ids(2, 9), 5), path, model)
    with pytest.raises(ValueError, match=r"of another model.*'hidden_size': 16.*'hidden_size': 24"):
        load_cache(path, random_model(hidden_size=24))
    with pytest.raises(ValueError, match=r"of another model.*'num_hidden_layers': 2.*'num_hidden_layers': 3"):
        load_cache(path, random_model(num_hidden_layers=3))
    with pytest.raises(ValueError, match=r"of another model: other weights"):
        load_cache(path, random_model(seed=1))  # same shape
    load_cache(path, copy.deepcopy(model).truncate(5))
    load_cache(path, copy.deepcopy(model).to(torch.bfloat16))
    assert load_cache(path, random_model(seed=0)).batch_size == 2


@pytest.mark.parametrize(
    "made, own",
    [
        ({}, {"hidden_size": 24}),
        ({"filter_length": 512}, {"filter_length": 1024}),
        ({}, {"ar_order": 2}),
        ({"ar_order": 2}, {"ar_order": 0}),
        ({"ar_order": 2}, {"ar_order": 2, "ar_feature_shift": 2}),
        ({"ar_order": 2, "ar_negative_filters": False}, {"ar_order": 2, "ar_negative_filters": True}),
    ],
    ids=str,
)
def test_a_running_cache_of_another_model_is_refused(made, own):
    model, other = random_model(**made), random_model(**own)
    cache = filled(model, random_ids(2, 9), 5)
    before = [t.clone() for t in states(cache)]
    name, value = list(own.items())[-1]
    was = getattr(model.config, name)
    with pytest.raises(ValueError, match=f"of a model of {name} {was}, but this one has {value}"):
        step(other, cache, random_ids(2, 1), 5)
    assert all(torch.equal(a, b) for a, b in zip(states(cache), before))
    step(random_model(state_margin=10, **made), cache, random_ids(2, 1), 5)  # more states than it needs: as good


@pytest.mark.parametrize("field", [{"ar_feature_shift": 2}, {"ar_negative_filters": False}], ids=str)
def test_a_file_says_which_ar_stu_made_it(field, tmp_path):
    """And one of today's default says what those from before the fields could be said say."""
    path, plain, other = tmp_path / "cache", random_model(ar_order=2), random_model(ar_order=2, **field)
    for model, refused in ((plain, other), (other, plain)):
        save_cache(filled(model, random_ids(2, 9), 5), path, model)
        load_cache(path, model)
        with pytest.raises(ValueError, match=rf"of another model.*{next(iter(field))}"):
            load_cache(path, refused)
    shape = {"num_hidden_layers": 2, "hidden_size": 16, "filter_length": 512, "ar_order": 2}
    assert filled(plain, random_ids(2, 9), 5).model_shape() == shape


def test_damaged_files(tmp_path):
    model, path = random_model(), tmp_path / "cache"
    with pytest.raises(FileNotFoundError):
        load_cache(path, model)
    save_cache(filled(model, random_ids(2, 9), 5), path, model)
    whole = path.read_bytes()
    for damaged in (whole[:-100], whole[:50], b""):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="truncated or corrupt"):
            load_cache(path, model)
    save_file({"a": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match="is not a cache of this version"):
        load_cache(path, model)
    save_file({"a": torch.zeros(2)}, path, metadata={"format": "essm-cache-1", "cache": "{"})
    with pytest.raises(ValueError, match="truncated or corrupt"):
        load_cache(path, model)


def written(path):
    """Metadata and tensors of a saved cache."""
    with safe_open(path, framework="pt") as file:
        return file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def without_checksum(path):
    """Rewrite a file as versions before the checksum wrote it: (record, tensors)."""
    metadata, tensors = written(path)
    return json.loads(metadata["cache"]), tensors


def write_without_checksum(path, record, tensors):
    save_file(tensors, path, metadata={"format": "essm-cache-1", "cache": json.dumps(record)})


@variants
def test_files_without_a_checksum_still_load(variant, tmp_path):
    model, path = random_model(**variant), tmp_path / "cache"
    cache = ESSMCache.merge([filled(model, random_ids(1, 5), 3), filled(model, random_ids(2, 9), 20)])
    save_cache(cache, path, model)
    write_without_checksum(path, *without_checksum(path))
    loaded = load_cache(path, model)
    token, budgets = random_ids(3, 1), torch.tensor([2, 20, 5])
    assert torch.equal(step(model, loaded, token, budgets), step(model, cache, token, budgets))


def test_any_flipped_bit_is_found(tmp_path):
    """Bits of the whole file, drawn at random, and all of the words that say what it is."""
    model, path = random_model(num_hidden_layers=1), tmp_path / "cache"
    save_cache(filled(model, random_ids(1, 9), 2), path, model)
    whole = path.read_bytes()
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 8 * len(whole), (300,), generator=generator).tolist()
    for word in (b"essm-cache", b"seen_tokens", b"sha256"):
        bits += range(8 * whole.index(word), 8 * (whole.index(word) + len(word) + 6))
    for bit in bits:
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=str(path)):
            load_cache(path, model)
    path.write_bytes(whole)
    load_cache(path, model)


def _rename(record, tensors):
    tensors["1.feature"] = tensors.pop("1.features")


def _cut(record, tensors):
    tensors["1.features"] = tensors["1.features"][:, :3].clone()


def _grow(record, tensors):
    tensors["0.features"] = torch.zeros(2, 500, 16)


def _nan(record, tensors):
    tensors["1.features"][1, 2, 3] = torch.nan


def _inf(record, tensors):
    tensors["0.inputs"][0, 1, 2] = torch.inf


def _replace(name, change):
    return lambda record, tensors: tensors.update({name: change(tensors[name]).clone()})


def _record(**fields):
    return lambda record, tensors: record.update(fields)


DAMAGE = {
    "missing-layer": lambda record, tensors: [tensors.pop(x) for x in sorted(tensors) if x.startswith("1.")],
    "no-tensors": lambda record, tensors: [tensors.pop(x) for x in sorted(tensors)],
    "foreign-tensor": lambda record, tensors: tensors.update(extra=torch.zeros(2)),
    "third-layer": lambda record, tensors: tensors.update({"2.features": tensors["1.features"].clone()}),
    "fewer-layers": lambda record, tensors: record["layers"].pop(),
    "renamed": _rename,
    "other-rows": _replace("1.features", lambda t: t[:1]),
    "other-width": _replace("1.features", lambda t: t[:, :, :8]),
    "too-few-states": _cut,
    "too-many-states": _grow,
    "other-states": _replace("1.negative", lambda t: t[:, :-1]),
    "other-order": _replace("1.outputs", lambda t: t[:, :1]),
    "no-rows": lambda record, tensors: tensors.update({name: t[:0].clone() for name, t in tensors.items()}),
    "scalar": _replace("0.features", lambda t: t[0, 0, 0]),
    "integers": _replace("0.features", lambda t: t.long()),
    "half-states": _replace("0.features", lambda t: t.half()),
    "booleans": _replace("0.inputs", lambda t: t > 0),
    "nan": _nan,
    "inf": _inf,
    "negative-tokens": _record(seen_tokens=-1),
    "text-tokens": _record(seen_tokens="9"),
    "float-tokens": _record(seen_tokens=9.0),
    "true-tokens": _record(seen_tokens=True),
    "huge-tokens": _record(seen_tokens=10**30),
    "layers-null": _record(layers=None),
    "layers-text": _record(layers="ab"),
    "entries": _record(layers=[1, 2]),
    "room-of-one": _record(layers=[[None, [17]], [None, None]]),
    "room-text": _record(layers=[[None, "17"], [None, None]]),
    "room-nested": _record(layers=[[None, [[17], [17]]], [None, None]]),
    "room-above": _record(layers=[[None, [17, 99]], [None, None]]),
    "room-zero": _record(layers=[[None, [0, 17]], [None, None]]),
    "state-budget-text": _record(layers=[["5", None], [None, None]]),
    "state-budget-zero": _record(layers=[[0, None], [None, None]]),
    "state-budget-list": _record(layers=[[[5], None], [None, None]]),
    "model-null": _record(model=None),
    "model-capacities": lambda record, tensors: record["model"].update(capacities=5),
    "model-nan": lambda record, tensors: record["model"]["samples"].update({"the norms": [float("nan")] * 32}),
    "model-text": lambda record, tensors: record["model"]["samples"].update({"the norms": ["a"] * 32}),
    "samples-list": lambda record, tensors: record["model"].update(samples=[1]),
    "shape": _record(shape=None),
    "missing-key": lambda record, tensors: record.pop("layers"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_contents_that_no_model_saves_are_refused(damage, tmp_path):
    """Of a file without a checksum, or of one made on purpose, the structure is all there is to check."""
    model, path = random_model(ar_order=2), tmp_path / "cache"
    save_cache(filled(model, random_ids(2, 9), 5), path, model)
    record, tensors = without_checksum(path)
    write_without_checksum(path, record, tensors)
    load_cache(path, model)
    damage(record, tensors)
    write_without_checksum(path, record, tensors)
    with pytest.raises(ValueError, match=str(path)):
        load_cache(path, model)


@pytest.mark.parametrize("text", ["[]", "3", "null", "{}", "[" * 100_000], ids=lambda text: text[:4])
def test_records_that_are_none(text, tmp_path):
    model, path = random_model(), tmp_path / "cache"
    save_cache(filled(model, random_ids(2, 9), 5), path, model)
    save_file(written(path)[1], path, metadata={"format": "essm-cache-1", "cache": text})
    with pytest.raises(ValueError, match=f"{path} is truncated or corrupt"):
        load_cache(path, model)


def test_states_that_are_not_finite_are_not_saved(tmp_path):
    model, path = random_model(), tmp_path / "cache"
    cache = filled(model, random_ids(2, 9), 5)
    cache.layers[1].apply(lambda t: t * torch.nan)
    with pytest.raises(ValueError, match="features of layer 1 is not finite"):
        save_cache(cache, path, model)
    assert not os.listdir(tmp_path)


def test_saving_is_atomic(tmp_path, monkeypatch):
    model, path = random_model(), tmp_path / "cache"
    save_cache(filled(model, random_ids(2, 9), 5), path, model)
    before = path.read_bytes()
    monkeypatch.setattr(os, "replace", lambda *a: (_ for _ in ()).throw(OSError("killed")))
    with pytest.raises(OSError, match="killed"):
        save_cache(filled(model, random_ids(2, 9), 7), path, model)
    assert path.read_bytes() == before


# --- Bad calls


def test_bad_rows_and_caches():
    model = random_model()
    cache = filled(model, random_ids(2, 9), 5)
    masks = ([True], [True, False, True], [False, False], torch.tensor([False, False]))
    for rows in ([2], [-1], [], torch.tensor([0, 5]), [0.5, 1.0], torch.tensor([0.0, 1.0]), *masks):
        with pytest.raises(ValueError, match=r"rows must be integers in \[0, 1\], at least one, or a mask of 2"):
            cache.select(rows)
    empty = ESSMCache(model.config)
    with pytest.raises(ValueError, match="cannot select rows of an empty cache"):
        empty.select([0])
    with pytest.raises(ValueError, match="cannot merge an empty cache"):
        ESSMCache.merge([cache, empty])
    with pytest.raises(ValueError, match="merge needs at least one cache"):
        ESSMCache.merge([])
    with pytest.raises(ValueError, match="caches of different models"):
        ESSMCache.merge([cache, filled(random_model(num_hidden_layers=1), random_ids(1, 3))])
    with pytest.raises(ValueError, match="cannot save an empty cache"):
        save_cache(empty, "nowhere", model)
