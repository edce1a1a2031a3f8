# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""essm-export: folders of programs that decode and classify without torch."""

import contextlib
import copy
import functools
import importlib.util
import itertools
import json
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import ROOT, VARIANTS, assert_close, random_ids, random_model

from essm_train.arguments import parse_arguments
from essm_train.console import Failed
from essm_train.publish import export as export_module
from essm_train.publish.arguments import PACKAGES, ExportArguments
from modeling_essm import ESSMCache, ESSMForCausalLM, ESSMForSequenceClassification, build_byte_tokenizer
from modeling_essm.export import WeightFile, export_programs

ONE = {"num_hidden_layers": 1}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    fields = ONE | {"filter_length": 160, "num_spectral_channels": 8, "tie_word_embeddings": False}
    fields |= VARIANTS["elastic"]
    presets = {"fast": [3], "full": 8, "slow": 7}
    random_model(seed=12, budget_presets=presets, **fields).save_pretrained(folder)  # of no short cycle
    build_byte_tokenizer().save_pretrained(folder)
    return folder


def export(*arguments):
    return export_module.export(parse_arguments(ExportArguments, [str(argument) for argument in arguments]))


@pytest.fixture(scope="module", params=[False, True], ids=["fp32", "int8"])
def exported(request, model_folder, tmp_path_factory):
    """(folder, the model that its programs compute) of two budgets; one call of prefill reads less than a prompt."""
    for package in PACKAGES["onnx"]:
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("exported") / "onnx"
    options = ("--max_length", 64, "--output_dir", folder, *["--int8"] * request.param)
    export("--model", model_folder, "--spectral_budget", "full", "fast", 3, *options)
    model = ESSMForCausalLM.from_pretrained(model_folder)
    if request.param:
        before = model.lm_head.weight.clone()
        WeightFile(model, tmp_path_factory.mktemp("weights") / "weights.bin", int8=True)
        assert 0 < (model.lm_head.weight - before).abs().max() <= before.abs().max() / 254 * 1.001
    return folder, model.eval()


@pytest.mark.slow
def test_an_export_describes_itself(exported):
    folder, model = exported
    description = json.loads((folder / "export.json").read_text())
    programs = [f"{name}-{K}.onnx" for name in ("prefill", "step") for K in (3, 8)]
    assert description["files"] == [*programs, "tokenizer.json", "weights.bin"]
    assert sorted(path.name for path in folder.iterdir()) == sorted([*description["files"], "export.json"])
    assert [path.name for path in folder.parent.iterdir()] == ["onnx"]  # nothing temporary is left
    assert description["max_length"] == 64 and description["presets"] == {"fast": "3", "full": "8"}
    assert description["eos_token_ids"] == [258] and description["format"] == "onnx"
    import onnxruntime

    assert [(K, about["layers"]) for K, about in description["budgets"].items()] == [("3", [3]), ("8", [8])]
    for K, about in description["budgets"].items():
        cache = model(torch.zeros(1, 1, dtype=torch.int64), use_cache=True, spectral_budget=int(K)).past_key_values
        assert about["state_bytes"] == cache.num_bytes
        for name in ("prefill", "step"):
            onnx = onnxruntime.InferenceSession(folder / about[name]["file"])
            for specs, values in (
                (about[name]["inputs"], onnx.get_inputs()),
                (about[name]["outputs"], onnx.get_outputs()),
            ):
                assert [(spec["name"], spec["shape"]) for spec in specs] == [(v.name, v.shape) for v in values]
                types = {"int64": "tensor(int64)", "float32": "tensor(float)"}
                assert [types[spec["dtype"]] for spec in specs] == [v.type for v in values]


@pytest.mark.slow
def test_all_budgets_read_leading_parts_of_one_file(exported):
    """Whose size is that of the largest; each part is what the model holds."""
    import onnx

    folder, model = exported
    description, whole = json.loads((folder / "export.json").read_text()), (folder / "weights.bin").read_bytes()
    matrices = {f"model.{name}": p for name, p in model.named_parameters(remove_duplicate=False)}
    kinds = {onnx.TensorProto.FLOAT: np.float32, onnx.TensorProto.INT8: np.int8}
    begins: dict[str, set[int]] = {}
    for about in description["budgets"].values():
        for name in ("prefill", "step"):
            read = 0
            for tensor in onnx.load(folder / about[name]["file"], load_external_data=False).graph.initializer:
                at = {entry.key: entry.value for entry in tensor.external_data}
                if not at:
                    assert np.prod(tensor.dims) * 4 < 100_000  # what is no matrix of the model
                    continue
                assert at["location"] == "weights.bin"
                offset, length = int(at["offset"]), int(at["length"])
                begins.setdefault(tensor.name, set()).add(offset)
                read += length
                part = np.frombuffer(whole[offset : offset + length], kinds[tensor.data_type])
                part = torch.from_numpy(part.reshape(tensor.dims).copy())
                if tensor.data_type == onnx.TensorProto.FLOAT and tensor.name in matrices:
                    value = matrices[tensor.name].detach()
                    value = value if part.shape[-1] == value.shape[-1] else value.T
                    assert torch.equal(part, value[: len(part)])
            assert read == about["weight_bytes"]
    assert begins and all(len(offsets) == 1 for offsets in begins.values())
    assert about["weight_bytes"] <= len(whole) == description["weights"]["bytes"] <= 1.01 * about["weight_bytes"] + 640


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["fast", None])
def test_a_language_model_decodes_without_torch_as_it_generates(exported, budget, tmp_path):
    """In a process of its own."""
    folder, model = exported
    code = (
        "import json, runpy, sys\n"
        "found = runpy.run_path(sys.argv.pop(1))\n"
        "assert not {'torch', 'transformers', 'modeling_essm'} & set(sys.modules), sorted(sys.modules)\n"
        "print(json.dumps(found['written']), file=sys.stderr)\n"
    )
    example, prompt = ROOT / "examples" / "decode_without_torch.py", "import math\n" * 8
    chosen = [] if budget is None else ["--spectral_budget", budget]
    command = [sys.executable, "-c", code, str(example), str(folder), prompt, "--tokens", "20", *chosen]
    run = subprocess.run(command, capture_output=True, timeout=120)
    assert run.returncode == 0, run.stderr.decode()
    tokenizer = build_byte_tokenizer()
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    new = model.generate(ids, spectral_budget=budget, do_sample=False, max_new_tokens=20)[0, ids.shape[1] :]
    new = new[new != model.config.eos_token_id].tolist()
    assert len(set(new)) > 5  # not one token over and over
    assert json.loads(run.stderr.decode().splitlines()[-1]) == new
    assert run.stdout.decode() == tokenizer.decode(new) + "\n"
    about = json.loads((folder / "export.json").read_text())
    (tmp_path / "export.json").write_text(json.dumps(about | {"format": "torch"}))
    for place, options, said in (
        (folder, ["--temperature", "-1"], "temperature must be at least 0, got -1.0"),
        (tmp_path, [], "folder must be an ONNX export of a language model with its tokenizer, got"),
    ):
        wrong = subprocess.run([sys.executable, example, place, prompt, *options], capture_output=True, text=True)
        assert wrong.returncode == 2 and said in wrong.stderr, wrong.stderr


@pytest.mark.slow
@torch.no_grad()
def test_the_budget_moves_in_the_middle_of_a_text(exported):
    """Down with the leading blocks of the states; up by reading on, from the last states of that size, what came since.

    As the model does with an `ESSMCache` that is shrunk, and with the one kept.
    """
    import onnxruntime

    folder, model = exported
    about = json.loads((folder / "export.json").read_text())["budgets"]
    run = {
        (K, name): onnxruntime.InferenceSession(folder / about[K][name]["file"])
        for K in about
        for name in ("prefill", "step")
    }
    ids = random_ids(1, 40, seed=3)

    def read(K, name, ids, states):
        inputs = [spec for spec in about[K][name]["inputs"] if spec["name"].startswith("past.")]
        cut = [state[:, : spec["shape"][1], : spec["shape"][2]] for spec, state in zip(inputs, states)]
        feed = {"input_ids": ids.numpy()} | {spec["name"]: state for spec, state in zip(inputs, cut)}
        mask = {"attention_mask": np.ones(ids.shape, np.int64)} if name == "prefill" else {}
        logits, *new = run[K, name].run(None, feed | mask)
        return torch.from_numpy(logits), new

    zeros = [np.zeros((1, *spec["shape"][1:]), np.float32) for spec in about["8"]["step"]["inputs"][1:]]
    _, kept = read("8", "prefill", ids[:, :20], zeros)
    cache = ESSMCache(model.config)
    model(ids[:, :20], past_key_values=cache, spectral_budget=8)
    small, states = copy.deepcopy(cache), kept
    for K, t in zip((8, 3, 3, 3, 3), range(20, 25)):
        logits, states = read(str(K), "step", ids[:, t : t + 1], states)
        token = ids[:, t : t + 1]
        assert_close(logits, model(token, past_key_values=small.shrink(K), spectral_budget=K).logits[:, -1])
    logits, _ = read("8", "prefill", ids[:, 20:25], kept)
    assert_close(logits, model(ids[:, 20:25], past_key_values=cache, spectral_budget=8).logits[:, -1])


SCALED = {"multiplier": 1 / 127.5, "offset": -1.0, "max_length": 30}


@pytest.fixture(scope="module")
def classifier_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classifier")
    fields = ONE | {"num_input_features": 2, "filter_length": 64, "num_spectral_channels": 8}
    random_model(ESSMForSequenceClassification, num_labels=3, **fields).save_pretrained(folder)
    (folder / "features.json").write_text(json.dumps(SCALED))
    return folder


@pytest.mark.slow
def test_a_classifier_reads_numbers_as_they_are_stored(classifier_folder, tmp_path):
    """What is left is enough to scale them; the model never sees them."""
    onnxruntime = pytest.importorskip("onnxruntime")
    export("--model", classifier_folder, "--spectral_budget", 2, "--output_dir", tmp_path)  # an empty folder
    description = json.loads((tmp_path / "export.json").read_text())
    assert description["files"] == ["classify-2.onnx", "features.json", "weights.bin"]
    assert description["labels"] == ["LABEL_0", "LABEL_1", "LABEL_2"]
    assert description["features"] == SCALED == json.loads((tmp_path / "features.json").read_text())
    stored = np.random.default_rng(0).integers(0, 256, (2, 30, 2))
    scale = description["features"]
    features = (stored * scale["multiplier"] + scale["offset"]).astype(np.float32)
    mask = (np.arange(30) < [[30], [11]]).astype(np.int64)
    onnx = onnxruntime.InferenceSession(tmp_path / "classify-2.onnx")
    (logits,) = onnx.run(None, {"input_features": features, "attention_mask": mask})
    model = ESSMForSequenceClassification.from_pretrained(classifier_folder)
    inputs = {"input_features": torch.from_numpy(stored / 127.5 - 1).float(), "attention_mask": torch.from_numpy(mask)}
    with torch.no_grad():
        assert_close(torch.from_numpy(logits), model(**inputs, spectral_budget=2).logits)


def test_an_export_replaces_an_export_and_nothing_else(classifier_folder, tmp_path, monkeypatch):
    arguments = ("--model", classifier_folder, "--format", "torch", "--output_dir", tmp_path / "out")
    export(*arguments, "--spectral_budget", 3, "--max_length", 9)
    description = json.loads((tmp_path / "out" / "export.json").read_text())
    assert list(description["budgets"]) == ["3"] and description["max_length"] == 9
    with monkeypatch.context() as patch, pytest.raises(InterruptedError):  # the export begins
        patch.setattr(export_module, "export_programs", mock.Mock(side_effect=InterruptedError))
        export(*arguments, "--spectral_budget", 3, "--overwrite")
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert {path.name for path in before} == {"export.json", "features.json", "classify-3.pt2"}
    with pytest.raises(ValueError, match=r"holds out, which this run did not write: .*--overwrite to replace it"):
        export(*arguments)
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"holds 'thesis\.tex', which no export wrote"):
        export(*arguments, "--overwrite")
    assert all(path.read_bytes() == content for path, content in before.items())
    (tmp_path / "out" / "thesis.tex").unlink()
    with (
        contextlib.chdir(tmp_path / "out"),
        pytest.raises(ValueError, match="cannot be replaced, as it is mounted or current"),
    ):
        export(*arguments[:-1], ".", "--overwrite")
    for other in ("{}", "[]"):
        (tmp_path / "out" / "export.json").write_text(other)
        with pytest.raises(ValueError, match=r"holds '.*', which no export wrote"):
            export(*arguments, "--overwrite")


@pytest.mark.slow
def test_a_wrong_program_is_not_published(tmp_path, monkeypatch):
    """One whose logits are off, or whose states are after two steps; of a model without a state of a convolution."""
    fields = VARIANTS["elastic"] | ONE | {"filter_length": 64, "num_spectral_channels": 2, "conv_kernel_size": 1}
    random_model(**fields).save_pretrained(tmp_path / "model")
    build_byte_tokenizer().save_pretrained(tmp_path / "model")
    traced, programs, open_program = [], {}, export_module.open_program

    def trace_once(*arguments):
        traced.extend([] if traced else [export_programs(*arguments)])
        return traced[0]

    def opened(wrong, path, name):
        if name not in programs:  # loading takes seconds
            programs[name] = open_program(path, name)
        run, calls = programs[name], itertools.count(1)

        def called(inputs):
            logits, *states = run(inputs)
            late = wrong == "states" and name == "step" and next(calls) % 2 == 0
            return [logits + (wrong == "logits"), *(state + late for state in states)]

        return called

    monkeypatch.setattr(export_module, "export_programs", trace_once)
    arguments = ("--spectral_budget", 2, "--max_length", 8, "--format", "torch", "--output_dir", tmp_path / "out")
    for wrong in ("logits", "states", ""):
        monkeypatch.setattr(export_module, "open_program", functools.partial(opened, wrong))
        refused = pytest.raises(Failed, match=f"differ from the model in {wrong}: .*: nothing was written")
        with refused if wrong else contextlib.nullcontext():
            export("--model", tmp_path / "model", *arguments)
        assert (tmp_path / "out" / "step-2.pt2").exists() == (not wrong)
    assert not list(tmp_path.glob(".tmp*"))


def test_what_cannot_be_exported_is_refused(model_folder, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name.startswith("onnx") else find(name))
    for arguments, message in (
        (("--format", "tflite"), "--format: invalid choice: 'tflite' .choose from '?onnx"),
        (("--format", "torch", "--spectral_budget", "2,2"), "one integer for each of the 1 spectral layers, got 2"),
        (("--format", "torch", "--spectral_budget", "none"), "unknown spectral_budget preset 'none'"),
        (("--format", "torch", "--int8"), "int8 needs format 'onnx', got 'torch'"),
        (("--format", "torch", "--max_length", "161"), r"max_length must be in \[2, 160\]"),
        ((), "pip install onnx onnxscript onnxruntime"),
        (("--format", "torch", "--model", tmp_path / "none"), "must be the folder of a saved model"),
    ):
        with pytest.raises(ValueError, match=message):
            export("--model", model_folder, "--output_dir", tmp_path / "out", *arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_executorch(tmp_path):
    """The script compares every program with the model by itself."""
    pytest.importorskip("executorch.exir")
    sizes = ONE | {"filter_length": 64, "num_spectral_channels": 8}
    random_model(**sizes, **VARIANTS["elastic"]).save_pretrained(tmp_path / "model")
    arguments = ("--model", tmp_path / "model", "--spectral_budget", 3, 8, "--format", "executorch")
    export(*arguments, "--output_dir", tmp_path / "out")
    description = json.loads((tmp_path / "out" / "export.json").read_text())
    assert description["files"] == ["model-3.pte", "model-8.pte"]
    assert {description["budgets"]["3"][name]["file"] for name in ("prefill", "step")} == {"model-3.pte"}
    small, large = ((tmp_path / "out" / f"model-{K}.pte").stat().st_size for K in (3, 8))
    assert small < large
    assert description["budgets"]["3"]["step"]["inputs"][0] == {"name": "input_ids", "shape": [1, 1], "dtype": "int64"}
