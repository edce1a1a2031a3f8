# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Attention layers among spectral ones: the layer, its implementations and positions, and what has no constant size.

Masks, pieces, packing, budgets, generation and prefixes of hybrids are tested with those of the other models.
"""

import copy
import itertools

import pytest
import torch
from helpers import F_, HYBRID, L_, S_, assert_close, random_ids, random_masks, random_model
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

from modeling_essm import ESSMForCausalLM
from modeling_essm.decoding import ContinuousBatch, compile_decoding
from modeling_essm.export import export_programs


def hybrid(types=HYBRID["layer_types"], **fields):
    """Four query heads for two of keys, a window of 5."""
    return random_model(**HYBRID | {"num_hidden_layers": len(types), "layer_types": types} | fields)


@torch.no_grad()
def in_pieces(model, ids, sizes, mask=None):
    """Logits of all positions, read in calls of these sizes with one cache, and the cache."""
    cache, parts, masks = None, [], [None] * len(sizes) if mask is None else mask.long().split(sizes, 1)
    for part, own in zip(ids.split(sizes, 1), masks):
        output = model(part, past_key_values=cache, use_cache=True, attention_mask=own)
        cache = output.past_key_values
        parts.append(output.logits)
    return torch.cat(parts, 1), cache


@torch.no_grad()
@pytest.mark.parametrize("kind", [S_, F_])
def test_attention_is_what_it_says(kind):
    """Query by query and head by head in fp64, from the definition: causal, within the window, rotated by position."""
    model = hybrid([L_, kind]).double()
    x, seen = torch.randn(2, 11, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), []
    layer = model.model.layers[1]
    layer.self_attn.register_forward_hook(lambda module, args, output: seen.append((args[0], output)))
    model(inputs_embeds=x)
    x, y = seen[0]
    attention, d = layer.self_attn, 4
    q, k, v = (f(x).unflatten(-1, (-1, d)) for f in (attention.q_proj, attention.k_proj, attention.v_proj))

    def turned(vector, t):
        pairs = torch.complex(vector[: d // 2], vector[d // 2 :])
        pairs = pairs * torch.polar(torch.ones(d // 2).double(), t * 10000.0 ** (-torch.arange(0, d, 2).double() / d))
        return torch.cat([pairs.real, pairs.imag])

    expected = torch.zeros_like(y)
    for b in range(2):
        for t in range(11):
            keys = [s for s in range(t + 1) if kind == F_ or t - s < 5]
            heads = []
            for h in range(4):
                scores = [turned(q[b, t, h], t) @ turned(k[b, s, h // 2], s) / d**0.5 for s in keys]
                weights = torch.stack(scores).softmax(0)
                heads.append(sum(w * v[b, s, h // 2] for w, s in zip(weights, keys)))
            expected[b, t] = attention.o_proj(torch.cat(heads))
    assert_close(y, expected, atol=1e-6)  # rotary factors are computed in fp32


def test_implementations_agree():
    model, ids = hybrid(), random_ids(2, 23)
    gradients, logits = [], []
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        output = model(ids, labels=ids, use_cache=False)
        output.loss.backward()
        logits.append(output.logits)
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert_close(*logits)
    for a, b in zip(*gradients, strict=True):
        assert_close(a, b, atol=1e-5 * max(1.0, float(b.abs().max())))


def unpadded_attention(module, query, key, value, attention_mask, scaling, sliding_window=None, **kwargs):
    """What kernels of variable length do: without masked keys and queries, each sequence alone, aligned at its end."""
    B, L = query.shape[0], query.shape[2]
    real = torch.ones(B, key.shape[2], dtype=torch.bool) if attention_mask is None else attention_mask
    key, value = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
    output = torch.zeros_like(query)
    offsets = kwargs.get("cu_seq_lens_q")
    for b in range(B):
        q, k, v = query[b][:, real[b, -L:]], key[b][:, real[b]], value[b][:, real[b]]
        parts = [(slice(None), slice(None))]
        if offsets is not None:
            inside = [int(o) - b * L for o in offsets if b * L <= o <= (b + 1) * L]
            parts = [(slice(i, j), slice(i, j)) for i, j in itertools.pairwise(inside)]
        done = torch.zeros_like(q)
        for here, there in parts:
            n, m = q[:, here].shape[1], k[:, there].shape[1]
            distance = torch.arange(n)[:, None] + m - n - torch.arange(m)
            seen = (distance >= 0) & (distance < (sliding_window or m + 1))
            scores = (q[:, here] @ k[:, there].mT * scaling).masked_fill(~seen, -torch.inf)
            done[:, here] = scores.softmax(-1) @ v[:, there]
        output[b][:, real[b, -L:]] = done
    return output.transpose(1, 2), None


AttentionInterface.register("unpadded_for_tests", unpadded_attention)
AttentionMaskInterface.register("unpadded_for_tests", flash_attention_mask)


@torch.no_grad()
def test_kernels_of_variable_length():
    """They get the library's two-dimensional mask, a window and offsets, as flash attention does."""
    model, ids = hybrid(), random_ids(3, 19)
    mask = random_masks(3, 19, torch.Generator().manual_seed(1))
    calls = {
        "whole": lambda: model(ids).logits,
        "pieces": lambda: in_pieces(model, ids, [7, 1, 1, 10])[0],
        "masked": lambda: in_pieces(model, ids, [7, 1, 11], mask)[0][mask],
        "packed": lambda: model(ids[:1], position_ids=torch.cat([torch.arange(8), torch.arange(11)])[None]).logits,
        "rows": lambda: model(ids, seq_idx=(torch.arange(19) > 6)[None].int().expand(3, -1), use_cache=False).logits,
    }
    expected = {name: call() for name, call in calls.items()}
    model.set_attn_implementation("unpadded_for_tests")
    for name, call in calls.items():
        assert_close(call(), expected[name])


@torch.no_grad()
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {"rope_type": "default", "rope_theta": 500.0},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rotary_variants(rope, tmp_path):
    """They change what the model computes, decode as they read, and are saved."""
    plain, model, ids = hybrid(), hybrid(rope_parameters=rope), random_ids(1, 15)
    whole = in_pieces(model, ids, [15])[0]
    assert (whole - plain(ids).logits).abs().max() > 1e-3
    assert_close(in_pieces(model, ids, [4, 1, 10])[0], whole)
    model.save_pretrained(tmp_path)
    assert torch.equal(ESSMForCausalLM.from_pretrained(tmp_path)(ids).logits, whole)


def test_a_window_keeps_what_it_needs():
    """All but the position that comes next, however the text was cut; full attention keeps all."""
    for sizes in ([19], [1] * 19, [3, 16]):
        states = in_pieces(hybrid([S_, L_, F_]), random_ids(2, 19), sizes)[1].states
        assert states["0.keys"].shape == (2, 2, 4, 4) and states["2.keys"].shape == (2, 2, 19, 4)


@torch.no_grad()
def test_far_positions_keep_their_precision():
    """Rotary angles depend on differences alone: a text that begins late reads as it does at the beginning."""
    model, ids = hybrid([L_, F_]), random_ids(1, 12)
    cache = model(ids[:, :1]).past_key_values
    near = model(ids[:, 1:], past_key_values=copy.deepcopy(cache)).logits
    for name in ("keys", "values"):  # nothing to attend to, far away
        cache.layers[1].tensors[name] = cache.layers[1].tensors[name][:, :, :0]
    far = copy.deepcopy(cache)
    far.layers[1].tensors["lengths"] = cache.layers[1].tensors["lengths"] + 1000
    a, b = (model(ids[:, 1:], past_key_values=c).logits for c in (cache, far))
    assert_close(a, b, atol=1e-3)  # fp32 angles of 1000 are exact to 1000 * 6e-8, here amplified by the layers
    assert (a - near).abs().max() > 1e-3


def test_what_needs_a_constant_size_is_refused():
    model, ids = hybrid(), random_ids(1, 5)
    for call, message in (
        (lambda: model.generate(ids, cache_implementation="static"), "layer 1 is 'sliding_attention', whose keys grow"),
        (lambda: compile_decoding(model), r"hybrid is not compiled ahead.*decodes eagerly"),
        (lambda: export_programs(model), "hybrid language model cannot be exported"),
        (lambda: ContinuousBatch(model, 1 << 24), "has attention layers, whose keys grow"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@torch.no_grad()
def test_keys_of_another_dtype_are_read_in_the_models():
    model, ids = hybrid(), random_ids(2, 9)
    cache = model(ids[:, :8]).past_key_values
    expected, alone = model(ids[:, 8:], past_key_values=copy.deepcopy(cache)).logits, model(ids[:, 8:]).logits
    off = (model.bfloat16()(ids[:, 8:], past_key_values=cache).logits.float() - expected).norm() / expected.norm()
    assert off < 8 * torch.finfo(torch.bfloat16).eps < (alone - expected).norm() / expected.norm()
