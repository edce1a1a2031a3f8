# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""baselines.py and s4d.py: matched sizes, causality, padding, losses, round trips, and S4D against its recurrence."""

import itertools
import math

import pytest
import torch
from helpers import assert_close, random_ids, randomise
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from essm_train.baselines.config import ARCHITECTURES, CAUSAL, BaselineConfig
from essm_train.baselines.models import BaselineForCausalLM, BaselineForSequenceClassification
from essm_train.baselines.s4d import DT_RANGE, S4DMixer
from essm_train.baselines.sizes import count_parameters, matched_baseline

TOKENS = tuple(a for a in ARCHITECTURES if a != "tc_resnet")
F = 5  # input features
LABELS = 3


def tiny(architecture: str, **fields) -> BaselineConfig:
    defaults = {"hidden_size": 16, "num_hidden_layers": 2, "num_labels": LABELS}
    if architecture == "mamba2":
        defaults["state_size"] = 8
    return BaselineConfig(architecture=architecture, **(defaults | fields))


def language_model(architecture: str, seed: int = 0, **fields) -> BaselineForCausalLM:
    """Tiny, in eval mode, no parameter at its initial value."""
    torch.manual_seed(seed)
    return randomise(BaselineForCausalLM(tiny(architecture, **fields)), seed).eval()


def classifier(architecture: str, seed: int = 0, **fields) -> BaselineForSequenceClassification:
    """Tiny, of features unless num_input_features is None; batch normalisation has seen a batch."""
    torch.manual_seed(seed)
    config = tiny(architecture, **({"num_input_features": F} | fields))
    model = randomise(BaselineForSequenceClassification(config), seed)
    if config.num_input_features is not None:
        model.train()(input_features=features(4, 16, seed=9))
    return model.eval()


def features(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, F, generator=torch.Generator().manual_seed(seed))


def padded(length: int, lengths: tuple[int, ...]) -> torch.Tensor:
    """(B, length) int64 mask, padded on the right."""
    return (torch.arange(length) < torch.tensor(lengths)[:, None]).long()


# Sizes: the three targets are a toy, the default of train_clm.py and the paper's language model.
TARGETS = {100_000: (64, 2), 2_700_000: (128, 4), 21_000_000: (256, 8)}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("architecture", CAUSAL)
def test_language_models_match_the_target(architecture, target):
    D, layers = TARGETS[target]
    config = matched_baseline(architecture, target, hidden_size=D, num_hidden_layers=layers)
    assert config.architecture == architecture
    assert abs(count_parameters(config, BaselineForCausalLM) / target - 1) <= 0.05
    published = BaselineConfig(architecture=architecture, hidden_size=config.hidden_size).intermediate_size
    assert published / 2 <= config.intermediate_size <= 2 * published


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.sampled(7)
def test_classifiers_match_the_target(architecture, target):
    D, layers = TARGETS[target]
    fields = {"model_class": BaselineForSequenceClassification, "num_input_features": 40, "num_labels": 12}
    config = matched_baseline(architecture, target, hidden_size=D, num_hidden_layers=layers, **fields)
    assert (config.num_labels, config.num_input_features) == (12, 40)
    assert abs(count_parameters(config, BaselineForSequenceClassification) / target - 1) <= 0.05


@pytest.mark.parametrize("architecture", CAUSAL)
def test_counted_parameters_are_those_of_the_model(architecture):
    config = tiny(architecture)
    state = torch.random.get_rng_state()
    counted = count_parameters(config, BaselineForCausalLM)
    assert torch.equal(state, torch.random.get_rng_state())
    model = BaselineForCausalLM(config)
    assert counted == model.num_parameters() == sum(p.numel() for p in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_inner_width_gives_way_first():
    config = matched_baseline("transformer", 140_000, hidden_size=64, num_hidden_layers=2)
    assert (config.hidden_size, config.num_hidden_layers) == (64, 2)
    # The architecture at its published proportions comes back as it is.
    asked = BaselineConfig(architecture="mamba", hidden_size=64, num_hidden_layers=3)
    found = matched_baseline(
        "mamba", count_parameters(asked, BaselineForCausalLM), hidden_size=64, num_hidden_layers=3, tolerance=0.0
    )
    assert found.to_dict() == asked.to_dict()


def test_an_impossible_target_names_the_closest():
    with pytest.raises(ValueError, match=r"no 'mamba2' near hidden_size 64 .* 1,000 parameters within 5\.0%; the clos"):
        matched_baseline("mamba2", 1000, hidden_size=64, num_hidden_layers=2)
    with pytest.raises(ValueError, match="the closest has"):
        matched_baseline(
            "tc_resnet", 100, model_class=BaselineForSequenceClassification, num_input_features=40, tolerance=0.0
        )
    with pytest.raises(ValueError, match="intermediate_size is what is searched for"):
        matched_baseline("s4d", 1000, intermediate_size=8)


@pytest.mark.parametrize("architecture", CAUSAL)
def test_language_models_are_causal(architecture):
    model = language_model(architecture)
    ids = random_ids(2, 12)
    changed = ids.clone()
    changed[:, 8] = (changed[:, 8] + 1) % 256
    with torch.no_grad():
        before, after = model(ids).logits, model(changed).logits
    assert_close(after[:, :8], before[:, :8])
    assert (after[:, 8:] - before[:, 8:]).abs().amax((0, 2)).min() > 1e-4  # and every later position sees it


def test_the_encoder_sees_both_sides_and_positions():
    model = classifier("transformer", classifier_pooling="last")
    x = features(1, 6)
    first, middle = x.clone(), x[:, [1, 0, 2, 3, 4, 5]]
    first[:, 0] += 1.0
    with torch.no_grad():
        logits = model(input_features=x).logits
        hidden = [model.model(None, y, None)[0] for y in (x, x + torch.eye(6)[-1][None, :, None])]
        assert (model(input_features=first).logits - logits).abs().max() > 1e-4
        assert (model(input_features=middle).logits - logits).abs().max() > 1e-4  # rotary, not a bag
    assert (hidden[0][:, 0] - hidden[1][:, 0]).abs().max() > 1e-4  # the first position sees the last


@pytest.mark.parametrize("architecture", CAUSAL)
def test_right_padding_changes_no_real_logit(architecture):
    model, ids, lengths = language_model(architecture), random_ids(2, 12), (7, 12)
    with torch.no_grad():
        logits = model(ids, attention_mask=padded(12, lengths)).logits
        for row, length in enumerate(lengths):
            assert_close(logits[row, :length], model(ids[row : row + 1, :length]).logits[0])


@pytest.mark.parametrize("architecture", CAUSAL)
def test_left_padding_changes_no_real_logit(architecture):
    model, ids, mask = language_model(architecture), random_ids(2, 12), padded(12, (7, 12)).flip(1)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits
        assert_close(logits[0, 5:], model(ids[:1, 5:]).logits[0])
        assert_close(logits[1], model(ids[1:]).logits[0])


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_right_padding_changes_no_classification(architecture, pooling):
    model, lengths = classifier(architecture, classifier_pooling=pooling), (9, 17, 16)
    x = features(3, 17)
    with torch.no_grad():
        logits = model(input_features=x, attention_mask=padded(17, lengths)).logits
        alone = [model(input_features=x[i : i + 1, :n]).logits[0] for i, n in enumerate(lengths)]
    assert_close(logits, torch.stack(alone))
    assert (logits[0] - logits[1]).abs().max() > 1e-3


@pytest.mark.parametrize("architecture", TOKENS)
def test_right_padding_changes_no_classification_of_tokens(architecture):
    model, ids, lengths = classifier(architecture, num_input_features=None), random_ids(2, 11), (6, 11)
    with torch.no_grad():
        logits = model(ids, attention_mask=padded(11, lengths)).logits
        alone = [model(ids[i : i + 1, :n]).logits[0] for i, n in enumerate(lengths)]
    assert_close(logits, torch.stack(alone))


def test_batch_statistics_leave_padding_out():
    x, mask = features(2, 16), padded(16, (9, 16))
    found = []
    for noise in (0.0, 100.0):
        model = classifier("tc_resnet").train()
        logits = model(input_features=x + noise * (1 - mask[..., None]), attention_mask=mask).logits
        found.append([logits, *(b for b in model.buffers() if b.is_floating_point())])
    for clean, noisy in zip(*found):
        assert torch.equal(clean, noisy)
    full = classifier("tc_resnet").train()
    assert_close(
        full(input_features=x, attention_mask=torch.ones(2, 16)).logits, full(input_features=x).logits, atol=1e-4
    )


def test_tc_resnet_is_the_papers():
    """Choi et al. 2019: 16, 24, 32, 48 channels over 40 bands; 66K parameters by their count."""
    config = BaselineConfig(architecture="tc_resnet", hidden_size=48, num_input_features=40, num_labels=12)
    model = BaselineForSequenceClassification(config)
    c = (16, 24, 32, 48)
    convolutions = 3 * 40 * 16 + sum(9 * a * b + 9 * b * b + a * b for a, b in itertools.pairwise(c))
    norms = 2 * 16 + sum(3 * 2 * b for b in c[1:])
    assert sum(p.numel() for p in model.parameters()) == convolutions + norms + 48 * 12 == 65_168
    x = torch.randn(2, 98, 40)
    lengths = []
    for block in model.model.backbone.layers:
        block.register_forward_hook(lambda module, inputs, output: lengths.append(tuple(output.shape)))
    output = model(input_features=x, labels=torch.tensor([0, 11]))
    assert lengths == [(2, 24, 49), (2, 32, 25), (2, 48, 13)]
    assert output.logits.shape == (2, 12) and output.loss.ndim == 0


@pytest.mark.parametrize("architecture", CAUSAL)
def test_language_loss_is_the_cross_entropy_of_the_next_token(architecture):
    model, ids = language_model(architecture), random_ids(2, 9)
    labels = ids.clone()
    labels[0, 5:] = -100
    with torch.no_grad():
        output = model(input_ids=ids, labels=labels, use_cache=False)
        summed = model(input_ids=ids, labels=labels, num_items_in_batch=torch.tensor(3)).loss
    log_p, targets = output.logits[:, :-1].log_softmax(-1), labels[:, 1:]
    nats = [-log_p[b, t, targets[b, t]] for b in range(2) for t in range(8) if targets[b, t] >= 0]
    assert len(nats) == 12
    assert_close(output.loss, torch.stack(nats).mean())
    assert_close(summed, torch.stack(nats).sum() / 3)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_classification_loss_is_the_cross_entropy(architecture):
    model, labels = classifier(architecture), torch.tensor([2, 0])
    with torch.no_grad():
        output = model(input_features=features(2, 12), labels=labels, use_cache=False)
    assert_close(output.loss, -output.logits.log_softmax(-1)[[0, 1], labels].mean())


def check_gradients_and_descent(model, batch, learning_rate) -> None:
    """Every parameter has a gradient, and ten steps of SGD on one batch lower its loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        silent = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
        assert not silent
        losses.append(loss.item())
        optimizer.step()
    assert losses[-1] < 0.98 * losses[0]


@pytest.mark.parametrize("architecture", CAUSAL)
def test_language_models_learn(architecture):
    torch.manual_seed(0)
    ids = random_ids(2, 12)
    model = BaselineForCausalLM(tiny(architecture)).train()
    check_gradients_and_descent(model, {"input_ids": ids, "labels": ids}, 0.5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_classifiers_learn(architecture):
    torch.manual_seed(0)
    model = BaselineForSequenceClassification(tiny(architecture, num_input_features=F)).train()
    check_gradients_and_descent(model, {"input_features": features(6, 16), "labels": torch.arange(6) % LABELS}, 0.5)


@pytest.mark.parametrize("architecture", CAUSAL)
def test_language_models_are_saved_and_loaded_bit_for_bit(architecture, tmp_path):
    model, ids = language_model(architecture), random_ids(2, 9)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(loaded) is BaselineForCausalLM and type(AutoConfig.from_pretrained(tmp_path)) is BaselineConfig
    for name in ("architecture", "hidden_size", "num_hidden_layers", "intermediate_size", "state_size"):
        assert getattr(loaded.config, name) == getattr(model.config, name)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name
    with torch.no_grad():
        assert torch.equal(model(ids).logits, loaded(ids).logits)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_classifiers_are_saved_and_loaded_bit_for_bit(architecture, tmp_path):
    model, x = classifier(architecture), features(2, 9)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    for name, tensor in model.state_dict().items():  # batch statistics among them
        assert torch.equal(tensor, loaded.state_dict()[name]), name
    with torch.no_grad():
        assert torch.equal(model(input_features=x).logits, loaded(input_features=x).logits)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_fsdp_wraps_the_blocks(architecture):
    model = classifier(architecture)
    (name,) = model._no_split_modules
    blocks = [module for module in model.modules() if type(module).__name__ == name]
    assert len(blocks) == (3 if architecture == "tc_resnet" else 2)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_seed_defines_the_weights(architecture):
    states = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        states.append(BaselineForSequenceClassification(tiny(architecture, num_input_features=F)).state_dict())
    first, same, other = states
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_dropout_acts_in_training_alone(architecture):
    x = features(2, 16)
    rate = classifier(architecture, dropout=0.5)
    with torch.no_grad():
        assert torch.equal(rate(input_features=x).logits, classifier(architecture)(input_features=x).logits)
        assert not torch.equal(*(rate.train()(input_features=x).logits for _ in range(2)))


@pytest.mark.parametrize("architecture", CAUSAL)
def test_gradient_checkpointing_changes_no_gradient(architecture):
    ids, gradients = random_ids(2, 8), []
    for checkpointing in (False, True):
        model = language_model(architecture, dropout=0.3).train()
        if checkpointing:
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )  # as loop.py does
        torch.manual_seed(3)  # of the dropout
        model(ids, labels=ids).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, checkpointed in zip(*gradients):
        assert_close(checkpointed, plain)


@pytest.mark.parametrize("architecture", CAUSAL)
def test_mixed_precision(architecture):
    model, ids = language_model(architecture), random_ids(2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    assert abs(loss.item() - model(ids, labels=ids).loss.item()) < 0.1  # bf16 keeps 8 bits
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_unsupported_calls_are_refused():
    model, ids = language_model("s4d"), random_ids(1, 4)
    with pytest.raises(TypeError, match="spectral_budget"):
        model(ids, spectral_budget=4)
    with pytest.raises(ValueError, match="use_cache must be False or None, got True"):
        model(ids, use_cache=True)
    with pytest.raises(ValueError, match=r"attention_mask must be \(1, 4\), got \(1, 3\)"):
        model(ids, attention_mask=torch.ones(1, 3))
    with pytest.raises(ValueError, match=r"reads input_features \(B, L, 5\) and nothing else"):
        classifier("cnn")(ids)
    with pytest.raises(ValueError, match=r"input_features must be \(B, L, 5\), got \(1, 4, 6\)"):
        classifier("cnn")(input_features=torch.zeros(1, 4, 6))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architecture": "lstm"}, "architecture must be one of .* got 'lstm'"),
        ({"hidden_size": 15}, "hidden_size of 'transformer' must be a multiple of 2"),
        ({"architecture": "mamba2", "intermediate_size": 40, "hidden_size": 16}, "must be a multiple of 32"),
        ({"architecture": "s4d", "state_size": 7}, "state_size of 's4d' must be a multiple of 2"),
        ({"architecture": "tc_resnet"}, "needs num_input_features"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer >= 1, got 0"),
        ({"classifier_pooling": "max"}, "classifier_pooling must be 'mean' or 'last', got 'max'"),
        ({"dropout": 1.0}, r"dropout must be a number in \[0, 1\), got 1.0"),
    ],
)
def test_bad_configs_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        BaselineConfig(**fields)


@pytest.mark.parametrize("architecture", ["cnn", "tc_resnet"])
def test_convolutional_networks_are_no_language_models(architecture):
    with pytest.raises(ValueError, match="a language model has an architecture of"):
        BaselineForCausalLM(tiny(architecture, num_input_features=F))


# S4D


def mixer(hidden_size: int = 3, state_size: int = 8) -> S4DMixer:
    torch.manual_seed(0)
    model = S4DMixer(hidden_size, state_size)
    model.reset_state_space()
    return model


def test_s4d_starts_as_s4d_lin():
    model = mixer(64, 8)
    A = torch.complex(-model.log_A_real.exp(), model.A_imag)
    assert_close(A, torch.complex(torch.tensor(-0.5), math.pi * torch.arange(4.0)).expand(64, 4))
    dt = model.log_dt.exp()
    assert DT_RANGE[0] <= dt.min() < 3e-3 and 3e-2 < dt.max() <= DT_RANGE[1]  # spread over the range
    assert 0.8 < torch.view_as_complex(model.C).abs().square().mean() < 1.2


@pytest.mark.parametrize("length", [1, 2, 63, 100])
@torch.no_grad()
def test_s4d_is_its_recurrence(length):
    """x_l = A_bar x_{l-1} + B_bar u_l, y_l = 2 Re C x_l + D u_l in fp64, with A_bar and B_bar from a matrix exponential
    of the held system [[A, B], [0, 0]]. Rounding of the FFT is 1e-15 of the outputs, which are of size 10."""
    model = randomise(mixer().double())
    u = torch.randn(2, length, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    A, C = torch.complex(-model.log_A_real.exp(), model.A_imag), torch.view_as_complex(model.C)
    held = torch.zeros(*A.shape, 2, 2, dtype=A.dtype)
    held[..., 0, 0], held[..., 0, 1] = A, 1.0
    held = torch.linalg.matrix_exp(held * model.log_dt.exp()[:, None, None, None])
    x, outputs = torch.zeros(2, *A.shape, dtype=A.dtype), []
    for t in range(length):
        x = held[..., 0, 0] * x + held[..., 0, 1] * u[:, t, :, None]
        outputs.append(2 * (C * x).sum(-1).real + model.D * u[:, t])
    assert_close(model.convolve(u), torch.stack(outputs, 1), atol=1e-11)
