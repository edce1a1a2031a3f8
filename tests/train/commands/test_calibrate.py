# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""essm-calibrate from end to end. No time is asserted."""

import contextlib
import io
import json
import shutil
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers import VARIANTS, random_ids, random_model
from profiles import HERE, THERE, as_here, of
from training_run import bpe_tokenizer, documents
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from essm_train.arguments import parse_arguments
from essm_train.data.blocks import evaluation_blocks, to_stream
from essm_train.data.documents import read_files
from essm_train.data.tokens import ByteEncoder
from essm_train.measure import calibration
from essm_train.measure.budget_sweep import sweep_budgets
from essm_train.measure.plots import draw_profile
from essm_train.measure.scoring import hold_out_blocks
from essm_train.models import read_saved_config
from essm_train.pairs import ESSMForPairClassification
from essm_train.publish import profile as calibrate
from essm_train.publish.arguments import CalibrateArguments
from essm_train.tasks.retrieval import PairFile, collate
from modeling_essm import ESSMForCausalLM, ESSMForSequenceClassification
from modeling_essm.budgets import choose_budget, read_profile
from modeling_essm.budgets.profile import PROFILE_NAME


def run(argv):
    return calibrate.calibrate(parse_arguments(CalibrateArguments, argv))


@pytest.fixture(autouse=True)
def named_machine(monkeypatch):
    """The tests run HERE."""
    as_here(monkeypatch)


QUICK = ["--rounds", "1", "--decode_tokens", "3", "--device", "cpu", "--threads", "1", "--batch_sizes", "1", "2"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A language model with a preset of its user's, and some text."""
    root = tmp_path_factory.mktemp("calibration")
    fields = {"budget_presets": {"phone": 3, "sweet-spot": 1}, "dropout": 0.1} | VARIANTS["gated"]
    random_model(seed=5, **fields).save_pretrained(root / "model")
    (root / "text.txt").write_text("the spectral state of the spectral budget " * 40)
    return root


@pytest.fixture(scope="module")
def calibrated(saved):
    """It, calibrated from the command line in a copy; what was printed is beside it."""
    folder = saved / "calibrated"
    shutil.copytree(saved / "model", folder)
    arguments = ["--model", str(folder), "--text_files", str(saved / "text.txt"), "--budgets", "2", "8"]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as output:
        patch.setattr(calibration, "device_name", lambda device: HERE)
        run([*arguments, "--block_size", "64", "--max_blocks", "5", *QUICK])
    (saved / "output.txt").write_text(output.getvalue())
    return folder


def test_a_language_model_is_calibrated(saved, calibrated):
    model = AutoModelForCausalLM.from_pretrained(calibrated, trust_remote_code=True).eval()
    found = read_profile(calibrated, model)
    stream, _ = to_stream(read_files([str(saved / "text.txt")]), ByteEncoder())
    blocks = evaluation_blocks(stream, 64, 5)
    sweep = sweep_budgets(model, hold_out_blocks(blocks, ByteEncoder.special_ids, 1.0, 8, ""), (2, 8))
    assert found.quality.budgets == (2, 8, 32)
    assert found.quality.values == pytest.approx(sweep.values, rel=1e-5)
    assert (found.quality.samples, found.quality.length, found.quality.dtype) == (5, 64, "float32")
    assert (
        found.quality.data == "text.txt; 5 blocks of 64 tokens"
        and str(saved) not in (calibrated / PROFILE_NAME).read_text()
    )
    assert all(error > 0 for error in found.quality.errors)

    entry = found.devices[HERE]
    assert (entry.prompt_length, entry.rounds, entry.threads, entry.dtype) == (64, 1, 1, "float32")
    assert entry.versions["torch"] == torch.__version__ and entry.weight_bytes == 4 * model.num_parameters()
    assert entry.phases == ("prefill", "decode")
    for phase, positions in (("prefill", 64), ("decode", 1)):
        assert entry.batch_sizes(phase) == (1, 2)
        for size in (1, 2):
            rows = list(entry.at(phase, size).values())
            assert [row.budget for row in rows] == [2, 8, 32]
            for row in rows:
                assert row.tokens_per_second == pytest.approx(size * positions / row.median_ms * 1e3)
                outputs = model(random_ids(size, 64), use_cache=True, spectral_budget=row.budget)
                assert row.cache_bytes == outputs.past_key_values.num_bytes
            assert rows[0].peak_bytes < rows[2].peak_bytes
    # a step holds the copy of its cache, a prefill hidden states of its whole prompt
    assert all(row.peak_bytes > row.cache_bytes for row in entry.rows)
    assert entry.at("prefill", 2)[8].peak_bytes > 1.5 * entry.at("prefill", 1)[8].peak_bytes


def test_what_is_printed_and_left(saved, calibrated):
    printed = (saved / "output.txt").read_text()
    assert read_profile(calibrated).table(HERE) in printed
    for heading in ("prefill, batch size 1, of 64 positions", "decode, batch size 2, after 64 positions"):
        lines = printed.split(heading)[1].splitlines()[2:5]
        assert [line.split()[0] for line in lines] == ["2", "8", "32"]
    K = read_profile(calibrated).presets()["sweet-spot"]
    assert all(line.split()[0] == str(K) for line in printed.splitlines() if "* sweet spot" in line)
    assert printed.count("* sweet spot") == 4 and "^ collapse boundary" not in printed  # random weights lose nothing
    steep = replace(read_profile(calibrated).quality, values=(3.0, 2.1, 2.0))
    table = replace(read_profile(calibrated), quality=steep).table(HERE)
    marked = [line.split()[0] for line in table.splitlines() if "^ collapse boundary" in line]
    assert marked == ["8"] * 4 and table.count("* sweet spot") == 4
    new = {path.name for path in calibrated.iterdir()} - {path.name for path in (saved / "model").iterdir()}
    assert new - {"__pycache__"} == {PROFILE_NAME, "budget_profile.png"}
    assert (calibrated / "budget_profile.png").read_bytes().startswith(b"\x89PNG")


def test_presets_work_after_reloading(saved, calibrated):
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (saved / "model", calibrated))
    found = read_profile(calibrated)
    assert after.pop("budget_presets") == {"phone": 3, **found.presets()}
    assert before.pop("budget_presets") == {"phone": 3, "sweet-spot": 1}
    assert list(before.items()) == list(after.items())
    model, ids = ESSMForCausalLM.from_pretrained(calibrated), random_ids(1, 12)
    for name in ("sweet-spot", "collapse-boundary", "full"):
        assert model(ids, spectral_budget=name).spectral_budget == (found.presets()[name],) * 2
        by_name, by_number = (
            model.generate(ids, max_new_tokens=5, do_sample=False, spectral_budget=budget, output_logits=True,
                           return_dict_in_generate=True).logits
            for budget in (name, found.presets()[name])
        )  # fmt: skip
        assert all(torch.equal(a, b) for a, b in zip(by_name, by_number))
    assert choose_budget(model, max_quality_drop=0.02) == found.presets()["sweet-spot"]


def test_another_device_adds_its_times(calibrated, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    shutil.copytree(calibrated, folder)
    before = read_profile(folder)
    monkeypatch.setattr(calibration, "device_name", lambda device: THERE)
    monkeypatch.setattr(calibrate, "measure_quality", None)
    monkeypatch.setattr(calibrate, "open_held_out", None)
    arguments = ["--model", str(folder), "--timing_only", "--dtype", "bfloat16", "--prompt_length", "9", *QUICK]
    run([*arguments, "--budgets", "8"])
    after = read_profile(folder)
    assert after.quality == before.quality and after.devices[HERE] == before.devices[HERE]
    entry = after.devices[THERE]
    assert (entry.dtype, entry.prompt_length, entry.weight_bytes) == (
        "bfloat16",
        9,
        before.devices[HERE].weight_bytes / 2,
    )
    assert {row.budget for row in entry.rows} == {8}
    assert [axes.get_title().split("\n")[0] for axes in draw_profile(after).axes] == [HERE, THERE]
    # and once more: only its own entry is replaced
    run(["--model", str(folder), "--timing_only", *QUICK])
    again = read_profile(folder)
    assert {row.budget for row in again.devices[THERE].rows} == {2, 8, 32}
    assert again.devices[HERE] == before.devices[HERE] and again.devices[THERE].dtype == "float32"


def test_calibrated_again_other_devices_stay(saved, calibrated, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    shutil.copytree(calibrated, folder)
    before = read_profile(folder)
    monkeypatch.setattr(calibration, "device_name", lambda device: THERE)
    run(["--model", str(folder), "--text_files", str(saved / "text.txt"), "--budgets", "4", *QUICK])
    after = read_profile(folder)
    assert after.devices[HERE] == before.devices[HERE] and after.quality.budgets == (4, 32)
    assert after.quality.length == 512  # by default, which is all that the filters reach
    assert after.devices[THERE].prompt_length == 509  # and leaves room for 3 tokens


def test_a_classifier_is_calibrated(tmp_path):
    rng = np.random.default_rng(0)
    for split, count in (("train", 20), ("test", 7)):
        rows = pa.array(list(rng.integers(0, 256, (count, 784)).astype(np.uint8)), pa.list_(pa.uint8()))
        table = pa.table({"pixels": rows, "label": rng.permutation(np.arange(count) % 10)})
        pq.write_table(table, tmp_path / f"mnist-{split}.parquet")
    folder = tmp_path / "model"
    fields = {"num_input_features": 1, "num_labels": 10, "filter_length": 1024}
    random_model(ESSMForSequenceClassification, **fields).save_pretrained(folder)
    arguments = ["--model", str(folder), "--task", "smnist", "--data_dir", str(tmp_path), "--scale", "small"]
    found = run([*arguments, "--budgets", "2", "--eval_batch_size", "4", *QUICK])

    model = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True).eval()
    assert read_profile(folder, model) == found
    test = pq.read_table(tmp_path / "mnist-test.parquet")
    pixels, labels = (torch.tensor(test[name].to_pylist()) for name in ("pixels", "label"))
    with torch.no_grad():
        expected = [
            model(input_features=(pixels / 127.5 - 1)[..., None], spectral_budget=K).logits.argmax(-1) == labels
            for K in (2, 32)
        ]
    assert found.quality.values == pytest.approx([float(hits.double().mean()) for hits in expected])
    assert (found.quality.metric, found.quality.samples, found.quality.length) == ("accuracy", 7, 784)
    entry = found.devices[HERE]
    assert entry.phases == ("prefill",) and entry.prompt_length == 784 and len(entry.rows) == 4
    assert all(row.cache_bytes == 0 for row in entry.rows)
    assert model.config.budget_presets == found.presets()
    assert choose_budget(model, max_latency_ms=1e9) in (2, 32)


def test_a_classifier_of_pairs_is_calibrated(tmp_path):
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("eval", 5), ("test", 9)):
        texts = ["".join(rng.choice(list("abc"), rng.integers(5, 40))) for _ in range(2 * count)]
        lines = [f"{i % 2:.1f}\tP{i}\tQ{i}\t{texts[2 * i]}\t{texts[2 * i + 1]}\n" for i in range(count)]
        (tmp_path / f"new_aan_pairs.{split}.tsv").write_text("".join(lines))
    folder = tmp_path / "model"
    random_model(ESSMForPairClassification).save_pretrained(folder)
    line = ["--model", str(folder), "--data_dir", str(tmp_path), "--scale", "small"]
    found = run([*line, "--task", "retrieval", "--budgets", "2", "--eval_batch_size", "4", *QUICK])
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    assert read_profile(folder, model) == found and model.config.budget_presets == found.presets()
    test = PairFile(tmp_path / "new_aan_pairs.test.tsv", 512)
    with torch.no_grad():
        expected = [model(**collate(list(test)), spectral_budget=K).logits.argmax(-1) == test.labels for K in (2, 32)]
    assert found.quality.values == pytest.approx([float(hits.double().mean()) for hits in expected])
    assert (found.quality.samples, found.quality.length) == (9, int(test.lengths.max()))
    row = found.devices[HERE].rows[0]
    both = 2 * row.batch_size * found.devices[HERE].prompt_length  # positions of both documents
    assert row.tokens_per_second == pytest.approx(both / row.median_ms * 1e3)
    with pytest.raises(ValueError, match=r"task 'smnist' is one of train_classification, and .* of pairs"):
        run([*line, "--task", "smnist"])
    with pytest.raises(ValueError, match="hold single sequences; a classifier of pairs needs task"):
        run([*line, "--test_file", "a.csv", "--text_column", "a"])


def test_an_own_classifier_is_calibrated_on_own_files(tmp_path):
    """Numbers are scaled as features.json says, whatever their type, and text as labels means the model's classes."""
    values = np.random.default_rng(0).integers(0, 256, (9, 24)) * np.arange(9)[:, None] // 8
    folder, names = tmp_path / "model", ["walk", "sit", "run"]  # not sorted
    model = random_model(ESSMForSequenceClassification, num_input_features=2, id2label=dict(enumerate(names)))
    with torch.no_grad():  # without what all samples share, or all are of one class
        inputs = torch.tensor(values.reshape(9, 12, 2)[:, :10] * 0.01 - 0.5).float()
        mean = model.model(input_features=inputs).last_hidden_state.mean((0, 1))
        model.score.weight -= torch.outer(model.score.weight @ mean, mean) / mean.square().sum()
    model.save_pretrained(folder)
    record = {"multiplier": 0.01, "offset": -0.5, "max_length": 10, "frame_length": 2}
    (folder / "features.json").write_text(json.dumps(record))

    def predictions(multiplier: float, offset: float, K: int) -> torch.Tensor:
        inputs = torch.tensor(values.reshape(9, 12, 2)[:, :10] * multiplier + offset).float()
        with torch.no_grad():
            return model(input_features=inputs, spectral_budget=K).logits.argmax(-1)

    labels = predictions(0.01, -0.5, 32)
    assert len(set(labels.tolist())) > 1 and not torch.equal(labels, predictions(1.0, 0.0, 32))
    lines = ["kind," + ",".join(f"t{i}" for i in range(24))]
    lines += [f"{names[label]}," + ",".join(map(str, row)) for label, row in zip(labels, values)]
    (tmp_path / "test.csv").write_text("\n".join(lines))
    arguments = ["--model", str(folder), "--test_file", str(tmp_path / "test.csv"), "--label_column", "kind"]
    found = run([*arguments, "--features_column", "t*", "--budgets", "2", *QUICK])
    expected = float((predictions(0.01, -0.5, 2) == labels).double().mean())
    assert found.quality.values == pytest.approx((expected, 1.0))
    assert (found.quality.metric, found.quality.samples, found.quality.length) == ("accuracy", 9, 10)
    for change, message in (
        (["--features_column", "t*", "--label_column", "t0"], r"row \d of .*: labels must be in \[0, 2\], got"),
        (["--features_column", "nothing"], "features_column must be one of"),
        ([], "give text_column or features_column, and not both"),
    ):
        with pytest.raises(ValueError, match=message):
            run([*arguments, *change, *QUICK])
    (folder / "features.json").write_text('{"offset": "none"}')
    with pytest.raises(ValueError, match=r"features\.json must hold numbers for multiplier"):
        run([*arguments, "--features_column", "t*", *QUICK])


def test_an_own_classifier_of_text_is_calibrated_with_its_own_tokenizer(tmp_path):
    tokenizer = bpe_tokenizer(documents())
    folder = tmp_path / "model"
    model = random_model(ESSMForSequenceClassification, vocab_size=len(tokenizer), num_labels=2)
    model.save_pretrained(folder)
    tokenizer.model_max_length = 7
    tokenizer.save_pretrained(folder)
    rows = [{"text": text, "label": i % 2} for i, text in enumerate(documents()) if text]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = CalibrateArguments(str(folder), test_file=[str(tmp_path / "test.jsonl")], text_column="text")
    held_out = calibrate.open_held_out(args, read_saved_config(folder))
    hits, _ = held_out.score(model, 32)
    with torch.no_grad():
        expected = [
            int(model(torch.tensor([tokenizer(row["text"])["input_ids"][:7]])).logits.argmax()) == row["label"]
            for row in rows
        ]
    assert hits.tolist() == expected and held_out.length == 7


BAD_ARGUMENTS = {
    "nothing": ([], "give text_files, test_file, dataset_name, task or timing_only, one of them, got none"),
    "files": (["--test_file", "a.csv", "--text_column", "a"], "measure classifiers; a language model needs text_files"),
    "rounds": (["--timing_only", "--rounds", "0"], "rounds must be at least 1, got 0"),
    "dtype": (["--timing_only", "--dtype", "int8"], "dtype must be one of .*'bfloat16'.*, got 'int8'"),
    "device": (["--timing_only", "--device", "tpu"], r"device must be one of \['auto', 'cpu', 'cuda'\], got 'tpu'"),
    "block-long": (["--text_files", "text.txt", "--block_size", "513"], r"block_size must be in \[2, 512\].*got 513"),
    "prompt": (["--text_files", "text.txt", "--prompt_length", "449"], r"prompt_length must be in \[1, 448\].*got 449"),
    "decode": (["--text_files", "text.txt", "--decode_tokens", "512"], r"decode_tokens must be in \[1, 511\].*got 512"),
    "large": (["--text_files", "text.txt", "--budgets", "4", "40"], r"budgets must be in \[1, 32\], got 40"),
    "absent": (["--text_files", "absent.txt"], "cannot read absent.txt"),
    "task": (["--task", "smnist"], "task 'smnist' is one of train_classification, and .* holds a language model"),
    "retrieval": (
        ["--task", "retrieval"],
        "task 'retrieval' is one of train_retrieval, and .* holds a language model",
    ),
}


@pytest.mark.parametrize("arguments, message", BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_bad_arguments(saved, monkeypatch, arguments, message):
    monkeypatch.chdir(saved)
    monkeypatch.setattr(calibrate, "measure_quality", None)
    monkeypatch.setattr(calibrate, "measure_device", None)
    before = {path: path.read_bytes() for path in (saved / "model").iterdir() if path.is_file()}
    with pytest.raises(ValueError, match=message):
        run(["--model", "model", *arguments])
    assert {path: path.read_bytes() for path in (saved / "model").iterdir() if path.is_file()} == before


def test_bad_models(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(calibrate, "measure_quality", None)
    text = ["--text_files", str(saved / "text.txt")]
    with pytest.raises(ValueError, match=r"model must be the folder of a saved model, got '.*nowhere': No such file"):
        run(["--model", str(tmp_path / "nowhere"), *text])
    with pytest.raises(FileNotFoundError, match=r"there is no .*budget_profile.json"):
        run(["--model", str(saved / "model"), "--timing_only"])
    config = tmp_path / "config.json"
    for content, message in (
        ("{", "config.json is not valid JSON"),
        ('{"model_type": "gpt2"}', "architecture must be ESSMForCausalLM or .*, got None of type 'gpt2'"),
        ('{"model_type": "essm", "architectures": ["ESSMModel"]}', "architecture must be .*, got ESSMModel of"),
    ):
        config.write_text(content)
        with pytest.raises(ValueError, match=message):
            run(["--model", str(tmp_path), *text])
    random_model(ESSMForSequenceClassification, num_labels=3).save_pretrained(tmp_path / "classifier")
    with pytest.raises(ValueError, match="text_files measure language models; a classifier needs test_file"):
        run(["--model", str(tmp_path / "classifier"), *text])


def test_a_profile_that_is_there_and_does_not_fit(saved, tmp_path, monkeypatch):
    """It may hold the figures of other devices, so it is refused, not replaced."""
    monkeypatch.setattr(calibrate, "measure_quality", None)
    folder = tmp_path / "model"
    random_model(seed=6).save_pretrained(folder)
    path = of(random_model(seed=5)).save(folder)
    for content, message in ((path.read_text(), "was measured on another model"), ("{", "cannot be read")):
        path.write_text(content)
        for what in (["--text_files", str(saved / "text.txt")], ["--timing_only"]):
            with pytest.raises(ValueError, match=message):
                run(["--model", str(folder), *what])
        assert path.read_text() == content
    of(random_model(seed=6)).save(folder)
    with pytest.raises(ValueError, match=r"budgets must be among those with a quality, \[2, 4, 8, 16, 32\], got \[3\]"):
        run(["--model", str(folder), "--timing_only", "--budgets", "3"])
