# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""A saved folder is a whole model: it loads in a fresh process without this package, and the tokenizer without code.

Child processes start isolated (`python -I`) in another folder, offline, with an empty HF_HOME and an import hook that
refuses `modeling_essm`. They load what the three classes saved, by path and through a Hub cache laid out by hand.
"""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import BLOCK, VARIANTS, assert_close, captured_warnings, random_ids, random_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import modeling_essm
from modeling_essm import (
    ESSMConfig,
    ESSMForCausalLM,
    ESSMForSequenceClassification,
    ESSMModel,
    build_byte_tokenizer,
)
from modeling_essm.checkpoints.derived_classes import _beside_the_package

# What is saved; "gated" is of the class that "causal" is of.
CLASSES = {
    "base": ESSMModel,
    "causal": ESSMForCausalLM,
    "classifier": ESSMForSequenceClassification,
    "gated": ESSMForCausalLM,
}
AUTO = {"base": "AutoModel", "causal": "AutoModelForCausalLM", "classifier": "AutoModelForSequenceClassification"}
AUTO_MAP = {
    "AutoConfig": "configuration_essm.ESSMConfig",
    "AutoModel": "modeling_essm.ESSMModel",
    "AutoModelForCausalLM": "modeling_essm.ESSMForCausalLM",
    "AutoModelForSequenceClassification": "modeling_essm.ESSMForSequenceClassification",
}
SHA = "0123456789abcdef0123456789abcdef01234567"
IDS = random_ids(2, 21)
PROFILE = "whatever it holds"

LOAD = """
import json, sys
from pathlib import Path
import torch
import transformers
from transformers import AutoConfig, AutoTokenizer, pipeline

torch.set_num_threads(1)
where, out = json.loads(sys.argv[1]), Path(sys.argv[2])
AUTO = json.loads(sys.argv[3])
ids, results = torch.load(out / "ids.pt"), {}
remote = {"trust_remote_code": True}
for saved, source in where.items():
    own = AUTO[{"gated": "causal"}.get(saved, saved)]
    config = AutoConfig.from_pretrained(source, **remote)
    for name, auto in AUTO.items():
        model = getattr(transformers, auto).from_pretrained(source, **remote).eval()
        assert type(model).__module__.startswith("transformers_modules."), type(model)
        assert type(config) is type(model.config)
        body = model if name == "base" else model.model
        with torch.no_grad():
            results[saved, name, "class"] = type(model).__name__
            results[saved, name, "hidden"] = body(ids, spectral_budget=7).last_hidden_state
    auto = getattr(transformers, own)
    options = {
        "plain": {}, "bf16": {"dtype": torch.bfloat16}, "device-map": {"device_map": {"": "cpu"}},
        "bf16-device-map": {"dtype": torch.bfloat16, "device_map": "auto"}, "budget": {"spectral_budget": 3},
    }
    for option, kwargs in options.items():
        model = auto.from_pretrained(source, **remote, **kwargs).eval()
        with torch.no_grad():
            results[saved, option] = model(ids)[0]
    model = auto.from_pretrained(source, **remote)
    (out / "again").mkdir(exist_ok=True)
    model.save_pretrained(out / "again" / saved)
    profile = out / "again" / saved / "budget_profile.json"
    results[saved, "profile"] = profile.read_text() if profile.exists() else None
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.save_pretrained(out / "again" / saved)
    results[saved, "tokenizer"] = tokenizer("h\\u00e9llo")["input_ids"]
    if saved in ("causal", "gated"):
        results[saved, "tied"] = model.lm_head.weight is model.model.embed_tokens.weight
        results[saved, "prefix"] = auto.from_pretrained(source, **remote, spectral_capacity=5).eval()(ids).logits
        results[saved, "generated"] = model.eval().generate(
            ids, max_new_tokens=6, min_new_tokens=6, do_sample=False, spectral_budget=5
        )
        generator = pipeline("text-generation", model=source, **remote)
        new = generator("elastic", max_new_tokens=6, do_sample=False, spectral_budget=3, return_tensors=True)
        results[saved, "pipeline"] = new[0]["generated_token_ids"]
torch.save(results, out / "results.pt")
"""

BOTH = """
import sys
import torch
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from modeling_essm import ESSMForCausalLM

torch.set_num_threads(1)
remote_class = get_class_from_dynamic_module("modeling_essm.ESSMForCausalLM", sys.argv[1])
assert remote_class is not ESSMForCausalLM
ids = torch.arange(40)[None]
grads = []
for cls in (ESSMForCausalLM, remote_class, ESSMForCausalLM):
    model = cls.from_pretrained(sys.argv[1])
    outputs = model(ids, labels=ids, use_cache=True, spectral_budget=6)
    outputs.loss.backward()
    grads.append([p.grad for p in model.parameters()])
    last = outputs
assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*grads))
# a cache of one copy serves the other
local, other = ESSMForCausalLM.from_pretrained(sys.argv[1]), remote_class.from_pretrained(sys.argv[1])
caches = [model(ids, use_cache=True).past_key_values for model in (local, other)]
with torch.no_grad():
    a, b = local(ids[:, :1], past_key_values=caches[1]).logits, other(ids[:, :1], past_key_values=caches[0]).logits
assert torch.equal(a, b)
# and each runs with the other's config
assert torch.equal(remote_class(local.config)(ids).logits.isfinite().all(), torch.tensor(True))
# a third copy with another operator keeps it to itself
changed_class = get_class_from_dynamic_module("modeling_essm.ESSMForCausalLM", sys.argv[2])
changed = changed_class.from_pretrained(sys.argv[2])
with torch.no_grad():
    expected = last.logits
    assert not torch.allclose(changed(ids, spectral_budget=6).logits, expected, atol=1e-3)
    for model in (local, other):
        assert torch.equal(model(ids, spectral_budget=6).logits, expected)
print("all copies work")
"""


def run_child(code, cwd, *args, package=None):
    """What a new process prints, which finds our package only if it is told where."""
    home = cwd / "hf_home"
    env = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "PYTHON", "TRANSFORMERS_"))}
    env |= {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    env |= {"PYTHONPATH": str(package)} if package else {}
    command = [sys.executable, *(("-s", "-P") if package else ("-I",)), "-c", code, *map(str, args)]
    child = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr[-4000:]
    return child.stdout


@pytest.fixture(scope="module")
def models():
    return {
        name: random_model(cls, seed=i, num_labels=3, **VARIANTS.get(name, {}))
        for i, (name, cls) in enumerate(CLASSES.items())
    }


@pytest.fixture(scope="module")
def folders(models, tmp_path_factory):
    """One folder per class, model and tokenizer saved as a user would."""
    root = tmp_path_factory.mktemp("saved")
    for name, model in models.items():
        model.save_pretrained(root / name)
        build_byte_tokenizer(512).save_pretrained(root / name)
    (root / "causal" / "budget_profile.json").write_text(PROFILE)
    return root


def lay_out_hub_cache(home, folders):
    """HF_HOME/hub as a download would leave it; returns the repository names."""
    for name in CLASSES:
        repository = home / "hub" / f"models--essm-tests--{name}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(SHA)
        shutil.copytree(folders / name, repository / "snapshots" / SHA)
    return {name: f"essm-tests/{name}" for name in CLASSES}


@pytest.fixture(scope="module")
def children(folders, tmp_path_factory):
    """Results of each route, computed when first asked for."""
    results, work = {}, {}

    def child(route):
        if route in results:
            return results[route]
        cwd = work[route] = tmp_path_factory.mktemp(route)
        torch.save(IDS, cwd / "ids.pt")
        if route == "path":
            where = {name: str(folders / name) for name in CLASSES}
        elif route == "hub":
            where = lay_out_hub_cache(cwd / "hf_home", folders)
        else:
            child("path")
            where = {name: str(work["path"] / "again" / name) for name in CLASSES}
        run_child(BLOCK + LOAD, cwd, json.dumps(where), cwd, json.dumps(AUTO))
        results[route] = torch.load(cwd / "results.pt")
        return results[route]

    return child


routes = pytest.mark.parametrize("route", ["path", "hub", pytest.param("saved-again", marks=pytest.mark.slow)])
saved_by = pytest.mark.parametrize("saved", CLASSES)


@routes
@saved_by
@pytest.mark.parametrize("loaded_as", AUTO)
@pytest.mark.sampled(6)
def test_every_auto_class_loads_every_folder(children, models, route, saved, loaded_as):
    results = children(route)
    assert results[saved, loaded_as, "class"] == CLASSES[loaded_as].__name__
    body = models[saved] if saved == "base" else models[saved].model
    with torch.no_grad():
        assert torch.equal(results[saved, loaded_as, "hidden"], body(IDS, spectral_budget=7).last_hidden_state)


@routes
@saved_by
@pytest.mark.parametrize("option", ["plain", "bf16", "device-map", "bf16-device-map", "budget"])
def test_outputs_are_bit_identical(children, folders, route, saved, option):
    kwargs = {"dtype": torch.bfloat16} if option.startswith("bf16") else {}
    kwargs |= {"spectral_budget": 3} if option == "budget" else {}
    with torch.no_grad():
        expected = CLASSES[saved].from_pretrained(folders / saved, **kwargs).eval()(IDS)[0]
    actual = children(route)[saved, option]
    assert actual.dtype == expected.dtype and torch.equal(actual, expected)


@routes
@pytest.mark.parametrize("saved", ["causal", "gated"])
def test_generation_and_pipeline(children, models, route, saved):
    results, model = children(route), models[saved]
    results = {key[1]: value for key, value in results.items() if key[0] == saved}
    greedy = {"max_new_tokens": 6, "do_sample": False}
    expected = model.generate(IDS, **greedy, min_new_tokens=6, spectral_budget=5)
    assert torch.equal(results["generated"], expected)
    prompt = torch.tensor([list(b"elastic")])
    assert torch.equal(torch.tensor([results["pipeline"]]), model.generate(prompt, **greedy, spectral_budget=3))
    assert results["tied"]
    with torch.no_grad():
        assert_close(results["prefix"], model(IDS, spectral_budget=5).logits)


@routes
@saved_by
def test_a_budget_profile_goes_along(children, route, saved):
    """As it is: what reads and checks it is in the package."""
    assert children(route)[saved, "profile"] == (PROFILE if saved == "causal" else None)


@routes
@saved_by
def test_tokenizer_needs_no_remote_code(children, route, saved):
    assert children(route)[saved, "tokenizer"] == list("h\u00e9llo".encode())


@saved_by
def test_the_whole_auto_map_is_written_whichever_class_saved(folders, saved):
    config = json.loads((folders / saved / "config.json").read_text())
    assert config["auto_map"] == AUTO_MAP
    assert config["architectures"] == [CLASSES[saved].__name__]


@saved_by
def test_the_code_saved_along_is_the_packages(folders, saved):
    package = Path(modeling_essm.__file__).parent
    copied = {path.name for path in (folders / saved).glob("*.py")}
    assert {"modeling_essm.py", "configuration_essm.py", "cache_essm.py", "spectral_ops.py"} <= copied
    for name in copied:
        assert (folders / saved / name).read_text() == (package / name).read_text()


@pytest.mark.parametrize("saved", ["causal", "gated"])
@pytest.mark.sampled(1)
def test_package_and_remote_copies_live_in_one_process(folders, saved, tmp_path):
    """Their custom operators must not collide, and caches and configs of either serve both."""
    package = Path(modeling_essm.__file__).parents[1]
    changed = shutil.copytree(folders / saved, tmp_path / "changed")
    code = (changed / "spectral_chunked.py").read_text()
    assert "    return y, state, x\n" in code  # of the custom operator
    (changed / "spectral_chunked.py").write_text(
        code.replace("    return y, state, x\n", "    return 2 * y, state, x\n")
    )
    assert "all copies work" in run_child(BOTH, tmp_path, folders / saved, changed, package=package)


# --- Classes that a user derives

DERIVED = """
from modeling_essm import (
    ESSMConfig,
    ESSMForCausalLM as Base,
)
from modeling_essm.spectral_ops import SpectralOperator


class Doubled(Base):
    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.logits = 2 * outputs.logits
        return outputs
"""

LOAD_DERIVED = """
import sys
import torch
from transformers import AutoModel, AutoModelForCausalLM

torch.set_num_threads(1)
folder, again, ids = sys.argv[1], sys.argv[2], torch.arange(40)[None]
try:
    import modeling_essm
except ModuleNotFoundError:
    modeling_essm = None
assert (modeling_essm is None) == (sys.argv[3] == "alone")
for where in (folder, again):
    derived = AutoModelForCausalLM.from_pretrained(where, trust_remote_code=True, spectral_budget=6).eval()
    assert type(derived).__name__ == "Doubled", type(derived)
    body = AutoModel.from_pretrained(where, trust_remote_code=True)
    assert type(body).__name__ == "ESSMModel"
    with torch.no_grad():
        logits = derived.lm_head(body.eval()(ids, spectral_budget=6).last_hidden_state)
        assert torch.equal(derived(ids).logits, 2 * logits)
    derived.save_pretrained(again)
small = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, spectral_capacity=6).eval()
with torch.no_grad():
    assert type(small).__name__ == "Doubled" and torch.equal(small(ids).logits, 2 * logits)
if modeling_essm is not None:
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert type(plain) is modeling_essm.ESSMForCausalLM
    with torch.no_grad():
        assert torch.equal(plain(ids, spectral_budget=6).logits, logits)
"""


@pytest.fixture(scope="module")
def derived(tmp_path_factory):
    """The same model as its class saves it, and as saved by ours with the class named by hand; the class."""
    root = tmp_path_factory.mktemp("derived")
    (root / "my_model.py").write_text(DERIVED)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root)
        import my_model
    model = my_model.Doubled(random_model().config)
    model.save_pretrained(root / "saved")
    model.__class__ = ESSMForCausalLM
    model.save_pretrained(root / "named")
    by_hand = DERIVED.replace("modeling_essm.spectral", ".spectral").replace("from modeling", "from .modeling")
    (root / "named" / "my_model.py").write_text(by_hand)
    config = json.loads((root / "named" / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "my_model.Doubled", "AutoConfig": AUTO_MAP["AutoConfig"]}
    (root / "named" / "config.json").write_text(json.dumps(config))
    return root, my_model.Doubled


@pytest.mark.parametrize("kind", ["saved", "named"])
@pytest.mark.parametrize(
    "package", [pytest.param(False, id="alone"), pytest.param(True, id="with-package", marks=pytest.mark.slow)]
)
@pytest.mark.sampled(1)
def test_a_derived_class_loads_as_what_it_is(derived, kind, package, tmp_path):
    where = Path(modeling_essm.__file__).parents[1] if package else None
    arguments = derived[0] / kind, tmp_path / "again", "with-package" if package else "alone"
    run_child(("" if package else BLOCK) + LOAD_DERIVED, tmp_path, *arguments, package=where)


def test_the_files_of_a_derived_class(derived):
    folder = derived[0] / "saved"
    assert {"my_model.py", "modeling_essm.py", "configuration_essm.py"} <= {path.name for path in folder.iterdir()}
    assert "from .modeling_essm import ESSMForCausalLM as Base\n" in (folder / "my_model.py").read_text()
    assert "from .spectral_ops import SpectralOperator\n" in (folder / "my_model.py").read_text()
    config = json.loads((folder / "config.json").read_text())
    assert config["auto_map"] == AUTO_MAP | {"AutoModelForCausalLM": "my_model.Doubled"}


@pytest.mark.parametrize(
    "statement",
    ["from modeling_essm.budgets import choose_budget\n", "from modeling_essm import build_byte_tokenizer\n"],
)
def test_what_a_checkpoint_does_not_carry_stays_an_import_of_the_package(statement):
    assert _beside_the_package(statement) == statement


def test_our_class_saves_no_reference_to_a_file_that_is_not_there(derived, tmp_path):
    """Neither code that was never run nor the name of its class goes along."""
    ESSMModel.from_pretrained(derived[0] / "named").save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == AUTO_MAP
    assert not (tmp_path / "my_model.py").exists()


def test_a_derived_class_that_is_not_run_is_named(derived):
    with captured_warnings() as messages:
        model = AutoModelForCausalLM.from_pretrained(derived[0] / "saved")
    assert type(model) is ESSMForCausalLM and "is a my_model.Doubled" in messages[0] and len(messages) == 1
    with captured_warnings() as messages:
        ESSMForCausalLM.from_pretrained(derived[0] / "saved")  # which says what it wants
    assert not messages


@pytest.mark.parametrize("value", ["modeling_essm.ESSMModel", ["a"]], ids=str)
def test_a_malformed_auto_map(value):
    with pytest.raises(ValueError, match="auto_map must be a dict"):
        ESSMConfig(auto_map=value)


# --- The tokenizer


@pytest.fixture(scope="module", params=["built", "loaded"])
def tokenizer(request, folders):
    return build_byte_tokenizer() if request.param == "built" else AutoTokenizer.from_pretrained(folders / "causal")


def test_ids_are_bytes(tokenizer):
    assert len(tokenizer) == tokenizer.vocab_size == 259
    text = "".join(map(chr, range(128)))
    assert tokenizer(text)["input_ids"] == list(range(128))
    seen = set()
    for character in map(chr, [*range(0xD800), *range(0xE000, 0x110000, 97)]):
        ids = tokenizer.encode(character)
        assert ids == list(character.encode())
        seen.update(ids)
    assert len(seen) == 243  # every byte that occurs in UTF-8: all but C0, C1 and F5..FF
    symbols = {chr(b): b for b in [*range(33, 127), *range(161, 173), *range(174, 256)]}
    hidden = [b for b in range(256) if chr(b) not in symbols]
    symbols |= {chr(256 + i): b for i, b in enumerate(hidden)}  # the byte-level alphabet of GPT-2
    assert {s: i for s, i in tokenizer.get_vocab().items() if i < 256} == symbols


def test_special_tokens(tokenizer):
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257, 258)
    assert (tokenizer.pad_token, tokenizer.bos_token, tokenizer.eos_token) == ("<pad>", "<bos>", "<eos>")
    assert tokenizer("a<bos>b<eos>")["input_ids"] == [97, 257, 98, 258]
    assert tokenizer.decode([257, 97, 98, 258, 256], skip_special_tokens=True) == "ab"
    config = random_model().config
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (256, 257, 258)


def test_nothing_is_appended_and_padding_is_left(tokenizer):
    assert tokenizer.padding_side == "left" and not tokenizer.clean_up_tokenization_spaces
    batch = tokenizer(["ab", "abcd"], padding=True)
    assert batch["input_ids"] == [[256, 256, 97, 98], [97, 98, 99, 100]]
    assert batch["attention_mask"] == [[0, 0, 1, 1], [1, 1, 1, 1]]
    assert set(batch) == {"input_ids", "attention_mask"}  # or forward would get arguments it does not know


SAMPLES = {
    "empty": "",
    "ascii": "Hello, world!",
    "leading-space": "  two spaces, trailing  ",
    "punctuation": "don 't ca n't . , ! ?",  # clean_up_tokenization_spaces would eat these spaces
    "newlines": "a\r\nb\n\n\tc\u2028d\u0085e",
    "controls": "".join(map(chr, range(32))) + "\x7f",
    "accents": "na\u00efve e\u0301 \u00e9",
    "emoji": "\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea",
    "scripts": "\u0440\u0443\u0441\u0441\u043a\u0438\u0439 \u4e2d\u6587 \u0627\u0644\u0639 \u0939\u093f",
    "marks": "\ufeff bom \ufffd \u202e rtl \u0000 nul",
    "like-symbols": "\u0120 \u010a \u0100",  # the stand-ins of the byte-level alphabet as text
}


@pytest.mark.parametrize("text", SAMPLES.values(), ids=SAMPLES.keys())
def test_round_trip(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_round_trip_of_random_unicode(tokenizer):
    rng = random.Random(0)
    for _ in range(300):
        planes = [0x80, 0x800, 0xD800, 0x110000]
        points = (rng.randrange(rng.choice(planes)) for _ in range(rng.randrange(60)))
        text = "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)
        ids = tokenizer(text)["input_ids"]
        assert ids == list(text.encode())
        assert tokenizer.decode(ids) == text


def test_length_limit_is_saved(folders):
    assert AutoTokenizer.from_pretrained(folders / "causal").model_max_length == 512
