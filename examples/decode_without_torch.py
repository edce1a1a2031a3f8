# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Continue a prompt with numpy, onnxruntime and tokenizers: no torch, no transformers.

    essm-export --model runs/train_clm/model --spectral_budget small full --output_dir exported
    python examples/decode_without_torch.py exported "import " --spectral_budget small

Greedy unless a temperature is given. The state has a constant size, whatever has been read.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

parser = argparse.ArgumentParser(description="Continue a prompt.")
parser.add_argument("folder", type=Path)
parser.add_argument("prompt")
parser.add_argument("--spectral_budget", help="a budget that was exported, or its name; by default the largest")
parser.add_argument("--tokens", type=int, default=200)
parser.add_argument("--temperature", type=float, default=0.0)
args = parser.parse_args()
about = json.loads((args.folder / "export.json").read_text(encoding="utf-8"))
K = about["presets"].get(args.spectral_budget, args.spectral_budget or list(about["budgets"])[-1])
if K not in about["budgets"]:
    parser.error(f"spectral_budget must be one of {', '.join([*about['budgets'], *about['presets']])}, got {K!r}")
if about["format"] != "onnx" or "step" not in about["budgets"][K] or not (args.folder / "tokenizer.json").is_file():
    parser.error(f"folder must be an ONNX export of a language model with its tokenizer, got {args.folder}")
if args.temperature < 0:
    parser.error(f"temperature must be at least 0, got {args.temperature}")
tokenizer = Tokenizer.from_file(str(args.folder / "tokenizer.json"))
files = {name: args.folder / about["budgets"][K][name]["file"] for name in ("prefill", "step")}
programs = {name: onnxruntime.InferenceSession(file) for name, file in files.items()}
states = {
    spec["name"]: np.zeros((1, *spec["shape"][1:]), spec["dtype"])
    for spec in about["budgets"][K]["step"]["inputs"]
    if spec["name"].startswith("past.")
}
random = np.random.default_rng()


def run(name: str, **inputs: np.ndarray) -> np.ndarray:
    """Logits (V,) after the last token; the states move on."""
    logits, *new = programs[name].run(None, inputs | states)
    states.update(zip(states, new))
    return logits[0]


def choose(logits: np.ndarray) -> int:
    if args.temperature:
        logits = logits / args.temperature + random.gumbel(size=logits.shape)
    return int(logits.argmax())


start_ids = tokenizer.encode(args.prompt).ids or [about["bos_token_id"]]
if None in start_ids:
    parser.error("write a prompt: no token begins a text of this model")
ids = np.array([start_ids])
for start in range(0, ids.shape[1], about["max_length"]):  # a long prompt in pieces
    piece = ids[:, start : start + about["max_length"]]
    logits = run("prefill", input_ids=piece, attention_mask=np.ones_like(piece))
written, shown, start = [], 0, time.perf_counter()
while len(written) < args.tokens and (token := choose(logits)) not in about["eos_token_ids"]:
    written.append(token)
    text = tokenizer.decode(written)
    if not text.endswith("\ufffd"):  # the bytes of a character come one by one
        print(text[shown:], end="", flush=True)
        shown = len(text)
    logits = run("step", input_ids=np.array([[token]]))
speed = len(written) / (time.perf_counter() - start)
print(tokenizer.decode(written)[shown:])
print(f"[K = {K}: {len(written)} tokens, {speed:.0f} tokens/s]", file=sys.stderr)
