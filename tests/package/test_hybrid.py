# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Attention layers among spectral ones: one meaning however computed, cut into calls, padded, packed and stored."""

import copy
import itertools
import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from helpers import BLOCK, VARIANTS, assert_close, pad, random_ids, random_masks, random_model
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

from modeling_essm import ESSMCache, ESSMForCausalLM, ESSMForSequenceClassification
from modeling_essm.decoding import compile_decoding, load_cache, save_cache, speculate
from modeling_essm.export import export_programs

L_, S_, F_ = "linear_attention", "sliding_attention", "full_attention"
PATTERNS = {"full": [L_, F_], "sliding": [S_, L_], "both": [L_, S_, L_, F_], "twice": [F_, F_, L_, S_]}
patterns = pytest.mark.parametrize("types", PATTERNS.values(), ids=PATTERNS)
BLOCKS = {name: VARIANTS[name] for name in ("paper", "ar", "gated", "gated-diagonal")}
blocks = pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
GREEDY = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 256}
LENGTHS = [9, 4, 6]


def hybrid(cls=ESSMForCausalLM, types=PATTERNS["both"], **fields):
    """Four query heads for two of keys, a window of 5."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "sliding_window": 5}
    return random_model(cls, num_hidden_layers=len(types), layer_types=types, **(heads | fields))


@torch.no_grad()
def in_pieces(model, ids, sizes, mask=None, **options):
    """Logits of all positions, read in calls of these sizes with one cache, and the cache."""
    cache, parts, start = None, [], 0
    for n in sizes:
        here = slice(start, start + n)
        call = {} if mask is None else {"attention_mask": mask[:, here].long()}
        output = model(ids[:, here], past_key_values=cache, use_cache=True, **call, **options)
        cache, start = output.past_key_values, start + n
        parts.append(output.logits)
    return torch.cat(parts, 1), cache


# ---------------------------------------------------------------------------------------------------------------------
# The layer.


@torch.no_grad()
@pytest.mark.parametrize("kind", [S_, F_])
def test_attention_is_what_it_says(kind):
    """Query by query and head by head in fp64, from the definition: causal, within the window, rotated by position."""
    model = hybrid(types=[L_, kind]).double()
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


@blocks
@patterns
def test_implementations_agree(types, block):
    model, ids = hybrid(types=types, **block), random_ids(2, 23)
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
@patterns
def test_kernels_of_variable_length(types):
    """They get the library's two-dimensional mask, a window and offsets, as flash attention does."""
    model, ids = hybrid(types=types), random_ids(3, 19)
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


def test_gradient_checkpointing_changes_nothing():
    model, ids = hybrid(dropout=0.0), random_ids(2, 21)
    found = []
    for checkpointing in (False, True):
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        found.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_masked_positions_leave_no_gradient():
    """Whatever stands there; and all gradients are finite."""
    model, ids = hybrid(), random_ids(3, 17)
    mask = random_masks(3, 17, torch.Generator().manual_seed(2))
    labels = ids.masked_fill(~mask, -100)
    found = []
    for other in (0, 7):
        model.zero_grad()
        model(ids.masked_fill(~mask, other), mask.long(), labels=labels, use_cache=False).loss.backward()
        found.append([p.grad.clone() for n, p in model.named_parameters() if "embed" not in n])
    for a, b in zip(*found, strict=True):
        assert a.isfinite().all()
        assert_close(a, b, atol=1e-5 * max(1.0, float(b.abs().max())))


@torch.no_grad()
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0},
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


# ---------------------------------------------------------------------------------------------------------------------
# Cut, padded, packed.


@patterns
@pytest.mark.parametrize("sizes", [[1] * 19, [7, 1, 1, 10], [3, 16], [18, 1]], ids=str)
def test_pieces_equal_the_whole(types, sizes):
    model, ids = hybrid(types=types), random_ids(2, 19)
    whole, _ = in_pieces(model, ids, [19])
    pieces, cache = in_pieces(model, ids, sizes)
    assert_close(pieces, whole)
    assert cache.get_seq_length() == 19
    for kind, layer in zip(types, cache.layers):
        if kind != L_:  # of a window all but the position that comes next
            assert layer.keys.shape == (2, 2, 4 if kind == S_ else 19, 4)


@patterns
@pytest.mark.parametrize("sizes", [[19], [7, 1, 1, 10], [10, 9]], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_masked_positions_do_not_exist(types, sizes, seed):
    """In front, behind and in between, in whichever call: rows equal those of real positions alone, and go on so."""
    model, ids = hybrid(types=types), random_ids(3, 19)
    mask = random_masks(3, 19, torch.Generator().manual_seed(seed))
    logits, cache = in_pieces(model, ids, sizes, mask)
    with torch.no_grad():
        further = model(ids[:, :4], past_key_values=cache).logits
        for b in range(3):
            row = torch.cat([ids[b][mask[b]], ids[b, :4]])[None]
            alone = model(row).logits[0]
            assert_close(logits[b][mask[b]], alone[:-4])
            assert_close(further[b], alone[-4:])


@patterns
def test_packed_equals_separate(types):
    model, lengths = hybrid(types=types), [7, 9, 1, 16]
    ids, positions = random_ids(1, 33), torch.cat([torch.arange(n) for n in lengths])[None]
    with torch.no_grad():
        separate = torch.cat([model(part).logits for part in ids.split(lengths, 1)], 1)
        assert_close(model(ids, position_ids=positions, use_cache=False).logits, separate)
        ids, positions = F.pad(ids, (3, 2), value=256), F.pad(positions, (3, 2))
        mask = F.pad(torch.ones(1, 33, dtype=torch.int64), (3, 2))
        padded = model(ids, mask, position_ids=positions, use_cache=False).logits
        assert_close(padded[:, 3:-2], separate)


@torch.no_grad()
def test_far_positions_keep_their_precision():
    """Rotary angles depend on differences alone: a text that begins late reads as it does at the beginning."""
    model = hybrid(types=[L_, F_])
    ids = random_ids(1, 12)
    cache = model(ids[:, :1]).past_key_values
    near = model(ids[:, 1:], past_key_values=copy.deepcopy(cache)).logits
    cache.layers[1].tensors["keys"] = cache.layers[1].tensors["keys"][:, :, :0]  # nothing to attend to, far away
    cache.layers[1].tensors["values"] = cache.layers[1].tensors["values"][:, :, :0]
    far = copy.deepcopy(cache)
    far.layers[1].tensors["lengths"] = cache.layers[1].tensors["lengths"] + 1000
    a, b = (model(ids[:, 1:], past_key_values=c).logits for c in (cache, far))
    assert_close(a, b, atol=1e-3)  # fp32 angles of 1000 are exact to 1000 * 6e-8, here amplified by the layers
    assert (a - near).abs().max() > 1e-3


# ---------------------------------------------------------------------------------------------------------------------
# Generation and states.


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 3},
        {"use_cache": False},
        {"prefill_chunk_size": 4},
        {"step_budgets": [32, 4, 9]},
        {"custom_generate": speculate(draft_budget=2)},
        {"custom_generate": speculate(draft_budget=2, draft_length=3)},
    ],
    ids=lambda options: "-".join(options) or "greedy",
)
def test_generate_gives_what_rows_give_alone(options):
    model, ids = hybrid(), random_ids(3, 9)
    prompts, mask = pad(ids, LENGTHS, "left")
    together = model.generate(prompts, attention_mask=mask, **GREEDY, **options)[:, 9:]
    plain = {name: value for name, value in options.items() if name != "custom_generate"}
    for row, n, found in zip(ids, LENGTHS, together):
        assert torch.equal(model.generate(row[None, :n], **GREEDY, **plain)[0, n:], found)


@torch.no_grad()
def test_budgets_of_rows():
    model, ids = hybrid(), random_ids(3, 9)
    budgets = torch.tensor([2, 32, 7])
    together = model.generate(ids, spectral_budget=budgets, **GREEDY)
    for b, K in enumerate(budgets.tolist()):
        assert torch.equal(model.generate(ids[b : b + 1], spectral_budget=K, **GREEDY)[0], together[b])
    torch.manual_seed(0)
    assert model.generate(ids, max_new_tokens=3, do_sample=True, num_return_sequences=2).shape == (6, 12)


@torch.no_grad()
def test_rows_leave_and_join():
    model, ids = hybrid(), random_ids(4, 9)
    prompts, mask = pad(ids[:3], LENGTHS, "right")
    cache, other = model(prompts, attention_mask=mask).past_key_values, model(ids[3:, :2]).past_key_values
    alone = [model(row[None, :n]).past_key_values for row, n in zip(ids, [*LENGTHS, 2])]
    short = cache.select([1])
    assert [layer.keys.shape[2] for layer in short.layers if layer.keys is not None] == [4, 4]  # no room for row 0
    merged = ESSMCache.merge([other, cache.select([2, 0]), short])
    expected = torch.cat([model(ids[:1, :3], past_key_values=alone[i]).logits for i in (3, 2, 0, 1)])
    assert_close(model(ids[:1, :3].expand(4, -1), past_key_values=merged).logits, expected)


@torch.no_grad()
def test_a_saved_cache_goes_on_bit_for_bit(tmp_path):
    model, ids = hybrid(), random_ids(3, 9)
    prompts, mask = pad(ids, LENGTHS, "left")
    cache = model(prompts, attention_mask=mask).past_key_values
    save_cache(cache, tmp_path / "cache", model)
    read = load_cache(tmp_path / "cache", model)
    assert torch.equal(*(model(ids[:, :2], past_key_values=c).logits for c in (cache, read)))
    with pytest.raises(ValueError, match="is of another model"):
        load_cache(tmp_path / "cache", hybrid(sliding_window=6))
    lengths = cache.layers[1].tensors["lengths"]
    for wrong, message in ((-lengths, "at least 0"), (lengths.float(), "int64"), (lengths[:2], "3 int64")):
        cache.layers[1].tensors["lengths"] = wrong
        with pytest.raises(ValueError, match=rf"lengths of layer 1 must be .*{message}|would not be read again"):
            save_cache(cache, tmp_path / "cache", model)
    cache.layers[1].tensors["lengths"] = lengths
    cache.layers[3].tensors["keys"] = cache.layers[3].tensors["keys"][:, :, 1:]
    with pytest.raises(ValueError, match=r"keys of layer 3 must have shape \(3, 2, T in "):
        save_cache(cache, tmp_path / "cache", model)


@torch.no_grad()
def test_a_cache_that_no_call_leaves_is_refused(tmp_path):
    """Keys that a window has left behind, and layers that disagree on how much was read."""
    model, ids = hybrid(), random_ids(1, 9)
    cache = model(ids).past_key_values
    window = cache.layers[1].tensors
    held = dict(window)
    window.update({name: held[name].repeat(1, 1, 9, 1) for name in ("keys", "values")})
    with pytest.raises(ValueError, match=r"keys of layer 1 must have shape \(1, 2, T in \[4, 4\]"):
        save_cache(cache, tmp_path / "cache", model)
    window.update(held)
    cache.layers[3].tensors["lengths"] -= 1
    with pytest.raises(ValueError, match=r"lengths of layer 3 must be those of layer 1, \[9\], got \[8\]"):
        save_cache(cache, tmp_path / "cache", model)


def test_keys_of_one_row_lie_as_their_shapes_say():
    """Those of a window, whatever was read before it; a compiled step looks at strides."""
    model = hybrid(types=[S_, L_], num_key_value_heads=1)
    for length in (5, 9, 14):
        cache = model(random_ids(1, length), use_cache=True).past_key_values
        for held in (cache, cache.select([0])):
            assert held.layers[0].tensors["keys"].shape[2] == 4
            for tensor in held.states.values():
                assert tensor.stride() == torch.empty(tensor.shape).stride()


@torch.no_grad()
def test_compiled_without_a_break():
    torch._dynamo.reset()
    model, ids = hybrid(), random_ids(2, 21)
    padded, mask = pad(ids, [21, 13], "left")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for kwargs in ({"attention_mask": mask}, {"spectral_budget": [3, 9]}, {}):
        assert_close(compiled(padded, use_cache=False, **kwargs).logits, model(padded, **kwargs).logits)


def test_a_cache_of_other_layers_is_refused():
    model, ids = hybrid(), random_ids(1, 5)
    cache = hybrid(types=[L_, F_, L_, S_])(ids).past_key_values
    with pytest.raises(ValueError, match="layer_types"):
        model(ids, past_key_values=cache)


def test_what_needs_a_constant_size_is_refused():
    model, ids = hybrid(), random_ids(1, 5)
    with pytest.raises(ValueError, match="layer 1 is 'sliding_attention', whose keys grow"):
        model.generate(ids, cache_implementation="static", **GREEDY)
    with pytest.raises(ValueError, match=r"hybrid is not compiled ahead.*decodes eagerly"):
        compile_decoding(model)
    with pytest.raises(ValueError, match="hybrid language model cannot be exported"):
        export_programs(model)
    with pytest.raises(ValueError, match="cannot be cropped"):
        model(ids).past_key_values.crop(-1)


@torch.no_grad()
def test_a_classifier_is_exported():
    model = hybrid(ESSMForSequenceClassification, num_labels=3)
    program = export_programs(model, 6)["classify"].module()
    for shape in ((3, 9), (2, 26)):
        ids = random_ids(*shape)
        mask = random_masks(*shape, torch.Generator().manual_seed(0)) if shape[0] > 2 else torch.ones(shape)
        expected = model(ids, attention_mask=mask.long(), spectral_budget=6).logits
        assert_close(program(ids, mask.long()), expected)


# ---------------------------------------------------------------------------------------------------------------------
# Budgets and weights.


@torch.no_grad()
@blocks
def test_budgets_act_on_spectral_layers(block):
    """One for each of them, in order; an attention layer is the same at all, and holds the same."""
    model, ids = hybrid(**block), random_ids(2, 13)
    seen = []
    for layer in (model.model.layers[1], model.model.layers[3]):
        layer.self_attn.register_forward_hook(lambda module, args, output: seen.append(output))
    caches = {}
    for K in ([32, 32], [32, 4], [4, 32]):
        output = model(ids, spectral_budget=K, use_cache=True)
        assert output.spectral_budget == tuple(K)
        caches[tuple(K)] = output.past_key_values
    first = seen[::2]
    assert torch.equal(first[0], first[1]) and not torch.equal(first[0], first[2])  # the layer before it decides
    sizes = [[tuple(t.shape) for t in layer.tensors.values()] for layer in caches[4, 32].layers]
    assert sizes[0][0][1] < sizes[2][0][1]
    assert sizes[1] == [tuple(t.shape) for t in caches[32, 32].layers[1].tensors.values()]
    with pytest.raises(ValueError, match="each of the 2 spectral layers, got 4"):
        model(ids, spectral_budget=[4, 4, 4, 4])


@torch.no_grad()
@pytest.mark.parametrize("capacity", [6, [5, 7]], ids=str)
def test_prefix_and_truncation(capacity, tmp_path):
    model, ids = hybrid(), random_ids(2, 13)
    model.save_pretrained(tmp_path)
    expected = model(ids, spectral_budget=capacity).logits
    prefix = ESSMForCausalLM.from_pretrained(tmp_path, spectral_capacity=capacity)
    small = copy.deepcopy(model).truncate(capacity)
    for shorter in (prefix, small):
        assert torch.equal(shorter(ids).logits, expected)
        assert shorter.num_parameters() == model.num_active_parameters(capacity)
        assert shorter.config.capacities == ((6, 6) if capacity == 6 else (5, 7))


@torch.no_grad()
def test_quantised_weights_leave_attention_alone(tmp_path):
    pytest.importorskip("torchao")
    model = hybrid(hidden_size=32, head_dim=16)
    model.save_pretrained(tmp_path)
    small = ESSMForCausalLM.from_pretrained(tmp_path, quantization_config="int8")
    for mine, theirs in zip(model.model.layers, small.model.layers):
        if hasattr(mine, "self_attn"):
            for a, b in zip(mine.self_attn.parameters(), theirs.self_attn.parameters(), strict=True):
                assert type(b) is torch.nn.Parameter and torch.equal(a, b)
        else:
            assert hasattr(theirs.mixer.channel_mixing, "qdata")


CHILD = """
import json, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
ids = torch.load(sys.argv[2])
whole = model(ids).logits.detach()
cache = model(ids[:, :7], use_cache=True).past_key_values
rest = model(ids[:, 7:], past_key_values=cache).logits.detach()
torch.save({"whole": whole, "rest": rest, "file": type(model.model.layers[1].self_attn).__module__}, sys.argv[2])
"""


def test_a_checkpoint_is_a_whole_model(tmp_path):
    """Through AutoModel with the code beside the weights, in a process without this package."""
    model, ids = hybrid(), random_ids(2, 13)
    model.save_pretrained(tmp_path / "model")
    saved = json.loads((tmp_path / "model" / "config.json").read_text())
    assert saved["layer_types"] == PATTERNS["both"] and saved["sliding_window"] == 5
    torch.save(ids, tmp_path / "ids.pt")
    (tmp_path / "home").mkdir()
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-I", "-c", BLOCK + CHILD, str(tmp_path / "model"), str(tmp_path / "ids.pt")]
    subprocess.run(command, check=True, timeout=300, cwd=tmp_path, env=environment)
    found = torch.load(tmp_path / "ids.pt")
    with torch.no_grad():
        expected = model(ids).logits
    assert torch.equal(found["whole"], expected) and found["file"].endswith("attention_essm")
    assert_close(found["rest"], expected[:, 7:])
