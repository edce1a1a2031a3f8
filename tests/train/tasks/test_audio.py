# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""essm-prepare-audio: mu-law and mel bands against their formulas, padding, official lists, the files written."""

from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers import ROOT
from training_run import write_wav
from transformers import AutoFeatureExtractor
from transformers.audio_utils import hertz_to_mel, mel_to_hertz

from essm_train import prepare_audio
from essm_train.data.readers import FeatureReader, Sample
from essm_train.data.rows import collate
from essm_train.tasks.audio import Speech4, SpeechCommands, clip_frames, log_mel, mu_law_decode, read_wav
from essm_train.tasks.shards import SPLITS


def tone(hertz: float, sampling_rate: int, seconds: float = 1.0) -> np.ndarray:
    t = np.arange(round(seconds * sampling_rate)) / sampling_rate
    return (0.5 * np.sin(2 * np.pi * hertz * t)).astype(np.float32)


def encode(x: np.ndarray) -> np.ndarray:
    """Continuous mu-law: y = sign(x) ln(1 + 255 |x|) / ln(256), on 256 levels."""
    y = np.sign(x) * np.log(1 + 255 * np.abs(x)) / np.log(256)
    return np.floor((y + 1) / 2 * 255 + 0.5).astype(np.uint8)


# ---------------------------------------------------------------------------------------------------------------------
# Sound to frames.


def test_mu_law_is_the_inverse_of_its_formula():
    codes = np.arange(256, dtype=np.uint8)
    decoded = mu_law_decode(codes)
    assert decoded.dtype == np.float32 and (encode(decoded) == codes).all()
    assert decoded[[0, 255]].tolist() == [-1.0, 1.0] and (np.diff(decoded) > 0).all()
    assert decoded[128] == pytest.approx((256 ** (1 / 255) - 1) / 255, rel=1e-5)  # the code of silence


@pytest.mark.parametrize("band", [5, 30])
def test_a_pure_tone_lands_in_its_mel_band(band):
    low, high = hertz_to_mel(20.0, "htk"), hertz_to_mel(4000.0, "htk")
    centre = mel_to_hertz(low + (high - low) * (band + 1) / 41, "htk")  # 40 triangles between 42 points
    frames = log_mel(tone(centre, 8000))
    assert frames.shape == (98, 40)
    assert (frames.argmax(1) == band).all()
    far = np.abs(np.arange(40) - band) > 8
    assert (frames.max(1) - frames[:, far].max(1)).min() > np.log(100)


def test_frames_are_normalised_and_padded():
    rng = np.random.default_rng(0)
    clip = rng.normal(0, 0.1, 8000).astype(np.float32) * np.linspace(0.1, 1, 8000, dtype=np.float32)
    whole, half = clip_frames(clip, 8000), clip_frames(clip[:4000], 8000)
    assert whole.shape == half.shape == (98, 40) and whole.dtype == half.dtype == np.float16
    np.testing.assert_allclose(whole.astype(float).mean(0), 0, atol=1e-3)  # fp16 rounds to 1e-3
    np.testing.assert_allclose(whole.astype(float).std(0), 1, atol=2e-3)
    real = 1 + (4000 - 200) // 80
    assert (half[real:] == 0).all() and (half[:real] != 0).any(1).all()
    np.testing.assert_allclose(half[:real].astype(float).std(0), 1, atol=2e-3)
    np.testing.assert_allclose(clip_frames(3 * clip, 8000).astype(float), whole, atol=5e-3)  # loudness is gone
    assert (clip_frames(np.zeros(8000, np.float32), 8000) == 0).all()
    for samples in (np.zeros(199), np.zeros(8001), np.full(8000, np.nan)):
        with pytest.raises(ValueError, match="200 to 8000 finite samples"):
            clip_frames(samples, 8000)


def test_frames_at_16_khz_are_those_of_the_published_extractor():
    clip = np.random.default_rng(0).normal(0, 0.1, 16000).astype(np.float32)
    extractor = AutoFeatureExtractor.from_pretrained(ROOT / "hub_configs" / "essm-audio")
    expected = extractor([clip, clip[:9000]], sampling_rate=16000, padding=True, return_tensors="pt")
    reader = FeatureReader("frames", 98, 40, "float16", "auto")
    frames = [reader.read(clip_frames(sound, 16000), "a row") for sound in (clip, clip[:9000])]
    batch = collate(reader, [Sample(values, 0) for values in frames])
    torch.testing.assert_close(batch["input_features"], expected["input_features"], atol=2e-3, rtol=0.0)  # fp16
    assert torch.equal(batch["attention_mask"], expected["attention_mask"].long())
    assert (clip_frames(np.zeros(16000, np.float32), 16000) == 0).all()


# ---------------------------------------------------------------------------------------------------------------------
# Where clips come from.


@pytest.fixture(scope="module")
def mu_law_folder(tmp_path_factory) -> Path:
    """5, 3 and 4 clips: tones whose pitch is the label's, the second of each split 7,000 of 16,000 samples long."""
    folder = tmp_path_factory.mktemp("clips")
    for split, count in zip(SPLITS, (5, 3, 4)):
        labels = [i % 4 for i in range(count)]
        codes, lengths = [], [7000 if i == 1 else 16000 for i in range(count)]
        for label, length in zip(labels, lengths):
            sound = tone(400 * (label + 1), 8000)
            sound[length // 2 :] = 0
            codes.append(encode(sound))
        values = pa.FixedSizeListArray.from_arrays(pa.array(np.concatenate(codes)), 8000)
        names = [f"word/{split}{i}.wav" for i in range(count)]
        columns = {"mulaw_8khz": values, "label": pa.array(labels, pa.int8()), "num_samples": lengths, "clip": names}
        pq.write_table(pa.table(columns), folder / f"speech_commands_4words-{split}.parquet")
    return folder


def test_four_words_are_written_and_read_by_the_trainer(mu_law_folder, tmp_path):
    made = tmp_path / "speech4"
    prepare_audio.run(["speech4", "--data_dir", str(mu_law_folder), "--output_dir", str(made), "--num_workers", "1"])
    assert str(mu_law_folder) not in (made / "manifest.json").read_text()
    rows = datasets.load_dataset(str(made), cache_dir=str(tmp_path / "cache"))
    assert rows["train"].features["label"].names == ["yes", "no", "up", "down"]
    assert rows["train"]["label"] == [0, 1, 2, 3, 0] and rows["test"]["clip"][3] == "word/test3.wav"
    frames = np.array(rows["train"]["frames"])
    assert frames.shape == (5, 98, 40)
    codes = np.array(pq.read_table(mu_law_folder / "speech_commands_4words-train.parquet")["mulaw_8khz"].to_pylist())
    for i, length in enumerate((8000, 3500, 8000)):
        np.testing.assert_array_equal(frames[i], clip_frames(mu_law_decode(codes[i, :length]), 8000))
    with pytest.raises(FileNotFoundError, match=r"speech_commands_4words-train\.parquet"):
        Speech4(str(tmp_path))
    reader = FeatureReader("frames", 98, 40, "float16", "auto")
    batch = collate(reader, [Sample(reader.read(frames[i].astype(np.float16), f"row {i}"), 0) for i in range(2)])
    assert batch["input_features"].shape == (2, 98, 40) and "attention_mask" not in batch


WRONG_CLIPS = [  # column, values, message
    (
        "label",
        pa.array([0, 4, 0, 0, 0], pa.int8()),
        r"word/train1.wav of speech4-train: .* got label 4, num_samples 7000 ",
    ),
    ("num_samples", pa.array([9, None, 9, 9, 9]), "got label 1, num_samples None and 8000 codes"),
    ("num_samples", pa.array([16001] * 5), "got label 0, num_samples 16001"),
    ("mulaw_8khz", pa.array([[0] * 8000, None, [0], [0], [0]], pa.list_(pa.uint8())), "num_samples 7000 and 0 codes"),
    ("mulaw_8khz", pa.array([[0] * 8001] * 5, pa.list_(pa.uint8())), "got label 0, num_samples 16000 and 8001 codes"),
    ("mulaw_8khz", pa.array([[-3] * 8000] * 5, pa.list_(pa.int8())), "mulaw_8khz must be lists of uint8"),
]


@pytest.mark.parametrize("column, values, message", WRONG_CLIPS)
def test_clips_that_cannot_be_are_named(column, values, message, mu_law_folder, tmp_path):
    for path in mu_law_folder.iterdir():
        table = pq.read_table(path)
        if "train" in path.name:
            table = table.set_column(table.schema.get_field_index(column), column, values)
        pq.write_table(table, tmp_path / path.name)
    with pytest.raises(ValueError, match=message):
        Speech4(str(tmp_path)).rows("train", range(5))


@pytest.fixture
def official(tmp_path, monkeypatch) -> Path:
    """A folder like the official one: three words, of which two are wanted, and background noise."""
    monkeypatch.setattr(SpeechCommands, "words", ("yes", "no"))
    folder = tmp_path / "speech_commands"
    for word in ("yes", "no", "bed", "_background_noise_"):
        for speaker in ("ab", "cd", "ef", "gh"):
            write_wav(folder / word / f"{speaker}_nohash_0.wav", tone(500, 16000, 0.8))
    (folder / "validation_list.txt").write_text("yes/cd_nohash_0.wav\nbed/cd_nohash_0.wav\nno/cd_nohash_0.wav\n")
    (folder / "testing_list.txt").write_text("no/ef_nohash_0.wav\nyes/ef_nohash_0.wav\n")
    return folder


def test_official_lists_split_the_words(official):
    clips = SpeechCommands(str(official))
    assert clips.sizes == {"train": 4, "validation": 2, "test": 2}
    names = {split: [(name, label) for _, label, name in clips.read(split, range(9))] for split in clips.sizes}
    assert names["validation"] == [("no/cd_nohash_0.wav", 1), ("yes/cd_nohash_0.wav", 0)]
    assert names["test"] == [("no/ef_nohash_0.wav", 1), ("yes/ef_nohash_0.wav", 0)]
    train = [f"{word}/{speaker}_nohash_0.wav" for word in ("no", "yes") for speaker in ("ab", "gh")]
    assert [name for name, _ in names["train"]] == train
    samples = clips.read("train", range(1))[0][0]
    assert len(samples) == 12800 and samples.max() == pytest.approx(0.5, abs=1e-3)
    frames = np.array(clips.rows("test", range(2))["frames"].to_pylist(), np.float32)
    assert frames.shape == (2, 1 + (12800 - 400) // 160, 40)
    write_wav(official / "yes" / "zz_nohash_0.wav", tone(500, 16000))
    assert SpeechCommands(str(official)).parameters != clips.parameters
    (official / "testing_list.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks testing_list\.txt: .*speech_commands_v0\.02\.tar\.gz"):
        SpeechCommands(str(official))


def test_clips_of_another_format(official, tmp_path):
    for name, changes, message in (
        ("rate", {"rate": 8000}, "one channel at 16000 Hz, got 1 at 8000 Hz"),
        ("stereo", {"channels": 2}, "got 2 at 16000 Hz"),
    ):
        write_wav(tmp_path / f"{name}.wav", np.zeros(800, np.float32), **changes)
        with pytest.raises(ValueError, match=f"{name}.wav must hold .*{message}"):
            read_wav(tmp_path / f"{name}.wav", 16000)
    (official / "no" / "ab_nohash_0.wav").write_text("not sound")
    with pytest.raises(ValueError, match=r"ab_nohash_0\.wav: is no WAV file"):
        SpeechCommands(str(official)).rows("train", range(1))
    write_wav(tmp_path / "long.wav", tone(500, 16000, 1.5))
    assert len(read_wav(tmp_path / "long.wav", 16000)) == 16000
    write_wav(official / "no" / "ab_nohash_0.wav", tone(500, 16000, 0.02))
    with pytest.raises(ValueError, match=r"no/ab_nohash_0\.wav of sc10-train: a clip must have 400 to"):
        SpeechCommands(str(official)).rows("train", range(1))
