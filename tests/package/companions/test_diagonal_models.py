# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Diagonal models as transformers models: configuration, padding, cache, generation, heads, saving and loading."""

import pytest
import torch
import torch.nn.functional as F
from elastic_states import random_inputs, random_model
from helpers import filled
from helpers import random_model as spectral_model
from recurrences import diagonal_model, ids_of
from torch.func import functional_call, grad, vmap
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from modeling_essm.companions import (
    DiagonalSSMConfig,
    DiagonalSSMForCausalLM,
    DiagonalSSMForSequenceClassification,
    DiagonalSSMModel,
    StateCache,
)
from modeling_essm.companions.models.modeling_diagonal_ssm import _mean_of_real, normalised
from modeling_essm.companions.systems import DiagonalAdapter


def assert_close(actual, expected, atol=1e-4):
    """fp32 over 20 steps and three layers, of logits up to 10."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def keep_modes(mixer, *kept):
    """A layer that keeps these modes alone; of S4D in every channel."""
    keep = torch.isin(torch.arange(mixer.state_size), torch.tensor(kept, dtype=torch.long))
    DiagonalAdapter().shrink(mixer, keep.expand(8, -1) if mixer.siso else keep, len(kept))


def ragged(s4d):
    """Channels of the first layer lose different modes, of an S4D model."""
    keep = torch.rand(8, 4, generator=torch.Generator().manual_seed(0)) < 0.6
    DiagonalAdapter().shrink(s4d.mixers[0], keep, 4)
    return s4d.mixers[0].present


both = pytest.mark.parametrize("kind", ["s5", "s4d"])  # whose states are scanned for all channels, and for each


@torch.no_grad()
def test_a_layer_adds_a_gated_branch():
    """x + GLU(W GELU(mixer(norm(x))))."""
    layer, x = diagonal_model("s5").model.layers[0], torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(0))
    a, b = layer.mix(F.gelu(layer.mixer(layer.norm(x))[0])).chunk(2, dim=-1)
    assert_close(layer(x, None, None)[0], x + a * b.sigmoid(), atol=1e-6)


# --- Padding and inputs


MASKS = {
    "left": [[0] * 5 + [1] * 7, [1] * 12],
    "right": [[1] * 7 + [0] * 5, [1] * 12],
    "holes": [[0, 1, 1, 0, 0, 1, 1, 1, 0, 1, 0, 1], [1, 0] * 6],
}


@pytest.mark.parametrize(
    ("kind", "mask"), [("s5", "holes"), ("lru", "left"), ("lru", "right"), ("s4d", "holes"), ("s4d", "right")]
)
def test_padding_does_not_exist(kind, mask):
    """Outputs and states, at once and in pieces, of which one has no real position; the mask covers what is cached."""
    model, ids, mask = diagonal_model(kind), ids_of(2, 12), torch.tensor(MASKS[mask])
    outputs = model(ids, attention_mask=mask, use_cache=True)
    cache, logits = None, []
    for start in (0, 4, 8):
        end = start + 4
        piece = model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)
        cache = piece.past_key_values
        logits.append(piece.logits)
    for row in range(2):
        real = mask[row].bool()
        alone = model(ids[row : row + 1, real], use_cache=True)
        for found in (outputs.logits, torch.cat(logits, 1)):
            assert_close(found[row, real], alone.logits[0])
        for found in (outputs.past_key_values, cache):
            for one, other in zip(found.states, alone.past_key_values.states):
                assert_close(one[row], other[0])
    last = mask[0].nonzero().max()
    assert torch.equal(outputs.logits[0, -1], outputs.logits[0, last])


@both
def test_bidirectional_padding(kind):
    model = diagonal_model(kind, DiagonalSSMForSequenceClassification, bidirectional=True, num_labels=3)
    ids = ids_of(2, 12)
    for mask in MASKS.values():
        mask = torch.tensor(mask)
        logits = model(ids, attention_mask=mask).logits
        for row in range(2):
            assert_close(logits[row], model(ids[row : row + 1, mask[row].bool()]).logits[0])
    changed = ids.clone()
    changed[:, -1] = 3 + (ids[:, -1] - 2) % 34
    body = model.model
    assert (body(ids)[0] - body(changed)[0])[:, 0].abs().max() > 1e-3  # the first position sees the last
    for given in ({"use_cache": True}, {"past_key_values": StateCache()}):
        with pytest.raises(ValueError, match="a bidirectional model reads whole sequences"):
            body(ids, **given)


@both
def test_an_empty_batch_of_a_diagonal_model(kind):
    model, ids = diagonal_model(kind), ids_of(0, 6)
    outputs = model(ids, attention_mask=torch.ones_like(ids), use_cache=True)
    for length in (1, 4):
        outputs = model(ids[:, :length], past_key_values=outputs.past_key_values)
        assert outputs.logits.shape == (0, length, 37)
    outputs.logits.sum().backward()
    assert all(not p.grad.any() for p in model.parameters())
    classifier = diagonal_model(kind, DiagonalSSMForSequenceClassification, bidirectional=True, num_labels=3)
    assert classifier(ids, attention_mask=torch.ones_like(ids)).logits.shape == (0, 3)


def gradients_with(model, name, filling, mask, labels):
    """Of all weights and of inputs (2, 12, 8) that hold `filling` behind the mask."""
    model.zero_grad()
    x = random_inputs(2, 12, 8, dtype=torch.float32).masked_fill(mask[..., None] == 0, filling).requires_grad_()
    model(**{name: x}, attention_mask=mask, labels=labels).loss.backward()
    return [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


@both
def test_numbers_behind_a_mask_are_not_read(kind):
    mask, classes = torch.tensor(MASKS["holes"]), torch.tensor([0, 1])
    labels = ids_of(2, 12).masked_fill(mask == 0, -100)
    signals = {"num_input_features": 8, "num_labels": 3, "bidirectional": True}
    for model, name, given in (
        (diagonal_model(kind), "inputs_embeds", labels),
        (diagonal_model(kind, DiagonalSSMForSequenceClassification, **signals), "input_features", classes),
    ):
        zeros, nans = (gradients_with(model, name, filling, mask, given) for filling in (0.0, float("nan")))
        assert all(map(torch.equal, zeros, nans)) and all(each.isfinite().all() for each in nans)


def test_bad_inputs():
    model, ids = diagonal_model("s5"), ids_of(2, 6)
    features = diagonal_model("s5", DiagonalSSMForSequenceClassification, num_input_features=4)
    for called, given, message in [
        (model, {}, "give exactly one of input_ids and inputs_embeds, got none"),
        (features, {"input_ids": ids}, "give exactly one of input_features and inputs_embeds, got input_ids"),
        (model.model, {"input_features": torch.zeros(2, 3, 5)}, "give exactly one of input_ids"),
        (model, {"input_ids": torch.tensor([[5, 37]])}, r"input_ids must be in \[0, 36\], got 5 to 37"),
        (model, {"input_ids": ids[:, :0]}, "with at least one position"),
        (model, {"inputs_embeds": torch.zeros(2, 3, 7)}, r"inputs_embeds must have shape \(B, L, 8\)"),
        (features, {"input_features": torch.zeros(2, 3, 5)}, r"input_features must have shape \(B, L, 4\)"),
        (model, {"input_ids": ids, "attention_mask": torch.ones(2, 5)}, r"attention_mask must have shape \(2, 6\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            called(**given)
    for given in (model, model.model, diagonal_model("s5", DiagonalSSMForSequenceClassification)):
        with pytest.raises(ValueError, match=r"position_ids must have shape \(2, 6\), got \(3,\)"):
            given(ids, position_ids=torch.arange(3))


@pytest.mark.parametrize(
    ("positions", "mask", "packed"),
    [
        ([0, 1, 2, 3, 4], [1, 1, 1, 1, 1], False),
        ([3, 4, 5, 6, 7], [1, 1, 1, 1, 1], False),  # goes on from a cache
        ([1, 1, 0, 1, 2], [0, 0, 1, 1, 1], False),  # padding in front
        ([0, 1, 1, 1, 2], [1, 1, 0, 0, 1], False),  # and within
        ([0, 1, 2, 1, 1], [1, 1, 1, 0, 0], False),
        ([0, 1, 2, 0, 1], [1, 1, 1, 1, 1], True),
        ([0, 1, 3, 4, 5], [1, 1, 1, 1, 1], True),
        ([0, 1, 2, 0, 1], [1, 1, 0, 1, 1], True),  # the second sequence begins behind padding
        ([0, 1, 0, 0, 1], [0, 1, 0, 1, 1], True),
        ([0, 1, 2, 0, 0], [0, 0, 1, 1, 1], True),
        ([0, 1, 2, 0, 2], [1, 1, 1, 0, 1], True),  # as far as before
    ],
)
def test_positions_of_packed_sequences_are_refused(positions, mask, packed):
    model, ids = diagonal_model("s5"), ids_of(2, 5)
    given = {"position_ids": torch.tensor([positions]), "attention_mask": torch.tensor([mask, mask])}
    if not packed:
        assert torch.equal(model(ids, **given).logits, model(ids, attention_mask=given["attention_mask"]).logits)
        return
    with pytest.raises(ValueError, match="position_ids tells of packed sequences, which are not supported"):
        model(ids, **given)


# --- The cache


def test_a_cache_goes_by_both_names():
    whole, ids = diagonal_model("s5"), ids_of(2, 6)
    for model in (whole, whole.model):
        caches = [whole(ids, use_cache=True).past_key_values for _ in range(2)]
        one, other = (model(ids[:, :1], **{name: c})[0] for name, c in zip(("past_key_values", "cache"), caches))
        assert torch.equal(one, other) and all(cache.get_seq_length() == 7 for cache in caches)
        with pytest.raises(ValueError, match="give past_key_values or cache, two names of one argument, not both"):
            model(ids[:, :1], past_key_values=caches[0], cache=caches[1])


@both
def test_pieces_equal_one_pass(kind, pieces=(1, 9, 1, 2, 7)):
    model, ids = diagonal_model(kind), ids_of(2, 20)
    whole = model(ids, use_cache=True)
    cache, logits, sizes = None, [], set()
    for piece in ids.split(list(pieces), 1):
        outputs = model(piece, past_key_values=cache, use_cache=True)
        cache = outputs.past_key_values
        logits.append(outputs.logits)
        sizes.add(cache.num_bytes)
    assert_close(torch.cat(logits, 1), whole.logits)
    for one, other in zip(cache.states, whole.past_key_values.states, strict=True):
        assert_close(one, other)
    assert cache.get_seq_length() == 20
    assert sizes == {2 * 8 * 8 * (8 if kind == "s4d" else 1)}  # constant: rows, bytes, modes, channels


def test_what_a_cache_refuses():
    model, ids = diagonal_model("s5"), ids_of(2, 6)
    cache = model(ids, use_cache=True).past_key_values
    elastic = random_model(latent_size=4)(random_inputs(2, 6, 5), use_cache=True).past_key_values
    spectral = spectral_model(vocab_size=37)
    for called, rows, given, message in (
        (model, 1, cache, "past_key_values holds 2 rows, but the input has 1"),
        (diagonal_model("s5", state_sizes=[4] * 3), 2, cache, r"of state_sizes \[5, 0, 3\], .* has \[4, 4, 4\]"),
        (diagonal_model("lru"), 2, cache, "past_key_values is of a model of parameterization s5, but this one has lru"),
        (diagonal_model("s5", hidden_size=4), 2, cache, "is of a model of hidden_size 8, but this one has 4"),
        (model, 2, elastic, "past_key_values is of a model of model_type elastic_state, but this one has diagonal_ssm"),
        (model, 2, filled(spectral, ids), "past_key_values must be a StateCache, got ESSMCache"),
        (spectral, 2, cache, "past_key_values must be an ESSMCache, got StateCache"),
        (model, 2, (), "past_key_values must be a StateCache, got tuple"),
    ):
        with pytest.raises(ValueError, match=message):
            called(ids[:rows], past_key_values=given)
    with pytest.raises(ValueError, match="cannot be cropped"):
        cache.crop(3)
    cache.batch_repeat_interleave(2)
    assert [state.shape[0] for state in cache.states] == [4] * 3 and torch.equal(cache.states[0][0], cache.states[0][1])
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.states == [] and not cache.has_previous_state()


# --- Generation


@pytest.mark.parametrize("kind", ["lru", "s4d"])
def test_generation_from_padded_prompts(kind):
    model, ids = diagonal_model(kind), ids_of(2, 9)
    mask = torch.tensor([[0] * 4 + [1] * 5, [1] * 9])
    greedy = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    generated = model.generate(ids.masked_fill(mask == 0, 0), attention_mask=mask, **greedy)
    assert torch.equal(generated[:1, 9:], model.generate(ids[:1, 4:], **greedy)[:, 5:])
    assert torch.equal(generated[1:], model.generate(ids[1:], **greedy))
    pieces = model.generate(ids.masked_fill(mask == 0, 0), attention_mask=mask, prefill_chunk_size=2, **greedy)
    assert torch.equal(pieces, generated)


@pytest.mark.parametrize("kind", ["lru", "s4d"])
def test_generation_goes_on_from_a_cache(kind):
    """With the whole text, of which it reads what is new, or with new tokens alone and the mask of all."""
    model, ids, new = diagonal_model(kind), ids_of(2, 9), ids_of(2, 3)
    greedy = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    text = torch.cat([ids, new], 1)
    expected = model.generate(text, **greedy)[:, 12:]
    for prompt in (text, new):
        cache = model(ids, use_cache=True).past_key_values
        found = model.generate(prompt, attention_mask=torch.ones(2, 12).long(), past_key_values=cache, **greedy)
        assert torch.equal(found[:, prompt.shape[1] :], expected) and cache.get_seq_length() == 17
    for read in (text, ids_of(2, 17)):
        with pytest.raises(
            ValueError, match=f"past_key_values has read 17 positions, and the prompt has {read.shape[1]}"
        ):
            model.generate(read, past_key_values=cache, **greedy)
    embeds = model.get_input_embeddings()(ids)
    with pytest.raises(ValueError, match="prefill_chunk_size reads input_ids in pieces"):
        model.generate(ids, inputs_embeds=embeds, prefill_chunk_size=2, **greedy)


def test_special_tokens_are_in_the_vocabulary():
    """Those of bytes where it has them, and such as are given."""
    names = ("pad_token_id", "bos_token_id", "eos_token_id")
    found = [[getattr(DiagonalSSMConfig(vocab_size=size), name) for name in names] for size in (100, 258, 259)]
    assert found == [[None] * 3, [256, 257, None], [256, 257, 258]]
    assert DiagonalSSMConfig(vocab_size=100, eos_token_id=[3, 4]).eos_token_id == [3, 4]


@both
def test_beams(kind):
    """With a cache, whose rows are reordered, as without: the same beams, and the same scores of them."""
    model, ids = diagonal_model(kind), ids_of(2, 5)
    beams = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 7, "do_sample": False, "eos_token_id": None}
    beams |= {"return_dict_in_generate": True, "output_scores": True}
    generated, expected = model.generate(ids, **beams), model.generate(ids, use_cache=False, **beams)
    assert torch.equal(generated.sequences, expected.sequences)
    assert_close(generated.sequences_scores, expected.sequences_scores)


# --- Training


@both
def test_losses_and_gradients(kind):
    model, ids = diagonal_model(kind), ids_of(2, 12)
    outputs = model(ids, labels=ids, output_hidden_states=True)
    logp = outputs.logits[:, :-1].log_softmax(-1)
    torch.testing.assert_close(outputs.loss, -logp.gather(2, ids[:, 1:, None]).mean())
    assert len(outputs.hidden_states) == 4 and outputs.hidden_states[0].shape == (2, 12, 8)
    assert torch.equal(model.lm_head(outputs.hidden_states[-1]), outputs.logits)
    outputs.loss.backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.numel() == 0 or p.grad.abs().max() > 0 or "layers.1" in name, name
    assert model.lm_head.weight is model.model.embed_tokens.weight
    kept = model(ids, logits_to_keep=2).logits
    assert torch.equal(kept, model(ids).logits[:, -2:])


@both
def test_gradients_of_single_samples(kind):
    model, ids = diagonal_model(kind), ids_of(2, 6)
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights, row):
        return functional_call(model, weights, (row[None],), {"labels": row[None], "use_cache": False}).loss

    together = vmap(grad(loss), (None, 0))(weights, ids)
    for i, row in enumerate(ids):
        for name, alone in grad(loss)(weights, row).items():
            assert_close(together[name][i], alone)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    model, ids, grads = diagonal_model("s5", dropout=0.2).train(), ids_of(2, 12), []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.zero_grad()
        torch.manual_seed(3)
        model(ids, labels=ids, attention_mask=torch.tensor(MASKS["left"])).loss.backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads))


def test_layers_with_running_statistics_are_not_run_twice():
    model, ids = diagonal_model("s5", norm="batch").train(), ids_of(2, 12)
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match='statistics of norm="batch" twice'):
        model(ids)
    with torch.no_grad():
        model(ids)
    model.eval()(ids)


@pytest.mark.parametrize("labels", [1, 3])
def test_classification_of_features(labels):
    fields = {"num_input_features": 4, "num_labels": labels, "bidirectional": True}
    model = diagonal_model("lru", DiagonalSSMForSequenceClassification, **fields)
    x = torch.randn(5, 9, 4, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([0, 1, 2, 1, 0]) if labels > 1 else torch.tensor([0.1, -1.0, 2.0, 0.5, 0.0])
    outputs = model(input_features=x, labels=targets)
    logits = outputs.logits
    assert torch.equal(logits, model.score(model.model(input_features=x).last_hidden_state.mean(1)))
    expected = (
        torch.nn.functional.cross_entropy(logits, targets) if labels > 1 else (logits[:, 0] - targets).square().mean()
    )
    torch.testing.assert_close(outputs.loss, expected)


def test_long_rows_are_averaged_in_fp32():
    for length in (16_384, 70_000):
        states = torch.full((1, length, 1), 60.0, dtype=torch.float16)
        for real in (None, torch.ones(1, length)):
            assert _mean_of_real(states, real).item() == 60.0


def test_what_models_announce():
    signals = diagonal_model("s5", DiagonalSSMForSequenceClassification, num_input_features=4)
    assert (signals.main_input_name, diagonal_model("s5").main_input_name) == ("input_features", "input_ids")
    assert signals._keep_in_fp32_modules_strict == {"Lambda", "log_step"}  # those that there are
    assert not signals.supports_context_parallel and not random_model().supports_context_parallel


def test_batch_norm_does_not_decode_in_training():
    """Outputs would depend on the other rows, and its running statistics on what is decoded."""
    model, ids = diagonal_model("lru", norm="batch").train(), ids_of(2, 5)
    with pytest.raises(ValueError, match=r"call model\.eval\(\) before decoding"):
        model.generate(ids, max_new_tokens=2)
    model(ids, labels=ids, use_cache=True).loss.backward()


def test_batch_norm_counts_real_positions():
    """Those of padding do not enter its statistics; in eval it uses those of training."""
    model = diagonal_model("lru", DiagonalSSMForSequenceClassification, norm="batch", num_labels=3).train()
    norm, mask = model.model.layers[0].norm, torch.tensor(MASKS["left"]).bool()
    x = torch.randn(2, 12, 8, generator=torch.Generator().manual_seed(0))
    y, kept = normalised(norm, x, mask), x[mask]
    expected = (kept - kept.mean(0)) / (kept.var(0, unbiased=False) + norm.eps).sqrt()
    assert_close(y[mask], expected, 1e-5)
    assert_close(norm.running_mean, 0.1 * kept.mean(0), 1e-6)
    assert not list(norm.parameters())
    norm.eval()
    assert_close(normalised(norm, x, mask), (x - norm.running_mean) / (norm.running_var + norm.eps).sqrt(), 1e-5)


# --- Saving and loading


def test_a_mixer_that_layers_share_is_not_saved(tmp_path):
    model = diagonal_model("s5")
    model.model.layers[1].mixer = model.model.layers[0].mixer
    with pytest.raises(ValueError, match="a mixer of its own to be saved, got 2 mixers, the model has 3 layers"):
        model.save_pretrained(tmp_path)


AUTO = {
    DiagonalSSMModel: AutoModel,
    DiagonalSSMForCausalLM: AutoModelForCausalLM,
    DiagonalSSMForSequenceClassification: AutoModelForSequenceClassification,
}


@pytest.mark.parametrize(("kind", "cls"), zip(("s4d", "lru", "s5"), AUTO), ids=lambda x: getattr(x, "__name__", x))
def test_auto_classes_load_what_was_saved(kind, cls, tmp_path):
    """Layers of different size, one of them without modes; of S4D with channels of different size."""
    model, ids = diagonal_model(kind, cls, state_sizes=[4, 0, 3], norm="batch"), ids_of(2, 12)
    if kind == "s4d":
        present = ragged(model)
    keep_modes(model.mixers[2], 0, 2)  # nobody has to remember config.state_sizes
    model.train()(ids)  # running statistics are not what they were
    model.eval().save_pretrained(tmp_path)
    loaded, info = AUTO[cls].from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is cls and not info["missing_keys"] and not info["unexpected_keys"]
    assert loaded.config.state_sizes == AutoConfig.from_pretrained(tmp_path).state_sizes == [4, 0, 2]
    assert torch.equal(loaded(ids)[0], model(ids)[0])
    assert all(getattr(getattr(m, name), "_no_weight_decay", False) for m in loaded.mixers for name in m.pole_names)
    if kind == "s4d":
        assert torch.equal(loaded.mixers[0].present, present)
    body = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(body(ids)[0], (model if cls is DiagonalSSMModel else model.model)(ids)[0])


@pytest.mark.parametrize("kind", ["lru", "s4d"])
def test_bf16(kind, tmp_path):
    """Poles stay in fp32; logits are those of fp32 up to bf16's 8 bits in three layers; training goes on."""
    model, ids = diagonal_model(kind, initializer_range=0.1), ids_of(2, 12)
    model.save_pretrained(tmp_path)
    small = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for mixer in small.mixers:
        dtypes = {name: p.dtype for name, p in mixer.named_parameters()}
        assert all(dtypes[name] == torch.float32 for name in mixer.pole_names)
        assert dtypes["C"] == dtypes["D"] == torch.bfloat16
    new = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)
    assert [p.dtype for p in new.parameters()] == [p.dtype for p in small.parameters()]
    outputs = small(ids, labels=ids, use_cache=True)
    assert outputs.logits.dtype == torch.bfloat16 and outputs.past_key_values.states[0].dtype == torch.complex64
    expected = model(ids).logits
    assert (outputs.logits - expected).abs().max() < 0.05 * expected.abs().max()
    outputs.loss.backward()
    assert small.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None).shape == (2, 15)
    assert model.to(torch.bfloat16)(ids).logits.isfinite().all()  # poles too, by hand
