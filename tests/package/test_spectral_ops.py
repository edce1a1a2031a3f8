# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""All four algorithms agree with the fp64 definition in outputs, final states and gradients."""

import pytest
import torch
from operators import TOLERANCE, H, make_inputs, reachable_state, relative_error, run

from modeling_essm import spectral_basis, spectral_chunked, spectral_constants, spectral_folded, spectral_groups
from modeling_essm.spectral_folded import mix_dense_folded, unmix_dense_folded
from modeling_essm.spectral_ops import ALGORITHMS, SpectralOperator


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("algorithm", ["chunked", "fft", "step"])
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "state-and-right-padding"])
@pytest.mark.parametrize(("B", "L", "K"), [(2, 1, 4), (2, 63, 3), (1, 64, 32), (3, 200, 32), (2, 321, 2), (1, 130, 8)])
def test_agrees_with_the_definition(dtype, algorithm, padded, B, L, K):
    operator = SpectralOperator(H)
    u, gates, M = make_inputs(B, L, K, dtype=dtype)
    x0, lengths = None, None
    if padded:
        x0 = reachable_state(operator, K, u.shape[-1], B, dtype)
        lengths = torch.arange(L, L - B, -1).clamp(min=1)
        for row, length in enumerate(lengths):
            u[row, length:] = 0
    expected = run(operator, "naive", u, gates, M, x0, lengths)
    actual = run(operator, algorithm, u, gates, M, x0, lengths)
    for name in expected:
        error = relative_error(actual[name], expected[name])
        assert error < TOLERANCE[dtype], f"{name}: {error:.1e}"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize(("B", "L", "K"), [(2, 63, 3), (3, 200, 32), (2, 321, 2), (1, 7, 1)])
@pytest.mark.parametrize("chunks_per_group", [1, 4])
def test_what_an_accelerator_runs_agrees_with_the_definition(dtype, B, L, K, chunks_per_group, monkeypatch):
    """With the gates folded into W, in groups of all sizes."""
    monkeypatch.setattr(spectral_chunked, "_inside_chunks", lambda M: (mix_dense_folded, unmix_dense_folded))
    monkeypatch.setattr(spectral_folded, "chunks_per_group", lambda *shape: chunks_per_group)
    operator = SpectralOperator(H)
    u, gates, M = make_inputs(B, L, K, dtype=dtype)
    M = torch.cat([M, torch.ones_like(M[:1])])  # beyond the budget
    x0 = reachable_state(operator, K, u.shape[-1], B, dtype)
    expected = run(operator, "naive", u, gates, M, x0, None)
    actual = run(operator, "chunked", u, gates, M, x0, None)
    assert not actual["dM"][K:].any()
    for name in expected:
        error = relative_error(actual[name], expected[name])
        assert error < TOLERANCE[dtype], f"{name}: {error:.1e}"


@pytest.mark.parametrize("shape", [(64, 8, 1024), (1024, 8, 64)], ids=["dense", "heads"])
def test_groups_of_an_accelerator_are_a_fixed_size_or_part_of_its_memory(shape, monkeypatch):
    u = torch.empty(0, dtype=torch.bfloat16)
    monkeypatch.setattr(spectral_groups, "_is_on_cpu", lambda x: False)
    monkeypatch.setattr(spectral_groups, "_memory", lambda device: 80 << 30)
    assert spectral_groups.chunks_per_group(shape, u) == (35 << 20) * 8 // (64 * 8 * 1024 * 2)
    monkeypatch.setattr(spectral_groups, "_memory", lambda device: 4 << 30)
    assert spectral_groups.chunks_per_group(shape, u) == (4 << 30) // 32 // (64 * 8 * 1024 * 2)
    assert spectral_groups.chunks_per_group((512, 32, 1 << 16), u) == 1


HEADS = {  # D, heads h, widths d and e, gates a channel G
    "diagonal": (12, 12, 1, 1, 3),
    "diagonal-one-gate": (12, 12, 1, 1, 1),
    "narrow-to-wide": (12, 6, 2, 3, 6),
    "gates-shared": (12, 4, 3, 3, 2),
    "one-head": (12, 1, 12, 8, 1),
}


def make_heads(shape, B, L, K, dtype=torch.float64, capacity=None, seed=0):
    D, h, d, e, G = shape
    generator = torch.Generator().manual_seed(seed)
    u = torch.randn(B, L, D, generator=generator, dtype=torch.float64).to(dtype)
    gates = torch.rand(B, L, K, G, generator=generator, dtype=torch.float64).to(dtype)
    M = (0.3 * torch.randn(capacity or K, h, d, e, generator=generator, dtype=torch.float64)).to(dtype)
    return u, gates, M


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("algorithm", ["chunked", "fft", "step"])
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "state-and-right-padding"])
@pytest.mark.parametrize(("B", "L", "K"), [(2, 1, 4), (2, 63, 3), (3, 200, 32), (2, 321, 2)])
@pytest.mark.parametrize("shape", HEADS.values(), ids=HEADS)
@pytest.mark.sampled(90)
def test_heads_agree_with_the_definition(dtype, algorithm, padded, B, L, K, shape):
    operator = SpectralOperator(H)
    u, gates, M = make_heads(shape, B, L, K, dtype, capacity=K + 1)
    x0, lengths = None, None
    if padded:
        x0 = reachable_state(operator, K, u.shape[-1], B, dtype)
        lengths = torch.arange(L, L - B, -1).clamp(min=1)
        for row, length in enumerate(lengths):
            u[row, length:] = 0
    expected = run(operator, "naive", u, gates, M, x0, lengths)
    actual = run(operator, algorithm, u, gates, M, x0, lengths)
    assert not expected["dM"][K:].any()
    for name in expected:
        error = relative_error(actual[name], expected[name])
        assert error < TOLERANCE[dtype], f"{name}: {error:.1e}"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize(("B", "L", "K"), [(2, 63, 3), (3, 200, 32)])
@pytest.mark.parametrize("shape", HEADS.values(), ids=HEADS)
@pytest.mark.sampled(10)
def test_heads_on_an_accelerator_agree_with_the_definition(dtype, B, L, K, shape, monkeypatch):
    monkeypatch.setattr(spectral_groups, "_is_on_cpu", lambda x: False)
    monkeypatch.setattr(spectral_groups, "_BYTES_PER_CHANNEL", 50_000)  # some chunks a group
    operator = SpectralOperator(H)
    u, gates, M = make_heads(shape, B, L, K, dtype, capacity=K + 1)
    x0 = reachable_state(operator, K, u.shape[-1], B, dtype)
    expected = run(operator, "naive", u, gates, M, x0, None)
    actual = run(operator, "chunked", u, gates, M, x0, None)
    for name in expected:
        error = relative_error(actual[name], expected[name])
        assert error < TOLERANCE[dtype], f"{name}: {error:.1e}"


def test_diagonal_matrices_are_no_products_on_an_accelerator(monkeypatch):
    """However large: a product of 1 x K and K x R for each channel of the width would wait for its launch."""
    monkeypatch.setattr(spectral_groups, "_is_on_cpu", lambda x: False)
    monkeypatch.setattr(spectral_groups, "_product_over_chunks", None)
    K, basis = 32, spectral_constants.Realization(H, 48, 64)
    chunks, x, dy = torch.randn(3, 64, 12), torch.randn(3, 48, 12), torch.randn(3, 64, 12)
    gates, M = torch.rand(3, 64, K, 1), torch.randn(K, 12, 1, 1)
    with monkeypatch.context() as products:
        products.setattr(torch, "matmul", None)
        y = spectral_groups.mix_heads(basis, chunks, x, gates, M)
        *_, dM = spectral_groups.unmix_heads(basis, dy, chunks, x, gates, M)
    monkeypatch.undo()
    assert relative_error(y, spectral_groups.mix_heads(basis, chunks, x, gates, M)) < 1e-5
    assert relative_error(dM, spectral_groups.unmix_heads(basis, dy, chunks, x, gates, M)[3]) < 1e-5


@pytest.mark.parametrize(("on_cpu", "dtype"), [(False, torch.bfloat16), (False, torch.float16), (True, torch.float16)])
def test_gradients_of_matrices_are_summed_in_fp32(on_cpu, dtype, monkeypatch):
    """Not rounded to the factors' dtype for each chunk."""
    monkeypatch.setattr(spectral_groups, "_is_on_cpu", lambda x: on_cpu)
    a, b = torch.randn(7, 3, 2, 16).to(dtype), torch.randn(7, 3, 10, 16).to(dtype)
    expected = torch.einsum("nher,nhcr->hec", a.double(), b.double())
    actual = spectral_groups._product_over_chunks(a, b, torch.float32)
    assert actual.dtype == torch.float32 and relative_error(actual, expected) < 1e-6


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("shape", HEADS.values(), ids=HEADS)
def test_heads_are_blocks_of_dense_matrices(shape, algorithm):
    """Each gate's heads alone, as dense matrices that are zero elsewhere."""
    D, h, d, e, G = shape
    operator, K = SpectralOperator(H, chunk_size=16), 5
    u, gates, M = make_heads(shape, 2, 40, K)
    expected, states = 0, None
    for gate in range(G):
        dense = torch.zeros(K, D, h * e, dtype=torch.float64)
        for j in range(gate * h // G, (gate + 1) * h // G):
            dense[:, j * d : (j + 1) * d, j * e : (j + 1) * e] = M[:, j]
        y, states = operator(u, gates[..., gate], dense, algorithm=algorithm)
        expected = expected + y
    y, state = operator(u, gates, M, algorithm=algorithm)
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(state, states)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((12, 5, 2, 2, 1), "5 heads of width 2 do not make up D = 12"),
        ((12, 4, 3, 3, 3), "must divide the 4 heads, got 3"),
    ],
    ids=str,
)
def test_heads_that_do_not_fit(shape, message):
    u, gates, M = make_heads(shape, 1, 9, 2)
    with pytest.raises(ValueError, match=message):
        SpectralOperator(H)(u, gates, M)


@pytest.mark.parametrize("L", [64, 128, 130])
@pytest.mark.parametrize("algorithm", ["chunked", "fft", "step"])
def test_inputs_of_any_strides(algorithm, L):
    """Gates that are one row expanded (those of `gating="none"`), transposed inputs and mixing matrices."""
    operator, K = SpectralOperator(H), 4
    u, gates, M = make_inputs(2, L, K)
    strange = [u.mT.contiguous().mT, gates[:1, :1].expand(2, L, K), M.mT.contiguous().mT]
    assert not any(t.is_contiguous() for t in strange)
    results = []
    for tensors in ([t.contiguous() for t in strange], strange):
        leaves = [t.detach().requires_grad_() for t in tensors]
        y, state = operator(*leaves, algorithm=algorithm)
        results.append([y, state, *torch.autograd.grad(y.square().sum() + state.square().sum(), leaves)])
    for plain, other in zip(*results):
        torch.testing.assert_close(other, plain)


def test_the_definition_is_eq_7():
    # Written out with loops: y(t) = sum_k g_k(t) (sum_j phi_k(t-j) u(j)) M_k.
    operator = SpectralOperator(64)
    u, gates, M = make_inputs(1, 9, 3, D=2, E=2)
    from modeling_essm.spectral_basis import spectral_basis

    phi = spectral_basis(64).filters(3)
    expected = torch.zeros(9, 2, dtype=torch.float64)
    for t in range(9):
        for k in range(3):
            feature = sum(phi[t - j, k] * u[0, j] for j in range(t + 1))
            expected[t] += gates[0, t, k] * feature @ M[k]
    y, _ = operator(u, gates, M, algorithm="naive")
    torch.testing.assert_close(y[0], expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("C", [1, 7, 64, 100])
def test_any_chunk_size(C):
    u, gates, M = make_inputs(2, 150, 6)
    expected = SpectralOperator(H)(u, gates, M, algorithm="naive")[0]
    actual = SpectralOperator(H, chunk_size=C)(u, gates, M)[0]
    assert relative_error(actual, expected) < TOLERANCE[torch.float64]


@pytest.mark.parametrize("filter_length, chunk_size, covered", [(64, 8192, 64), (2**20, 2**20, 512)], ids=str)
def test_a_chunk_is_no_longer_than_the_filters_and_512(filter_length, chunk_size, covered, monkeypatch):
    """Its cost grows with the square of C: chunks of 8192 steps took 22 GiB at filters of 512."""
    lengths = []

    def record(H, N, C):
        lengths.append(C)
        assert covered >= C, "gigabytes"
        return spectral_basis.chunk_operators(H, N, C)

    monkeypatch.setattr(spectral_constants, "chunk_operators", record)
    spectral_constants._chunk_constants.cache_clear()
    spectral_constants._channel_readout.cache_clear()
    u, gates, M = make_inputs(1, 60, 3)
    long = SpectralOperator(filter_length, chunk_size=chunk_size)
    y, state = long(u, gates, M)
    assert set(lengths) == {covered}
    expected = SpectralOperator(filter_length, chunk_size=covered)
    assert long == expected
    assert all(map(torch.equal, expected(u, gates, M), (y, state)))
    assert relative_error(y, expected(u, gates, M, algorithm="naive")[0]) < TOLERANCE[torch.float64]


@pytest.mark.parametrize("algorithm", ["chunked", "step"])
@pytest.mark.parametrize("cuts", [(1,), (64,), (63, 65, 129), (1, 2, 3, 199), (100, 101)], ids=str)
def test_a_sequence_split_anywhere_equals_one_pass(algorithm, cuts):
    operator, K = SpectralOperator(H), 8
    u, gates, M = make_inputs(2, 200, K)
    y, state = operator(u, gates, M, algorithm=algorithm)
    pieces, x = [], None
    for a, b in zip((0, *cuts), (*cuts, 200)):
        piece, x = operator(u[:, a:b], gates[:, a:b], M, x, algorithm=algorithm)
        pieces.append(piece)
    # One and the same linear system in fp64, whatever the split: only rounding differs, on all N states.
    torch.testing.assert_close(torch.cat(pieces, 1), y, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(x, state, rtol=1e-7, atol=1e-8)


def test_chunked_and_step_are_the_same_system():
    operator = SpectralOperator(H)
    u, gates, M = make_inputs(2, 170, 5)
    (y, state), (y_step, state_step) = (operator(u, gates, M, algorithm=a) for a in ("chunked", "step"))
    torch.testing.assert_close(y_step, y, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(state_step, state, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_budget_touches_only_its_prefix(algorithm):
    operator, K = SpectralOperator(H), 4
    u, gates, M = make_inputs(2, 70, K, capacity=16)
    x0 = reachable_state(operator, 16, u.shape[-1], 2, u.dtype)
    clean = run(operator, algorithm, u, gates, M[:K].clone(), x0[:, : operator.num_states(K)], None)
    M[K:] = float("nan")
    x0[:, operator.num_states(K) :] = float("nan")
    poisoned = run(operator, algorithm, u, gates, M, x0, None)
    for name in ("y", "state", "du", "dgates", "dx0"):
        assert torch.equal(poisoned[name], clean[name]), name
    assert torch.equal(poisoned["dM"][:K], clean["dM"])
    assert (poisoned["dM"][K:] == 0).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_zero_gates_are_smaller_budgets_per_row(algorithm):
    operator = SpectralOperator(H)
    u, gates, M = make_inputs(2, 90, 16)
    gates[0, :, 3:] = 0
    y, _ = operator(u, gates, M, algorithm=algorithm)
    solo, _ = operator(u[:1], gates[:1, :, :3], M, algorithm=algorithm)
    assert relative_error(y[:1], solo) < TOLERANCE[torch.float64]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_left_padding_with_zeros_changes_nothing(algorithm):
    operator = SpectralOperator(H)
    u, gates, M = make_inputs(2, 80, 6)
    y, state = operator(u, gates, M, algorithm=algorithm)
    pad = 37
    u_padded, gates_padded = (torch.cat([t.new_zeros(2, pad, t.shape[2]), t], 1) for t in (u, gates))
    y_padded, state_padded = operator(u_padded, gates_padded, M, algorithm=algorithm)
    assert relative_error(y_padded[:, pad:], y) < 1e-12
    assert relative_error(state_padded, state) < 1e-12


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_rows_of_padding_only_keep_their_state(algorithm):
    operator = SpectralOperator(H)
    u, gates, M = make_inputs(2, 20, 4)
    u[0] = 0
    x0 = reachable_state(operator, 4, u.shape[-1], 2, u.dtype)
    _, state = operator(u, gates, M, x0, torch.tensor([0, 20]), algorithm=algorithm)
    assert torch.equal(state[0], x0[0])
    assert not torch.equal(state[1], x0[1])
    _, state = operator(u, gates, M, None, torch.tensor([0, 20]), algorithm=algorithm)
    assert (state[0] == 0).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_causality(algorithm):
    operator = SpectralOperator(H)
    u, gates, M = make_inputs(1, 100, 8)
    y, _ = operator(u, gates, M, algorithm=algorithm)
    changed = u.clone()
    changed[:, 60:] += 1.0
    y_changed, _ = operator(changed, gates, M, algorithm=algorithm)
    if algorithm == "fft":  # a transform mixes all times: equal up to rounding only
        torch.testing.assert_close(y_changed[:, :60], y[:, :60], rtol=1e-10, atol=1e-12)
    else:
        assert torch.equal(y_changed[:, :60], y[:, :60])
    assert (y_changed[:, 60] != y[:, 60]).any()


def test_more_states_than_the_budget_needs_are_carried_on_request():
    operator = SpectralOperator(H)
    u, gates, M = make_inputs(1, 40, 4, capacity=16)
    N = operator.num_states(16)
    for algorithm in ("chunked", "step", "fft"):
        y, state = operator(u, gates, M, algorithm=algorithm, num_states=N)
        assert state.shape[1] == N
        # The state serves a budget of 16 from here on, as if 16 had run from the start.
        more, more_gates, _ = make_inputs(1, 30, 16, seed=3)
        continued, _ = operator(more, more_gates, M, state)
        all_u, all_gates = torch.cat([u, more], 1), torch.cat([torch.zeros(1, 40, 16), more_gates], 1)
        expected, _ = operator(all_u, all_gates, M, algorithm="naive")
        assert relative_error(continued, expected[:, 40:]) < TOLERANCE[torch.float64]
        assert relative_error(y, operator(u, gates, M, algorithm="naive")[0]) < TOLERANCE[torch.float64]


def test_gradients_by_finite_differences():
    operator = SpectralOperator(64, chunk_size=4)
    u, gates, M = make_inputs(2, 11, 3, D=2, E=3)
    x0 = 0.1 * torch.randn(2, operator.num_states(3), 2, dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (u, gates, M, x0)]
    lengths = torch.tensor([11, 6])
    assert torch.autograd.gradcheck(lambda *a: operator(*a, lengths), leaves)


def test_gradients_only_where_asked():
    operator = SpectralOperator(H)
    u, gates, M = make_inputs(1, 70, 4)
    M.requires_grad_()
    y, state = operator(u, gates, M)
    y.sum().backward(retain_graph=True)
    first = M.grad.clone()
    M.grad = None
    (y.sum() + 0 * state.sum()).backward()
    assert torch.equal(M.grad, first)


def test_memory_of_a_backward_pass_does_not_hold_features():
    # What autograd keeps between forward and backward: inputs and chunk states, not K features per token.
    operator, K = SpectralOperator(H), 32
    u, gates, M = make_inputs(1, 1024, K, D=16, E=16, dtype=torch.float32)
    saved = []
    leaves = [t.requires_grad_() for t in (u, gates, M)]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        operator(*leaves)
    kept = sum(t.numel() for t in saved) - sum(t.numel() for t in leaves)
    assert kept <= 1024 // 64 * operator.num_states(K) * 16
    assert kept < u.numel()


def test_constants_made_under_inference_mode_can_train():
    operator = SpectralOperator(2048)  # a filter length no other test uses
    u, gates, M = make_inputs(1, 70, 4)
    for algorithm in ALGORITHMS:
        with torch.inference_mode():
            operator(u, gates, M, algorithm=algorithm)
        leaf = u.clone().requires_grad_()
        operator(leaf, gates, M, algorithm=algorithm)[0].sum().backward()
        assert leaf.grad.abs().sum() > 0
