# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""essm-calibrate from end to end, where no time is asserted; what it measures: quality with its errors, and times."""

import contextlib
import io
import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import VARIANTS, random_ids, random_model
from profiles import HERE, THERE, as_here, of
from training_run import bpe_tokenizer, documents, read
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from essm_train.arguments import parse_arguments
from essm_train.data.blocks import evaluation_blocks, to_stream
from essm_train.data.documents import read_files
from essm_train.data.tokens import ByteEncoder
from essm_train.measure import calibration
from essm_train.measure.budget_sweep import sweep_budgets
from essm_train.measure.calibration import measure_device, measure_quality
from essm_train.measure.plots import draw_profile
from essm_train.measure.scoring import ACCURACY, BITS_PER_BYTE, HeldOut, hold_out_blocks
from essm_train.measure.timing import peak_memory
from essm_train.models import read_saved_config
from essm_train.pairs import ESSMForPairClassification
from essm_train.publish import profile as calibrate
from essm_train.publish.arguments import CalibrateArguments
from essm_train.tasks.retrieval import PairFile, collate
from modeling_essm import ESSMForCausalLM, ESSMForSequenceClassification
from modeling_essm.budgets import BudgetProfile, choose_budget, read_profile
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
    fields = {"budget_presets": {"phone": 3, "medium": 1}, "dropout": 0.1} | VARIANTS["elastic"]
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
        with pytest.raises(ValueError, match="holds the preset 'medium', which this run did not write"):
            run([*arguments, *QUICK])
        run([*arguments, "--block_size", "64", "--max_blocks", "5", "--overwrite", *QUICK])
    (saved / "output.txt").write_text(output.getvalue())
    return folder


def test_a_language_model_is_calibrated(saved, calibrated):
    model = AutoModelForCausalLM.from_pretrained(calibrated, trust_remote_code=True).eval()
    found = read_profile(calibrated, model)
    stream, _ = to_stream(read_files([str(saved / "text.txt")]), ByteEncoder())
    blocks = evaluation_blocks(stream, 64, 5)
    sweep = sweep_budgets(model, hold_out_blocks(blocks, ByteEncoder.special_ids, 1.0, 8, ""), (2, 8))
    quality, entry = found.quality, found.devices[HERE]
    assert quality.budgets == (2, 8, 32) and quality.values == pytest.approx(sweep.values, rel=1e-5)
    assert (quality.samples, quality.length, quality.dtype) == (5, 64, "float32")
    assert quality.data == "text.txt; 5 blocks of 64 tokens" and all(error > 0 for error in quality.errors)
    assert str(saved) not in (calibrated / PROFILE_NAME).read_text()
    assert (entry.prompt_length, entry.rounds, entry.threads, entry.dtype) == (64, 1, 1, "float32")
    assert entry.versions["torch"] == torch.__version__ and entry.weight_bytes == 4 * model.num_parameters()
    assert entry.phases == ("prefill", "decode")
    for phase, positions in (("prefill", 64), ("decode", 1)):
        assert entry.batch_sizes(phase) == (1, 2)
        for size in (1, 2):
            rows = list(entry.at(phase, size).values())
            assert [row.budget for row in rows] == [2, 8, 32] and rows[0].peak_bytes < rows[2].peak_bytes
            for row in rows:
                assert row.tokens_per_second == pytest.approx(size * positions / row.median_ms * 1e3)
                outputs = model(random_ids(size, 64), use_cache=True, spectral_budget=row.budget)
                # a step holds the copy of its cache, a prefill hidden states of its whole prompt
                assert row.cache_bytes == outputs.past_key_values.num_bytes < row.peak_bytes
    assert entry.at("prefill", 2)[8].peak_bytes > 1.5 * entry.at("prefill", 1)[8].peak_bytes


def test_what_is_printed_and_left(saved, calibrated):
    printed, found = (saved / "output.txt").read_text(), read_profile(calibrated)
    presets = found.presets()
    assert found.table(HERE) in printed and printed.count("* sweet spot") == 4
    for heading in ("prefill, batch size 1, of 64 positions", "decode, batch size 2, after 64 positions"):
        lines = printed.split(heading)[1].splitlines()[2:5]
        assert [line.split()[0] for line in lines] == ["2", "8", "32"]
    table = replace(found, quality=replace(found.quality, values=(3.0, 2.1, 2.0))).table(HERE)
    marked = [line.split()[0] for line in table.splitlines() if "^ collapse boundary" in line]
    assert marked == ["8"] * 4 and "^ collapse boundary" not in printed  # random weights lose nothing
    new = {path.name for path in calibrated.iterdir()} - {path.name for path in (saved / "model").iterdir()}
    assert new - {"__pycache__"} == {PROFILE_NAME, "budget_profile.png"}
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (saved / "model", calibrated))
    assert after == before | {"budget_presets": {"phone": 3, **presets}}
    model, ids = ESSMForCausalLM.from_pretrained(calibrated), random_ids(1, 12)
    for name in ("small", "medium", "full"):
        assert torch.equal(model(ids, spectral_budget=name).logits, model(ids, spectral_budget=presets[name]).logits)
    assert choose_budget(model, max_quality_drop=0.02) == presets["medium"]


def test_another_device_adds_its_times(saved, calibrated, tmp_path, monkeypatch):
    """And calibrated again, all other devices stay."""
    folder = tmp_path / "model"
    shutil.copytree(calibrated, folder)
    before, timing = read_profile(folder), ["--model", str(folder), "--timing_only", *QUICK]
    monkeypatch.setattr(calibration, "device_name", lambda device: THERE)
    presets = read(folder / "config.json")["budget_presets"]
    other = {name: K - 1 for name, K in presets.items()}
    monkeypatch.setattr(BudgetProfile, "presets", lambda self: other)
    run([*timing, "--dtype", "bfloat16", "--prompt_length", "9", "--budgets", "8", "--batch_sizes", "1"])
    assert read(folder / "config.json")["budget_presets"] == presets
    after = read_profile(folder)
    entry, here = after.devices[THERE], before.devices[HERE]
    assert after.quality == before.quality and after.devices[HERE] == here
    assert (entry.dtype, entry.prompt_length, entry.weight_bytes) == ("bfloat16", 9, here.weight_bytes / 2)
    assert {row.budget for row in entry.rows} == {8, 32}  # the full one always
    assert [axes.get_title().split("\n")[0] for axes in draw_profile(after).axes] == [HERE, THERE]
    with pytest.raises(
        ValueError, match=f"holds the figures of {THERE} in budget_profile.json, which this run did not"
    ):
        run(timing)
    run([*timing, "--batch_sizes", "1", "--overwrite"])
    assert read(folder / "config.json")["budget_presets"] == other
    monkeypatch.undo()
    monkeypatch.setattr(calibration, "device_name", lambda device: THERE)
    again = read_profile(folder)
    assert {row.budget for row in again.devices[THERE].rows} == {2, 8, 32}
    assert again.devices[HERE] == here and again.devices[THERE].dtype == "float32"
    whole = ["--model", str(folder), "--text_files", str(saved / "text.txt")]
    whole += ["--budgets", "4", *QUICK, "--batch_sizes", "1"]
    with pytest.raises(
        ValueError, match=r"holds the quality in budget_profile\.json, the figures of .*, which this run"
    ):
        run(whole)
    run([*whole, "--overwrite"])
    last = read_profile(folder)
    assert last.devices[HERE] == here and last.quality.budgets == (4, 32)
    assert last.quality.length == 512  # by default, which is all that the filters reach
    assert last.devices[THERE].prompt_length == 509  # and leaves room for 3 tokens


def test_two_devices_that_are_measured_at_once_are_both_kept(calibrated, tmp_path, monkeypatch):
    folder, measure = tmp_path / "model", calibrate.measure_device
    shutil.copytree(calibrated, folder)

    def measure_here(*arguments):
        entry = measure(*arguments)
        read_profile(folder).merge(replace(entry, device="a third")).save(folder)
        return entry

    monkeypatch.setattr(calibration, "device_name", lambda device: THERE)
    monkeypatch.setattr(calibrate, "measure_device", measure_here)
    run(["--model", str(folder), "--timing_only", *QUICK, "--batch_sizes", "1", "--budgets", "8"])
    assert set(read_profile(folder).devices) == {HERE, THERE, "a third"}


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
    with pytest.raises(ValueError, match="trained by train_retrieval, and the data given is for train_classification"):
        run([*line[:2], "--test_file", "a.csv", "--text_column", "a"])


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
    entry = found.devices[HERE]
    assert entry.phases == ("prefill",) and not any(row.cache_bytes for row in entry.rows)
    with pytest.raises(ValueError, match=r"label_column 't0' holds numbers, where the classes are \['walk'"):
        run([*arguments, "--features_column", "t*", "--label_column", "t0", *QUICK])
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
    "nothing": ([], "give text_files or .*, one of them, got none"),
    "scale": (["--text_files", "text.txt", "--scale", "small"], "scale needs task"),
    "block": (["--test_file", "a.csv", "--block_size", "64"], "block_size needs text_files"),
    "block-long": (["--text_files", "text.txt", "--block_size", "513"], r"block_size must be in \[2, 512\].*got 513"),
    "prompt": (["--text_files", "text.txt", "--prompt_length", "449"], r"prompt_length must be in \[1, 448\].*got 449"),
    "decode": (["--text_files", "text.txt", "--decode_tokens", "512"], r"decode_tokens must be in \[1, 511\].*got 512"),
    "large": (["--text_files", "text.txt", "--budgets", "4", "40"], r"budgets must be in \[1, 32\].*got 40"),
    "absent": (["--text_files", "absent.txt"], "cannot read absent.txt"),
    "files": (["--test_file", "a.csv"], "trained by train_clm, and the data given is for train_classification"),
    "task": (["--task", "retrieval"], "trained by train_clm, and the data given is for train_retrieval"),
}


@pytest.mark.parametrize("arguments, message", BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_bad_arguments(saved, monkeypatch, arguments, message):
    monkeypatch.chdir(saved)
    monkeypatch.setattr(calibrate, "measure_quality", None)
    monkeypatch.setattr(calibrate, "measure_device", None)
    with pytest.raises(ValueError, match=message):
        run(["--model", "model", *arguments])


def test_bad_models(saved, tmp_path):
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


def test_a_profile_that_is_there_and_does_not_fit(saved, tmp_path):
    """It may hold the figures of other devices, so it is refused, not replaced."""
    folder = tmp_path / "model"
    random_model(seed=6).save_pretrained(folder)
    path = of(random_model(seed=5)).save(folder)
    for content, message in ((path.read_text(), "was measured on other weights"), ("{", "cannot be read")):
        path.write_text(content)
        for what in (["--text_files", str(saved / "text.txt")], ["--timing_only"]):
            with pytest.raises(ValueError, match=message):
                run(["--model", str(folder), *what])
        assert path.read_text() == content
    of(random_model(seed=6)).save(folder)
    with pytest.raises(ValueError, match=r"budgets must be of \[2, 4, 8, 16, 32\], measured before, got \[3\]"):
        run(["--model", str(folder), "--timing_only", "--budgets", "3"])


def test_standard_errors_are_those_of_paired_samples():
    generator = torch.Generator().manual_seed(0)
    hits = {K: (torch.rand(500, generator=generator) < p).double() for K, p in ((2, 0.5), (4, 0.8), (8, 0.8))}
    coins = HeldOut(ACCURACY, lambda model, K: (hits[K], torch.ones(500).double()), {}, lambda: 7, "coins", None)
    found = measure_quality(random_model(num_spectral_channels=8), coins, (2, 4, 8))
    assert (found.metric, found.higher_is_better, found.data, found.samples) == ("accuracy", True, "coins", 500)
    assert found.values == pytest.approx([float(hits[K].mean()) for K in (2, 4, 8)])
    assert found.errors == pytest.approx([float(hits[K].std() / math.sqrt(500)) for K in (2, 4, 8)])
    assert found.drop_errors[2] == 0
    one = replace(coins, score=lambda model, K: (hits[K][:1], torch.ones(1).double()))
    with pytest.raises(ValueError, match="need at least two held-out blocks or samples, got 1"):
        measure_quality(random_model(), one, (2, 4, 8))
    broken = replace(coins, score=lambda model, K: (hits[2] / 0, torch.ones(500).double()))
    with pytest.raises(ValueError, match="accuracy of coins at K=2 must be finite, got nan"):
        measure_quality(random_model(), broken, (2, 4, 8))
    # By resampling: what is measured of drops when samples are drawn anew.
    rows = torch.randint(500, (4000, 500), generator=generator)
    resampled = {K: hits[K][rows].mean(1) for K in (2, 4, 8)}
    for i, K in enumerate((2, 4)):
        expected = float((1 - resampled[K] / resampled[8]).std())
        assert found.drop_errors[i] == pytest.approx(expected, rel=0.1)  # 4000 draws of a spread: 1%
    # Blocks that all lose alike have errors, but their drop has none.
    bits, sizes = torch.tensor([9.0, 3.0, 5.0]).double(), torch.tensor([3.0, 2.0, 2.0]).double()
    blocks = replace(coins, metric=BITS_PER_BYTE, score=lambda model, K: (bits * (1.1 if K == 2 else 1.0), sizes))
    found = measure_quality(random_model(num_spectral_channels=4), blocks, (2, 4))
    assert found.values == pytest.approx((17 / 7 * 1.1, 17 / 7)) and found.drops[0] == pytest.approx(0.1)
    assert found.errors[1] > 0.1 and found.drop_errors == pytest.approx((0, 0), abs=1e-12)


def test_what_a_time_means(monkeypatch):
    """A prefill's is that of the call, decoding's that of one of its steps, for the whole batch."""
    times = [0.004, 0.012, 0.002]
    monkeypatch.setattr(calibration, "paired", lambda calls, *args, **kwargs: {case: times for case in calls})
    prefill, decode = measure_device(random_model(), (4,), (3,), 10, 2, 1).rows
    assert (prefill.phase, decode.phase) == ("prefill", "decode")
    assert (prefill.median_ms, prefill.min_ms, prefill.max_ms) == pytest.approx((4, 2, 12))
    assert (decode.median_ms, decode.min_ms, decode.max_ms) == pytest.approx((2, 1, 6))
    assert (prefill.tokens_per_second, decode.tokens_per_second) == pytest.approx((30 / 0.004, 3 / 0.002))


def test_peak_memory_is_what_was_held_at_once():
    MB = 2**20

    def call():  # holds 8, 32, 24, 40 (the peak), 16 MB
        a = torch.empty(8 * MB, dtype=torch.uint8)
        b = torch.empty(24 * MB, dtype=torch.uint8)
        del a
        c = torch.empty(16 * MB, dtype=torch.uint8)
        del b
        return c

    assert peak_memory(call, torch.device("cpu")) == pytest.approx(40 * MB, rel=0.02)


def test_peak_memory_does_not_lack_what_was_freed_from_before():
    """The profiler takes a tensor for the earlier one that a profile saw at its address; large ones get the same."""
    large, earlier = 64 * 2**20, []

    def call():
        earlier.clear()
        return torch.empty(large, dtype=torch.uint8)

    for _ in range(4):
        assert peak_memory(call, torch.device("cpu")) == large
        earlier.append(torch.empty(large, dtype=torch.uint8))
