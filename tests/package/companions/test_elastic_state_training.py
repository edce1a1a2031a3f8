# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""A tiny stream that is hard in places: a trained gate works there, less for a higher price, and not at random."""

import functools

import pytest
import torch
from elastic_states import hard_stream, tiny
from helpers import trainer_arguments
from transformers import Trainer

from modeling_essm.companions import ElasticStateModel, distillation_loss
from modeling_essm.companions.models.modeling_elastic_state import ElasticStateOutput


@functools.cache
def trained(penalty, gate_training="straight_through"):
    torch.manual_seed(0)
    fields = {"num_input_features": 3, "latent_size": 8, "max_refine_depth": 2, "readout_hidden_size": 0}
    fields |= {"gate_first_threshold": -1.5, "trust_radius": 2.0, "metric": "diagonal", "r_max": 0.6, "r_min": 0.1}
    config = tiny(**fields, gate_training=gate_training, compute_penalty=penalty)
    model = ElasticStateModel(config).train()
    gate = list(model.gate.parameters())
    others = [parameter for name, parameter in model.named_parameters() if not name.startswith("gate.")]
    optimizer = torch.optim.Adam([{"params": others, "lr": 0.02}, {"params": gate, "lr": 0.1}])
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        features, signal, _ = hard_stream(32, 3, 3, generator)
        optimizer.zero_grad()
        model(features, signal).loss.backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def on_test_stream(model, **dials):
    features, signal, hard = hard_stream(64, 6, 3, torch.Generator().manual_seed(99))
    return model(features, signal, **dials), hard


def test_a_price_lowers_the_depth():
    """At no price the mean depth need not be K_max, but it is more than twice that at a high price."""
    models = [trained(price, "policy_gradient") for price in (0.0, 5.0)]
    free, dear = (on_test_stream(model)[0].refine_depths.float().mean() for model in models)
    assert free > 0.3 and free > 2 * dear


def test_depth_follows_difficulty_and_counts_where_it_falls():
    """AUROC of K for hard positions, ties counted as halves; the same depths in another order leave more to do."""
    model = trained(0.05)
    output, hard = on_test_stream(model)
    K = output.refine_depths
    more = (K[hard][:, None] > K[~hard]).float() + 0.5 * (K[hard][:, None] == K[~hard]).float()
    assert more.mean() > 0.7
    order = torch.randperm(K.numel(), generator=torch.Generator().manual_seed(0))
    shuffled, _ = on_test_stream(model, refine_depth=K.flatten()[order].view_as(K))
    assert shuffled.gradient_calls == output.gradient_calls
    assert shuffled.losses.mean() > 1.2 * output.losses.mean()
    refined = K > 0
    assert (output.losses <= output.proposal_losses * (1 + 1e-5)).all()
    assert (output.losses < output.proposal_losses)[refined].float().mean() >= 0.95
    plain, _ = on_test_stream(model, refine_depth=0)
    assert plain.losses.mean() > 1.2 * output.losses.mean()


def test_distillation_pulls_proposals_to_where_they_were_refined_to():
    model = trained(0.05)
    features, signal, _ = hard_stream(4, 5, 3, torch.Generator().manual_seed(3))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 1, 1, 1, 1], [1, 0, 1, 0, 1]])
    output = model(features, signal, attention_mask=mask, refine_depth=2)
    apart = (output.proposals - output.latents).pow(2).sum(-1)
    torch.testing.assert_close(distillation_loss(output, mask), apart[mask == 1].mean())
    torch.testing.assert_close(distillation_loss(output), apart.mean())
    proposals = output.proposals.detach().requires_grad_()
    latents = output.latents.detach().requires_grad_()
    distillation_loss(ElasticStateOutput(proposals=proposals, latents=latents), mask).backward()
    torch.testing.assert_close(proposals.grad, 2 * (proposals - latents).detach() * mask[..., None] / mask.sum())
    assert latents.grad is None
    assert distillation_loss(model(features, signal, refine_depth=0)) == 0


def test_trainer_trains_and_evaluates(tmp_path):
    torch.manual_seed(0)
    features, signal, _ = hard_stream(8, 5, 3, torch.Generator().manual_seed(0))
    data = [{"input_features": x, "observations": y} for x, y in zip(features, signal)]
    model = ElasticStateModel(tiny(num_input_features=3, readout_size=3))
    arguments = trainer_arguments(tmp_path, max_steps=2, learning_rate=1e-2)
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    with torch.no_grad():
        expected = float(model.eval()(features, signal).loss)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-4) and expected < before
    assert all(x.shape[:2] == (8, 5) for x in trainer.predict(data).predictions)  # not counts, nor a cache
