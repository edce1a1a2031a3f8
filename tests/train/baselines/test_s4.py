# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""s4.py: HiPPO-LegS as diagonal plus low rank, and the kernel against the recurrence that it stands for."""

import pytest
import torch
from helpers import assert_close

from essm_train.baselines.config import BaselineConfig
from essm_train.baselines.models import BaselineForCausalLM
from essm_train.baselines.s4 import S4Mixer, hippo_legs
from essm_train.run.learning_rate import parameter_groups


def mixer(max_length: int, hidden_size: int = 3, state_size: int = 8) -> S4Mixer:
    torch.manual_seed(0)
    model = S4Mixer(hidden_size, state_size, max_length)
    model.reset_state_space()
    return model.double()


def moved(model: S4Mixer) -> S4Mixer:
    """No channel like another, as after training."""
    with torch.no_grad():
        for p in (model.log_A_real, model.A_imag, model.P, model.B, model.C):
            p.add_(0.3 * torch.randn_like(p))
    return model


def untruncated(model: S4Mixer) -> torch.Tensor:
    """C of C~ = C (I - A_bar^L): (H, N)."""
    A_bar, _, C = model.discretise()
    identity = torch.eye(A_bar.shape[-1], dtype=A_bar.dtype)
    return torch.linalg.solve((identity - torch.linalg.matrix_power(A_bar, model.max_length)).mT, C)


def recurrence(model: S4Mixer, u: torch.Tensor) -> torch.Tensor:
    """x_l = A_bar x_{l-1} + B_bar u_l, y_l = C x_l + D u_l: (B, L, H) -> (B, L, H)."""
    A_bar, B_bar, _ = model.discretise()
    C, x, outputs = untruncated(model), 0j * B_bar, []
    for step in u.unbind(1):
        x = (A_bar @ x[..., None]).squeeze(-1) + B_bar * step[..., None]
        y = (C * x).sum(-1)
        assert float(y.imag.abs().max()) < 1e-10  # conjugate pairs
        outputs.append(y.real + model.D * step)
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("N", [2, 8, 64])
def test_hippo_in_its_eigenbasis_is_hippo(N):
    Lambda, P, B = (torch.cat([x, x.conj()]) for x in hippo_legs(N))
    A = torch.diag(Lambda) - P[:, None] * P.conj()
    n = torch.arange(N, dtype=torch.float64)
    b = (2 * n + 1).sqrt().to(torch.complex128)
    of_polynomials = -(b[:, None] * b).tril(-1) - torch.diag(n + 1)  # Eq. (2) of the paper
    # Both have the same response B* (g - A)^-1 B, which no change of basis alters.
    for g in (0.5 + 0j, 2.0 - 3j, 40j):
        ours = B.conj() @ torch.linalg.solve(g * torch.eye(N) - A, B)
        theirs = b @ torch.linalg.solve(g * torch.eye(N) - of_polynomials, b)
        assert abs(complex(ours - theirs)) < 1e-9 * abs(complex(theirs))


@pytest.mark.parametrize("change", [lambda model: model, moved], ids=["new", "moved"])
@pytest.mark.parametrize("L", [1, 2, 31, 64])
def test_the_convolution_is_the_recurrence(L, change):
    model = change(mixer(64))
    u = torch.randn(2, L, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert_close(model.convolve(u), recurrence(model, u), atol=1e-10)


@pytest.mark.parametrize("max_length", [63, 2048])
def test_the_kernel_of_odd_and_long_lengths(max_length):
    model = mixer(max_length, state_size=64)
    with torch.no_grad():
        impulse = torch.zeros(1, 50, 3, dtype=torch.float64)
        impulse[:, 0] = 1.0
        expected = (recurrence(model, impulse) - model.D * impulse)[0].T
        kernel = model.kernel(max_length, torch.float64)
        assert_close(kernel[:, :50], expected, atol=1e-10)
        assert_close(model.float().kernel(max_length, torch.float32), kernel.float(), atol=1e-4)


def test_c_starts_standard_normal_before_it_is_truncated():
    C = untruncated(mixer(64, hidden_size=256)).detach()
    assert abs(float(C.abs().square().mean()) - 1) < 0.1
    assert abs(complex(C.square().mean())) < 0.1


def test_gradients_of_everything_are_right():
    model = moved(mixer(16, hidden_size=2, state_size=4))
    u = torch.randn(1, 9, 2, dtype=torch.float64)
    names, values = zip(*((n, p) for n, p in model.named_parameters() if not n.startswith("mix")))

    def run(*given):
        return torch.func.functional_call(model, dict(zip(names, given)), (u,))

    assert torch.autograd.gradcheck(run, [v.detach().requires_grad_() for v in values])


def test_a_longer_sequence_is_refused():
    config = BaselineConfig(architecture="s4", hidden_size=8, num_hidden_layers=1, max_position_embeddings=16)
    model = BaselineForCausalLM(config)
    model(torch.zeros(1, 16, dtype=torch.long))
    with pytest.raises(ValueError, match=r"at most 16 positions \(max_position_embeddings\), got 17"):
        model(torch.zeros(1, 17, dtype=torch.long))


def test_no_weight_decay_moves_the_poles():
    config = BaselineConfig(architecture="s4", hidden_size=8, num_hidden_layers=2, max_position_embeddings=16)
    model = BaselineForCausalLM(config)
    decayed, others = (group["params"] for group in parameter_groups(model, 0.1))
    for layer in model.model.backbone.layers:
        own = layer.mixer
        assert all(any(p is q for q in others) for p in (own.log_A_real, own.A_imag, own.log_dt, own.P, own.B))
        assert any(own.C is q for q in decayed)
