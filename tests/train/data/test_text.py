# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""essm_train/data/text.py: documents to tokens to blocks, map-style and streaming, and what is wrong with a file."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pyarrow as pa
import pytest
import tokenizers
import torch
from datasets import Dataset
from training_run import bpe_tokenizer, documents, write_tables
from transformers import PreTrainedTokenizerFast

from essm_train.data import documents as document_files
from essm_train.data.blocks import Blocks, evaluation_blocks, text_labels, to_mapped_stream, to_stream
from essm_train.data.documents import open_files, read_files
from essm_train.data.text import TextData, load_text
from essm_train.data.tokens import ByteEncoder, TokenizerEncoder, choose_tokenizer, open_tokenizer, with_end_token
from modeling_essm import ESSMConfig, build_byte_tokenizer
from modeling_essm.training.byte_tokenizer import EOS_ID, PAD_ID

BYTES = ByteEncoder()


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def stream_of(*texts: str) -> np.ndarray:
    return to_stream(texts, BYTES)[0]


def write(path: Path, text: str) -> list[str]:
    path.write_text(text)
    return [str(path)]


def load(encoder=BYTES, **changes) -> TextData:
    values = {"train_file": None, "validation_file": None, "dataset_name": None, "dataset_config_name": None}
    values |= {"text_column": "text", "streaming": False, "shuffle_buffer": 6, "block_size": 16, "sweep_blocks": 100}
    values |= {"output_dir": "runs"}
    return load_text(SimpleNamespace(**values | {"seed": 0} | changes), encoder)


def drawn(text: TextData, count: int) -> list[bytes]:
    return [block.tobytes() for block in text.source.load(text.source.draw(count))]


# ---------------------------------------------------------------------------------------------------------------------
# Tokens.


def test_bytes_and_tokenizers_count_bytes_and_mark_special_tokens():
    ids, size = BYTES("zwölf", "x")
    assert ids.tolist() == [*"zwölf".encode(), EOS_ID, ord("x"), EOS_ID] and size == 7 and ids.dtype == np.uint16
    tokenizer = bpe_tokenizer(documents())
    encoder = TokenizerEncoder(tokenizer, "mine")
    ids, size = encoder("hab dach ä")
    assert ids[-1] == tokenizer.eos_token_id and tokenizer.decode(ids[:-1]) == "hab dach ä" and size == 11
    assert len(ids) < size and ids.dtype == np.uint16 and encoder.vocab_size == len(tokenizer)
    stream, density = to_stream(filter(None, documents()), encoder)
    num_bytes = sum(len(text) for text in documents())
    assert density == num_bytes / np.isin(stream, tokenizer.eos_token_id, invert=True).sum() > 1.5
    assert encoder.pad_id == tokenizer.eos_token_id and set(encoder.special_ids) == {tokenizer.eos_token_id}


def test_bytes_are_those_of_the_text_and_not_of_decoded_tokens(tmp_path):
    """A tokenizer without a decoder puts spaces between its tokens, and this one drops those of the text."""
    bare = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<eos>": 0, "a": 1, "bcdé": 2, "<unk>": 3}, unk_token="<unk>")
    )
    bare.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    encoder = TokenizerEncoder(PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<eos>"), "bare")
    found = load(encoder, train_file=write(tmp_path / "text.txt", "a   bcdé " * 100))  # 10 bytes, two tokens
    assert found.bytes_per_token == 5 and np.array_equal(found.held_out[0, :4], [1, 2, 1, 2])
    declared = PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<eos>", unk_token="<unk>")
    assert TokenizerEncoder(declared, "bare").special_ids == (0,)  # unknown words are text, and are scored


def test_bytes_per_token_are_those_of_what_is_held_out(tmp_path):
    """The last tenth of the text is of bytes that the tokenizer never merged."""
    tokenizer = bpe_tokenizer(documents())
    text = "".join(documents())[:9000]
    paths = write(tmp_path / "text.txt", text + "\x01" * 1200)
    found = load(TokenizerEncoder(tokenizer, "mine"), train_file=paths)
    assert found.bytes_per_token == 1.0 and load(train_file=paths).bytes_per_token == 1.0


def test_a_tokenizer_may_be_one_file_and_gets_an_end_token(tmp_path):
    tokenizer = bpe_tokenizer(documents())
    tokenizer.backend_tokenizer.save(str(tmp_path / "bpe.json"))
    alone = open_tokenizer(str(tmp_path / "bpe.json"))
    assert alone.get_vocab() == tokenizer.get_vocab() and alone.name_or_path == str(tmp_path / "bpe.json")
    with pytest.raises(ValueError, match="tokenizer 'bare' has no end-of-sequence token"):
        TokenizerEncoder(alone, "bare")  # forgets which token it is
    assert with_end_token(alone).eos_token == "<|end|>" and len(alone) == 300
    plain = tokenizers.ByteLevelBPETokenizer()
    plain.train_from_iterator(documents(), vocab_size=299, show_progress=False)
    made = with_end_token(PreTrainedTokenizerFast(tokenizer_object=plain._tokenizer))
    assert (made.eos_token, made.eos_token_id, len(made)) == ("<eos>", 299, 300)
    gaps = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<eos>": 1, "b": 12}, unk_token="a"))
    gaps = PreTrainedTokenizerFast(tokenizer_object=gaps, eos_token="<eos>")
    assert (len(gaps), TokenizerEncoder(gaps, "gaps").vocab_size) == (3, 13)
    (tmp_path / "other.json").write_text('{"version": "1.0"}')
    for name, reason in (("other.json", "a file must be what"), ("nowhere", "")):
        with pytest.raises(ValueError, match=f"cannot load tokenizer '.*{name}': {reason}"):
            open_tokenizer(str(tmp_path / name))


def test_code_beside_a_tokenizer_is_not_run(tmp_path, monkeypatch):
    bpe_tokenizer(documents()).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": [None, "mine.Mine"]}, "tokenizer_class": "Mine"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.setattr("builtins.input", lambda question: "y")
    with pytest.raises(ValueError, match="cannot load tokenizer"):
        open_tokenizer(str(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_the_tokenizer_of_the_weights_counts(tmp_path):
    def choose(**names):
        values = {"tokenizer_name": None, "model_name_or_path": None, "replace_tokenizer": False} | names
        return choose_tokenizer(SimpleNamespace(**{k: str(v) if isinstance(v, Path) else v for k, v in values.items()}))

    own, other, of_bytes, bare = (tmp_path / name for name in ("own", "other", "bytes", "bare"))
    tokenizer = bpe_tokenizer(documents())
    for folder, saved in ((own, tokenizer), (other, bpe_tokenizer(["xyz" * 50])), (of_bytes, build_byte_tokenizer())):
        ESSMConfig(hidden_size=8, num_hidden_layers=1).save_pretrained(folder)
        saved.save_pretrained(folder)
    ESSMConfig().save_pretrained(bare)
    assert choose(model_name_or_path=own).get_vocab() == tokenizer.get_vocab()
    assert choose() is None and choose(model_name_or_path=bare) is None and choose(model_name_or_path=of_bytes) is None
    assert choose(model_name_or_path=own, tokenizer_name=own).get_vocab() == tokenizer.get_vocab()
    assert choose(model_name_or_path=bare, tokenizer_name=own).get_vocab() == tokenizer.get_vocab()
    refused = r"must be the tokenizer of '.*own', whose .* 300 tokens, got '.*other' with \d+"
    with pytest.raises(ValueError, match=refused):
        choose(model_name_or_path=own, tokenizer_name=other)
    with pytest.raises(ValueError, match=r"must be the tokenizer of '.*bytes'"):
        choose(model_name_or_path=of_bytes, tokenizer_name=own)
    assert len(choose(model_name_or_path=own, tokenizer_name=other, replace_tokenizer=True)) < 300


# ---------------------------------------------------------------------------------------------------------------------
# Documents.


def test_a_folder_of_text_files_is_texts(tmp_path):
    """By --train_file and by --dataset_name, streamed too: a file is one text, with its line ends."""
    folder = tmp_path / "books"
    (folder / "part").mkdir(parents=True)
    texts = {"a [1897].txt": "one\ntwo\n\nthree\n" * 9, "part/b.txt": "zwölf\n" * 9}
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / ".hidden").write_text("not this")
    (folder / "part" / "empty.txt").touch()
    held_out, blocks = write(tmp_path / "held_out.txt", "held out"), Blocks(stream_of(*texts.values()), 16)
    text = load(train_file=[str(folder)], validation_file=held_out)
    assert np.array_equal(text.source.samples, blocks) and "books (2 files)" in text.description
    (folder / "part" / "empty.txt").unlink()
    for named in ({"train_file": [str(folder)]}, {"dataset_name": str(folder)}):
        for streaming in (False, True):
            text = load(**named, validation_file=held_out, streaming=streaming)
            assert sorted(drawn(text, len(blocks))) == sorted(block.tobytes() for block in blocks)


def test_files_of_all_kinds_are_read_in_order(tmp_path):
    (tmp_path / "a.txt").write_text("a whole\nfile")
    (tmp_path / "b.jsonl").write_text('{"body": "eins"}\n{"body": ""}\n{"body": "zw\\u00f6lf"}\n')
    (tmp_path / "c.csv").write_text("id,body\n1,drei\n2,\n3,vier\n")
    Dataset.from_dict({"body": ["x", None, "y"]}).to_parquet(tmp_path / "d.parquet")
    paths = [str(tmp_path / name) for name in ("d.parquet", "a.txt", "c.csv", "b.jsonl")]
    texts = ["x", "y", "a whole\nfile", "drei", "vier", "eins", "zwölf"]
    assert list(read_files(paths, "body")) == texts
    assert list(filter(None, (item["body"] for item in open_files(paths, streaming=True, column="body")))) == texts


WORDS = ["NA", "null", "None", "nan", "N/A", "007", "1.50", "True", "2020-01-01", "#N/A"]


@pytest.mark.parametrize("streaming", [False, True], ids=["map-style", "streaming"])
def test_text_is_text_whatever_it_says(streaming, tmp_path):
    """A CSV's NA is no missing cell, and 007 no number; an empty cell is left out, as everywhere."""
    (tmp_path / "data").mkdir()
    (tmp_path / "a.csv").write_text("\n".join(["id,text", *(f"{i},{word}" for i, word in enumerate(["", *WORDS]))]))
    (tmp_path / "data" / "train.csv").write_text((tmp_path / "a.csv").read_text())
    (tmp_path / "B.CSV.gz").write_bytes(gzip.compress((tmp_path / "a.csv").read_bytes()))
    (tmp_path / "a.json").write_text(json.dumps([{"text": word} for word in ["", *WORDS]]))
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": word}) for word in ["", *WORDS]))
    Dataset.from_dict({"text": [None, *WORDS]}).to_parquet(tmp_path / "a.parquet")
    held_out, expected = write(tmp_path / "held_out.txt", "held out"), Blocks(stream_of(*WORDS), 16)
    for name in ("a.csv", "B.CSV.gz", "a.json", "a.jsonl", "a.parquet", "data"):
        named = {"dataset_name" if name == "data" else "train_file": str(tmp_path / name)}
        if "train_file" in named:
            named["train_file"] = [named["train_file"]]
        text = load(**named, validation_file=held_out, streaming=streaming, shuffle_buffer=1)
        assert sorted(drawn(text, len(expected))) == sorted(block.tobytes() for block in expected), name


def test_shards_whose_other_columns_differ(tmp_path):
    (tmp_path / "0.jsonl").write_text('{"id": 1, "text": "one"}\n')
    (tmp_path / "1.jsonl").write_text('{"id": "b", "text": "two", "more": {"x": 1}}\n')
    Dataset.from_dict({"text": ["three"]}).to_parquet(tmp_path / "2.parquet")
    Dataset.from_dict({"text": ["four"], "id": [4]}).to_parquet(tmp_path / "3.parquet")
    assert list(read_files([str(tmp_path)])) == ["one", "two", "three", "four"]


def test_linked_folders_are_read_once(tmp_path):
    for name in ("books/a.txt", "shared/b.txt"):
        (tmp_path / name).parent.mkdir()
        write(tmp_path / name, name)
    (tmp_path / "books" / "more").symlink_to(tmp_path / "shared")
    (tmp_path / "shared" / "loop").symlink_to(tmp_path / "books")
    (tmp_path / "shared" / "again").symlink_to(tmp_path / "shared")
    assert list(read_files([str(tmp_path / "books")])) == ["books/a.txt", "shared/b.txt"]
    (tmp_path / "books" / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"cannot read books \(3 files\): there is no file '.*books/gone\.txt'"):
        list(read_files([str(tmp_path / "books")]))


BROKEN = {
    "empty.jsonl": (b"", "cannot read empty.jsonl: no file with anything in it"),
    "latin.txt": (b"caf\xe9" * 99, "cannot read .*can't decode byte 0xe9"),
    "missing.parquet": (None, "cannot read missing.parquet"),
    "garbage.parquet": (b"no table" * 99, "cannot read garbage.parquet: Parquet magic bytes not found"),
    "garbage.jsonl": (b'{"text": "good"}\nbad', "cannot read garbage.jsonl.*JSON parse error"),
    "column.jsonl": (b'{"body": "x"}\n', r"cannot read column.jsonl: Column name \['text'\] not in .*\['body'\]"),
    "numbers.jsonl": (b'{"text": 1}\n{"text": 2}\n', "column 'text' of .* must hold text, got int64"),
    "nothing.csv": (b'id,text\n1,""\n2,\n', "nothing.csv must hold text, got float64|stream holds no sample"),
    "short.jsonl": (b'{"text": ""}\n{"text": "brief"}\n', "shorter than one block"),
}


@pytest.mark.parametrize("streaming", [False, True], ids=["map-style", "streaming"])
def test_broken_files_are_named(streaming, tmp_path):
    held_out = write(tmp_path / "held_out.txt", "held out")
    for name, (content, message) in BROKEN.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            load(train_file=[str(tmp_path / name)], validation_file=held_out, streaming=streaming).source.draw(1)


def test_other_columns_of_csv_may_hold_anything(tmp_path):
    """`datasets` would take the types of the first 10,000 rows for those of all."""
    rows = [f"some words,{i}" for i in range(10_001)]
    (tmp_path / "mixed.csv").write_text("\n".join(["text,zip", *rows, "the last,A12"]))
    *_, last = read_files([str(tmp_path / "mixed.csv")])
    assert last == "the last"


def test_text_that_is_not_there(tmp_path):
    (tmp_path / "books").mkdir()
    for named, message in (
        ({"train_file": [str(tmp_path / "books")]}, "cannot read books .*: no file with anything in it"),
        ({"train_file": write_tables(tmp_path), "streaming": True}, "streaming needs validation_file"),
        ({"streaming": True}, "streaming needs train_file"),
        ({"dataset_name": "no such/thing"}, "cannot read dataset 'no such/thing'"),
    ):
        with pytest.raises(ValueError, match=message):
            load(**named)


def test_standard_library_is_split_by_whole_files(tmp_path, monkeypatch):
    for i in range(200):
        (tmp_path / f"m{i:03}.py").write_text(f"module {i}")
    (tmp_path / "empty.py").touch()
    (tmp_path / "huge.py").write_bytes(b"#" * ((1 << 18) + 1))
    (tmp_path / "_sysconfigdata_x.py").write_text("generated")
    for folder in ("test", "site-packages"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "skipped.py").write_text("skipped")
    monkeypatch.setattr(document_files.sysconfig, "get_path", lambda name: str(tmp_path))
    train, held_out = document_files.standard_library()
    assert sorted(train + held_out) == sorted(f"module {i}" for i in range(200))
    assert train == sorted(train, key=lambda text: int(text[7:])) and 0 < len(held_out) < 20
    (tmp_path / f"m{int(train[1][7:]):03}.py").unlink()  # what is held out does not depend on the other files
    train, again = document_files.standard_library()
    assert again == held_out
    text = load(block_size=8)
    assert text.description.startswith(
        f"the sources of Python's standard library: {sum(map(len, train)) + len(train):,} "
    )


# ---------------------------------------------------------------------------------------------------------------------
# Blocks.


@pytest.mark.parametrize("encoder", ["bytes", "bpe"])
def test_mapped_streams_are_those_of_memory_and_made_once(encoder, tmp_path, monkeypatch):
    """Whatever the rows of the Arrow file are, and blocks across them."""
    monkeypatch.setattr("essm_train.data.blocks._TEXTS_AT_ONCE", 3)
    encode = BYTES if encoder == "bytes" else TokenizerEncoder(bpe_tokenizer(documents()), "mine")
    paths, texts = write_tables(tmp_path), list(filter(None, documents()))
    rows = open_files(paths, streaming=False, column="text")
    stream, density = to_stream(texts, encode)
    mapped, mapped_density = to_mapped_stream(rows, "text", encode)
    assert mapped.num_chunks > 3 and np.array_equal(mapped, stream) and mapped_density == density
    assert np.asarray(mapped).dtype == stream.dtype
    assert np.array_equal(Blocks(mapped, 16), Blocks(stream, 16))
    assert torch.equal(evaluation_blocks(mapped, 16, 5), evaluation_blocks(stream, 16, 5))
    made, before = sorted((tmp_path / "cache").rglob("*.arrow")), pa.total_allocated_bytes()
    again, _ = to_mapped_stream(open_files(paths, streaming=False, column="text"), "text", encode)
    assert again.equals(mapped) and pa.total_allocated_bytes() - before < stream.nbytes  # it lies in the file
    assert sorted((tmp_path / "cache").rglob("*.arrow")) == made
    other = TokenizerEncoder(bpe_tokenizer(["ab" * 9]), "mine")
    assert np.array_equal(to_mapped_stream(rows, "text", other)[0], to_stream(texts, other)[0])


def test_large_texts_fill_rows_of_their_own(tmp_path, monkeypatch):
    """A row of ids has a limit, as a cell of text has."""
    rows = open_files(write(tmp_path / "a.txt", "ab" * 30) + write(tmp_path / "b.txt", "cd" * 50), False, column="text")
    monkeypatch.setattr("essm_train.data.blocks._BYTES_AT_ONCE", 199)
    mapped, _ = to_mapped_stream(rows, "text", BYTES)
    assert [len(chunk) for chunk in mapped.chunks] == [61, 101]
    monkeypatch.setattr(document_files, "_MAX_TEXT_BYTES", 99)
    Dataset.from_dict({"text": ["in a table"] * 9}).to_json(tmp_path / "c.jsonl")
    assert len(open_files([str(tmp_path / "c.jsonl")], streaming=False)) == 9
    with pytest.raises(ValueError, match=r"cannot read '.*b\.txt': a text holds at most 2 GB; split it"):
        open_files([str(tmp_path)], streaming=True)


def test_a_text_whose_end_is_held_out_becomes_tokens_once(tmp_path, monkeypatch):
    paths = write(tmp_path / "book.txt", "A sentence of a book. " * 90)
    first = load(train_file=paths)
    monkeypatch.setattr(ByteEncoder, "__call__", None)
    second = load(train_file=paths)
    assert (second.sha256, second.description) == (first.sha256, first.description)
    assert torch.equal(second.held_out, first.held_out)


@pytest.mark.parametrize(("name", "content"), [("3.txt", "caf\xe9"), ("3.csv", "other\nx\n")])
def test_the_file_of_a_folder_that_cannot_be_read_is_named(name, content, tmp_path):
    for i in (1, 2, 4):
        write(tmp_path / f"{i}{name[1:]}", "text\nwords\n")
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=rf"cannot read .*/{name}: "):
        open_files([str(tmp_path)], streaming=False, column="text")


def test_a_training_folder_holds_nothing_held_out_and_no_run(tmp_path, monkeypatch):
    books = tmp_path / "books"
    books.mkdir()
    for name in ("one.txt", "two.txt"):
        write(books / name, "A sentence of a book. " * 9)
    options = {"train_file": [str(books)], "validation_file": [str(books / "two.txt")]}
    with pytest.raises(ValueError, match=r"folder '.*books' holds '.*two\.txt', which is held out: move one"):
        load(**options)
    monkeypatch.chdir(books)
    with pytest.raises(ValueError, match=r"folder '\.' holds 'two.txt', which is held out"):
        load(train_file=["."], validation_file=["two.txt"], streaming=True)
    with pytest.raises(ValueError, match=r"folder '\.' holds output_dir 'runs', which would be read"):
        load(train_file=["."])
    assert load(train_file=["."], output_dir=".runs").description.startswith(". (2 files)")
    again = ["one.txt"]  # a file that is named itself was meant
    assert load(train_file=again, validation_file=again, output_dir="runs").held_out.numel()


def test_every_target_of_a_stream_stands_in_exactly_one_block():
    stream = stream_of("".join(map(chr, range(100))), "second document")
    blocks = evaluation_blocks(stream, block_size=16, max_blocks=1000)
    targets = blocks[:, 1:].flatten()
    assert targets[: len(stream) - 1].tolist() == stream[1:].tolist()
    assert set(targets[len(stream) - 1 :].tolist()) <= {PAD_ID}
    assert blocks[1:, 0].tolist() == blocks[:-1, -1].tolist()  # one token of context
    labels = text_labels(blocks)
    assert ((labels == -100) == (blocks >= 256)).all() and (blocks == EOS_ID).sum() >= 2


def test_training_blocks_are_those_windows_but_for_the_incomplete_end():
    stream = stream_of("".join(map(chr, range(100))))
    blocks = Blocks(stream, 16)
    assert torch.equal(torch.tensor(np.array(blocks).astype(int)), evaluation_blocks(stream, 16, 1000)[: len(blocks)])
    assert len(blocks) == 6 and len(Blocks(stream[:91], 16)) == 6 and len(Blocks(stream[:90], 16)) == 5
    with pytest.raises(ValueError, match="shorter than one block: it holds 15 tokens and block_size is 16"):
        Blocks(stream[:15], 16)
    everything = evaluation_blocks(stream_of("x" * 250), 11, 1000)
    assert torch.equal(evaluation_blocks(stream_of("x" * 250), 11, 3), everything[[0, 12, 24]])  # spread evenly
    with pytest.raises(ValueError, match="validation text must hold at least 2 tokens, got 1"):
        evaluation_blocks(stream_of("x"), 11, 3)


# ---------------------------------------------------------------------------------------------------------------------
# All of it together.


def test_a_stream_of_files_has_the_blocks_of_the_files_and_resumes_anywhere(tmp_path):
    """Across files, row groups, rows that fill no block, and the end of the stream."""
    files = {"train_file": write_tables(tmp_path), "validation_file": write(tmp_path / "a.txt", "held out " * 9)}
    at_once, streamed = load(**files), load(**files, streaming=True)
    assert torch.equal(at_once.held_out, streamed.held_out)
    assert at_once.bytes_per_token == streamed.bytes_per_token == 1
    count, states, expected = at_once.source.num_samples, [], []
    for _ in range(2 * count):
        states.append(streamed.source.state_dict())
        expected += drawn(streamed, 1)
    assert sorted(drawn(at_once, count)) == sorted(expected[:count]) == sorted(expected[count:])  # both epochs
    for place in range(0, count + 5, 3):
        streamed.source.load_state_dict(states[place])
        assert drawn(streamed, 4) == expected[place : place + 4], place


def test_a_stream_reads_no_more_held_out_text_than_it_scores(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "0123456789"}\n' * 9)
    text = load(train_file=path, validation_file=path, streaming=True, sweep_blocks=2)
    whole = stream_of(*["0123456789"] * 4)  # the first documents with 2 * 16 bytes
    assert torch.equal(text.held_out, evaluation_blocks(whole, 16, 2))


def test_data_sets_are_read_from_a_local_folder(tmp_path):
    rows = {"train": ["eins" * 9, "", "zwölf" * 9], "validation": ["drei" * 9]}
    (tmp_path / "data").mkdir()
    for split, texts in rows.items():
        Dataset.from_dict({"content": texts}).to_parquet(tmp_path / "data" / f"{split}-00000-of-00001.parquet")
    expected = Blocks(stream_of(rows["train"][0], rows["train"][2]), 16)
    for streaming in (False, True):
        named = {"dataset_name": str(tmp_path / "data"), "streaming": streaming, "shuffle_buffer": 1}
        text = load(**named, text_column="content")
        assert sorted(drawn(text, len(expected))) == sorted(block.tobytes() for block in expected)
        assert torch.equal(text.held_out, evaluation_blocks(stream_of(*rows["validation"]), 16, 100))
        with pytest.raises(ValueError, match=r"Column name \['text'\] not in .*\['content'\]"):
            load(**named)


def test_without_a_validation_part_the_end_is_held_out(tmp_path):
    whole = "spectral" * 25
    text = load(train_file=write(tmp_path / "a.txt", whole))
    assert (
        np.array_equal(text.source.samples, Blocks(stream_of(whole[:180]), 16)) and "10% held out" in text.description
    )
    assert torch.equal(text.held_out, evaluation_blocks(stream_of(whole[180:]), 16, 100))
    write(tmp_path / "b.jsonl", "".join(json.dumps({"text": piece}) + "\n" for piece in ("é" * 40, None, "é" * 60)))
    text = load(train_file=[str(tmp_path / "b.jsonl")])
    assert torch.equal(text.held_out, evaluation_blocks(stream_of("é" * 10), 16, 100))


@pytest.mark.parametrize("streaming", [False, True], ids=["map-style", "streaming"])
def test_digests_change_with_the_text(streaming, tmp_path):
    held_out = write(tmp_path / "held_out.txt", "held out")

    def digest(*texts: str) -> str:
        path = write(tmp_path / "a.jsonl", "".join(f'{{"text": "{text}"}}\n' for text in texts))
        return load(train_file=path, validation_file=held_out, streaming=streaming).sha256

    original = digest("one" * 9, "two" * 9)
    assert original == digest("one" * 9, "two" * 9)
    assert len({original, digest("one" * 9, "twi" * 9), digest("two" * 9, "one" * 9)}) == 3
    assert digest(*["a"] * 65) != digest(*["a"] * 66)  # beyond the rows that are looked at in a stream
