# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Mixer, block, models and heads: names, budgets, causality, padding, gradients, compilation, loading."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    BUDGETS,
    VARIANTS,
    assert_close,
    pad,
    random_ids,
    random_masks,
    random_model,
    tiny_config,
    truncate,
    variants,
)

from modeling_essm import (
    ESSMCache,
    ESSMForCausalLM,
    ESSMForPairClassification,
    ESSMForSequenceClassification,
    ESSMModel,
)
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
    "pairs": (
        ESSMForPairClassification,
        {"num_labels": 3, "head_hidden_size": 24},
        {
            "model.embed_tokens.weight": (259, 16),
            **IN_MODEL,
            "head.weight": (24, 64),
            "head.bias": (24,),
            "score.weight": (3, 24),
            "score.bias": (3,),
        },
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
    state = cls(tiny_config(cls.config_class, **fields)).state_dict()
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


@pytest.mark.parametrize("cls", [ESSMModel, ESSMForCausalLM, ESSMForSequenceClassification, ESSMForPairClassification])
@variants
def test_every_missing_weight_is_initialised(cls, variant, tmp_path):
    """What transformers' own test_can_init_all_missing_weights asks: load a checkpoint that holds next to nothing."""
    from safetensors.torch import load_file, save_file

    config = tiny_config(cls.config_class, **variant)
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


@pytest.mark.parametrize("side", ["left", "right"])
@algorithms
@variants
@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no-cache"])
def test_padding_is_silent(side, algorithm, variant, use_cache):
    model, ids = random_model(spectral_algorithm=algorithm, **variant), random_ids(3, 21)
    padded, mask = pad(ids, [21, 13, 1], side)
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
    padded, mask = pad(ids, lengths, side)
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


@variants
@pytest.mark.parametrize("seed", range(6))
def test_masked_positions_do_not_exist(variant, seed):
    """Random masks and cuts: as if every row had been run alone on its real tokens, with a cache and without."""
    generator = torch.Generator().manual_seed(seed)
    B, L, algorithm = 6, 20, ("chunked", "step", "chunked", "fft", "chunked", "naive")[seed]
    model = random_model(spectral_algorithm=algorithm, **variant)
    ids, mask = random_ids(B, L, seed=seed), random_masks(B, L, generator)
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
