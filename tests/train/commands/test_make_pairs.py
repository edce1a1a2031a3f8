# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""essm-make-pairs: pairs of passages in the form of Retrieval's files."""

import ast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from essm_train import make_pairs
from essm_train.tasks.retrieval import PairFile
from essm_train.tasks.shards import SPLITS

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
    pq.write_table(pa.table({"text": [*(book.decode()[:600] for book in BOOKS), None]}), tmp_path / "short.parquet")
    with pytest.raises(SystemExit, match="1"):
        make_pairs.run(["--books", str(tmp_path / "short.parquet"), "--output_dir", str(tmp_path / "no"), *sizes])
    assert not list(tmp_path.glob("no/*.tsv"))
