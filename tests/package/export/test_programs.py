# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Exported programs equal the model, under torch.export and onnxruntime.

The basis of a program is the model's own, so logits differ by the order of fp32 sums, 1e-6 here. States are compared
up to a few chunks: near filter_length rounding in fp32 fills those far beyond K, which count for little in logits.
"""

import copy
import functools
import importlib.util

import numpy as np
import pytest
import torch
from helpers import HYBRID, ROOT, VARIANTS, assert_close, random_ids, random_model

from modeling_essm import ESSMCache, ESSMForSequenceClassification, ESSMModel
from modeling_essm.cache_essm import operator_of
from modeling_essm.export import empty_states, export_programs, save_onnx, signature

ONE = {"num_hidden_layers": 1, "chunk_size": 64}
SMALL = {"filter_length": 160, "num_spectral_channels": 8}
# name: fields of the model, budget, (B, L) of prefills
CASES = {
    "per-layer": (SMALL, [6, 2], ((1, 1), (3, 7), (1, 65), (2, 160))),
    "gated": (VARIANTS["gated"] | ONE | SMALL, 6, ((1, 1), (2, 2), (3, 70))),
}
_INTEGERS = (6, 7, 9)  # int32, int64 and bool of onnx.TensorProto
HAS_ONNX = all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))
needs_onnx = pytest.mark.skipif(not HAS_ONNX, reason="needs onnx, onnxscript and onnxruntime")
cases = pytest.mark.parametrize("case", CASES)
runtimes = pytest.mark.parametrize(
    ("case", "runtime"),
    [
        ("per-layer", "torch"),
        ("gated", "torch"),
        pytest.param("per-layer", "onnx", marks=[needs_onnx, pytest.mark.slow]),
        pytest.param("gated", "onnx", marks=needs_onnx),
    ],
)


@functools.cache
def exported(case):
    """(model, budget, programs)."""
    fields, budget, _ = CASES[case]
    model = random_model(**fields)
    return model, budget, export_programs(model, budget)


def session(program, path):
    import onnxruntime

    save_onnx(program, path)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    return onnxruntime.InferenceSession(path, options)


@pytest.fixture(scope="module")
def runners(tmp_path_factory):
    """(case, runtime) -> function of a program's name, its plain inputs and the states: (logits, new states)."""
    made = {}

    def make(case, runtime):
        if (case, runtime) in made:
            return made[case, runtime]
        programs = exported(case)[2]
        if runtime == "torch":
            modules = {name: program.module() for name, program in programs.items()}

            def run(name, *inputs):
                with torch.no_grad():
                    return modules[name](*inputs)

        else:
            folder = tmp_path_factory.mktemp(case)
            sessions = {name: session(program, folder / f"{name}.onnx") for name, program in programs.items()}

            def run(name, *inputs):
                *plain, states = inputs
                names = [spec.name for spec in sessions[name].get_inputs()]
                feed = dict(zip(names, [t.numpy() for t in plain]))
                feed |= {f"past.{key}": t.numpy() for key, t in states.items()}
                wanted = ["logits", *(f"present.{key}" for key in states)]
                logits, *new = map(torch.from_numpy, sessions[name].run(wanted, feed))
                return logits, dict(zip(states, new, strict=True))

            run.paths = {name: folder / f"{name}.onnx" for name in programs}
        return made.setdefault((case, runtime), run)

    return make


def assert_states_close(actual, expected):
    assert actual.keys() == expected.keys()
    for name, state in expected.items():
        assert actual[name].shape == state.shape and actual[name].dtype == state.dtype
        assert_close(actual[name], state, atol=1e-5 * max(1.0, float(state.abs().max())))


# --- Language models


@runtimes
@torch.no_grad()
def test_prefill_and_steps_equal_the_model(case, runtime, runners):
    """From nothing, then from the states, in another piece and token by token."""
    model, budget, programs = exported(case)
    run = runners(case, runtime)
    for B, L in CASES[case][2]:
        ids, cache = random_ids(B, L + 7, seed=L), ESSMCache(model.config)
        states, start = empty_states(programs["prefill"], B), 0
        for length in (L, 5, 1, 1):
            if start + length > model.config.filter_length:
                break
            piece = ids[:, start : start + length]
            expected = model(piece, past_key_values=cache, use_cache=True, spectral_budget=budget).logits[:, -1]
            if length > 1 or start == 0:
                logits, states = run("prefill", piece, torch.ones_like(piece), states)
            else:
                logits, states = run("step", piece, states)
            start += length
            assert logits.shape == (B, model.config.vocab_size)
            assert_close(logits, expected)
            if start <= model.config.filter_length // 8:
                assert_states_close(states, cache.states)


@runtimes
@torch.no_grad()
def test_padded_rows_are_what_they_are_alone(case, runtime, runners):
    """Left padding where a row begins and later, right padding, holes, a piece of nothing but padding, and none."""
    model, budget, programs = exported(case)
    run, rows = runners(case, runtime), 4
    states = empty_states(programs["prefill"], rows)
    alone = [ESSMCache(model.config) for _ in range(rows)]
    for real in (
        ["00011111111", "11111100000", "11111111111", "11011100101"],
        ["11111", "11000", "00000", "00110"],
    ):
        mask = torch.tensor([[int(one) for one in row] for row in real])
        ids = random_ids(*mask.shape, seed=mask.shape[1])
        logits, states = run("prefill", ids, mask, states)
        for row in range(rows):
            if mask[row].any():
                solo = {"past_key_values": alone[row], "use_cache": True, "spectral_budget": budget}
                assert_close(logits[row], model(ids[row : row + 1, mask[row].bool()], **solo).logits[0, -1])
            assert_states_close({name: t[row : row + 1] for name, t in states.items()}, alone[row].states)


@cases
def test_a_program_holds_the_weights_of_its_budget_only(case):
    model, budget, programs = exported(case)
    for program in programs.values():
        distinct = {t.data_ptr(): t.numel() for t in program.parameters()}  # embedding and head are one
        assert sum(distinct.values()) == model.num_active_parameters(budget)
        assert not [t for t in program.constants.values() if t.dtype == torch.float64]


@needs_onnx
def test_an_onnx_file_holds_the_weights_of_its_budget_once(runners):
    import onnx

    model, budget, _ = exported("gated")
    for name, path in runners("gated", "onnx").paths.items():
        tensors = onnx.load(path).graph.initializer
        held = sum(int(np.prod(tensor.dims)) for tensor in tensors)
        N, C = operator_of(model.config).num_states(budget), model.config.chunk_size
        basis = N * N + N if name == "step" else C * (N + budget) * (C + N) + 30 * N * N + 1000
        active = model.num_active_parameters(budget)
        assert active <= held <= active + basis + 3000
        assert {tensor.data_type for tensor in tensors} <= {onnx.TensorProto.FLOAT, *_INTEGERS}


def test_files_name_no_machine(tmp_path, runners):
    program = exported("gated")[2]["step"]
    torch.export.save(program, tmp_path / "step.pt2")
    paths = [tmp_path / "step.pt2"]
    if HAS_ONNX:
        paths += runners("gated", "onnx").paths.values()
    for path in paths:
        content = path.read_bytes()
        assert len(content) > 40_000
        assert str(ROOT).encode() not in content and b"site-packages" not in content and b".py" not in content


@cases
def test_programs_are_plain_operations(case):
    for program in exported(case)[2].values():
        targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
        assert targets and all(target.startswith(("aten.", "<built-in", "<function sym_")) for target in targets), (
            targets
        )


def test_signature():
    programs = exported("per-layer")[2]
    inputs, outputs = (
        [(spec.name, spec.shape, spec.dtype) for spec in specs] for specs in signature(programs["prefill"])
    )
    assert inputs == [
        ("input_ids", ("batch", "length"), "int64"),
        ("attention_mask", ("batch", "length"), "int64"),
        ("past.0.features", ("batch", 22, 16), "float32"),
        ("past.1.features", ("batch", 10, 16), "float32"),
    ]
    assert outputs == [
        ("logits", ("batch", 259), "float32"),
        ("present.0.features", ("batch", 22, 16), "float32"),
        ("present.1.features", ("batch", 10, 16), "float32"),
    ]
    assert signature(programs["step"])[0][0].shape == ("batch", 1)
    assert [(spec.name, spec.shape) for spec in signature(exported("gated")[2]["step"])[0][1:]] == [
        ("past.0.features", ("batch", 22, 24)),
        ("past.0.convolution", ("batch", 2, 24)),
    ]


def test_the_model_stays_as_it_is():
    """Also one of another algorithm, with a default budget and in training mode."""
    model = random_model(spectral_algorithm="fft", spectral_budget=2, **ONE).train()
    before, config = copy.deepcopy(model.state_dict()), model.config.to_dict()
    programs = export_programs(model, 5)
    assert model.training and model.config.to_dict() == config
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    ids = random_ids(2, 9)
    logits, _ = programs["prefill"].module()(ids, torch.ones_like(ids), empty_states(programs["prefill"], 2))
    assert_close(logits, model.eval()(ids, spectral_budget=5).logits[:, -1])


@runtimes
def test_a_longer_piece_than_max_length_is_refused(case, runtime, runners):
    """A runtime that knows no largest length would compute something else."""
    run, ids = runners(case, runtime), random_ids(1, 161)
    with pytest.raises(Exception, match="160"):
        run("prefill", ids, torch.ones_like(ids), empty_states(exported(case)[2]["prefill"], 1))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"spectral_budget": 33}, r"integer in \[1, 32\], got 33"),
        ({"spectral_budget": "fast"}, "unknown spectral_budget preset 'fast'"),
        ({"spectral_budget": torch.tensor([2, 6])}, "the same for all rows"),
        ({"max_length": 513}, r"max_length must be in \[2, 512\] \(filter_length\), got 513"),
        ({"max_length": 1}, r"\[2, 512\]"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
    ],
    ids=["budget", "preset", "rows", "long", "short", "batch"],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        export_programs(random_model(**ONE), **arguments)


def test_other_models_are_refused():
    with pytest.raises(ValueError, match="ESSMForCausalLM or ESSMForSequenceClassification, got ESSMModel"):
        export_programs(random_model(ESSMModel, **ONE))
    with pytest.raises(ValueError, match="a hybrid language model cannot be exported"):
        export_programs(random_model(**HYBRID))
    quantised = random_model(**ONE)
    quantised.is_quantized = True
    with pytest.raises(ValueError, match="a quantised model cannot be exported"):
        export_programs(quantised)


# --- Classifiers


@pytest.mark.parametrize("pooling, features, block", [("mean", 3, "gated"), ("last", None, "paper")])
@torch.no_grad()
def test_classifiers(pooling, features, block):
    fields = VARIANTS[block] | ONE | {"classifier_pooling": pooling, "num_input_features": features}
    model = random_model(ESSMForSequenceClassification, num_labels=4, **fields)
    programs = export_programs(model, 6)
    assert list(programs) == ["classify"]
    first = signature(programs["classify"])[0][0]
    assert first.shape == (("batch", "length") if features is None else ("batch", "length", 3))
    for B, L in ((1, 1), (3, 21), (1, 512)):
        generator = torch.Generator().manual_seed(L)
        values = random_ids(B, L) if features is None else torch.randn(B, L, 3, generator=generator)
        mask = (torch.arange(L) < torch.tensor([[L], [L - 5], [4]])[:B]).long()
        expected = model(**{first.name: values}, attention_mask=mask, spectral_budget=6).logits
        assert_close(programs["classify"].module()(values, mask), expected)
