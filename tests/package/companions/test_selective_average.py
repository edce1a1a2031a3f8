# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""selective_average.py: against means token by token, and its truncation."""

import pytest
import torch
from recurrences import error_norm
from transformers import FalconMambaConfig, FalconMambaModel, MambaConfig, MambaModel

from modeling_essm.companions.truncation.balancing import channels, truncate
from modeling_essm.companions.truncation.selective_average import averaged_systems

D, N = 8, 4


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=20, hidden_size=D // 2, state_size=N, num_hidden_layers=2, time_step_rank=2)
    model = MambaModel(config)
    for layer in model.layers:  # fresh weights of x_proj are so small that delta, B and C hardly depend on the text
        torch.nn.init.normal_(layer.mixer.x_proj.weight)
    return model.train()


def by_tokens(model, rows):
    """Means over the tokens of rows of different lengths, run one by one, from what x_proj is given."""
    seen = {}
    handles = [
        layer.mixer.x_proj.register_forward_pre_hook(lambda m, args, i=i: seen.setdefault(i, []).append(args[0]))
        for i, layer in enumerate(model.layers)
    ]
    with torch.no_grad():
        for row in rows:
            model.eval()(row[None])
    for handle in handles:
        handle.remove()
    found = []
    for i, layer in enumerate(model.layers):
        mixer, terms = layer.mixer, []
        for x in (x.double() for row in seen[i] for x in row[0]):
            projected = mixer.x_proj.weight.double() @ x
            raw = mixer.dt_proj.weight.double() @ projected[:2] + mixer.dt_proj.bias.double()
            delta = torch.log1p(raw.exp())[:, None]
            B, C = projected[2 : 2 + N], projected[2 + N :]
            terms.append(((-delta * mixer.A_log.double().exp()).exp(), delta * B, C.expand(D, N)))
        found.append([torch.stack(term).mean(0).detach() for term in zip(*terms)])
    return found


def test_means_over_tokens(model):
    """In batches with padding on the right. x_proj works in fp32, 1e-7 of entries of up to 10."""
    rows = [torch.arange(7) % 20, torch.tensor([3, 1, 4, 1]), torch.tensor([19, 2, 5, 9, 11])]
    expected = by_tokens(model, rows)
    model.train()
    padded = torch.nn.utils.rnn.pad_sequence(rows[:2], batch_first=True)
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    systems = averaged_systems(model, [{"input_ids": padded, "attention_mask": mask}, rows[2][None]])
    assert model.training
    assert list(systems) == ["layers.0.mixer", "layers.1.mixer"]
    for system, means in zip(systems.values(), expected):
        for found, mean in zip((system.lam, system.B, system.C), means):
            assert found.shape == (D, N)
            torch.testing.assert_close(found.real, mean, rtol=1e-4, atol=1e-5)
        assert system.output == "real"


def test_an_average_can_be_truncated(model):
    system = averaged_systems(model, [torch.arange(12)[None] % 20])["layers.1.mixer"]
    result = truncate(system, size=2, variant="real")
    assert result.system.modes <= 2 * D
    errors = [error_norm(one, other, 200) for one, other in zip(channels(system), channels(result.system))]
    assert max(errors) <= result.bound
    assert result.hankel.shape == (D, 2 * N)


def test_a_mean_at_the_circle_is_scaled():
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=5, hidden_size=2, state_size=2, num_hidden_layers=1, time_step_rank=1)
    model = MambaModel(config)
    with torch.no_grad():
        model.layers[0].mixer.A_log[1, 0] = -1000.0  # exp(-delta exp(-1000)) = 1
    system = averaged_systems(model, [torch.tensor([[1, 2, 3]])])["layers.0.mixer"]
    assert system.lam[1, 0] == 1 - 1e-3
    assert (system.lam.real < 1).all()


def test_nothing_to_average(model):
    with pytest.raises(ValueError, match="no selective layer"):
        averaged_systems(torch.nn.Linear(2, 2), [])
    with pytest.raises(ValueError, match="at least one token"):
        averaged_systems(model, [])


def test_relatives_with_norms_behind_the_projection_are_refused():
    """Their delta, B and C are not what x_proj gives."""
    config = FalconMambaConfig(vocab_size=20, hidden_size=4, state_size=N, num_hidden_layers=1, time_step_rank=2)
    with pytest.raises(ValueError, match="no selective layer like MambaMixer"):
        averaged_systems(FalconMambaModel(config), torch.ones(1, 3, dtype=torch.long))


def test_one_batch_can_stand_by_itself(model):
    ids = torch.arange(6).view(1, 6)
    one, other = averaged_systems(model, ids), averaged_systems(model, [ids])
    assert all(torch.equal(one[name].lam, other[name].lam) for name in other)
