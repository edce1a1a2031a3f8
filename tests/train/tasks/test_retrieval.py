# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Pairs of documents: lines of the files, what is held out, what is wrong with a line, and files that are made."""

import ast
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from training_run import TINY_CLASSIFIER, options, read
from transformers import AutoTokenizer

from essm_train import make_pairs
from essm_train.arguments import parse_arguments
from essm_train.data.arguments import RetrievalArguments
from essm_train.pairs import ESSMForPairClassification
from essm_train.run.classifier import train_pair_classifier
from essm_train.tasks.retrieval import PairFile, collate, load_retrieval
from essm_train.tasks.shards import SPLITS


def test_pairs_are_read_as_they_stand_cut_and_padded(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_bytes(b"1.0\ta\tb\tabcdef\t\"x\n0.0\tc\td\tb'\\n'\t" + "é".encode() + b"\n")
    found = PairFile(path, max_length=4)
    assert len(found) == 2 and found.labels.tolist() == [1, 0] and found.lengths.tolist() == [[6, 2], [5, 2]]
    assert [bytes(text) for i in (1, 0) for text in found[i][:2]] == [b"b'\\n", "é".encode(), b"abcd", b'"x']
    batch = collate([found[0], found[1]])
    assert batch["input_ids"].tolist() == [
        [[97, 98, 99, 100], [34, 120, 256, 256]],
        [[98, 39, 92, 110], [195, 169, 256, 256]],
    ]
    assert batch["attention_mask"].sum(-1).tolist() == [[4, 2], [4, 2]] and batch["labels"].tolist() == [1, 0]
    assert collate([found[0]], 7)["input_ids"].shape == (1, 2, 7)


def test_files_that_cannot_be(tmp_path):
    path = tmp_path / "pairs.tsv"
    with pytest.raises(ValueError, match=r"pairs\.tsv is not there: fetch lra_release\.gz"):
        PairFile(path, 10)
    for line, message in (
        ("1.0\ta\tb\tc", r"line 2 of .*pairs\.tsv must hold label, id1, id2, text1, text2 between tabs"),
        ("1.0\ta\tb\t\td", r"line 2 of .* texts that are not empty"),
        ("1.0\ta\tb\tc\td\te", r"cannot read .*pairs\.tsv: .* line 2, saw 6"),
        ("label\tid1\tid2\ttext1\ttext2", "line 2 of .* label 0 or 1 .* got label 'label'"),
        ("", "line 2 of .* label 0 or 1"),
    ):
        path.write_text(f"1.0\ta\tb\tc\td\n{line}\n1.0\ta\tb\tc\td\n")
        with pytest.raises(ValueError, match=message):
            PairFile(path, 10)


def test_a_run_leaves_a_model_of_pairs(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text(
        "".join(f"{i % 2}.0\t{i}\t{i}\tfirst {i}\t{'first' if i % 2 else 'other'} {i}\n" for i in range(20))
    )
    values = TINY_CLASSIFIER | {"train_file": path, "test_file": path, "output_dir": tmp_path / "run", "max_steps": 2}
    train_pair_classifier(parse_arguments(RetrievalArguments, options(RetrievalArguments, values)))
    sweep, batch = read(tmp_path / "run" / "budget_sweep.json"), collate([PairFile(path, 40)[0]])
    assert sweep["samples"] == 20 and sweep["metric"]["name"] == "accuracy"
    model = ESSMForPairClassification.from_pretrained(tmp_path / "run" / "model")
    assert model(batch["input_ids"], batch["attention_mask"], spectral_budget=2).logits.shape == (1, 2)


def test_a_tenth_is_held_out_where_nothing_is_given(tmp_path):
    files = {}
    for split, count in (("train", 30), ("test", 9)):
        files[f"{split}_file"] = str(tmp_path / f"{split}.tsv")
        lines = [f"{i % 2}.0\t{i}\t{i}\tfirst {i}\tsecond {i}\n" for i in range(count)]
        (tmp_path / f"{split}.tsv").write_text("".join(lines))

    def load(**changes):
        values = {"validation_file": None, "max_length": 8, "seed": 0, "validation_samples": None, "test_samples": 7}
        return load_retrieval(SimpleNamespace(**files | values | changes))

    data = load()
    parts = data.source.samples, data.validation.samples, data.test.samples
    assert tuple(map(len, parts)) == (27, 3, 7) and not set(parts[0].indices) & set(parts[1].indices)
    assert data.validation.labels.tolist() == [pair.label for pair in data.validation.samples]
    assert load(seed=1).validation.samples.indices == parts[1].indices
    assert "27 pairs of bytes" in data.description and "of the documents cut at 8" in data.description
    assert len(load(validation_file=files["test_file"]).validation.samples) == 9
    data.save_beside(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")  # pads and cuts as it was done here
    batch = tokenizer(["a" * 80, "ab"], padding=True, truncation=True, return_tensors="pt")
    assert batch["input_ids"].shape == (2, 8) and batch["attention_mask"][1].tolist() == [1, 1] + [0] * 6


# --- essm-make-pairs: pairs of passages in the form of those files


BOOKS = [bytes([97 + i]) * 200 + "".join(f"{i}:{at:04};\tä\n" for at in range(100)).encode() for i in range(4)]


def fields(split, seed=0):
    for line in make_pairs.pairs(BOOKS, split, 400, 20, seed):
        label, *places, first, second = line.split("\t")
        places = [tuple(map(int, place.split(":"))) for place in places]
        yield places, [ast.literal_eval(text) for text in (first, second)], int(float(label))


def test_pairs_are_what_their_labels_say():
    labels = []
    for places, texts, label in fields("train"):
        assert label == (places[0][0] == places[1][0])
        assert texts == [BOOKS[book][at : at + 20] for book, at in places]
        assert not label or abs(places[0][1] - places[1][1]) >= 20  # passages do not overlap
        labels.append(label)
    assert 150 < sum(labels) < 250
    assert list(fields("train")) == list(fields("train")) != list(fields("train", seed=1))


def test_splits_share_no_text():
    spans = {
        split: {place for places, *_ in fields(split) for place in places} for split in ("train", "validation", "test")
    }
    for book, text in enumerate(BOOKS):
        ends = {split: [at for i, at in found if i == book] for split, found in spans.items()}
        assert max(ends["train"]) + 20 <= min(ends["validation"]) and max(ends["validation"]) + 20 <= min(ends["test"])
        assert max(ends["test"]) + 20 <= len(text)


def test_the_files_are_those_of_retrieval(tmp_path):
    pq.write_table(pa.table({"text": [book.decode() for book in BOOKS]}), tmp_path / "books.parquet")
    sizes = ["--length", "30", "--train_size", "8", "--validation_size", "2", "--test_size", "3"]
    make_pairs.run(["--books", str(tmp_path / "books.parquet"), "--output_dir", str(tmp_path / "pairs"), *sizes])
    assert [len(PairFile(tmp_path / "pairs" / f"{split}.tsv", 20)) for split in SPLITS] == [8, 2, 3]
    with pytest.raises(ValueError, match="train needs two books with two passages of length 5000, got 0"):
        list(make_pairs.pairs(BOOKS, "train", 1, 5000, 0))
    for texts in ([*(book.decode()[:600] for book in BOOKS), None], [1, 2]):
        pq.write_table(pa.table({"text": texts}), tmp_path / "short.parquet")
        with pytest.raises(SystemExit, match="1"):
            make_pairs.run(["--books", str(tmp_path / "short.parquet"), "--output_dir", str(tmp_path / "no"), *sizes])
    assert not list(tmp_path.glob("no/*.tsv"))
