# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Pairs of documents: lines of the files, what is held out, and what is wrong with a line."""

from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from essm_train.tasks.retrieval import PairFile, collate, load_retrieval


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
    assert set(load(seed=1).validation.samples.indices) != set(parts[1].indices)
    assert "27 pairs of bytes" in data.description and "of the documents cut at 8" in data.description
    assert len(load(validation_file=files["test_file"]).validation.samples) == 9
    data.save_beside(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")  # pads and cuts as it was done here
    batch = tokenizer(["a" * 80, "ab"], padding=True, truncation=True, return_tensors="pt")
    assert batch["input_ids"].shape == (2, 8) and batch["attention_mask"][1].tolist() == [1, 1] + [0] * 6
