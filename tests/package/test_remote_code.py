# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""A saved folder is a whole model: it loads in a fresh process without this package, and the tokenizer without code.

Child processes start isolated (`python -I`) in another folder, offline, with an empty HF_HOME and an import hook that
refuses `modeling_essm`. They load what the classes saved, by path and through a Hub cache laid out by hand.
"""

import json
import random
import shutil

import pytest
import torch
from helpers import HYBRID, VARIANTS, hub_snapshot, random_ids, random_model, run_alone
from transformers import AutoTokenizer
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from modeling_essm import ESSMForCausalLM, ESSMForSequenceClassification, ESSMModel, build_byte_tokenizer

# What is saved, "elastic" in several files, and the Auto class of its head.
SAVED = {
    "base": (ESSMModel, {}, "AutoModel"),
    "causal": (ESSMForCausalLM, {}, "AutoModelForCausalLM"),
    "classifier": (ESSMForSequenceClassification, {"num_labels": 3}, "AutoModelForSequenceClassification"),
    "elastic": (ESSMForCausalLM, VARIANTS["memory"] | {"intermediate_size": 64}, "AutoModelForCausalLM"),
    "hybrid": (ESSMForCausalLM, HYBRID, "AutoModelForCausalLM"),
}
IDS = random_ids(2, 21)
LOAD = """
import json, sys
from pathlib import Path
import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoTokenizer, Trainer, TrainingArguments, pipeline

torch.set_num_threads(1)
where, out = json.loads(sys.argv[1]), Path(sys.argv[2])
ids, results = torch.load(out / "ids.pt"), {}
remote = {"trust_remote_code": True}
for saved, (source, own) in where.items():
    auto, found = getattr(transformers, own), results.setdefault(saved, {})
    config = AutoConfig.from_pretrained(source, **remote)
    model = auto.from_pretrained(source, **remote).eval()
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    assert type(config) is type(model.config)
    body = AutoModel.from_pretrained(source, **remote).eval()
    with torch.no_grad():
        found["class"], found["body class"] = type(model).__name__, type(body).__name__
        found["whole"] = model(ids)[0]
        found["body"] = body(ids, spectral_budget=7).last_hidden_state
        for name, options in {
            "bf16": {"dtype": torch.bfloat16, "device_map": "auto"}, "budget": {"spectral_budget": 3},
            "prefix": {"spectral_capacity": 5},
        }.items():
            found[name] = auto.from_pretrained(source, **remote, **options).eval()(ids)[0]
        cut = auto.from_pretrained(source, **remote, spectral_capacity=9)
        cut.truncate(5).save_pretrained(out / "small" / saved)
        found["small"] = auto.from_pretrained(out / "small" / saved, **remote).eval()(ids)[0]
    model.save_pretrained(out / "again" / saved)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.save_pretrained(out / "again" / saved)
    found["tokenizer"] = tokenizer("h\\u00e9llo")["input_ids"]
    with torch.no_grad():
        found["again"] = auto.from_pretrained(out / "again" / saved, **remote).eval()(ids)[0]
    if own == "AutoModelForCausalLM":
        found["tied"] = model.lm_head.weight is model.model.embed_tokens.weight
        found["generated"] = model.generate(
            ids, max_new_tokens=6, min_new_tokens=6, do_sample=False, spectral_budget=5
        )
        arguments = TrainingArguments(str(out), report_to=[], use_cpu=True, label_smoothing_factor=0.1)
        with torch.no_grad():
            found["smoothed"] = Trainer(model, arguments).compute_loss(model, {"input_ids": ids, "labels": ids.clone()})
        generator = pipeline("text-generation", model=source, **remote)
        new = generator("elastic", max_new_tokens=6, do_sample=False, spectral_budget=3, return_tensors=True)
        found["pipeline"] = new[0]["generated_token_ids"]
torch.save(results, out / "results.pt")
"""


@pytest.fixture(scope="module")
def models():
    return {name: random_model(cls, seed=i, **fields) for i, (name, (cls, fields, _)) in enumerate(SAVED.items())}


@pytest.fixture(scope="module")
def folders(models, tmp_path_factory):
    """Model and tokenizer saved as a user would."""
    root = tmp_path_factory.mktemp("saved")
    for name, model in models.items():
        model.save_pretrained(root / name, max_shard_size="20KB" if name == "elastic" else "1GB")
        build_byte_tokenizer(512).save_pretrained(root / name)
    assert (root / "elastic" / "model.safetensors.index.json").exists()
    return root


@pytest.fixture(scope="module")
def loaded(folders, tmp_path_factory):
    """What a new process, which cannot import our package, finds in a Hub cache laid out by hand, and saves again."""
    cwd = tmp_path_factory.mktemp("hub")
    torch.save(IDS, cwd / "ids.pt")
    where = {name: (f"essm-tests/{name}", auto) for name, (*_, auto) in SAVED.items()}
    for name, (repository, _) in where.items():
        shutil.copytree(folders / name, hub_snapshot(cwd / "hf_home" / "hub", repository))
    run_alone(LOAD, cwd, json.dumps(where), str(cwd))
    return torch.load(cwd / "results.pt")


@torch.no_grad()
@pytest.mark.parametrize("saved", SAVED)
def test_a_folder_loads_without_the_package(loaded, models, folders, saved):
    """Whole, in bf16, at a budget, as a prefix, cut and saved, saved again, and its body alone: bit for bit."""
    found, model, (cls, _, auto) = loaded[saved], models[saved], SAVED[saved]
    assert (found["class"], found["body class"]) == (cls.__name__, "ESSMModel")
    whole, five = model(IDS)[0], model(IDS, spectral_budget=5)[0]
    expected = {"whole": whole, "again": whole, "prefix": five, "small": five}
    expected |= {
        "bf16": cls.from_pretrained(folders / saved, dtype=torch.bfloat16)(IDS)[0],
        "budget": model(IDS, spectral_budget=3)[0],
        "body": (model if saved == "base" else model.model)(IDS, spectral_budget=7).last_hidden_state,
    }
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    assert found["tokenizer"] == list("h\u00e9llo".encode())
    if auto == "AutoModelForCausalLM":
        tokens = model.generate(IDS, min_new_tokens=6, max_new_tokens=6, do_sample=False, spectral_budget=5)
        assert found["tied"] and torch.equal(found["generated"], tokens)
        log_p = whole[:, :-1].log_softmax(-1)  # the library shifts labels of classes that it knows by name
        smoothed = -0.9 * log_p.gather(-1, IDS[:, 1:, None]).mean() - 0.1 * log_p.mean()
        torch.testing.assert_close(found["smoothed"], smoothed)
        prompt = torch.tensor([list(b"elastic")])
        tokens = model.generate(prompt, max_new_tokens=6, do_sample=False, spectral_budget=3)
        assert found["pipeline"] == tokens[0].tolist()


def test_package_and_remote_copies_live_in_one_process(folders, models, tmp_path):
    """Their custom operators do not collide, and caches and configs of either serve both."""
    changed = shutil.copytree(folders / "causal", tmp_path / "changed")
    code = (changed / "spectral_chunked.py").read_text()
    assert "    return y, state, x\n" in code  # of the custom operator
    code = code.replace("    return y, state, x\n", "    return 2 * y, state, x\n")
    (changed / "spectral_chunked.py").write_text(code)
    models, outputs, gradients = [], [], []
    for folder in (None, folders / "causal", changed):
        remote = folder and get_class_from_dynamic_module("modeling_essm.ESSMForCausalLM", str(folder))
        models.append((remote or ESSMForCausalLM).from_pretrained(folder or folders / "causal"))
        outputs.append(models[-1](IDS, labels=IDS, spectral_budget=6))
        outputs[-1].loss.backward()
        gradients.append([p.grad for p in models[-1].parameters()])
    assert len({type(model) for model in models}) == 3
    local, copied, _ = models
    assert all(map(torch.equal, *gradients[:2]))
    assert not torch.allclose(outputs[2].logits, outputs[0].logits, atol=1e-3)
    with torch.no_grad():
        caches = [model(IDS, use_cache=True).past_key_values for model in (copied, local)]
        steps = [model(IDS[:, :1], past_key_values=cache).logits for model, cache in zip((local, copied), caches)]
        assert torch.equal(*steps)
        assert type(copied)(local.config)(IDS).logits.isfinite().all()
        assert torch.equal(local(IDS, spectral_budget=6).logits, outputs[0].logits)


# --- The tokenizer


@pytest.fixture(scope="module", params=["built", "loaded"])
def tokenizer(request, folders):
    return build_byte_tokenizer() if request.param == "built" else AutoTokenizer.from_pretrained(folders / "causal")


def test_ids_are_bytes(tokenizer):
    assert len(tokenizer) == tokenizer.vocab_size == 259
    text = "".join(map(chr, range(128)))
    assert tokenizer(text)["input_ids"] == list(range(128))
    symbols = {chr(b): b for b in [*range(33, 127), *range(161, 173), *range(174, 256)]}
    hidden = [b for b in range(256) if chr(b) not in symbols]
    symbols |= {chr(256 + i): b for i, b in enumerate(hidden)}  # the byte-level alphabet of GPT-2
    assert {s: i for s, i in tokenizer.get_vocab().items() if i < 256} == symbols


def test_special_tokens_and_padding_on_the_left(tokenizer):
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257, 258)
    assert tokenizer("a<bos>b<eos><pad>")["input_ids"] == [97, 257, 98, 258, 256]
    assert tokenizer.decode([257, 97, 98, 258, 256], skip_special_tokens=True) == "ab"
    assert tokenizer.padding_side == "left" and not tokenizer.clean_up_tokenization_spaces
    assert tokenizer.model_max_length in (512, int(1e30))
    assert dict(tokenizer(["ab", "abcd"], padding=True)) == {  # or forward would get arguments it does not know
        "input_ids": [[256, 256, 97, 98], [97, 98, 99, 100]],
        "attention_mask": [[0, 0, 1, 1], [1, 1, 1, 1]],
    }


SAMPLES = [
    "  two spaces, trailing  ",
    "don 't ca n't . , ! ?",  # clean_up_tokenization_spaces would eat these spaces
    "a\r\nb\n\n\tc\u2028d\u0085e",
    "".join(map(chr, range(32))) + "\x7f",
    "\u0440\u0443\u0441\u0441\u043a\u0438\u0439 \u4e2d\u6587 \U0001f469\u200d\U0001f467",
    "\u0120 \u010a \u0100",  # the stand-ins of the byte-level alphabet as text
]


def test_round_trip(tokenizer):
    """Of those, and of random Unicode."""
    rng, texts = random.Random(0), list(SAMPLES)
    for _ in range(300):
        points = (rng.randrange(rng.choice([0x80, 0x800, 0xD800, 0x110000])) for _ in range(rng.randrange(60)))
        texts.append("".join(chr(point) for point in points if not 0xD800 <= point < 0xE000))
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        assert ids == list(text.encode()) and tokenizer.decode(ids) == text
