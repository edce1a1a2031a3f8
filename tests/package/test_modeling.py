# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Mixer, block, models and heads: names, budgets, causality, padding, gradients, compilation, loading."""

import copy
import re
import shutil

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    BUDGETS,
    CAPACITY,
    VARIANTS,
    assert_close,
    random_ids,
    random_model,
    randomise,
    tiny_config,
    truncate,
    variants,
)

from modeling_essm import ESSMCache, ESSMConfig, ESSMForCausalLM, ESSMForSequenceClassification, ESSMModel
from modeling_essm.spectral_basis import spectral_basis

ALGORITHMS = ("chunked", "fft", "step", "naive")
algorithms = pytest.mark.parametrize("algorithm", ALGORITHMS)
budgets = pytest.mark.parametrize("K", BUDGETS, ids=lambda K: f"K{K}")

LAYER = {
    "input_norm.weight": (16,),
    "input_norm.bias": (16,),
    "mixer.gate_in.weight": (8, 16),
    "mixer.gate_in.bias": (8,),
    "mixer.gate_out.weight": (32, 8),
    "mixer.gate_out.bias": (32,),
    "mixer.channel_mixing": (32, 16, 16),
    "mixer.skip.weight": (16, 16),
    "ffn_norm.weight": (16,),
    "ffn_norm.bias": (16,),
    "ffn.up.weight": (64, 16),
    "ffn.up.bias": (64,),
    "ffn.down.weight": (16, 64),
    "ffn.down.bias": (16,),
}
BODY = {
    **{f"layers.{i}.{name}": shape for i in range(2) for name, shape in LAYER.items()},
    "norm.weight": (16,),
    "norm.bias": (16,),
}
IN_MODEL = {f"model.{name}": shape for name, shape in BODY.items()}
GATED_LAYER = {
    "input_norm.weight": (16,),
    "in_proj.weight": (48, 16),
    "mixer.gate_in.weight": (8, 24),
    "mixer.gate_in.bias": (8,),
    "mixer.gate_out.weight": (32, 4, 8),
    "mixer.gate_out.bias": (32, 4),
    "mixer.channel_mixing": (32, 24, 3),
    "mixer.convolution": (4, 24),
    "mixer.skip.weight": (24,),
    "mixer_norm.weight": (24,),
    "out_proj.weight": (16, 24),
    "ffn_norm.weight": (16,),
    "ffn.up.weight": (64, 16),
    "ffn.down.weight": (16, 32),
}
FORMATS = {
    "gated": (
        ESSMModel,
        {"block": "gated", "inner_size": 24, "num_heads": 4, "mixing_size": 3, "intermediate_size": 32},
        {
            "embed_tokens.weight": (259, 16),
            **{f"layers.{i}.{name}": shape for i in range(2) for name, shape in GATED_LAYER.items()},
            "norm.weight": (16,),
        },
    ),
    "base": (ESSMModel, {}, {"embed_tokens.weight": (259, 16), **BODY}),
    "causal-lm": (
        ESSMForCausalLM,
        {},
        {"model.embed_tokens.weight": (259, 16), **IN_MODEL, "lm_head.weight": (259, 16)},
    ),
    "classifier": (
        ESSMForSequenceClassification,
        {"num_labels": 3},
        {"model.embed_tokens.weight": (259, 16), **IN_MODEL, "score.weight": (3, 16)},
    ),
    "features": (
        ESSMForSequenceClassification,
        {"num_labels": 3, "num_input_features": 5},
        {
            "model.embed_features.weight": (16, 5),
            "model.embed_features.bias": (16,),
            **IN_MODEL,
            "score.weight": (3, 16),
        },
    ),
}


# --- Checkpoint format and initialisation


@pytest.mark.parametrize("cls, fields, expected", FORMATS.values(), ids=FORMATS.keys())
def test_checkpoint_names_and_shapes_are_the_documented_format(cls, fields, expected):
    state = cls(tiny_config(**fields)).state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == expected


def test_no_basis_in_buffers():
    assert list(random_model().buffers()) == []


def test_initialisation_is_deterministic_and_depends_on_the_seed():
    def build(seed):
        torch.manual_seed(seed)
        return ESSMForCausalLM(tiny_config()).state_dict()

    first, again, other = build(0), build(0), build(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


@pytest.mark.parametrize("embeddings", [None, 0.1])
@variants
def test_initial_values(variant, embeddings):
    """Small random M_k, gate bias constant and nonzero, norms and diagonal skip terms at identity, feedback off.

    The gated block's projections keep unit scale but for those that write to the residual stream.
    """
    torch.manual_seed(0)
    tied, own = embeddings is None, {} if embeddings is None else {"embedding_initializer_range": embeddings}
    config = tiny_config(hidden_size=32, initializer_range=0.02, tie_word_embeddings=tied, **own, **variant)
    for name, tensor in ESSMForCausalLM(config).state_dict().items():
        if "channel_mixing" in name:
            std = 1e-3 if config.block == "paper" else config.mixing_size**-0.5
            assert 0.9 * std < tensor.std() < 1.1 * std, name  # at least 768 draws: the standard error is below 3%
        elif name.endswith("convolution"):
            assert 0.4 < tensor.abs().max() * config.conv_kernel_size**0.5 <= 1.0, name
        elif name.endswith("gate_out.bias") or "norm.weight" in name or (config.block == "gated" and "skip" in name):
            assert (tensor == 1.0).all(), name
        elif name.endswith("bias") or name.endswith("output_mixing"):
            assert (tensor == 0.0).all(), name
        elif ("embed_tokens" in name or (tied and "lm_head" in name)) and (own or config.block == "gated"):
            assert 0.09 < tensor.std() < 0.11, name
        elif config.block == "gated" and re.search("in_proj|gate_|ffn.up", name):
            assert 0.85 < tensor.std() * tensor.shape[-1] ** 0.5 < 1.15, name
        else:
            assert 0.015 < tensor.std() < 0.025, name  # at least 256 draws: the standard error is below 5%


@pytest.mark.parametrize("block", ["paper", "gated"])
def test_a_single_feature_keeps_its_size_from_the_start(block):
    """Without a bias, LayerNorm(w x) is the same for every x > 0; with one, it is not."""
    torch.manual_seed(0)
    model = ESSMModel(tiny_config(num_input_features=1, hidden_size=64, block=block))
    encoder = model.embed_features
    assert 0.5 < float(encoder.bias.std() / encoder.weight.std()) < 2.0
    small, large = (model.layers[0].input_norm(encoder(torch.full((1, 1, 1), x))) for x in (0.2, 0.9))
    assert (small - large).abs().max() > 0.2
    assert (ESSMModel(tiny_config(num_input_features=2)).embed_features.bias == 0).all()


@pytest.mark.parametrize("cls", [ESSMModel, ESSMForCausalLM, ESSMForSequenceClassification])
@variants
def test_every_missing_weight_is_initialised(cls, variant, tmp_path):
    """What transformers' own test_can_init_all_missing_weights asks: load a checkpoint that holds next to nothing."""
    from safetensors.torch import load_file, save_file

    config = tiny_config(**variant)
    cls(config).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    kept = next(name for name in weights if name.endswith("norm.weight"))
    save_file({kept: torch.full_like(weights[kept], 7.0)}, tmp_path / "model.safetensors", {"format": "pt"})

    def load(seed):
        torch.manual_seed(seed)
        return cls.from_pretrained(tmp_path).state_dict()

    first, again = load(0), load(0)
    torch.manual_seed(0)
    fresh = cls(config).state_dict()
    for name in first:
        assert torch.equal(first[name], again[name]), name
        assert first[name].isfinite().all() and first[name].abs().max() < 8.0, name
        if name == kept:
            assert (first[name] == 7.0).all()
        elif fresh[name].std() == 0:
            assert torch.equal(first[name], fresh[name]), name  # constants
        else:  # 128 draws at least: the standard error of a standard deviation is below 7%
            assert 0.7 < first[name].std() / fresh[name].std() < 1.4, name


def test_init_weights_overwrites_a_sentinel():
    model = ESSMForCausalLM(tiny_config(ar_order=2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(-77.0)
    model.apply(model._init_weights)
    assert all((parameter != -77.0).all() for parameter in model.parameters())


# --- Budgets


def test_budgets_change_the_logits():
    model, ids = random_model(), random_ids(2, 50)
    with torch.no_grad():
        logits = {K: model(ids, spectral_budget=K).logits for K in BUDGETS}
    for a in BUDGETS:
        for b in BUDGETS:
            if a < b:
                assert (logits[a] - logits[b]).abs().max() > 1e-3, (a, b)  # 50 times the rounding tolerance


@budgets
@variants
def test_a_budget_is_a_truncated_model(K, variant):
    model, ids = random_model(**variant), random_ids(2, 50)
    with torch.no_grad():
        small = truncate(model, K)
        assert_close(model(ids, spectral_budget=K).logits, small(ids).logits, atol=1e-6)
    assert model.num_active_parameters(K) == small.num_parameters()
    assert model.num_active_parameters([K, 32]) > small.num_parameters() or K == 32


@algorithms
@pytest.mark.parametrize("K", [1, 6, 31], ids=lambda K: f"K{K}")
def test_channels_beyond_the_budget_are_not_read(algorithm, K):
    model, ids = random_model(spectral_algorithm=algorithm), random_ids(2, 30)
    with torch.no_grad():
        expected = model(ids, spectral_budget=K).logits
        for layer in model.model.layers:
            layer.mixer.channel_mixing[K:] = float("nan")
            layer.mixer.gate_out.weight[K:] = float("nan")
            layer.mixer.gate_out.bias[K:] = float("nan")
        assert torch.equal(model(ids, spectral_budget=K).logits, expected)
        assert model(ids, spectral_budget=K + 1).logits.isnan().any()


@algorithms
@pytest.mark.parametrize("budget", [5, [5, 5], torch.tensor([5, 3])], ids=["int", "list", "rows"])
def test_inactive_channels_get_exactly_zero_gradient(algorithm, budget):
    model, ids = random_model(spectral_algorithm=algorithm).train(), random_ids(2, 20)
    model(ids, labels=ids, spectral_budget=budget).loss.backward()
    for layer in model.model.layers:
        mixer = layer.mixer
        for parameter in (mixer.channel_mixing, mixer.gate_out.weight, mixer.gate_out.bias):
            assert (parameter.grad[5:] == 0).all()
            assert all((channel != 0).any() for channel in parameter.grad[:5])


@algorithms
@variants
def test_row_budgets_equal_solo_runs(algorithm, variant):
    model, ids = random_model(spectral_algorithm=algorithm, **variant), random_ids(4, 30)
    rows = torch.tensor([1, 32, 7, 7])
    with torch.no_grad():
        mixed = model(ids, spectral_budget=rows)
        for i, K in enumerate(rows.tolist()):
            assert_close(mixed.logits[i : i + 1], model(ids[i : i + 1], spectral_budget=K).logits)
    assert torch.equal(mixed.spectral_budget, rows)


def test_uniform_list_is_the_int_bit_for_bit():
    model, ids = random_model(), random_ids(2, 50)
    with torch.no_grad():
        expected = model(ids, spectral_budget=6).logits
        assert torch.equal(model(ids, spectral_budget=[6, 6]).logits, expected)
        assert torch.equal(model(ids, spectral_budget=torch.tensor([6, 6])).logits, expected)


def test_layer_budgets_reach_their_layers():
    """[a, b] runs a in the first layer and b in the second: each list is compared with weights zeroed by hand."""
    model, ids = random_model(gating="none"), random_ids(2, 50)
    for budget in ([3, 20], [20, 3]):
        by_hand = copy.deepcopy(model)
        with torch.no_grad():
            for layer, K in zip(by_hand.model.layers, budget):
                layer.mixer.channel_mixing[K:] = 0.0
            assert_close(model(ids, spectral_budget=budget).logits, by_hand(ids).logits)


def test_outputs_report_the_budget_that_ran():
    model, ids = random_model(spectral_budget=9, budget_presets={"fast": [2, 4]}), random_ids(2, 5)
    for asked, ran in [(None, (9, 9)), (6, (6, 6)), ([3, 7], (3, 7)), ("fast", (2, 4)), (torch.tensor(5), (5, 5))]:
        assert model(ids, spectral_budget=asked).spectral_budget == ran
        assert model.model(ids, spectral_budget=asked).spectral_budget == ran
    classifier = random_model(ESSMForSequenceClassification)
    assert classifier(ids, spectral_budget=4).spectral_budget == (4, 4)
    assert classifier(ids).spectral_budget == (32, 32)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int64, torch.uint8], ids=str)
def test_row_budgets_of_any_integer_type(dtype):
    model, ids = random_model(), random_ids(2, 9)
    rows = torch.tensor([3, 11])
    with torch.no_grad():
        assert torch.equal(model(ids, spectral_budget=rows.to(dtype)).logits, model(ids, spectral_budget=rows).logits)


# --- Time, padding, batch


@algorithms
@variants
def test_causality(algorithm, variant):
    model, ids = random_model(spectral_algorithm=algorithm, **variant), random_ids(1, 40)
    changed = ids.clone()
    changed[0, 21] = (ids[0, 21] + 1) % 256
    with torch.no_grad():
        before, after = model(ids).logits, model(changed).logits
    assert_close(after[:, :21], before[:, :21])
    assert ((after - before)[0, 21:].abs().amax(-1) > 1e-4).all()  # and the change is felt by every later position


def _pad(ids, lengths, side):
    """Rows cut to `lengths` and padded to the full width with pad ids: (ids, mask)."""
    L = ids.shape[1]
    position = torch.arange(L)[None]
    lengths = torch.tensor(lengths)[:, None]
    mask = position >= L - lengths if side == "left" else position < lengths
    padded = torch.full_like(ids, 256)
    padded[mask] = torch.cat([row[:n] for row, n in zip(ids, lengths.flatten().tolist())])
    return padded, mask.long()


@pytest.mark.parametrize("side", ["left", "right"])
@algorithms
@variants
@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no-cache"])
def test_padding_is_silent(side, algorithm, variant, use_cache):
    model, ids = random_model(spectral_algorithm=algorithm, **variant), random_ids(3, 21)
    padded, mask = _pad(ids, [21, 13, 1], side)
    with torch.no_grad():
        logits = model(padded, attention_mask=mask, spectral_budget=11, use_cache=use_cache).logits
        for i, n in enumerate([21, 13, 1]):
            assert_close(logits[i][mask[i].bool()], model(ids[i : i + 1, :n], spectral_budget=11).logits[0])
        assert (model(padded, spectral_budget=11).logits - logits).abs().max() > 1e-3  # the mask did something


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("variant", [{}, {"ar_order": 2}], ids=["paper", "ar2"])
@pytest.mark.parametrize("pieces", [(8, 5), (1,) * 13, (5, 1, 4, 3)], ids=["8+5", "13x1", "5+1+4+3"])
def test_cached_pieces_equal_the_whole_with_padding(side, algorithm, variant, pieces):
    """Ragged rows, cut anywhere, pads included: every real position sees what it sees alone."""
    K, lengths = 11, [13, 7, 2]
    model, ids = random_model(spectral_algorithm=algorithm, **variant), random_ids(3, 13)
    padded, mask = _pad(ids, lengths, side)
    cache, logits, a = ESSMCache(model.config), [], 0
    with torch.no_grad():
        for size in pieces:
            b = a + size
            piece = model(padded[:, a:b], attention_mask=mask[:, :b], past_key_values=cache, spectral_budget=K)
            logits.append(piece.logits)
            a = b
        for i, n in enumerate(lengths):
            alone = model(ids[i : i + 1, :n], spectral_budget=K, use_cache=True)
            assert_close(torch.cat(logits, 1)[i][mask[i].bool()], alone.logits[0])
            for layer, solo in zip(cache.layers, alone.past_key_values.layers):
                # the margin beyond K belongs to the recurrence: exact filters and (R) need not agree on it
                states = slice(0, K if algorithm in ("fft", "naive") else None)
                assert_close(layer.tensors["features"][i, states], solo.tensors["features"][0, states])
    assert cache.get_seq_length() == 13


def _random_masks(B, L, generator):
    """(B, L) bool: holes anywhere, a left-padded row, a right-padded one, one of a single token; none all masked."""
    mask = torch.rand(B, L, generator=generator) < torch.rand(B, 1, generator=generator)
    n = int(torch.randint(1, L, (), generator=generator))
    mask[0], mask[1], mask[2] = torch.arange(L) >= n, torch.arange(L) < n, torch.arange(L) == n
    mask[:, int(torch.randint(L, (), generator=generator))] |= ~mask.any(1)
    return mask[torch.randperm(B, generator=generator)]


@variants
@pytest.mark.parametrize("seed", range(6))
def test_masked_positions_do_not_exist(variant, seed):
    """Random masks and cuts: as if every row had been run alone on its real tokens, with a cache and without."""
    generator = torch.Generator().manual_seed(seed)
    B, L, algorithm = 6, 20, ("chunked", "step", "chunked", "fft", "chunked", "naive")[seed]
    model = random_model(spectral_algorithm=algorithm, **variant)
    ids, mask = random_ids(B, L, seed=seed), _random_masks(B, L, generator)
    rows = torch.randint(1, 33, (B,), generator=generator)
    cuts = torch.randperm(L - 1, generator=generator)[: 1 + seed].add(1).sort().values.tolist()
    cache, pieces = ESSMCache(model.config, state_budget=32), []
    with torch.no_grad():
        whole = model(ids, attention_mask=mask, spectral_budget=rows, use_cache=False).logits
        for a, b in zip([0, *cuts], [*cuts, L]):
            own = mask[:, a:b] if seed % 2 else mask[:, :b].long()
            piece = model(ids[:, a:b], attention_mask=own, past_key_values=cache, spectral_budget=rows)
            pieces.append(piece.logits)
        for i in range(B):
            solo = ESSMCache(model.config, state_budget=32)
            tokens, K = ids[i : i + 1, mask[i]], int(rows[i])
            alone = model(tokens, past_key_values=solo, spectral_budget=K).logits[0]
            assert_close(whole[i, mask[i]], alone)
            assert_close(torch.cat(pieces, 1)[i, mask[i]], alone)
            if mask[i, cuts[-1] :].any():  # so that the last position speaks for its row
                assert_close(whole[i, -1], alone[-1])
                assert_close(pieces[-1][i, -1], alone[-1])
            for layer, expected in zip(cache.layers, solo.layers):
                for name, tensor in expected.tensors.items():
                    states = K if algorithm in ("fft", "naive") and name in ("features", "negative") else None
                    assert_close(layer.tensors[name][i, :states], tensor[0, :states])
    assert cache.get_seq_length() == L


def test_masked_positions_have_no_gradient():
    """Nor do they change that of others; hidden states stand where their positions stand."""
    model, ids = random_model(ar_order=2).train(), random_ids(2, 20)
    mask = torch.rand(2, 20, generator=torch.Generator().manual_seed(1)) < 0.5
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    labels = ids.masked_fill(~mask | (mask.cumsum(1) == 1), -100)  # nothing real stands before a first token
    outputs = model(inputs_embeds=embeds, attention_mask=mask, labels=labels, output_hidden_states=True)
    outputs.loss.backward()
    assert (embeds.grad[~mask] == 0).all() and embeds.grad.isfinite().all()
    loss = 0.0
    for i in range(2):
        alone = model(ids[i : i + 1, mask[i]], labels=ids[i : i + 1, mask[i]], output_hidden_states=True)
        for actual, expected in zip(outputs.hidden_states, alone.hidden_states):
            assert_close(actual[i, mask[i]], expected[0])
        loss += alone.loss * (mask[i].sum() - 1)
    assert_close(outputs.loss, loss / (mask.sum() - 2))  # the token after a hole is told by the one before it


@variants
def test_algorithms_agree(variant):
    ids, models = random_ids(2, 37), {}
    for algorithm in ALGORITHMS:
        models[algorithm] = random_model(spectral_algorithm=algorithm, **variant)
    with torch.no_grad():
        expected = models["naive"](ids).logits
        for algorithm in ALGORITHMS[:3]:
            assert_close(models[algorithm](ids).logits, expected)


@variants
@pytest.mark.parametrize("L", [1, 7, 8, 9, 64], ids=lambda L: f"L{L}")
def test_rows_do_not_see_each_other(variant, L):
    model, ids = random_model(**variant), random_ids(5, L)
    with torch.no_grad():
        together = model(ids, spectral_budget=13).logits
        for i in range(5):
            assert_close(together[i : i + 1], model(ids[i : i + 1], spectral_budget=13).logits)


# --- Heads


def test_loss_is_next_token_cross_entropy():
    model, ids = random_model(), random_ids(2, 20)
    labels = ids.clone()
    labels[0, :5] = -100
    outputs = model(ids, labels=labels)
    expected = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert_close(outputs.loss, expected, atol=1e-6)


def test_logits_to_keep_hidden_states_and_tuples():
    model, ids = random_model(), random_ids(2, 20)
    with torch.no_grad():
        full = model(ids, output_hidden_states=True, use_cache=False)
        assert_close(model(ids, logits_to_keep=3).logits, full.logits[:, -3:], atol=1e-6)
        assert_close(model(ids, logits_to_keep=torch.tensor([0, 7])).logits, full.logits[:, [0, 7]], atol=1e-6)
        as_tuple = model(ids, return_dict=False, use_cache=False)
    assert isinstance(as_tuple, tuple) and torch.equal(as_tuple[0], full.logits)
    assert len(full.hidden_states) == 3 and full.past_key_values is None
    assert_close(model.lm_head(full.hidden_states[-1]), full.logits, atol=1e-6)
    assert torch.equal(full.hidden_states[0], model.model.embed_tokens(ids))


def test_embeddings_instead_of_ids():
    model, ids = random_model(), random_ids(2, 20)
    with torch.no_grad():
        assert torch.equal(model(inputs_embeds=model.model.embed_tokens(ids)).logits, model(ids).logits)


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("features", [None, 5], ids=["ids", "features"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("block", ["paper", "gated", "gated-diagonal"])
def test_classifier_ignores_padding(pooling, features, side, block):
    fields = VARIANTS[block] | {"classifier_pooling": pooling, "num_input_features": features, "num_labels": 3}
    model, ids = random_model(ESSMForSequenceClassification, **fields), random_ids(3, 20)
    lengths = [20, 11, 1]
    padded, mask = _pad(ids, lengths, side)
    encode = torch.randn(259, 5, generator=torch.Generator().manual_seed(0))

    def run(x, **kwargs):
        return model(**({"input_ids": x} if features is None else {"input_features": encode[x]}), **kwargs).logits

    with torch.no_grad():
        logits = run(padded, attention_mask=mask, spectral_budget=9)
        assert logits.shape == (3, 3)
        for i, n in enumerate(lengths):
            assert_close(logits[i : i + 1], run(ids[i : i + 1, :n], spectral_budget=9))


def test_pooling_modes_are_the_mean_and_the_last_position():
    ids = random_ids(2, 20)
    for pooling, pool in [("mean", lambda h: h.mean(1)), ("last", lambda h: h[:, -1])]:
        model = random_model(ESSMForSequenceClassification, classifier_pooling=pooling)
        hidden = model.model(ids).last_hidden_state
        assert_close(model(ids).logits, model.score(pool(hidden)), atol=1e-6)


@pytest.mark.parametrize(
    "fields, labels, loss",
    [
        ({"num_labels": 3}, torch.tensor([2, 0]), F.cross_entropy),
        ({"num_labels": 1}, torch.tensor([0.5, -1.0]), lambda x, y: F.mse_loss(x[:, 0], y)),
        (
            {"num_labels": 3, "problem_type": "multi_label_classification"},
            torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]]),
            F.binary_cross_entropy_with_logits,
        ),
    ],
    ids=["classes", "regression", "multi-label"],
)
@pytest.mark.parametrize("block", ["paper", "gated"])
def test_classifier_losses(fields, labels, loss, block):
    model = random_model(ESSMForSequenceClassification, **VARIANTS[block], **fields)
    outputs = model(random_ids(2, 9), labels=labels)
    assert_close(outputs.loss, loss(outputs.logits, labels), atol=1e-6)
    outputs.loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


# --- Training


@variants
def test_every_parameter_gets_a_gradient(variant):
    model, ids = random_model(**variant).train(), random_ids(2, 20)
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert (parameter.grad != 0).any(), name


@variants
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_gradient_checkpointing_changes_nothing(variant, reentrant):
    model, ids = random_model(**variant).train(), random_ids(2, 20)
    calls = []
    model.model.layers[0].mixer.register_forward_hook(lambda *_: calls.append(1))

    def gradients():
        model.zero_grad()
        calls.clear()
        model(ids, labels=ids, spectral_budget=7).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    plain = gradients()
    assert len(calls) == 1
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    checkpointed = gradients()
    assert len(calls) == 2  # it did recompute
    assert plain.keys() == checkpointed.keys()
    for name in plain:
        assert_close(checkpointed[name], plain[name], atol=1e-6)


def test_gradient_checkpointing_refuses_a_cache():
    model, ids = random_model().train(), random_ids(2, 20)
    cache = model(ids, use_cache=True).past_key_values
    model.gradient_checkpointing_enable()
    for kwargs in ({"use_cache": True}, {"past_key_values": cache}):
        with pytest.raises(ValueError, match="advance the cache twice: train with use_cache=False"):
            model(ids, labels=ids, **kwargs)
    model(ids, labels=ids).loss.backward()  # the default is legal
    model.eval()(ids, use_cache=True)  # and so is inference


def test_dropout_and_stochastic_depth_act_in_training_only():
    ids = random_ids(2, 20)
    for fields in ({"dropout": 0.5}, {"stochastic_depth": 0.5}):
        model = random_model(**fields)
        with torch.no_grad():
            expected = random_model()(ids).logits
            assert torch.equal(model(ids).logits, expected)
            model.train()
            assert not torch.equal(model(ids).logits, model(ids).logits)


# --- Precision


@pytest.mark.parametrize("K", [2, 16, 32], ids=lambda K: f"K{K}")
def test_bf16_follows_fp32(K):
    """bf16 keeps 8 bits: an error of a few times 2^-8 of the logits' size. States stay in fp32."""
    model, ids = random_model(), random_ids(2, 100)
    half = copy.deepcopy(model).to(torch.bfloat16)
    with torch.no_grad():
        expected = model(ids, spectral_budget=K).logits
        outputs = half(ids, spectral_budget=K, use_cache=True)
        assert outputs.logits.dtype == torch.bfloat16
        assert (outputs.logits.float() - expected).norm() / expected.norm() < 0.03
        # decoding goes on from the same state
        more = half(ids[:, :1], past_key_values=outputs.past_key_values, spectral_budget=K).logits.float()
        longer = model(torch.cat([ids, ids[:, :1]], 1), spectral_budget=K).logits[:, -1:]
        assert (more - longer).norm() / longer.norm() < 0.03
    for layer in outputs.past_key_values.layers:
        assert layer.tensors["features"].dtype == torch.float32


def test_fp64_is_the_limit_of_fp32():
    model, ids = random_model(), random_ids(2, 100)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(ids).logits
        assert exact.dtype == torch.float64
        assert_close(model(ids).logits.double(), exact)


def test_autocast_trains():
    model, ids = random_model().train(), random_ids(2, 40)
    expected = model(ids, labels=ids).loss
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    assert abs(loss - expected) < 0.02 * expected  # bf16 rounding
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("K", [1, 5, 32])
@pytest.mark.parametrize("variant", [VARIANTS[name] for name in ("paper", "gated", "gated-diagonal")], ids=str)
def test_the_gate_is_eq_8(variant, K):
    """Head by head: scores of the active prefix scaled to length sqrt(K), softmax over channels, a power of sigma_k."""
    mixer = random_model(scaling_exponent=0.25, **variant).model.layers[0].mixer
    u = torch.randn(2, 7, mixer.gate_in.in_features, generator=torch.Generator().manual_seed(4))
    hidden = F.gelu(u @ mixer.gate_in.weight.T + mixer.gate_in.bias)
    weight, bias = (t.reshape(32, mixer.num_heads, -1) for t in (mixer.gate_out.weight, mixer.gate_out.bias))
    with torch.no_grad():
        gates = mixer.gates(u, K).reshape(2, 7, K, mixer.num_heads)
        for head in range(mixer.num_heads):
            s = hidden @ weight[:K, head].T + bias[:K, head, 0]
            s = s * K**0.5 / (s.square().sum(-1, keepdim=True).sqrt() + 1e-6)
            alpha = s.exp() / s.exp().sum(-1, keepdim=True)
            sigma = torch.tensor(spectral_basis(512).sigma[:K], dtype=torch.float32)
            torch.testing.assert_close(gates[..., head], alpha * sigma**0.25, rtol=1e-5, atol=1e-7)


def test_the_gated_block_is_what_it_says():
    """x + out_proj(norm(mixer(v)) silu(z)), where the mixer reads SiLU of a causal convolution of v."""
    model = random_model(**VARIANTS["gated-diagonal"])
    layer, x = model.model.layers[0], torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(4))
    mixer, taps = layer.mixer, layer.mixer.convolution
    with torch.no_grad():
        z, v = (layer.input_norm(x) @ layer.in_proj.weight.T).chunk(2, -1)
        u = torch.zeros_like(v)
        for t in range(7):
            for back in range(min(3, t + 1)):  # the last row of taps is that of the same step
                u[:, t] += taps[2 - back] * v[:, t - back]
        u = u * torch.sigmoid(u)
        mixing = mixer.channel_mixing[:5].reshape(5, 24, 1, 1)
        y = mixer.operator(u, mixer.gates(u, 5), mixing, algorithm="naive")[0] + mixer.skip.weight * u
        y = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.mixer_norm.weight
        expected = x + (y * z * torch.sigmoid(z)) @ layer.out_proj.weight.T
        assert_close(layer(x, 5), expected)


# --- torch.compile and torch.export


@variants
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_forward_and_training_equal_eager(variant, backend):
    torch._dynamo.reset()
    model, ids = random_model(**variant), random_ids(2, 37)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        for K in (32, 4):
            outputs = compiled(ids, use_cache=False, spectral_budget=K)
            assert_close(outputs.logits, model(ids, spectral_budget=K).logits)
    model.train()
    model(ids, labels=ids, spectral_budget=6).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    compiled(ids, labels=ids, spectral_budget=6).loss.backward()
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, expected[name])


def test_compiled_forward_with_cache_mask_and_layer_budgets():
    torch._dynamo.reset()
    model, ids = random_model(), random_ids(2, 21)
    padded, mask = _pad(ids, [21, 13], "left")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        for kwargs in ({"spectral_budget": [3, 9]}, {"attention_mask": mask}):
            assert_close(compiled(padded, use_cache=False, **kwargs).logits, model(padded, **kwargs).logits)
        holes = _random_masks(4, 21, torch.Generator().manual_seed(2))[:2]
        actual = compiled(padded, use_cache=False, attention_mask=holes).logits
        assert_close(actual, model(padded, attention_mask=holes).logits)
        cache, expected = ESSMCache(model.config), ESSMCache(model.config)
        for a, b in ((0, 12), (12, 20), (20, 21)):
            actual = compiled(ids[:, a:b], past_key_values=cache).logits
            assert_close(actual, model(ids[:, a:b], past_key_values=expected).logits)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_equals_eager():
    torch._dynamo.reset()
    model, ids = random_model(num_hidden_layers=1), random_ids(2, 21)
    with torch.no_grad():
        actual = torch.compile(model, fullgraph=True)(ids, use_cache=False, spectral_budget=6).logits
        assert_close(actual, model(ids, spectral_budget=6).logits)


@variants
def test_export_with_fixed_shape(variant):
    model, ids = random_model(**variant), random_ids(2, 21)
    program = torch.export.export(model, (), {"input_ids": ids, "use_cache": False, "spectral_budget": 6})
    with torch.no_grad():
        actual = program.module()(input_ids=ids, use_cache=False, spectral_budget=6).logits
        assert_close(actual, model(ids, spectral_budget=6).logits)


@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
@variants
def test_export_with_any_batch_and_length(masked, variant):
    model, ids = random_model(**variant), random_ids(2, 21)
    batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=2, max=512)
    shape = {0: batch, 1: length}
    inputs, shapes = {"input_ids": ids, "use_cache": False}, {"input_ids": shape, "use_cache": None}
    if masked:
        inputs["attention_mask"], shapes["attention_mask"] = torch.ones_like(ids), shape
    program = torch.export.export(model, (), inputs, dynamic_shapes=shapes)
    with torch.no_grad():
        for B, L in ((2, 21), (1, 7), (5, 64), (3, 200)):
            ids = random_ids(B, L)
            mask = {"attention_mask": (torch.arange(L) >= L // 3).long().expand(B, L)} if masked else {}
            actual = program.module()(input_ids=ids, use_cache=False, **mask).logits
            expected = model(ids, **mask).logits
            real = slice(L // 3, None) if masked else slice(None)
            assert_close(actual[:, real], expected[:, real])


@pytest.mark.parametrize("algorithm", ["fft", "step", "naive"])
def test_export_of_another_algorithm_for_any_length_is_refused(algorithm):
    model, ids = random_model(spectral_algorithm=algorithm), random_ids(2, 21)
    shapes = {"input_ids": {1: torch.export.Dim("length", min=2, max=512)}, "use_cache": None}
    with pytest.raises(ValueError, match=f"spectral_algorithm='{algorithm}' cannot be exported for any length"):
        torch.export.export(model, (), {"input_ids": ids, "use_cache": False}, dynamic_shapes=shapes)


# --- Saving and loading


def _saved(tmp_path, **fields):
    model = random_model(**fields)
    model.save_pretrained(tmp_path)
    return model


def test_tied_embeddings_are_saved_once_and_shared_after_loading(tmp_path):
    from safetensors import safe_open

    model = _saved(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    loaded = ESSMForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded(random_ids(1, 9)).logits, model(random_ids(1, 9)).logits)


def test_untied_embeddings_are_two_tensors(tmp_path):
    model = _saved(tmp_path, tie_word_embeddings=False)
    loaded = ESSMForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight.data_ptr() != loaded.model.embed_tokens.weight.data_ptr()
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert torch.equal(loaded(random_ids(1, 9)).logits, model(random_ids(1, 9)).logits)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_resize_token_embeddings(tied, tmp_path):
    model, ids = random_model(tie_word_embeddings=tied), random_ids(2, 9)
    with torch.no_grad():
        before = model(ids).logits
        model.resize_token_embeddings(300)
        after = model(ids).logits
    assert model.config.vocab_size == 300 and after.shape[-1] == 300
    assert_close(after[..., :259], before, atol=1e-6)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert model(torch.tensor([[299]])).logits.isfinite().all()
    model.save_pretrained(tmp_path)
    assert torch.equal(ESSMForCausalLM.from_pretrained(tmp_path)(ids).logits, model(ids).logits)


@pytest.mark.parametrize("device_map", [{"": "cpu"}, "auto", "cpu"], ids=["dict", "auto", "cpu"])
def test_device_map(device_map, tmp_path):
    model, ids = _saved(tmp_path), random_ids(2, 20)
    loaded = ESSMForCausalLM.from_pretrained(tmp_path, device_map=device_map)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_layers_offloaded_to_disk(tmp_path):
    model, ids = _saved(tmp_path / "model"), random_ids(2, 20)
    device_map = {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    device_map |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    loaded = ESSMForCausalLM.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload"
    )
    assert loaded.model.layers[1].mixer.channel_mixing.is_meta
    with torch.no_grad():
        assert_close(loaded(ids, spectral_budget=5).logits, model(ids, spectral_budget=5).logits, atol=1e-6)
        generate = {"max_new_tokens": 5, "do_sample": False, "spectral_budget": 5}
        assert torch.equal(loaded.generate(ids, **generate), model.generate(ids, **generate))


@pytest.mark.parametrize("convert", ["to", "load"])
def test_bf16_by_conversion_and_by_loading_agree(convert, tmp_path):
    """The basis is fp64 whatever happens to the parameters: nothing of it may be rounded twice."""
    model, ids = _saved(tmp_path), random_ids(2, 40)
    if convert == "to":
        half = copy.deepcopy(model).to(torch.bfloat16)
    else:
        half = ESSMForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    rounded = copy.deepcopy(model)
    with torch.no_grad():
        for p in rounded.parameters():
            p.copy_(p.to(torch.bfloat16))
        # back in fp32, the model is exactly the one with rounded weights
        assert torch.equal(half.float()(ids).logits, rounded(ids).logits)


def test_default_budget_survives_saving(tmp_path):
    model, ids = _saved(tmp_path), random_ids(2, 20)
    loaded = ESSMForCausalLM.from_pretrained(tmp_path, spectral_budget=6)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids, spectral_budget=6).logits)
    loaded.save_pretrained(tmp_path / "again")
    assert ESSMForCausalLM.from_pretrained(tmp_path / "again").config.spectral_budget == 6
    assert ESSMConfig.from_pretrained(tmp_path).spectral_budget is None


@pytest.mark.parametrize("cls", [ESSMModel, ESSMForCausalLM, ESSMForSequenceClassification])
@pytest.mark.parametrize("name", ["sdpa", "flash_attention_2"])
def test_attention_implementations_are_refused(cls, name, tmp_path):
    random_model(cls).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"None or 'eager', got '{name}'.*no attention.*spectral_algorithm"):
        cls.from_pretrained(tmp_path, attn_implementation=name)
    assert cls.from_pretrained(tmp_path, attn_implementation="eager") is not None


# --- Stability: Appendix C


def _mixer(**sizes):
    """A mixer of a model: one built by itself has memory for weights, not yet weights."""
    return randomise(ESSMModel(tiny_config(**sizes)).layers[0].mixer, seed=3)


def _bound(mixer, K, alpha=None):
    """||D|| + sum_k alpha_k sigma_k^{1/4} ||M_k|| ||phi_k||_1; without alpha its largest value over the simplex."""
    basis = spectral_basis(512)
    phi_1 = torch.from_numpy(abs(basis.filters(K)).sum(0))
    gain = torch.from_numpy(basis.sigma[:K] ** 0.25) * torch.linalg.matrix_norm(mixer.channel_mixing[:K].double(), 2)
    gain = gain * phi_1
    skip = torch.linalg.matrix_norm(mixer.skip.weight.double(), 2)
    return skip + (gain.max() if alpha is None else (alpha.double() * gain).sum())


def _matched_inputs(mixer, K, L=512):
    """(2K, L, D): for every k <= K, unit inputs that drive channel k hardest at the last step, in two directions."""
    phi = torch.from_numpy(spectral_basis(512).filters(K)[:L]).float()
    signs = torch.where(phi.flip(0) >= 0, 1.0, -1.0).T  # (K, L)
    top = torch.linalg.svd(mixer.channel_mixing[:K])[0][:, :, 0]  # y = f M: the left singular vector
    drive = signs[..., None] * top[:, None]
    return torch.cat([drive, -drive])


@torch.no_grad()
def test_outputs_stay_within_the_bound_at_every_budget():
    """|u(t)|_2 <= U implies |y(t)|_2 <= bound U, at every K, for random, constant and adversarial inputs."""
    mixer = _mixer()
    noise = torch.randn(4, 512, 16, generator=torch.Generator().manual_seed(1))
    constant = noise[:, :1].expand(-1, 512, -1)
    for K in range(1, CAPACITY + 1):
        u = F.normalize(torch.cat([noise, constant, _matched_inputs(mixer, K)]), dim=-1)
        for U in (0.5, 4.0):
            y = mixer(U * u, K)
            alpha = mixer.gates(U * u, K) / mixer.operator.sigma(K, 0.25, u)
            torch.testing.assert_close(alpha.sum(-1), torch.ones(alpha.shape[:2]))
            measured = y.double().norm(dim=-1).max() / U
            assert measured <= _bound(mixer, K, alpha.amax((0, 1))) * (1 + 1e-5), K  # fp32 rounding
            assert measured <= _bound(mixer, K) * (1 + 1e-5), K


@torch.no_grad()
@pytest.mark.parametrize("gating, floor", [("softmax", 0.75), ("none", 0.45)])
def test_the_bound_is_not_vacuous(gating, floor):
    """With one strong channel, an aligned skip term and matched inputs, the output comes near the bound.

    softmax: the gate can put between 0.88 (K=2) and 0.9 (K=32) of its weight on one channel, and all of it at K=1.
    none: alpha is 1 for every channel, so the bound is the sum, of which the strong channel is a part.
    """
    ratios = []
    for K in range(1, CAPACITY + 1):
        mixer = _mixer(gating=gating)
        mixer.channel_mixing[K - 1] *= 20.0
        mixer.skip.weight.copy_(0.5 * mixer.channel_mixing[K - 1].T)
        if gating == "softmax":
            mixer.gate_out.weight.zero_()
            mixer.gate_out.bias.fill_(-1.0 if K == 2 else 0.0)
            mixer.gate_out.bias[K - 1] = 1.0
        measured = mixer(_matched_inputs(mixer, K), K).double().norm(dim=-1).max()
        bound = _bound(mixer, K, None if gating == "softmax" else torch.ones(K))
        ratios.append(float(measured / bound))
    print("measured / bound for K = 1..32:", [round(ratio, 2) for ratio in ratios])
    assert floor < min(ratios) and max(ratios) <= 1 + 1e-5
