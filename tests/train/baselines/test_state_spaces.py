# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The state spaces of S4, S4D, Mamba and Mamba-2 against the recurrences that they stand for."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, randomise
from transformers import DynamicCache, Mamba2Config
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from essm_train.baselines.config import BaselineConfig
from essm_train.baselines.mamba import ChunkedMamba2Mixer, by_chunks, chunked_scan
from essm_train.baselines.models import BaselineForCausalLM
from essm_train.baselines.state_spaces import S4DMixer, S4Mixer, hippo_legs
from essm_train.run.steps import parameter_groups


def inputs(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def mixer(cls, *sizes: int):
    torch.manual_seed(0)
    model = cls(*sizes)
    model.reset_state_space()
    return model.double()


# ---------------------------------------------------------------------------------------------------------------------
# S4D and S4.


@pytest.mark.parametrize("length", [1, 63])
@torch.no_grad()
def test_s4d_is_its_recurrence(length):
    """x_l = A_bar x_{l-1} + B_bar u_l, y_l = 2 Re C x_l + D u_l in fp64, with A_bar and B_bar from a matrix exponential
    of the held system [[A, B], [0, 0]]. Rounding of the FFT is 1e-15 of the outputs, which are of size 10."""
    model, u = randomise(mixer(S4DMixer, 3, 8)), inputs(2, length, 3)
    A, C = torch.complex(-model.log_A_real.exp(), model.A_imag), torch.view_as_complex(model.C)
    held = torch.zeros(*A.shape, 2, 2, dtype=A.dtype)
    held[..., 0, 0], held[..., 0, 1] = A, 1.0
    held = torch.linalg.matrix_exp(held * model.log_dt.exp()[:, None, None, None])
    x, outputs = torch.zeros(2, *A.shape, dtype=A.dtype), []
    for t in range(length):
        x = held[..., 0, 0] * x + held[..., 0, 1] * u[:, t, :, None]
        outputs.append(2 * (C * x).sum(-1).real + model.D * u[:, t])
    assert_close(model.convolve(u), torch.stack(outputs, 1), atol=1e-11)
    a, b = model.mix(F.gelu(model.convolve(u))).chunk(2, dim=-1)
    assert_close(model(u), a * b.sigmoid(), atol=1e-11)


@pytest.mark.parametrize("N", [2, 64])
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


def untruncated(model: S4Mixer) -> torch.Tensor:
    """C of C~ = C (I - A_bar^L): (H, N)."""
    A_bar, _, C = model.discretise()
    identity = torch.eye(A_bar.shape[-1], dtype=A_bar.dtype)
    return torch.linalg.solve((identity - torch.linalg.matrix_power(A_bar, model.max_length)).mT, C)


@pytest.mark.parametrize("length, moved", [(31, False), (1, True), (64, True)])
@torch.no_grad()
def test_s4_is_its_recurrence(length, moved):
    """x_l = A_bar x_{l-1} + B_bar u_l, y_l = C x_l + D u_l."""
    model, u = mixer(S4Mixer, 3, 8, 64), inputs(2, length, 3)
    for p in (model.log_A_real, model.A_imag, model.P, model.B, model.C) if moved else ():
        p.add_(0.3 * torch.randn_like(p))  # no channel like another, as after training
    A_bar, B_bar, _ = model.discretise()
    C, x, outputs = untruncated(model), 0j * B_bar, []
    for step in u.unbind(1):
        x = (A_bar @ x[..., None]).squeeze(-1) + B_bar * step[..., None]
        y = (C * x).sum(-1)
        assert float(y.imag.abs().max()) < 1e-10  # conjugate pairs
        outputs.append(y.real + model.D * step)
    assert_close(model.convolve(u), torch.stack(outputs, 1), atol=1e-10)
    assert_close(model.float().kernel(64, torch.float32), model.double().kernel(64, torch.float64).float(), atol=1e-4)


def test_s4_starts_with_a_standard_normal_c_and_has_right_gradients():
    C = untruncated(mixer(S4Mixer, 256, 8, 64)).detach()
    assert abs(float(C.abs().square().mean()) - 1) < 0.1 and abs(complex(C.square().mean())) < 0.1
    model, u = mixer(S4Mixer, 2, 4, 16), inputs(1, 9, 2)
    names, values = zip(*((n, p) for n, p in model.named_parameters() if not n.startswith("mix")))

    def run(*given):
        return torch.func.functional_call(model, dict(zip(names, given)), (u,))

    assert torch.autograd.gradcheck(run, [v.detach().requires_grad_() for v in values])


def test_an_s4_model_refuses_longer_sequences_and_keeps_its_poles_from_decay():
    config = BaselineConfig(architecture="s4", hidden_size=8, num_hidden_layers=1, max_position_embeddings=16)
    model = BaselineForCausalLM(config)
    with pytest.raises(ValueError, match=r"at most 16 positions \(max_position_embeddings\), got 17"):
        model(torch.zeros(1, 17, dtype=torch.long))
    decayed, others = ({id(p) for p in group["params"]} for group in parameter_groups(model, 0.1))
    own = model.model.backbone.layers[0].mixer
    assert {id(p) for p in (own.log_A_real, own.A_imag, own.log_dt, own.P, own.B)} <= others and id(own.C) in decayed


# ---------------------------------------------------------------------------------------------------------------------
# Mamba and Mamba-2.


def both_mamba2(**fields):
    """The library's mixer and ours in its place, with the same weights."""
    sizes = {"hidden_size": 12, "num_heads": 3, "head_dim": 8, "state_size": 5, "chunk_size": 64}
    config = Mamba2Config(**{"n_groups": 1, "num_hidden_layers": 1} | sizes | fields)
    library = randomise(Mamba2Mixer(config, 0)).eval()
    library.whole_config = config
    ours = by_chunks(copy.deepcopy(library))
    assert type(library) is Mamba2Mixer and type(ours) is ChunkedMamba2Mixer
    return library, ours


def assert_alike(library, ours, length, width):
    """Outputs and gradients of a sum of squares, one row padded on the right and one on the left; fp32."""
    mask = torch.ones(2, length, dtype=torch.int64)
    mask[0, max(1, length - 5) :] = mask[1, : length // 4] = 0
    found = []
    for model in (library, ours):
        x = inputs(2, length, width).float().requires_grad_()
        y = model(x, attention_mask=mask)
        y.square().sum().backward()
        found.append([y, x.grad, *(p.grad for p in model.parameters())])
    for expected, actual in zip(*found):
        assert_close(actual, expected, atol=2e-5 * max(1.0, expected.abs().max().item()))


@pytest.mark.parametrize("length", [1, 17])
def test_the_chunked_mamba_is_the_librarys(length):
    config = BaselineConfig(architecture="mamba", hidden_size=16, num_hidden_layers=1)
    layer = randomise(BaselineForCausalLM(config)).eval().model.backbone.layers[0].mixer
    assert type(layer) is not MambaMixer
    library = MambaMixer(layer.config, 0)
    library.load_state_dict(layer.state_dict())
    assert_alike(library, layer, length, 16)


@pytest.mark.parametrize("length, limit", [(1, (0.0, math.inf)), (130, (0.0, math.inf)), (64, (0.05, 0.2))])
def test_the_chunked_mamba2_is_the_librarys(length, limit):
    assert_alike(*both_mamba2(time_step_limit=limit), length, 12)


def test_what_is_left_to_the_library():
    """Groups of heads with B and C of their own, and calls with a cache, bit for bit."""
    x = inputs(2, 9, 12).float()
    library, layer = both_mamba2(n_groups=3)
    assert torch.equal(layer(x), library(x))
    outputs = []
    for model in both_mamba2():
        cache = DynamicCache(config=model.whole_config)
        outputs.append([model(x, cache_params=cache), model(x[:, :1], cache_params=cache)])
    assert all(map(torch.equal, *outputs))


def test_a_chunked_scan_forgets_at_once_and_then_slowly():
    """Sums of a are 1e4 from the first step on: in fp32 their differences would be off by 1e-3."""
    x, B, C = inputs(2, 16, 3, 4), inputs(2, 16, 5), inputs(2, 16, 5)
    log_decay = torch.full((2, 16, 3), -0.1).index_fill(1, torch.tensor([0]), -1e4)
    state, outputs = 0.0, []
    for t in range(16):
        state = log_decay[:, t, :, None, None].exp() * state + x[:, t, ..., None] * B[:, t, None, None]
        outputs.append((state * C[:, t, None, None]).sum(-1))
    expected = torch.stack(outputs, 1).float()
    found = chunked_scan(x.float(), log_decay, B.float(), C.float(), 16)
    assert_close(found, expected, atol=2e-6 * expected.abs().max().item())
