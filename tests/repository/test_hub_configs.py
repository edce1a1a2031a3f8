# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""hub_configs/: what is committed is what make.py makes, and every configuration loads, runs and can be published."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import make
import pytest
import torch
from helpers import randomise
from huggingface_hub import ModelCard
from transformers import AutoConfig, AutoFeatureExtractor, AutoModelForSequenceClassification, AutoTokenizer

import modeling_essm
from essm_train.publish.hub import split_files
from essm_train.publish.model_card import SECTIONS, check_template, write_model_card
from modeling_essm import ESSMConfig, ESSMForCausalLM

FOLDER = Path(make.__file__).parent
NAMES = sorted(make.CONFIGURATIONS)
LONGEST = {  # positions that the task needs
    "essm-tiny": 512,
    "essm-21m": 4096,
    "essm-gated-20m": 4096,
    "essm-gated-130m": 4096,
    "essm-lra-listops": 2000,
    "essm-lra-text": 4096,
    "essm-lra-retrieval": 4000,
    "essm-lra-image": 32 * 32,
    "essm-lra-pathfinder": 32 * 32,
    "essm-lra-pathx": 128 * 128,
    "essm-audio": 98,
}
names = pytest.mark.parametrize("name", NAMES)
kinds = pytest.mark.parametrize("name", ["essm-tiny", "essm-lra-listops", "essm-lra-image", "essm-audio"])
# The same in small: everything that a loader could stumble over, without the millions of numbers.
SMALL = {"hidden_size": 8, "intermediate_size": 8, "gate_hidden_size": 4, "num_hidden_layers": 1}
SMALL |= {"layer_types": ["linear_attention"]}


def files_of(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def fields(config: ESSMConfig) -> dict:
    return {k: v for k, v in config.to_dict().items() if k not in ("_name_or_path", "auto_map", "transformers_version")}


def inputs_for(name: str) -> dict[str, torch.Tensor]:
    """A short input made the way a user would."""
    published = make.CONFIGURATIONS[name]
    if published.inputs == "pixels":
        return {"input_features": torch.rand(2, 40, 1) * 2 - 1}
    if published.inputs == "speech":
        extractor = AutoFeatureExtractor.from_pretrained(FOLDER / name)
        sound = [torch.randn(length).numpy() for length in (16000, 12000)]
        return dict(extractor(sound, sampling_rate=16000, padding=True, return_tensors="pt"))
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / name)
    batch = tokenizer([published.example, published.example], return_tensors="pt")
    return dict(batch)


def test_committed_files_are_the_ones_made(tmp_path):
    make.make(tmp_path)
    made, committed = files_of(tmp_path), files_of(FOLDER)
    committed = {path: content for path, content in committed.items() if path.split("/")[0] in make.CONFIGURATIONS}
    assert sorted(made) == sorted(committed)
    for path, content in made.items():
        assert committed[path] == content, f"{path} differs: run python hub_configs/make.py"


def test_the_folders_hold_no_code_but_a_link_to_it():
    code = {path.name for path in FOLDER.glob("**/*.py") if "code" not in path.parts}
    assert code == {"make.py", "peers.py", "release.py"}
    for name, published in make.CONFIGURATIONS.items():
        link = FOLDER / name / make.CODE
        if published.pairs:  # a class of the training library
            assert not link.is_symlink()
            continue
        assert link.is_symlink() and not os.path.isabs(os.readlink(link))
        assert link.resolve() == Path(modeling_essm.__file__).parent


WRITES = """
import math, sys
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
remote = {"trust_remote_code": True}
config = AutoConfig.from_pretrained("hub_configs/essm-tiny", **remote, num_hidden_layers=1)
AutoModelForCausalLM.from_config(config, **remote).save_pretrained("saved")
config.save_pretrained("saved_config")
assert type(AutoModel.from_pretrained("saved", **remote)).__name__ == "ESSMModel"
for folder in ("saved", "saved_config"):
    assert "/" not in "".join(AutoConfig.from_pretrained(folder, **remote).auto_map.values())
folder = f"hub_configs/{sys.argv[1]}"
model = AutoModelForCausalLM.from_pretrained(folder, **remote)
tokenizer = AutoTokenizer.from_pretrained(folder, **remote)
assert "modeling_essm" not in sys.modules, "the package was imported"
ids = tokenizer(sys.argv[2], return_tensors="pt").input_ids
for K in (2, 4, model.config.num_spectral_channels):
    written = model.generate(ids, spectral_budget=K, max_new_tokens=8, do_sample=False)
    with torch.no_grad():
        print(K, written.shape[1] - ids.shape[1], model(ids, labels=ids, spectral_budget=K).loss.item() / math.log(2))
"""
PROSE = (
    "She looked at him for a moment without speaking, and then she turned away to the window and said that she would "
    "go to London in the morning, and that nothing he could say would change her mind."
)


def test_a_clone_loads_and_writes_without_the_package(tmp_path):
    """A saved model holds its own code, and the released one has learnt: a byte trigram needs 2.9 bits a byte."""
    (name,) = make.RELEASED
    for part in (f"hub_configs/{name}", "hub_configs/essm-tiny", "modeling_essm"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(FOLDER.parent / part, tmp_path / part, symlinks=True, ignore=ignored)
    assert sum(path.stat().st_size for path in (FOLDER / name).iterdir() if path.is_file()) <= 16e6
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    command = [sys.executable, "-c", WRITES, name, PROSE]
    ran = subprocess.run(command, cwd=tmp_path, env=env | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    rows = [line.split() for line in ran.stdout.splitlines()]
    assert [int(K) for K, _, _ in rows] == [2, 4, 8] and {new for _, new, _ in rows} == {"8"}
    assert all(float(bits) < 2.2 for _, _, bits in rows), rows


@pytest.mark.parametrize("name", make.RELEASED)
def test_the_card_of_a_released_model_says_what_was_measured(name):
    folder = FOLDER / name
    card, sweep = (folder / "README.md").read_text(), json.loads((folder / "budget_sweep.json").read_text())
    for K, bits in zip(sweep["budgets"], sweep["bits_per_byte"]):
        assert f"| {K} | {bits:.3f} |" in card.replace("**", "") or f"{bits:.4f}" in card, (K, bits)
    config = AutoConfig.from_pretrained(folder)
    assert sweep["budgets"][-1] == config.num_spectral_channels
    assert (folder / make.CODE).resolve() == Path(modeling_essm.__file__).parent
    profile = json.loads((folder / "budget_profile.json").read_text())
    assert profile["quality"]["budgets"] == sweep["budgets"]
    assert config.budget_presets["sweet-spot"] == sweep["sweet_spot"]
    for preset, budget in config.budget_presets.items():
        assert f"`{preset}` ({budget})" in card
    assert f'folder = "hub_configs/{name}"' in card


@names
def test_config_loads_and_is_as_large_as_its_card_says(name):
    published = make.CONFIGURATIONS[name]
    config = AutoConfig.from_pretrained(FOLDER / name)
    assert published.pairs or config.auto_map["AutoConfig"].startswith("code/")
    assert fields(config) == fields(published.config())
    assert config.filter_length >= LONGEST[name]
    with torch.device("meta"):
        model = published.model_class()(config)
    assert f"| `{name}` | {model.num_parameters() / 1e6:.1f}M |" in (FOLDER / "README.md").read_text()


def test_the_21m_configuration_is_the_papers():
    config = AutoConfig.from_pretrained(FOLDER / "essm-21m")
    assert fields(config) == fields(ESSMConfig(architectures=config.architectures, dtype=torch.float32))


@kinds
def test_a_saved_model_with_its_card_can_be_published(name, tmp_path):
    """What README.md there tells to do, with a smaller model."""
    published, folder = make.CONFIGURATIONS[name], tmp_path / "model"
    model = randomise(published.model_class()(AutoConfig.from_pretrained(FOLDER / name, **SMALL))).eval()
    model.save_pretrained(folder)
    if published.tokenizer() is not None:
        AutoTokenizer.from_pretrained(FOLDER / name).save_pretrained(folder)
    if published.inputs == "speech":
        AutoFeatureExtractor.from_pretrained(FOLDER / name).save_pretrained(folder)
    card_path = write_model_card(
        folder, sweep=None, training=None, hub_model_id="org/it", template=FOLDER / name / "README.md"
    )
    files, _ = split_files(folder)
    assert {"README.md", "config.json", "model.safetensors", "modeling_essm.py"} <= set(files)
    assert ("generation_config.json" in files) == (not published.labels)
    card = ModelCard(card_path.read_text())
    assert card.data.pipeline_tag == published.pipeline_tag and card.data.library_name == "transformers"
    assert published.title in card.text and not any(f"<!-- {section} -->" in card.text for section in SECTIONS)

    auto = AutoModelForSequenceClassification if published.labels else ESSMForCausalLM
    inputs = inputs_for(name)
    with torch.no_grad():
        expected, got = (m(**inputs, spectral_budget=5).logits for m in (model, auto.from_pretrained(folder)))
    assert torch.equal(expected, got)
    # The card's example runs as it stands, from the folder in the repository's place.
    code = card.text.split("```python\n")[2].split("```")[0]
    code = code.replace('"org/it"', repr(str(folder))).replace("the 40 digits of the commit you have read", "main")
    variables: dict = {}
    exec(code, variables)
    assert type(variables["model"]).__name__ == published.model_class().__name__


def test_card_templates():
    for name in NAMES:
        card = check_template((FOLDER / name / "README.md").read_text())
        assert card.data.license == "apache-2.0"
        assert make.SIZES[make.CONFIGURATIONS[name].size] in card.text  # where the size is from is said


def test_listops_tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "essm-lra-listops")
    assert len(tokenizer) == 16 == AutoConfig.from_pretrained(FOLDER / "essm-lra-listops").vocab_size
    batch = tokenizer(["[MAX 2 9 [MIN 4 7 ] 0 ]", "[SM 1 ]"], padding=True)
    assert batch["input_ids"] == [[11, 2, 9, 10, 4, 7, 14, 0, 14], [13, 1, 14, 15, 15, 15, 15, 15, 15]]
    assert batch["attention_mask"][1] == [1, 1, 1, 0, 0, 0, 0, 0, 0]
    assert tokenizer.decode([12, 3, 14]) == "[MED 3 ]"
    with pytest.raises(Exception, match="Missing"):
        tokenizer("[MAX 2 ( ]")


def test_speech_features():
    extractor = AutoFeatureExtractor.from_pretrained(FOLDER / "essm-audio")
    one_second = extractor(torch.randn(16000).numpy(), sampling_rate=16000, return_tensors="pt")
    assert one_second["input_features"].shape == (1, 98, 40)
    assert one_second["attention_mask"].shape == (1, 98)
