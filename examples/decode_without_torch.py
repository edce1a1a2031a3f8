# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Continue a prompt with numpy, onnxruntime and tokenizers: no torch, no transformers.

    essm-export --model runs/train_clm/model --spectral_budget 6 --output_dir exported
    python examples/decode_without_torch.py exported "import " [tokens] [temperature]

Greedy unless a temperature is given. The state has a constant size, whatever has been read.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

folder, prompt = Path(sys.argv[1]), sys.argv[2]
count = int(sys.argv[3]) if len(sys.argv) > 3 else 200
temperature = float(sys.argv[4]) if len(sys.argv) > 4 else 0.0
about = json.loads((folder / "export.json").read_text(encoding="utf-8"))
tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
programs = {name: onnxruntime.InferenceSession(folder / p["file"]) for name, p in about["programs"].items()}
states = {
    spec["name"]: np.zeros((1, *spec["shape"][1:]), spec["dtype"])
    for spec in about["programs"]["step"]["inputs"]
    if spec["name"].startswith("past.")
}
random = np.random.default_rng()


def run(name: str, **inputs: np.ndarray) -> np.ndarray:
    """Logits (V,) after the last token; the states move on."""
    logits, *new = programs[name].run(None, inputs | states)
    states.update(zip(states, new))
    return logits[0]


def choose(logits: np.ndarray) -> int:
    return int((logits if not temperature else logits / temperature + random.gumbel(size=logits.shape)).argmax())


ids = np.array([tokenizer.encode(prompt).ids or [about["bos_token_id"]]])
for start in range(0, ids.shape[1], about["max_length"]):  # a long prompt in pieces
    piece = ids[:, start : start + about["max_length"]]
    logits = run("prefill", input_ids=piece, attention_mask=np.ones_like(piece))
written, shown, start = [], 0, time.perf_counter()
while len(written) < count and (token := choose(logits)) not in about["eos_token_ids"]:
    written.append(token)
    text = tokenizer.decode(written)
    if not text.endswith("\ufffd"):  # the bytes of a character come one by one
        print(text[shown:], end="", flush=True)
        shown = len(text)
    logits = run("step", input_ids=np.array([[token]]))
speed = len(written) / (time.perf_counter() - start)
print(tokenizer.decode(written)[shown:])
print(f"[K = {about['spectral_budget']}: {len(written)} tokens, {speed:.0f} tokens/s]", file=sys.stderr)
