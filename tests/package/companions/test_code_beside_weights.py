# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The folder of models is an island: what a model saves runs where this package cannot be imported."""

import json
from pathlib import Path

import torch
from elastic_states import random_inputs, random_model
from helpers import run_alone, tiny_config
from recurrences import diagonal_model, ids_of
from transformers import GPT2Config

from modeling_essm.companions import models
from modeling_essm.companions.systems import DiagonalAdapter

ISLAND = {path.stem: path for path in Path(models.__file__).parent.glob("*.py") if path.stem != "__init__"}
SHARED = {"cache_states", "checks_states"}

LOAD = """
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

torch.set_num_threads(1)
ids, x, results = torch.load("ids.pt"), torch.load("x.pt"), {}
for where in ("s4d", "s4d-again"):
    model = AutoModelForCausalLM.from_pretrained(where, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    with torch.no_grad():
        results[where, "logits"] = model(ids).logits
        body = AutoModel.from_pretrained(where, trust_remote_code=True)
        results[where, "hidden"] = body(ids).last_hidden_state
    classifier = AutoModelForSequenceClassification.from_pretrained(where, trust_remote_code=True, num_labels=3)
    assert classifier(ids).logits.shape == (2, 3)
    results[where, "generated"] = model.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=None)
    if where == "s4d":
        model.save_pretrained("s4d-again")
for kind in ("own", "gpt2"):
    for where in (kind, kind + "-again"):
        model = AutoModel.from_pretrained(where, trust_remote_code=True)
        assert type(model).__module__.startswith("transformers_modules."), type(model)
        with torch.inference_mode():
            results[where] = model(x, refine_depth=2).readouts
        if where == kind:
            model.save_pretrained(kind + "-again")
    model.set_objective(lambda y, observation, history: (y - observation).square().mean(-1))
    with torch.no_grad():
        results[kind + "-attached"] = model(x, refine_depth=2).readouts
torch.save(results, "results.pt")
"""


def carried(folder, own):
    """A folder holds the files of one kind of model and those that both share, as they are."""
    found = {path.stem: path.read_text() for path in folder.glob("*.py")}
    names = SHARED | {name for name in ISLAND if own in name}
    return found == {name: ISLAND[name].read_text() for name in names}


def test_saved_folders_need_no_package(tmp_path):
    """Loaded and saved again there; layers without modes, channels with fewer modes than others, and two backbones."""
    ids, diagonal = ids_of(2, 11), diagonal_model("s4d", state_sizes=[4, 0, 3])
    torch.save(ids, tmp_path / "ids.pt")
    DiagonalAdapter().shrink(diagonal.mixers[0], torch.arange(32).view(8, 4) % 3 > 0, 4)
    diagonal.save_pretrained(tmp_path / "s4d")
    assert carried(tmp_path / "s4d", "diagonal")
    x, elastic = random_inputs(2, 3, 5, dtype=torch.float32), {}
    torch.save(x, tmp_path / "x.pt")
    gpt2 = GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=32, vocab_size=8)
    for kind, backbone in {"own": None, "gpt2": gpt2}.items():
        elastic[kind] = random_model(dtype=torch.float32, backbone_config=backbone)
        elastic[kind].save_pretrained(tmp_path / kind)
        assert carried(tmp_path / kind, "elastic")
    run_alone(LOAD, tmp_path)
    results = torch.load(tmp_path / "results.pt")
    with torch.no_grad():
        expected = {
            "logits": diagonal(ids).logits,
            "hidden": diagonal.model(ids).last_hidden_state,
            "generated": diagonal.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=None),
        }
    for name, tensor in expected.items():
        assert torch.equal(results["s4d", name], tensor) and torch.equal(results["s4d-again", name], tensor)
    for kind, model in elastic.items():
        with torch.no_grad():
            expected = model(x, refine_depth=2).readouts
        for name in ("", "-again", "-attached"):  # fp32, weights lie elsewhere in memory: sums in another order
            torch.testing.assert_close(results[kind + name], expected, rtol=0, atol=1e-5)


def test_a_configuration_names_only_code_that_lies_beside_it(tmp_path):
    """As a model saves it, all of it does; that of a backbone's package is not saved."""
    for model in (diagonal_model("s5"), random_model(backbone_config=tiny_config(num_hidden_layers=1))):
        config, folder = model.config, tmp_path / model.config.model_type
        config.save_pretrained(folder)
        named = json.loads((folder / "config.json").read_text())["auto_map"]
        assert set(named) == {"AutoConfig"} and (folder / f"{named['AutoConfig'].split('.')[0]}.py").exists()
        assert len(type(config).from_pretrained(folder).auto_map) > 1
        model.save_pretrained(folder)
        fields = json.loads((folder / "config.json").read_text())
        assert fields["auto_map"] == config.auto_map and not fields.get("backbone_config", {}).get("auto_map")
        assert config.auto_map and (config.model_type == "diagonal_ssm" or config.backbone_config.auto_map)
        elsewhere = {"AutoModel": "org/name--modeling_of.Model", "AutoTokenizer": ["mine.Tokenizer", None]}
        config.auto_map = config.auto_map | elsewhere
        config.save_pretrained(folder)
        assert elsewhere.items() <= json.loads((folder / "config.json").read_text())["auto_map"].items()
