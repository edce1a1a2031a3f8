# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Models: the checkpoint's format, first values, budgets and masks, for everything that differs in code."""

import copy
import math
import re

import pytest
import torch
import torch.nn.functional as F
from accelerate.utils import convert_outputs_to_fp32, send_to_device
from helpers import (
    HYBRID,
    VARIANTS,
    all_variants,
    assert_close,
    filled,
    random_ids,
    random_masks,
    random_model,
    tiny_config,
    variants,
)
from safetensors.torch import save_file
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrizations, prune

from modeling_essm import ESSMCache, ESSMForCausalLM, ESSMForSequenceClassification, ESSMModel
from modeling_essm.loading_essm import channel_parameters, leading
from modeling_essm.mixer_essm import LayerCall, prefix_linear
from modeling_essm.packing import close_up, read_packing, reorder

# Names and sizes, of layers and of what stands around them
LAYERS = {
    "paper": "input_norm.weight 16, input_norm.bias 16, mixer.gate_in.weight 8 16, mixer.gate_in.bias 8, "
    "mixer.gate_out.weight 32 8, mixer.gate_out.bias 32, mixer.channel_mixing 32 16 16, mixer.skip.weight 16 16, "
    "ffn_norm.weight 16, ffn_norm.bias 16, ffn.up.weight 64 16, ffn.up.bias 64, ffn.down.weight 16 64, "
    "ffn.down.bias 16",
    "elastic": "input_norm.weight 16, mixer.in_proj.weight 640 16, mixer.convolution 4 384, "
    "mixer.gate_in.weight 32 16, mixer.gate_in.bias 32, "
    "mixer.gate_weight 32 32 32, mixer.gate_offset 32 32, mixer.channel_mixing 32 128, "
    "mixer.skip 128, mixer.norm 256, mixer.out_proj.weight 16 256, mixer.memory.offset 128, "
    "mixer.memory.rates.weight 2 16, mixer.memory.rates.bias 2, "
    "ffn_norm.weight 16, ffn.up.weight 192 16, ffn.down.weight 16 96",
}
FORMATS = {
    "elastic": (
        ESSMModel,
        VARIANTS["memory"] | {"intermediate_size": 96},
        "",
        "embed_tokens.weight 259 16, norm.weight 16",
    ),
    "paper": (
        ESSMForCausalLM,
        {},
        "model.",
        "model.embed_tokens.weight 259 16, model.norm.weight 16, model.norm.bias 16, lm_head.weight 259 16",
    ),
    "features": (
        ESSMForSequenceClassification,
        {"num_labels": 3, "num_input_features": 5},
        "model.",
        "model.embed_features.weight 16 5, model.embed_features.bias 16, model.norm.weight 16, model.norm.bias 16, "
        "score.weight 3 16",
    ),
}


# --- Checkpoint format and initialisation


@pytest.mark.parametrize("name", FORMATS)
def test_checkpoint_names_and_shapes_are_the_documented_format(name):
    cls, fields, prefix, around = FORMATS[name]
    block = "elastic" if name == "elastic" else "paper"
    inside = [f"{prefix}layers.{i}.{text}" for i in range(2) for text in LAYERS[block].split(", ")]
    expected = {name: tuple(map(int, sizes)) for name, *sizes in map(str.split, [*inside, *around.split(", ")])}
    model = cls(tiny_config(**fields))
    assert {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} == expected
    assert list(model.buffers()) == []  # the basis is no part of it


@pytest.mark.parametrize("embeddings", [None, 0.1])
@variants
def test_initial_values(variant, embeddings, tmp_path):
    """Small random M_k, gate bias constant and nonzero, norms and diagonal skip terms at identity.

    The elastic block's projections keep unit scale but for those that write to the residual stream, where later
    channels start smaller. What is missing in a checkpoint starts like that too, which transformers' own
    test_can_init_all_missing_weights asks.
    """
    tied, own = embeddings is None, {} if embeddings is None else {"embedding_initializer_range": embeddings}
    fields = {"hidden_size": 32, "initializer_range": 0.02, "gate_bias": -2.0, "tie_word_embeddings": tied}
    config = tiny_config(**fields, **own, **variant)
    config.save_pretrained(tmp_path)
    save_file({"model.norm.weight": torch.ones(32)}, tmp_path / "model.safetensors", {"format": "pt"})
    torch.manual_seed(0)
    for model in (ESSMForCausalLM(config), ESSMForCausalLM.from_pretrained(tmp_path)):
        for name, tensor in model.state_dict().items():
            if "channel_mixing" in name:
                std = 1e-3 if config.block == "paper" else 1.0
                assert 0.9 * std < tensor.std() < 1.1 * std, name  # at least 768 draws: their standard error is 3%
            elif name.endswith("convolution"):
                assert 0.4 < tensor.abs().max() * config.conv_kernel_size**0.5 <= 1.0, name
            elif name.endswith(("gate_out.bias", "gate_offset")):
                assert (tensor == -2.0).all(), name
            elif name.endswith(("norm.weight", "mixer.norm", "mixer.skip")):
                assert (tensor == 1.0).all(), name
            elif name.endswith(("bias", "offset")):
                assert (tensor == 0.0).all(), name
            elif ("embed_tokens" in name or (tied and "lm_head" in name)) and (own or config.block == "elastic"):
                assert 0.09 < tensor.std() < 0.11, name
            elif config.block == "elastic" and re.search("in_proj|gate_|ffn.up|rates|[qkv]_proj", name):
                error = float(tensor.std()) * tensor.shape[-1] ** 0.5 - 1
                assert abs(error) < 3 * (2 * tensor.numel()) ** -0.5, name
            elif config.block == "elastic" and re.search("mixer.out_proj|layers.*ffn.down", name):
                channels = 1 if "attn" in name else model.config.num_spectral_channels
                for j, part in enumerate(tensor.unflatten(1, (channels, -1)).unbind(1)):
                    std = 0.02 * min(1, 2 / 2 ** math.ceil(math.log2(j + 1)))
                    assert abs(float(part.std()) / std - 1) < 4 * (2 * part.numel()) ** -0.5, name
            else:
                assert 0.015 < tensor.std() < 0.025, name  # at least 256 draws: the standard error is below 5%


@pytest.mark.parametrize("block", ["paper", "elastic"])
def test_a_single_feature_keeps_its_size_from_the_start(block):
    """Without a bias, LayerNorm(w x) is the same for every x > 0; with one, it is not."""
    torch.manual_seed(0)
    model = ESSMModel(tiny_config(num_input_features=1, hidden_size=64, block=block))
    encoder = model.embed_features
    assert 0.5 < float(encoder.bias.detach().std() / encoder.weight.detach().std()) < 2.0
    small, large = (model.layers[0].input_norm(encoder(torch.full((1, 1, 1), x))) for x in (0.2, 0.9))
    assert (small - large).abs().max() > 0.2
    assert (ESSMModel(tiny_config(num_input_features=2)).embed_features.bias == 0).all()


# --- Budgets


@pytest.mark.parametrize("budget", [5, torch.tensor([5, 3])], ids=["int", "rows"])
@all_variants
def test_a_budget_reads_the_leading_blocks_alone(variant, budget):
    """Everything beyond them may be NaN, and gets a gradient of exactly 0; every channel within gets another."""
    model, ids = random_model(**variant).train(), random_ids(2, 20)
    expected = model(ids, labels=ids, spectral_budget=budget).logits
    parts = [(parameter, block, name) for _, block, _, name, parameter in channel_parameters(model)]
    with torch.no_grad():
        for parameter, block, _ in parts:
            kept = parameter[leading(block, 5)].clone()
            parameter.fill_(float("nan"))[leading(block, 5)] = kept
    outputs = model(ids, labels=ids, spectral_budget=budget)
    assert torch.equal(outputs.logits, expected)
    outputs.loss.backward()
    for parameter, block, name in parts:
        # A nested head 1 has a single gate, which is 1 whatever its score.
        first = int(model.config.gating == "nested" and name in ("gate_weight", "gate_offset"))
        counts = [int((parameter.grad[leading(block, K)] != 0).sum()) for K in range(first, 6)]
        assert counts == sorted({*counts}) and counts[-1] == (parameter.grad != 0).sum()
    with torch.no_grad():
        cache = filled(model.eval(), ids[:, :10], budget)
        logits = [model(part, past_key_values=cache, spectral_budget=budget).logits for part in ids[:, 10:].split(9, 1)]
    assert_close(torch.cat(logits, 1), expected[:, 10:])
    assert model(ids, spectral_budget=6).logits.isnan().any()


WATCHERS = {
    "hook": lambda linear: linear.register_forward_hook(lambda module, args, output: 2 * output),
    "pruning": lambda linear: prune.ln_structured(linear, "weight", 0.3, 2, 0),
    "parametrization": lambda linear: parametrizations.orthogonal(linear),
    "forward": lambda linear: setattr(linear, "forward", lambda x: F.linear(x, linear.weight).relu()),
}


@torch.no_grad()
@pytest.mark.parametrize("watch", WATCHERS.values(), ids=WATCHERS)
def test_what_is_done_to_a_linear_layer_acts_at_every_budget(watch):
    """A budget reads a block of a plain layer's weights; one that was changed is called as it is."""
    torch.manual_seed(0)
    linear, x = torch.nn.Linear(12, 10), torch.randn(2, 12).index_fill(1, torch.arange(7, 12), 0.0)
    before = linear(x)
    watch(linear)
    for parameter in linear.parameters():
        parameter.mul_(1.1)  # what is computed from it is computed anew
    assert_close(prefix_linear(linear, x[:, :7], 4), linear(x)[:, :4])
    assert (linear(x) - 1.1 * before)[:, :4].abs().max() > 0.01  # it does something


def test_outputs_rebuilt_from_their_items_keep_the_budget():
    forward = convert_outputs_to_fp32(random_model().bfloat16().forward)
    outputs = forward(random_ids(2, 9), spectral_budget=3)
    assert outputs.logits.dtype == torch.float32 and outputs.spectral_budget == (3, 3)


# --- Time, masks, batch


@all_variants
@pytest.mark.parametrize("seed", range(4))
def test_rows_are_what_they_are_alone(variant, seed):
    """With masks and cuts drawn at random and a budget for each row: what is masked, and other rows, do not exist."""
    generator = torch.Generator().manual_seed(seed)
    B, L, algorithm = 6, 20, ("chunked", "step")[seed % 2]
    model = random_model(spectral_algorithm=algorithm, **variant)
    ids, mask = random_ids(B, L, seed=seed), random_masks(B, L, generator)
    rows = torch.randint(1, 33, (B,), generator=generator)
    cuts = torch.randperm(L - 1, generator=generator)[: 1 + 4 * seed].add(1).sort().values.tolist()
    room, pieces = (None, 32)[seed // 2], []  # None: each row writes its own part of a memory
    cache = ESSMCache(model.config, state_budget=room)
    with torch.no_grad():
        whole = model(ids, attention_mask=mask, spectral_budget=rows, use_cache=seed in (1, 2)).logits
        for a, b in zip([0, *cuts], [*cuts, L]):
            own = mask[:, a:b] if seed < 2 else mask[:, :b].long()
            piece = model(ids[:, a:b], attention_mask=own, past_key_values=cache, spectral_budget=rows)
            pieces.append(piece.logits)
        further = model(ids[:, :3], past_key_values=cache, spectral_budget=rows).logits
        for i in range(B):
            solo = ESSMCache(model.config, state_budget=room)
            tokens, K = ids[i : i + 1, mask[i]], int(rows[i])
            alone = model(tokens, spectral_budget=K).logits[0]
            kept = model(tokens, past_key_values=solo, spectral_budget=K).logits[0]
            assert_close(whole[i, mask[i]], alone)
            assert_close(torch.cat(pieces, 1)[i, mask[i]], kept)
            if mask[i, cuts[-1] :].any():  # so that the last position speaks for its row
                assert_close(whole[i, -1], alone[-1])
                assert_close(pieces[-1][i, -1], kept[-1])
            assert_close(further[i], model(ids[i : i + 1, :3], past_key_values=solo, spectral_budget=K).logits[0])
    assert cache.get_seq_length() == L + 3
    assert (model(ids, spectral_budget=rows).logits - whole)[mask].abs().max() > 1e-3  # the mask did something


@variants
def test_masked_positions_have_no_gradient(variant):
    """Nor do they, whatever lies there, change that of others; hidden states stand where their positions stand."""
    model, ids = random_model(**variant).train(), random_ids(2, 20)
    mask = torch.rand(2, 20, generator=torch.Generator().manual_seed(1)) < 0.5
    embeds = model.get_input_embeddings()(ids).detach().masked_fill(~mask[..., None], torch.nan).requires_grad_()
    labels = ids.masked_fill(~mask | (mask.cumsum(1) == 1), -100)  # nothing real stands before a first token
    outputs = model(inputs_embeds=embeds, attention_mask=mask, labels=labels, output_hidden_states=True)
    outputs.loss.backward()
    assert (embeds.grad[~mask] == 0).all() and embeds.grad.isfinite().all()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if "embed" not in name}
    model.zero_grad()
    loss = 0.0
    for i in range(2):
        own = model.get_input_embeddings()(ids[i : i + 1, mask[i]]).detach()
        alone = model(inputs_embeds=own, labels=ids[i : i + 1, mask[i]], output_hidden_states=True)
        for actual, expected in zip(outputs.hidden_states, alone.hidden_states):
            assert_close(actual[i, mask[i]], expected[0], atol=max(2e-5, 2e-6 * float(expected.abs().max())))
        loss = loss + alone.loss * (mask[i].sum() - 1) / (mask.sum() - 2)
    loss.backward()
    assert_close(outputs.loss, loss)  # the token after a hole is told by the one before it
    for name, parameter in model.named_parameters():
        if name in found:
            assert_close(found[name], parameter.grad, atol=2e-5 * max(1.0, float(parameter.grad.abs().max())))


@variants
def test_padding_is_skipped_by_layers_with_biases_too(variant):
    """As adapters give them: zeros before such a layer are no silence after it."""
    model, ids = random_model(**variant), random_ids(1, 9)
    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda module, inputs, output: output + 0.5)
    padded, mask = (torch.cat([torch.zeros(1, 4, dtype=torch.long), x], 1) for x in (ids, torch.ones_like(ids)))
    with torch.no_grad():
        assert_close(model(padded, attention_mask=mask).logits[:, 4:], model(ids).logits)


@variants
def test_an_empty_batch(variant):
    model, none = random_model(**variant), torch.zeros(0, 5, dtype=torch.long)
    assert model(none, attention_mask=torch.ones_like(none)).logits.shape == (0, 5, 259)
    for budget in (None, 4, torch.tensor([], dtype=torch.int32)):
        cache = ESSMCache(model.config)
        for L in (5, 5, 1):
            logits = model(none[:, :L], past_key_values=cache, spectral_budget=budget).logits
            assert logits.shape == (0, L, 259)
        assert cache.get_seq_length() == 11
    with pytest.raises(ValueError, match=r"shape \(0,\), got \(2,\)"):
        model(none, spectral_budget=torch.tensor([4, 4]))


def test_what_a_layer_is_told_moves_with_it():
    """As Accelerate's hooks move it, where layers lie on several devices."""
    call = send_to_device(LayerCall(2, rows=torch.ones(2), lengths=torch.ones(2)), "meta")
    assert call.budget == 2 and call.rows.is_meta and call.lengths.is_meta and call.padding is None


@pytest.mark.parametrize("packed", [False, True])
def test_positions_follow_a_model_that_is_spread_over_devices(packed):
    """What `close_up` and `Packing` found on the device of the embeddings serves later layers and the last norm."""
    real = torch.tensor([[True, False, True, True], [True, True, True, True]])
    order = close_up(real)[0]
    packing = read_packing({"seq_idx": torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])}, 2, 4)
    with FakeTensorMode() as mode:
        hidden, order = torch.empty(2, 4, 8, device="cuda"), mode.from_tensor(order)
        packing.groups = [tuple(map(mode.from_tensor, group)) for group in packing.groups]
        packing.place = mode.from_tensor(packing.place)
        moved = packing.apply(lambda u, call: u, hidden, LayerCall(2)) if packed else reorder(hidden, order)
    assert moved.device.type == "cuda" and moved.shape == hidden.shape


def test_what_a_model_announces_is_what_it_does():
    plain, hybrid = random_model(), random_model(**HYBRID)
    assert not (plain._supports_sdpa or plain._supports_flash_attn) and hybrid._supports_sdpa
    assert not plain.is_backend_compatible() and not hybrid.is_backend_compatible()  # its state would be lost there
    assert plain.config == copy.deepcopy(plain.config) != hybrid.config
    signals = random_model(ESSMForSequenceClassification, num_input_features=2)
    assert (signals.main_input_name, plain.main_input_name) == ("input_features", "input_ids")
    hybrid.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ValueError, match="rope_parameters must have a rope_type"):
        ESSMForCausalLM(hybrid.config)
