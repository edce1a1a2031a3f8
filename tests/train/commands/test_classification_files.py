# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""essm-train-classification: wide tables, class names and sound; rows and arguments that cannot be are named."""

import csv
import itertools
import wave
from pathlib import Path

import datasets
import numpy as np
import pytest
import tokenizers
from helpers import random_model
from training_run import ONCE, PIXELS, read, signals, write, write_wav
from training_run import load_classes as load
from training_run import train_classes as train
from transformers import PreTrainedTokenizerFast

from essm_train.arguments import parse_arguments
from essm_train.data.arguments import ClassificationArguments
from essm_train.data.classification import load_classification, load_test
from essm_train.data.documents import decode_wav, open_files
from essm_train.data.readers import read_record
from essm_train.data.rows import collate
from essm_train.run import classifier
from essm_train.run.checkpoints import list_checkpoints
from modeling_essm import ESSMForSequenceClassification, build_byte_tokenizer


def write_wide(path: Path, count: int, seed: int, labels: list[str]) -> str:
    """A row per sample of 12 steps in x0, y0, x1, y1, .., about a mean of its class."""
    rng = np.random.default_rng(seed)
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["id", *(f"{axis}{i}" for i in range(12) for axis in "xy"), "kind"])
        for row in range(count):
            kind = labels[row % len(labels)]
            table.writerow([row, *rng.normal({"walk": 0, "run": 1, "sit": 2}[kind], 0.3, 24).round(3), kind])
    return str(path)


def text_file(path: Path, content: str) -> str:
    path.write_text(content)
    return str(path)


def write_sounds(folder: Path, counts: dict[str, int], rate: int = 8000) -> str:
    """A folder per class: 40 ms of a tone, low or high, in 16 bits."""
    rng = np.random.default_rng(0)
    for name, hertz in {"low": 200, "high": 1900}.items():
        for i in range(counts[name]):
            tone = 0.5 * np.sin(2 * np.pi * (hertz * np.arange(rate // 25) / rate + rng.random()))
            write_wav(folder / name / f"{i}.wav", tone, rate)
    return str(folder)


def test_wide_tables_with_text_as_labels(arguments, tmp_path):
    """One column per number; classes are the sorted values of the label, or those of weights that are trained on."""
    train_file = write_wide(tmp_path / "train.csv", 60, 0, ["walk", "run", "sit"])
    test_file = write_wide(tmp_path / "test.csv", 18, 1, ["walk", "sit"])
    changes = {"train_file": train_file, "test_file": test_file, "features_column": "[xy]*", "label_column": "kind"}
    data = load(arguments(tmp_path / "x", **changes, frame_length=2))
    assert data.label_names == ["run", "sit", "walk"] and set(data.test.labels.tolist()) == {1, 2}
    values = data.source.samples[0].values
    rows = csv.DictReader(Path(train_file).read_text().splitlines())
    rows = [[float(row[f"{axis}{i}"]) for i in range(12) for axis in "xy"] for row in rows]
    assert values.shape == (12, 2) and any(values.flatten().tolist() == pytest.approx(row) for row in rows)
    names = {i: name for i, name in enumerate(["run", "sit", "walk"])}
    labels = {"id2label": names, "label2id": {name: i for i, name in names.items()}}
    random_model(ESSMForSequenceClassification, num_input_features=2, **labels).save_pretrained(tmp_path / "head")
    head = {"model_name_or_path": tmp_path / "head", "train_file": test_file, "test_file": None, "frame_length": 2}
    train(arguments(tmp_path / "on", **changes | ONCE | head))
    assert read(tmp_path / "on" / "model" / "config.json")["id2label"] == {"0": "run", "1": "sit", "2": "walk"}


@pytest.mark.parametrize(
    ("rows", "changes", "message"),
    [
        ("x0,x1,kind\n1,2,a\n3,,b\n", {}, r"row 1 of .* must hold finite numbers, got nan"),
        ("x0,x1,kind\n1,2,a\n3,no,b\n", {}, "cannot read train_file a.csv: could not convert string to float: 'no'"),
        ("y0,y1,kind\n1,2,a\n3,4,b\n", {}, r"Column name \['x\*'\] not in .*\['y0', 'y1', 'kind'\]"),
        ("x0,x1,kind\n1,2,a\n3,4,b\n", {"frame_length": 3}, r"row 0 .* holds 2 steps, and frame_length is 3"),
        ("x0,x1,kind\n1,2,a\n3,4,a\n", {}, "num_labels must be at least 2, got 1"),
    ],
)
def test_wide_tables_that_cannot_be(rows, changes, message, arguments, tmp_path):
    (tmp_path / "a.csv").write_text(rows)
    wide = {"train_file": tmp_path / "a.csv", "features_column": "x*", "label_column": "kind"}
    with pytest.raises(ValueError, match=message):
        load(arguments(tmp_path / "run", **wide | changes))


def test_texts_and_classes_are_text_whatever_they_say(arguments, tmp_path):
    words = ["NA", "null", "nan", "007", "True", "1.50"]
    rows = "".join(f"{word},{('NA', 'None')[i % 2]}\n" for i, word in enumerate(words * 2))
    (tmp_path / "a.csv").write_text("text,label\n" + rows)
    named = {"text_column": "text", "features_column": None, "train_file": tmp_path / "a.csv", "test_file": None}
    data = load(arguments(tmp_path / "run", **named, validation_file=tmp_path / "a.csv"))
    assert data.label_names == ["NA", "None"]
    samples = data.validation.samples
    found = [(bytes(samples[i].values), data.label_names[samples[i].label]) for i in range(len(samples))]
    assert sorted(found) == sorted((word.encode(), ("NA", "None")[i % 2]) for i, word in enumerate(words * 2))
    (tmp_path / "a.csv").write_text("text,label\na,NA\n,None\n")
    with pytest.raises(ValueError, match=r"row 1 of .* must hold text, got NoneType"):
        load(arguments(tmp_path / "run", **named))


def test_a_training_folder_holds_no_test_rows(arguments, tmp_path):
    (tmp_path / "rows").mkdir()
    for name in ("a.csv", "b.csv"):
        text_file(tmp_path / "rows" / name, "text,label\n" + "one,0\ntwo,1\n" * 20)
    options = {"text_column": "text", "features_column": None, "test_file": None, "train_file": tmp_path / "rows"}
    for held_out in ("validation_file", "test_file"):
        with pytest.raises(ValueError, match=r"holds '.*b\.csv', which is held out"):
            load(arguments(tmp_path / "run", **options | {held_out: tmp_path / "rows" / "b.csv"}))


def test_labels_of_other_files_must_be_known(arguments, tmp_path):
    train_file = write(tmp_path, "train.jsonl", {"text": ["a", "b", "c", "d"], "label": ["yes", "no"] * 2})
    validation = write(tmp_path, "validation.jsonl", {"text": ["a", "b"], "label": ["yes", "perhaps"]})
    with pytest.raises(ValueError, match=r"cannot read validation_file validation.jsonl: .* label perhaps"):
        load(arguments(tmp_path / "run", "text", train_file=train_file, validation_file=validation))
    numbers = write(tmp_path, "numbers.jsonl", {"text": ["a", "b"], "label": [1, 0]})
    for first, other, message in (
        (train_file, numbers, r"jsonl: label_column 'label' holds numbers, where the classes are \['no', 'yes'\]"),
        (numbers, train_file, r"label_column 'label' holds text such as \['no'\], where the classes are numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            load(arguments(tmp_path / "run", "text", train_file=first, validation_file=other))


def test_labels_of_a_csv_are_numbers_if_all_of_them_are(arguments, tmp_path):
    """In all rows, though pandas reads 10,000 at a time, and as the classes of training."""

    def labels(name, *values):
        return text_file(tmp_path / name, "text,kind\n" + "".join(f"so {value},{value}\n" for value in values))

    columns = {"text_column": "text", "features_column": None, "label_column": "kind", "test_file": None}
    train_file = labels("a.csv", *(["1", "2", "3"] * 4000), "n/a", "02")
    data = load(arguments(tmp_path / "x", **columns, train_file=train_file, validation_file=labels("b.csv", "2", "1")))
    assert data.label_names == ["02", "1", "2", "3", "n/a"] and data.validation.labels.tolist() == [2, 1]
    numbers, truth = labels("c.csv", "0", " 2", "1"), labels("d.csv", "True", "False", "True")
    data = load(arguments(tmp_path / "y", **columns, train_file=numbers, validation_file=numbers))
    assert data.label_names is None and data.validation.labels.tolist() == [0, 2, 1]
    data = load(arguments(tmp_path / "z", **columns, train_file=truth, validation_file=truth))
    assert data.label_names == ["False", "True"] and data.validation.labels.tolist() == [1, 0, 1]
    for wrong, message in {
        "": "row 1 of train_file e.csv: .* must hold integers from 0, got None",
        "0.5": "'kind' of train_file e.csv must hold integers from 0, or text, got '0.5'",
        "9" * 20: "'kind' of train_file e.csv must hold integers from 0, or text, got '99999999999999999999'",
    }.items():
        with pytest.raises(ValueError, match=message):
            load(arguments(tmp_path / "e", **columns, train_file=labels("e.csv", "1", wrong, "0")))


def test_a_csv_of_numbers_may_have_its_first_fraction_late(arguments, tmp_path):
    numbers = [*range(10_000), 0.5]
    rows = "".join(f"{number},{i % 2}\n" for i, number in enumerate(numbers))
    train_file = text_file(tmp_path / "a.csv", f"t0,kind\n{rows}")
    columns = {"features_column": "t*", "label_column": "kind", "test_file": None, "feature_scale": 1.0}
    data = load(arguments(tmp_path / "run", **columns, train_file=train_file, validation_file=train_file))
    found = {float(data.source.samples[i].values.squeeze()) for i in range(len(data.source.samples))}
    assert found == {*numbers}


@pytest.mark.parametrize("streaming", [False, True], ids=["map-style", "streaming"])
def test_classes_go_by_their_names(streaming, arguments, tmp_path):
    def file(name, names, labels):
        kind = datasets.Features({"text": datasets.Value("string"), "kind": datasets.ClassLabel(names=names)})
        rows = {"text": [f"text {label}" for label in labels], "kind": labels}
        datasets.Dataset.from_dict(rows, features=kind).to_parquet(tmp_path / name)
        return str(tmp_path / name)

    train_file = file("a.parquet", ["a", "b", "c"], ["a", "b", "c"])
    columns = {"text_column": "text", "features_column": None, "label_column": "kind", "test_file": None}
    columns |= {"train_file": train_file, "streaming": streaming, "num_labels": 3}
    data = load(arguments(tmp_path / "x", **columns, validation_file=file("b.parquet", ["c", "a"], ["a", "c", "a"])))
    assert data.validation.labels.tolist() == [0, 2, 0] and data.label_names == ["a", "b", "c"]
    with pytest.raises(ValueError, match=r"classes \['d'\], which are not among \['a', 'b', 'c'\]"):
        load(arguments(tmp_path / "y", **columns, validation_file=file("c.parquet", ["d", "a"], ["a", "d"])))
    known = ["c", "b", "a"]  # of weights that are trained on
    again = load(arguments(tmp_path / "w", **columns, shuffle_buffer=1, validation_file=train_file), known)
    batch = again.collate(again.source.load(again.source.draw(3)))
    read = ["".join(map(chr, ids)) for ids in batch["input_ids"]]
    assert sorted(read) == ["text a", "text b", "text c"]
    assert all(known[label] == text[-1] for text, label in zip(read, batch["labels"]))
    more = load(arguments(tmp_path / "z", **columns | {"num_labels": 5}, validation_file=train_file))
    assert more.label_names == ["a", "b", "c", "LABEL_3", "LABEL_4"]


@pytest.mark.parametrize("streaming", [False, True], ids=["map-style", "streaming"])
def test_tables_of_several_kinds(streaming, tmp_path):
    """csv holds text of another Arrow type than json, and parquet of either."""
    large = datasets.Features(dict.fromkeys(("review", "kind"), datasets.Value("large_string")))
    paths = [
        write(tmp_path, "a.csv", {"review": ["one"], "kind": ["a"]}),
        write(tmp_path, "b.jsonl", {"review": ["two"], "kind": ["b"]}),
        write(tmp_path, "c.parquet", {"review": ["three"], "kind": ["a"]}, large),
    ]
    for order in itertools.permutations(paths):
        rows = open_files(order, streaming, text="review", label="kind")
        assert sorted(row["review"] + row["kind"] for row in rows) == ["onea", "threea", "twob"]
    other = write(tmp_path, "d.parquet", {"review": ["four"], "kind": [1]})
    with pytest.raises(ValueError, match=r"cannot read b\.jsonl, d\.parquet: The features can't be aligned"):
        open_files([paths[1], other], streaming, text="review", label="kind")


def test_columns_of_a_pattern_are_those_of_training(arguments, tmp_path):
    rows = "x0,x1,kind\n" + "1,2,0\n3,4,1\n" * 10
    changes = {"train_file": text_file(tmp_path / "a.csv", rows), "features_column": "x*", "label_column": "kind"}
    turned = text_file(tmp_path / "b.csv", "kind,x1,x9,x0\n0,2,7,1\n")
    data = load(arguments(tmp_path / "x", **changes, validation_file=changes["train_file"], test_file=turned))
    assert data.test.samples[0].values[:, 0].tolist() == [1, 2]
    data.save_beside(tmp_path)
    given = arguments(tmp_path / "z", **changes | {"train_file": turned}, test_file=turned)
    args = parse_arguments(ClassificationArguments, given)
    args.model_name_or_path, args.validation_file, args.num_labels = (
        str(tmp_path),
        [turned],
        2,
    )  # trained further on the other table
    assert load_classification(args).source.samples[0].values[:, 0].tolist() == [1, 2]
    found = load_test(args, ["LABEL_0", "LABEL_1"], read_record(tmp_path))
    assert found is not None
    split = found[1]
    assert split.samples[0].values[:, 0].tolist() == [1, 2]
    args.features_column = "k*"
    with pytest.raises(ValueError, match=r"'k\*' does not name column 'x0', which the training data had"):
        load_test(args, ["LABEL_0", "LABEL_1"], read_record(tmp_path))
    with pytest.raises(ValueError, match=r"no column 'x1', which the training data has for 'x\*'"):
        load(arguments(tmp_path / "y", **changes, test_file=text_file(tmp_path / "c.csv", "x0,kind\n1,0\n")))


def test_truth_values_are_labels(arguments, tmp_path):
    path = text_file(tmp_path / "a.jsonl", '{"text": "no", "kind": false}\n{"text": "yes", "kind": true}\n')
    columns = {"text_column": "text", "features_column": None, "label_column": "kind"}
    data = load(arguments(tmp_path / "x", **columns, train_file=path, validation_file=path, test_file=path))
    assert [type(sample.label) for sample in data.test.samples] == [int, int]


def test_a_folder_of_sound(arguments, tmp_path):
    """One sub-folder per class, splits by the folder's name, without any package that decodes."""
    for split, count in {"train": 24, "test": 8}.items():
        write_sounds(tmp_path / "clips" / split, {"low": count, "high": count})
    changes = {"train_file": None, "dataset_name": tmp_path / "clips", "features_column": "audio", "frame_length": 8}
    data = load(arguments(tmp_path / "x", **changes))
    assert data.label_names == ["high", "low"] and len(data.test.samples) == 16
    batch = collate(data.reader, [data.source.samples[0]])
    assert batch["input_features"].shape == (1, 40, 8) and 0.4 < batch["input_features"].abs().max() <= 0.5
    data.save_beside(tmp_path)
    assert read(tmp_path / "features.json") == {
        "multiplier": 1.0, "offset": 0.0, "max_length": 40, "frame_length": 8, "sampling_rate": 8000,
    }  # fmt: skip


def test_wav_files_of_every_width_and_number_of_channels(tmp_path):
    sound = np.random.default_rng(0).uniform(-1, 1, (50, 2))
    for width, levels in {1: 128, 2: 1 << 15, 3: 1 << 23, 4: 1 << 31}.items():
        codes = (sound * levels).round().clip(-levels, levels - 1).astype(np.int64)
        raw = (codes + 128 if width == 1 else codes).astype("<i8")[..., None].view(np.uint8)[..., :width]
        with wave.open(str(tmp_path / "a.wav"), "wb") as file:
            file.setparams((2, width, 16000, 0, "NONE", ""))
            file.writeframes(raw.tobytes())
        for value in ({"path": str(tmp_path / "a.wav"), "bytes": None}, {"path": None, "bytes": None}):
            value["bytes"] = None if value["path"] else (tmp_path / "a.wav").read_bytes()
            samples, rate = decode_wav(value, "a test")
            assert (
                rate == 16000 and samples.dtype == np.float32 and np.abs(samples - sound).max() <= 1.01 / levels + 1e-7
            )


def test_sound_that_cannot_be_read(arguments, tmp_path):
    def load_clips():
        changes = {"train_file": None, "dataset_name": tmp_path / "clips", "features_column": "audio"}
        load(arguments(tmp_path / "run", **changes))

    write_sounds(tmp_path / "clips", {"low": 2, "high": 2})
    write_sounds(tmp_path / "other", {"low": 1, "high": 0}, rate=16000)
    (tmp_path / "other" / "low" / "0.wav").rename(tmp_path / "clips" / "low" / "9.wav")
    with pytest.raises(ValueError, match=r"low/9\.wav: sound must have 8000 samples a second.* got 16000: convert"):
        load_clips()
    (tmp_path / "clips" / "low" / "9.wav").write_bytes(b"RIFF")
    with pytest.raises(ValueError, match=r"low/9\.wav: is no WAV file of PCM: .*ffmpeg"):
        load_clips()
    with wave.open(str(tmp_path / "clips" / "low" / "9.wav"), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(bytes(8))
    raw = bytearray((tmp_path / "clips" / "low" / "9.wav").read_bytes())
    raw[32], raw[34] = 8, 64  # bytes of a frame, bits of a sample
    (tmp_path / "clips" / "low" / "9.wav").write_bytes(raw)
    with pytest.raises(ValueError, match=r"low/9\.wav: is no WAV file of PCM: 64 bits a sample.*ffmpeg"):
        load_clips()
    (tmp_path / "clips" / "high" / "train.wav").write_bytes(bytes(raw))
    with pytest.raises(ValueError, match=r"'.*high/0\.wav', as 5 of 6 files, is in no split of `datasets`: it enters"):
        load_clips()
    (tmp_path / "clips" / "high" / "train.wav").unlink()
    (tmp_path / "clips" / "metadata.csv").write_text("file_name,label\nlow/0.wav,0\n")
    with pytest.raises(ValueError, match=r"label is the name of its folder, so take out '.*metadata\.csv'"):
        load_clips()
    (tmp_path / "clips" / "metadata.csv").unlink()
    (tmp_path / "clips" / "low" / "9.wav").rename(tmp_path / "clips" / "low" / "9.mp3")
    with pytest.raises(ValueError, match=r"sound must be WAV files, got '.*9\.mp3'"):
        load_clips()


GOOD = {"pixels": [[1, 2], [3, 4], [5, 6]], "label": [0, 1, 2]}
BAD_ARGUMENTS = [
    ({"train_file": "words.txt"}, r"cannot read train_file words.txt: Column name .* not in .*\['text'\]"),
    ({"train_file": "broken.parquet"}, "cannot read train_file broken.parquet: "),
    ({"features_column": "frames"}, r"Column name \['frames'\] not in .*\['pixels', 'label'\]"),
    ({"label_column": "class"}, r"Column name \['class'\] not in .*\['pixels', 'label'\]"),
    ({"features_column": "pix*", "label_column": "class"}, "no column 'class' for the labels among pixels, label"),
    ({"train_file": "images.parquet"}, "column 'pixels' of train_file images.parquet holds images; make numbers of"),
    ({"num_labels": 2}, r"row \d+ of train_file pixels-train.parquet: labels must be in \[0, 1\], got 2"),
    ({"train_file": "none.parquet"}, r"train_file none.parquet.* no (rows|data)"),
    ({"validation_file": "none.parquet"}, r"validation_file none.parquet.* no (rows|data)"),
    ({"train_file": "ids.parquet", "num_labels": None}, "ids.parquet: labels go up to 1000000; number the classes"),
    ({"streaming": True, "train_file": "none.parquet"}, r"train_file none.parquet.* no (rows|data)"),
    ({"streaming": True, "train_file": "latin.csv"}, "cannot read .*: 'utf-8' codec can't decode byte 0xff"),
    ({"streaming": True, "num_labels": None}, "streaming needs num_labels"),
    ({"streaming": True, "validation_file": None}, "streaming needs a validation_file"),
    ({"streaming": True, "train_file": "broken.jsonl"}, "cannot read "),
    ({"streaming": True, "num_labels": 2}, r"row \d+ of validation_file .*: labels must be in \[0, 1\], got 2"),
]


@pytest.mark.parametrize(
    ("changes", "message"), BAD_ARGUMENTS, ids=["-".join(map(str, changes)) for changes, _ in BAD_ARGUMENTS]
)
def test_errors_come_before_any_work(changes, message, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("words.txt").write_text("words")
    Path("latin.csv").write_bytes(b"pixels,label\n1,0\n\xff\xfe,1\n")
    write(tmp_path, "none.parquet", {"pixels": [], "label": []}, PIXELS)
    images = datasets.Features({"pixels": datasets.Image(decode=False), "label": datasets.Value("int64")})
    write(tmp_path, "images.parquet", {"pixels": [{"bytes": b"PNG", "path": None}], "label": [0]}, images)
    write(tmp_path, "ids.parquet", GOOD | {"label": [0, 10**6, 3]}, PIXELS)
    Path("broken.parquet").write_bytes(b"no parquet")
    Path("broken.jsonl").write_text('{"pixels": [1], "label": 0}\nno json\n')
    monkeypatch.setattr(classifier, "train_and_sweep", None)
    with pytest.raises(ValueError, match=message):
        train(arguments("run", **changes))


BAD_ROWS = [
    ({"pixels": [[1], [2], []]}, "row 2 of .*: features_column 'pixels' holds 0 steps, and frame_length is 1"),
    ({"pixels": [[1], [2], [0.5, None]]}, "row 2 of .* must hold finite numbers, got nan|must hold numbers"),
    ({"pixels": [[1.0], [2.0], [1e39]]}, r"row 2 of .* must hold finite numbers, got 1e\+39; in float32"),
    ({"pixels": [["a"], ["b"], ["c"]]}, r"row 0 of .* must hold numbers, got \['a'\]"),
    ({"pixels": [[[1, 2]], [[3, 4], [5]], [[6, 7]]]}, "row 1 of .* must hold numbers, or frames of one width: .*shape"),
    ({"pixels": [[[1, 2]], [[3, 4]], [[5]]]}, r"row 2 of .* must hold frames of 2 numbers, .*shape \(1, 1\)"),
    ({"label": [0, 3, 2]}, r"row 1 of .*: labels must be in \[0, 2\], got 3"),
    ({"label": [0, 1, None]}, "row 2 of .*: label_column 'label' must hold integers from 0, got None"),
    (
        {"label": ["no", "yes", None]},  # of a stream the first row is refused: its classes are not known
        "row 2 of .* must hold integers from 0, got None|row 0 of .* must hold integers from 0, got 'no'",
    ),
    ({"pixels": [[1], [256], [0]], "scale": "uint8"}, r"row 1 of .* numbers in \[0, 255\] .*got 256"),
]


@pytest.mark.parametrize(("columns", "message"), BAD_ROWS, ids=[message[:40] for _, message in BAD_ROWS])
@pytest.mark.parametrize("streaming", [False, True], ids=["table", "stream"])
def test_bad_rows_are_named(columns, message, streaming, arguments, tmp_path):
    columns = dict(columns)
    scale = columns.pop("scale", "auto")
    path = write(tmp_path, "bad.parquet", GOOD | columns)
    changes = {"train_file": path, "feature_scale": scale, "num_labels": 3, "per_device_train_batch_size": 1}
    if not streaming:
        with pytest.raises(ValueError, match=message):
            load(arguments(tmp_path / "run", **changes))
        return
    width = np.asarray(columns.get("pixels", [[0]])[0]).ndim  # a validation set of the same kind
    good = {"v": [[[1, 2]]] * 2, "label": [0, 1]} if width == 2 else {"v": [[1]] * 2, "label": [0, 1]}
    validation = write(tmp_path, "good.parquet", {"pixels": good["v"], "label": good["label"]})
    with pytest.raises(ValueError, match=message):
        load(arguments(tmp_path / "run", **changes, streaming=True, validation_file=validation)).source.draw(3)


def test_a_test_split_that_lacks_one_label_is_not_one_without_labels(arguments, tmp_path):
    path = write(tmp_path, "test.parquet", {"pixels": [[1], [2]], "label": [-1, 0]}, PIXELS)
    with pytest.raises(ValueError, match=r"row 0 of test_file test.parquet: labels must be in \[0, 2\], got -1"):
        load(arguments(tmp_path / "run", test_file=path))


def test_streams_name_the_row_after_a_resume(arguments, files, tmp_path):
    rows = signals(12, seed=0)
    rows["label"][9] = 7
    path = write(tmp_path, "train.parquet", rows, PIXELS)
    line = arguments(tmp_path / "run", train_file=path, streaming=True, shuffle_buffer=1, save_steps=1)
    with pytest.raises(ValueError, match=r"row 9 of train_file train.parquet: labels must be in \[0, 2\], got 7"):
        train(line)
    assert [path.name for path in list_checkpoints(tmp_path / "run")][-1] == "checkpoint-00000002"
    with pytest.raises(ValueError, match=r"row 9 of train_file"):
        train(line)
    assert [path.name for path in list_checkpoints(tmp_path / "run")][-1] == "checkpoint-00000002"  # nothing is lost


def test_text_rows_are_checked(arguments, tmp_path):
    build_byte_tokenizer().save_pretrained(tmp_path / "tokenizer")

    def check(rows: list, **changes):
        path = write(tmp_path, "bad.parquet", {"text": rows, "label": [0, 1, 0]})
        return load(arguments(tmp_path / "run", "text", train_file=path, **changes))

    with pytest.raises(ValueError, match=r"row 1 of .*: text_column 'text' holds an empty text"):
        check(["a", "", "c"])
    with pytest.raises(ValueError, match=r"row 2 of .*: text_column 'text' must hold text, got NoneType"):
        check(["a", "b", None])
    with pytest.raises(ValueError, match=r"row 0 of .*: text_column 'text' must hold text, got int"):
        check([1, 2, 3])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"cannot load tokenizer '.*empty'"):
        check(["a", "b", "c"], tokenizer_name=tmp_path / "empty")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"ab": 0, "<unk>": 1}, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()  # makes nothing of spaces
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>").save_pretrained(tmp_path / "words")
    with pytest.raises(ValueError, match=r"row 1 of .*bad.parquet: the tokenizer makes no token of its text"):
        check(["ab", "   ", "ab"], tokenizer_name=tmp_path / "words")
    text = "ab " * 20
    path = write(tmp_path, "good.parquet", {"text": [text] * 8, "label": [0, 1] * 4})
    found = load(arguments(tmp_path / "run", "text", train_file=path, max_length=40, tokenizer_name=tmp_path / "words"))
    assert found.tokens_per_sample == 20 and "cut" not in found.description
