# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""All baselines: matched sizes, causality, padding, losses, training, round trips."""

import itertools

import pytest
import torch
from helpers import assert_close, pad, random_ids, randomise
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Mamba2Config, Mamba2ForCausalLM

from essm_train.baselines.config import ARCHITECTURES, CAUSAL, BaselineConfig
from essm_train.baselines.models import BaselineForCausalLM, BaselineForSequenceClassification
from essm_train.baselines.sizes import count_parameters, matched_baseline
from modeling_essm.companions import state_layers

F = 5  # input features
causal = pytest.mark.parametrize("architecture", CAUSAL)
architectures = pytest.mark.parametrize("architecture", ARCHITECTURES)


def tiny(architecture: str, **fields) -> BaselineConfig:
    defaults = {"hidden_size": 16, "num_hidden_layers": 2, "num_labels": 3, "max_position_embeddings": 64}
    defaults["state_size"] = 8 if architecture in ("mamba2", "matmamba") else None
    return BaselineConfig(architecture=architecture, **defaults | fields)


def language_model(architecture: str, **fields) -> BaselineForCausalLM:
    """Tiny, in eval mode, no parameter at its initial value."""
    torch.manual_seed(0)
    return randomise(BaselineForCausalLM(tiny(architecture, **fields))).eval()


def classifier(architecture: str, **fields) -> BaselineForSequenceClassification:
    """Tiny, of features; batch normalisation has seen a batch."""
    torch.manual_seed(0)
    model = randomise(BaselineForSequenceClassification(tiny(architecture, num_input_features=F, **fields)))
    model.train()(input_features=features(4, 16, seed=9))
    return model.eval()


def features(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, F, generator=torch.Generator().manual_seed(seed))


def mask_of(length: int, *lengths: int) -> torch.Tensor:
    """(B, length) int64, rows padded on the right."""
    return (torch.arange(length) < torch.tensor(lengths)[:, None]).long()


@architectures
def test_baselines_match_the_target(architecture):
    """Language models and classifiers; two layers have the widths of the paper's eight."""
    classify = {"model_class": BaselineForSequenceClassification, "num_input_features": 40, "num_labels": 12}
    for target, D, layers in ((100_000, 64, 2), (5_300_000, 256, 2)):
        for fields in (classify, {}) if architecture in CAUSAL else (classify,):
            config = matched_baseline(architecture, target, hidden_size=D, num_hidden_layers=layers, **fields)
            parameters = count_parameters(config, fields.get("model_class", BaselineForCausalLM))
            assert config.architecture == architecture and abs(parameters / target - 1) <= 0.05
            if architecture != "tc_resnet":
                published = BaselineConfig(architecture=architecture, hidden_size=config.hidden_size).intermediate_size
                assert published / 2 <= config.intermediate_size <= 2 * published
                assert config.num_hidden_layers == layers


def test_the_inner_width_gives_way_first():
    config = matched_baseline("transformer", 140_000, hidden_size=64, num_hidden_layers=2)
    assert (config.hidden_size, config.num_hidden_layers) == (64, 2)
    # The architecture at its published proportions comes back as it is.
    asked = BaselineConfig(architecture="mamba", hidden_size=64, num_hidden_layers=3)
    state = torch.random.get_rng_state()
    target = count_parameters(asked, BaselineForCausalLM)
    found = matched_baseline("mamba", target, hidden_size=64, num_hidden_layers=3)
    assert found.to_dict() == asked.to_dict() and torch.equal(state, torch.random.get_rng_state())
    assert target == BaselineForCausalLM(asked).num_parameters()
    with pytest.raises(ValueError, match=r"no such model has 1,000 parameters within 5\.0%; the closest has"):
        matched_baseline("mamba2", 1000, hidden_size=64, num_hidden_layers=2)


@causal
@torch.no_grad()
def test_language_models_are_causal_and_padding_changes_nothing(architecture):
    model, ids = language_model(architecture), random_ids(2, 12)
    changed = ids.clone()
    changed[:, 8] = (changed[:, 8] + 1) % 256
    logits, after = model(ids).logits, model(changed).logits
    assert_close(after[:, :8], logits[:, :8])
    assert (after[:, 8:] - logits[:, 8:]).abs().amax((0, 2)).min() > 1e-4  # and every later position sees it
    for side in ("left", "right"):
        padded, mask = pad(ids, [7, 12], side)
        found = model(padded, attention_mask=mask).logits
        assert_close(found[0][mask[0].bool()], model(ids[:1, :7]).logits[0])
        assert_close(found[1], logits[1])


@architectures
@torch.no_grad()
def test_padding_changes_no_classification(architecture):
    lengths, x = (9, 17, 16), features(3, 17)
    for pooling in ("mean", "last"):
        model = classifier(architecture, classifier_pooling=pooling)
        logits = model(input_features=x, attention_mask=mask_of(17, *lengths)).logits
        assert_close(logits, torch.cat([model(input_features=x[i : i + 1, :n]).logits for i, n in enumerate(lengths)]))
        assert (logits[0] - logits[1]).abs().max() > 1e-3


@torch.no_grad()
def test_the_encoder_sees_both_sides_and_positions():
    model, x = classifier("transformer", classifier_pooling="last"), features(1, 6)
    swapped = model(input_features=x[:, [1, 0, 2, 3, 4, 5]]).logits
    assert (swapped - model(input_features=x).logits).abs().max() > 1e-4  # rotary, not a bag
    hidden = [model.model(None, y, None)[0] for y in (x, x + torch.eye(6)[-1][None, :, None])]
    assert (hidden[0][:, 0] - hidden[1][:, 0]).abs().max() > 1e-4  # the first position sees the last


def test_batch_statistics_leave_padding_out():
    x, mask = features(2, 16), mask_of(16, 9, 16)
    found = []
    for noise in (0.0, 100.0):
        model = classifier("tc_resnet").train()
        logits = model(input_features=x + noise * (1 - mask[..., None]), attention_mask=mask).logits
        found.append([logits, *(b for b in model.buffers() if b.is_floating_point())])
    assert all(map(torch.equal, *found))


def test_tc_resnet_is_the_papers():
    """Choi et al. 2019: 16, 24, 32, 48 channels over 40 bands; 66K parameters by their count."""
    config = BaselineConfig(architecture="tc_resnet", hidden_size=48, num_input_features=40, num_labels=12)
    model = BaselineForSequenceClassification(config)
    c = (16, 24, 32, 48)
    convolutions = 3 * 40 * 16 + sum(9 * a * b + 9 * b * b + a * b for a, b in itertools.pairwise(c))
    norms = 2 * 16 + sum(3 * 2 * b for b in c[1:])
    assert model.num_parameters() == convolutions + norms + 48 * 12 == 65_168
    lengths = []
    for block in model.model.backbone.layers:
        block.register_forward_hook(lambda module, inputs, output: lengths.append(tuple(output.shape)))
    model(input_features=torch.randn(2, 98, 40))
    assert lengths == [(2, 24, 49), (2, 32, 25), (2, 48, 13)]


@causal
def test_language_models_learn_the_next_token(architecture):
    """The loss is the cross-entropy; every parameter has a gradient, also with checkpoints and in mixed precision."""
    model, ids = language_model(architecture, dropout=0.3), random_ids(2, 9)
    labels = ids.clone()
    labels[0, 5:] = -100
    with torch.no_grad():
        output = model(input_ids=ids, labels=labels)
    log_p, targets = output.logits[:, :-1].log_softmax(-1), labels[:, 1:]
    nats = torch.stack([-log_p[b, t, targets[b, t]] for b in range(2) for t in range(8) if targets[b, t] >= 0])
    assert_close(output.loss, nats.mean())
    gradients = []
    for checkpointing in (False, True):
        model = language_model(architecture, dropout=0.3).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(3)  # of the dropout
        model(ids, labels=ids).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, checkpointed in zip(*gradients):
        assert plain.any()
        assert_close(checkpointed, plain)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model.eval()(ids, labels=ids).loss
    assert abs(mixed.item() - model(ids, labels=ids).loss.item()) < 0.1  # bf16 keeps 8 bits


@architectures
def test_classifiers_learn(architecture):
    """A seed defines the weights, dropout acts in training alone, and ten steps lower the loss of a batch."""
    config, x, labels = tiny(architecture, num_input_features=F, dropout=0.1), features(6, 16), torch.arange(6) % 3
    models = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        models.append(BaselineForSequenceClassification(config))
    first, same, other = (list(model.state_dict().values()) for model in models)
    assert all(map(torch.equal, first, same)) and not all(map(torch.equal, first, other))
    model = models[0].eval()
    with torch.no_grad():
        output = model(input_features=x, labels=labels)
        assert torch.equal(output.logits, model(input_features=x).logits)
        assert not torch.equal(*(model.train()(input_features=x).logits for _ in range(2)))
    assert_close(output.loss, -output.logits.log_softmax(-1)[range(6), labels].mean())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = model(input_features=x, labels=labels).loss
        loss.backward()
        assert not [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
        losses.append(loss.item())
        optimizer.step()
    assert min(losses[5:]) < 0.98 * losses[0]


@architectures
def test_baselines_are_saved_and_loaded_bit_for_bit(architecture, tmp_path):
    """Batch statistics too. FSDP wraps the blocks."""
    models = [(classifier(architecture), AutoModelForSequenceClassification, {"input_features": features(2, 9)})]
    if architecture in CAUSAL:
        models.append((language_model(architecture), AutoModelForCausalLM, {"input_ids": random_ids(2, 9)}))
    for model, auto, inputs in models:
        model.save_pretrained(tmp_path)
        loaded = auto.from_pretrained(tmp_path).eval()
        assert type(loaded) is type(model)
        assert all(map(torch.equal, model.state_dict().values(), loaded.state_dict().values()))
        with torch.no_grad():
            assert torch.equal(model(**inputs).logits, loaded(**inputs).logits)
    assert architecture not in CAUSAL or loaded.lm_head.weight is loaded.model.embed_tokens.weight
    (name,) = models[0][0]._no_split_modules
    blocks = [module for module in models[0][0].modules() if type(module).__name__ == name]
    assert len(blocks) == (3 if architecture == "tc_resnet" else 2)


@pytest.mark.parametrize("architecture", ["transformer", "mamba", "s4"])
@torch.no_grad()
def test_pairs_are_compared(architecture):
    """Both documents alone, without padding, and then the head on both codes."""
    torch.manual_seed(0)
    model = BaselineForSequenceClassification(tiny(architecture, head_hidden_size=9)).eval()
    documents = [random_ids(1, 5), random_ids(1, 9, seed=1)]
    ids, mask = torch.full((1, 2, 9), 256), mask_of(9, 5, 9)[None]
    ids[mask.bool()] = torch.cat(documents, 1)[0]
    a, b = (model.model(text, None, None)[0].mean(1) for text in documents)
    hidden = torch.nn.functional.gelu(model.head(torch.cat([a, b, a * b, a - b], -1)))
    assert_close(model(ids, attention_mask=mask).logits, model.score(hidden))


def test_what_is_refused():
    ids = random_ids(1, 4)
    with pytest.raises(ValueError, match="use_cache must be False or None, got True"):
        language_model("s4d")(ids, use_cache=True)
    with pytest.raises(ValueError, match=r"reads input_features \(B, L, 5\) and nothing else"):
        classifier("cnn")(ids)
    with pytest.raises(ValueError, match="a language model has an architecture of"):
        BaselineForCausalLM(tiny("cnn"))
    for fields, message in (
        ({"architecture": "lstm"}, "architecture must be one of .* got 'lstm'"),
        ({"hidden_size": 15}, "hidden_size of 'transformer' must be a multiple of 2"),
        ({"architecture": "mamba2", "intermediate_size": 40, "hidden_size": 16}, "must be a multiple of 32"),
        ({"architecture": "matmamba", "intermediate_size": 36}, "must be a multiple of 8, got 36"),
        ({"architecture": "s4d", "num_spectral_channels": 8}, "num_spectral_channels must be 1 for 's4d', got 8"),
        ({"architecture": "tc_resnet"}, "needs num_input_features"),
    ):
        with pytest.raises(ValueError, match=message):
            BaselineConfig(**fields)
    for model, K, legal in ((language_model("s4d"), 2, 1), (nested(), 9, 8), (nested(), torch.tensor([1, 2]), 8)):
        with pytest.raises(ValueError, match=rf"spectral_budget must be an integer in \[1, {legal}\], got"):
            model(ids, spectral_budget=K)


def nested(**fields) -> BaselineForCausalLM:
    """Two heads of 26 units a channel."""
    return language_model("matmamba", hidden_size=26, intermediate_size=416, **fields)


def cut(model: BaselineForCausalLM, name: str, x: torch.Tensor, K: int) -> torch.Tensor:
    """What MatMamba's rule leaves of a parameter: rows of z, x, B, C and dt, of the convolution's x, B and C, .."""
    heads, inner, shared = 2 * K, 52 * K, 2 * model.config.state_size
    if name.endswith("out_proj.weight"):
        return x[:, :inner]
    kept = {"in_proj.weight": [*range(inner), *range(416, 416 + inner), *range(832, 832 + shared + heads)]}
    kept |= {name: [*range(heads)] for name in ("A_log", "D", "dt_bias")} | {"norm.weight": [*range(inner)]}
    kept |= {name: [*range(inner), *range(416, 416 + shared)] for name in ("conv1d.weight", "conv1d.bias")}
    return x[kept[name.partition(".mixer.")[2]]] if ".mixer." in name else x


def test_states_of_a_nested_mamba2_are_not_pruned():
    with pytest.raises(ValueError, match="layers with modes"):
        state_layers(nested())


@pytest.mark.parametrize("K", [1, 2, 3, 8])
def test_a_budget_of_a_nested_mamba2_is_a_mamba2_of_its_heads(K):
    """The library's own, in logits and gradients, whole and token by token; what a budget does not run has none."""
    model, ids = nested(), random_ids(2, 11)
    sizes = {
        "num_heads": 2 * K,
        "head_dim": 26,
        "expand": 2 * K,
        "state_size": 8,
        "n_groups": 1,
        "num_hidden_layers": 2,
    }
    library = Mamba2ForCausalLM(Mamba2Config(**sizes, hidden_size=26, vocab_size=259, tie_word_embeddings=True)).eval()
    names = {"model.embed_tokens.weight": "backbone.embeddings.weight"}
    names |= {name: name.removeprefix("model.") for name, _ in model.named_parameters() if name not in names}
    weights = {names[name]: cut(model, name, p.detach(), K) for name, p in model.named_parameters()}
    library.load_state_dict(weights, strict=False)
    truncated = model.truncate(K)
    found, expected = model(ids, labels=ids, spectral_budget=K), library(ids, labels=ids)
    assert_close(found.logits, expected.logits)
    assert torch.equal(found.logits, truncated(ids).logits)
    for output in (found, expected):
        output.loss.backward()
    for name, parameter in model.named_parameters():
        gradient = cut(model, name, parameter.grad, K)
        assert_close(gradient, library.get_parameter(names[name]).grad)
        assert torch.count_nonzero(parameter.grad) == torch.count_nonzero(gradient) > 0
    for small, budget in ((truncated, {}), (model, {"spectral_budget": K})):
        encoder, cache, steps = small.model, None, []
        with torch.no_grad():
            for token in encoder.embed_tokens(ids).split(1, 1):
                step = encoder.backbone(inputs_embeds=token, cache_params=cache, use_cache=True, **budget)
                cache = step.cache_params
                steps.append(small.lm_head(step.last_hidden_state))
        assert_close(torch.cat(steps, 1), found.logits)
