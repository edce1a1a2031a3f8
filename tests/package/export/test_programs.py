# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Exported programs equal the model, under torch.export and onnxruntime.

The basis of a program is the model's own, so logits differ by the order of fp32 sums, 1e-6 here. States are compared
up to a few chunks: near filter_length rounding in fp32 fills those far beyond K, which count for little in logits.
"""

import copy
import functools

import numpy as np
import pytest
import torch
from helpers import HYBRID, ROOT, VARIANTS, assert_close, random_ids, random_model

from modeling_essm import ESSMCache, ESSMForSequenceClassification, ESSMModel
from modeling_essm.cache_essm import operator_of
from modeling_essm.export import empty_states, export_programs, save_onnx, signature

ONE = {"num_hidden_layers": 1, "chunk_size": 64}
SMALL = {"filter_length": 160, "num_spectral_channels": 8}
MEMORY = VARIANTS["memory"] | ONE | {"intermediate_size": 32}
# name: fields of the model, budget, (B, L) of prefills
CASES = {
    "per-layer": (SMALL, [6, 2], ((1, 1), (3, 7), (1, 65), (2, 160))),
    "memory": (MEMORY | SMALL, 6, ((1, 1), (2, 2), (3, 70))),
}
runtimes = pytest.mark.parametrize(
    ("case", "runtime"),
    [
        ("per-layer", "torch"),
        ("memory", "torch"),
        pytest.param("memory", "onnx", marks=pytest.mark.slow),
    ],
)


@functools.cache
def exported(case):
    """(model, budget, programs)."""
    fields, budget, _ = CASES[case]
    model = random_model(**fields)
    return model, budget, export_programs(model, budget)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A case to its programs as ONNX: path by name. Tests of them are slow."""
    folder = tmp_path_factory.mktemp("onnx")

    @functools.cache
    def save(case):
        for package in ("onnx", "onnxscript", "onnxruntime"):
            pytest.importorskip(package)
        paths = {name: folder / f"{case}-{name}.onnx" for name in exported(case)[2]}
        for name, path in paths.items():
            save_onnx(exported(case)[2][name], path)
        return paths

    return save


@pytest.fixture
def run(case, runtime, files):
    """A function of a program's name, its plain inputs and the states: (logits, new states)."""
    if runtime == "torch":
        modules = {name: program.module() for name, program in exported(case)[2].items()}
        return lambda name, *inputs: modules[name](*inputs)
    paths = files(case)
    import onnxruntime

    options, sessions = onnxruntime.SessionOptions(), {}
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    for name, path in paths.items():
        sessions[name] = onnxruntime.InferenceSession(path, options)

    def run(name, *inputs):
        *plain, states = inputs
        feed = {spec.name: t.numpy() for spec, t in zip(sessions[name].get_inputs(), plain)}
        feed |= {f"past.{key}": t.numpy() for key, t in states.items()}
        wanted = ["logits", *(f"present.{key}" for key in states)]
        logits, *new = map(torch.from_numpy, sessions[name].run(wanted, feed))
        return logits, dict(zip(states, new, strict=True))

    return run


def assert_states_close(actual, expected):
    assert actual.keys() == expected.keys()
    for name, state in expected.items():
        assert actual[name].shape == state.shape and actual[name].dtype == state.dtype
        assert_close(actual[name], state, atol=1e-5 * max(1.0, float(state.abs().max())))


# --- Language models


@runtimes
@torch.no_grad()
def test_prefill_and_steps_equal_the_model(case, run):
    """From nothing, then from the states, in another piece and token by token."""
    model, budget, programs = exported(case)
    for B, L in CASES[case][2]:
        ids, cache = random_ids(B, L + 7, seed=L), ESSMCache(model.config)
        states, start = empty_states(programs["prefill"], B), 0
        for length in (L, 5, 1, 1):
            if start + length > model.config.filter_length:
                break
            piece = ids[:, start : start + length]
            expected = model(piece, past_key_values=cache, use_cache=True, spectral_budget=budget).logits[:, -1]
            prefill = length > 1 or start == 0
            logits, states = (
                run("prefill", piece, torch.ones_like(piece), states) if prefill else run("step", piece, states)
            )
            start += length
            assert logits.shape == (B, model.config.vocab_size)
            assert_close(logits, expected)
            if start <= model.config.filter_length // 8:
                assert_states_close(states, cache.states)


@runtimes
@torch.no_grad()
def test_padded_rows_are_what_they_are_alone(case, run):
    """Left padding where a row begins and later, right padding, holes, a piece of nothing but padding, and none."""
    model, budget, programs = exported(case)
    states, alone = empty_states(programs["prefill"], 4), [ESSMCache(model.config) for _ in range(4)]
    for real in ("00011111111 11111100000 11111111111 11011100101", "11111 11000 00000 00110"):
        mask = torch.tensor([[int(one) for one in row] for row in real.split()])
        ids = random_ids(*mask.shape, seed=mask.shape[1])
        logits, states = run("prefill", ids, mask, states)
        for row, cache in enumerate(alone):
            if mask[row].any():
                own = model(ids[row : row + 1, mask[row].bool()], past_key_values=cache, spectral_budget=budget)
                assert_close(logits[row], own.logits[0, -1])
            assert_states_close({name: t[row : row + 1] for name, t in states.items()}, cache.states)


@runtimes
@torch.no_grad()
def test_a_longer_piece_than_max_length_is_refused(case, run):
    """A runtime that knows no largest length would compute something else."""
    ids = random_ids(1, 161)
    with pytest.raises(Exception, match="160"):
        run("prefill", ids, torch.ones_like(ids), empty_states(exported(case)[2]["prefill"], 1))


@pytest.mark.parametrize("case", CASES)
def test_a_program_is_plain_operations_on_the_weights_of_its_budget(case):
    model, budget, programs = exported(case)
    for program in programs.values():
        distinct = {t.data_ptr(): t.numel() for t in program.parameters()}  # embedding and head are one
        assert sum(distinct.values()) == model.num_active_parameters(budget)
        assert not [t for t in program.constants.values() if t.dtype == torch.float64]
        targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
        assert all(target.startswith(("aten.", "<built-in", "<function sym_")) for target in targets), targets


@pytest.mark.slow
def test_an_onnx_file_holds_the_weights_of_its_budget_once(files):
    onnx = pytest.importorskip("onnx")
    model, budget, _ = exported("memory")
    N, C, active = operator_of(model.config).num_states(budget), model.config.chunk_size, model.num_active_parameters(6)
    for name, path in files("memory").items():
        tensors = onnx.load(path).graph.initializer
        basis = N * N + N if name == "step" else C * (N + budget) * (C + N) + 30 * N * N + 1000
        basis += 0 if name == "step" else 10 * 64 * 64  # masks of the memory's chunks
        assert active <= sum(int(np.prod(tensor.dims)) for tensor in tensors) <= active + basis + 3000
        kinds = [getattr(onnx.TensorProto, kind) for kind in ("FLOAT", "INT32", "INT64", "BOOL")]
        assert {tensor.data_type for tensor in tensors} <= {*kinds}


@pytest.mark.slow
def test_files_name_no_machine(tmp_path, files):
    torch.export.save(exported("memory")[2]["step"], tmp_path / "step.pt2")
    for path in (tmp_path / "step.pt2", *files("memory").values()):
        content = path.read_bytes()
        assert len(content) > 40_000
        assert str(ROOT).encode() not in content and b"site-packages" not in content and b".py" not in content


def test_signature():
    programs = exported("per-layer")[2]
    inputs, outputs = ([(x.name, x.shape, x.dtype) for x in specs] for specs in signature(programs["prefill"]))
    states = {"0.features": ("batch", 22, 16), "1.features": ("batch", 10, 16)}
    plain = [(name, ("batch", "length"), "int64") for name in ("input_ids", "attention_mask")]
    assert inputs == [*plain, *((f"past.{name}", shape, "float32") for name, shape in states.items())]
    present = [(f"present.{name}", shape, "float32") for name, shape in states.items()]
    assert outputs == [("logits", ("batch", 259), "float32"), *present]
    assert [(spec.name, spec.shape) for spec in signature(exported("memory")[2]["step"])[0]] == [
        ("input_ids", ("batch", 1)),
        ("past.0.features", ("batch", 22, 24)),
        ("past.0.convolution", ("batch", 3, 72)),
        ("past.0.memory", ("batch", 12, 24)),
    ]


def test_the_model_stays_as_it_is():
    """Also one of another algorithm, with a default budget and in training mode; here for batches of one size."""
    model = random_model(spectral_algorithm="fft", spectral_budget=2, **ONE | SMALL).train()
    before, config, ids = copy.deepcopy(model.state_dict()), model.config.to_dict(), random_ids(2, 9)
    programs = export_programs(model, 5, batch_size=2)
    assert model.training and model.config.to_dict() == config
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    prefill, step = (programs[name].module() for name in ("prefill", "step"))
    _, states = prefill(ids[:, :8], torch.ones_like(ids[:, :8]), empty_states(programs["prefill"], 2))
    logits, _ = step(ids[:, 8:], states)
    assert_close(logits, model.eval()(ids, spectral_budget=5).logits[:, -1])


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"spectral_budget": 33}, r"integer in \[1, 32\], got 33"),
        ({"spectral_budget": torch.tensor([2, 6])}, "the same for all rows"),
        ({"max_length": 513}, r"max_length must be in \[2, 512\] \(filter_length\), got 513"),
        ({"max_length": 1}, r"\[2, 512\]"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"is_quantized": True}, "a quantised model cannot be exported"),
        ({"cls": ESSMModel}, "ESSMForCausalLM or ESSMForSequenceClassification, got ESSMModel"),
    ],
    ids=["budget", "rows", "long", "short", "batch", "quantised", "class"],
)
def test_what_is_not_exported(arguments, message):
    model = random_model(**{name: arguments.pop(name) for name in ("cls",) if name in arguments}, **ONE)
    model.is_quantized = arguments.pop("is_quantized", False)
    with pytest.raises(ValueError, match=message):
        export_programs(model, **arguments)


# --- Classifiers


@pytest.mark.parametrize(
    "pooling, features, fields",
    [
        ("mean", 3, MEMORY | SMALL),
        ("last", None, ONE | SMALL),
        pytest.param("mean", None, HYBRID | SMALL, marks=pytest.mark.slow),
    ],
    ids=["memory", "paper", "hybrid"],
)
@torch.no_grad()
def test_classifiers(pooling, features, fields):
    fields = fields | {"classifier_pooling": pooling, "num_input_features": features}
    model = random_model(ESSMForSequenceClassification, num_labels=4, **fields)
    (program,) = export_programs(model, 6).values()
    first = signature(program)[0][0]
    assert first.shape == (("batch", "length") if features is None else ("batch", "length", 3))
    for B, L in ((1, 1), (3, 21), (1, 160)):
        generator = torch.Generator().manual_seed(L)
        values = random_ids(B, L) if features is None else torch.randn(B, L, 3, generator=generator)
        mask = (torch.arange(L) < torch.tensor([[L], [L - 5], [4]])[:B]).long()
        expected = model(**{first.name: values}, attention_mask=mask, spectral_budget=6).logits
        assert_close(program.module()(values, mask), expected)
