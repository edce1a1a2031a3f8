# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
r"""`transformers serve` and `transformers chat` for an ES-SSM: alone they find only the library's own architectures.

    python examples/serve.py serve runs/train_clm/model --port 8000
    python examples/serve.py chat runs/train_clm/model http://localhost:8000/v1 spectral_budget=6 max_new_tokens=200

A request says its budget, by number or by a size's name as "small", in its generation_config, a JSON string, beside the
usual settings of `generate`:

    curl localhost:8000/v1/completions -H "Content-Type: application/json" -d '{"model": "runs/train_clm/model",
        "prompt": "def main(", "generation_config": "{\"spectral_budget\": 6, \"max_new_tokens\": 40}"}'

An OpenAI client passes it as extra_body={"generation_config": ..}. Needs `pip install "transformers[serving]"`.

serving/guard.py stands before it: one model, LIMITS on every request, a reason with every refusal, and no work for a
client that has left.
"""

from fastapi.middleware.cors import CORSMiddleware
from serving.guard import Guard
from serving.schema import Limits
from transformers import GenerationConfig
from transformers.cli.serving import model_manager, server
from transformers.cli.serving.utils import Modality
from transformers.cli.transformers import main

from modeling_essm import ESSMForCausalLM

LIMITS = Limits()  # new_tokens=4096, seconds=120, requests=16, ...: change them here

model_manager.transformers.ESSMForCausalLM = ESSMForCausalLM
GenerationConfig.spectral_budget = None  # else chat drops the flag: it takes names that a GenerationConfig has

# What a model that was not trained on conversations reads for one: the messages, a line each.
PLAIN = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
ModelManager = model_manager.ModelManager
load_processor, build_server = ModelManager._load_processor, server.build_server


def load_with_template(self, *args, **kwargs):
    tokenizer = load_processor(self, *args, **kwargs)
    tokenizer.chat_template = tokenizer.chat_template or PLAIN
    return tokenizer


def build_guarded(manager, *args, **kwargs):
    if (name := manager.force_model) is None:
        raise SystemExit("error: name the model to serve; a request cannot make the server load another one")
    model, _ = manager.load_model_and_processor(manager.process_model_name(name))
    if kwargs["generation_state"].use_continuous_batching(model, Modality.LLM):
        raise SystemExit("error: leave out --continuous-batching: requests share a batch without it")
    cors = kwargs.pop("enable_cors", False)  # around the guard, whose own answers browsers have to read too
    guard = Guard(build_server(manager, *args, **kwargs), model, name, LIMITS)
    return CORSMiddleware(guard, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"]) if cors else guard


ModelManager._load_processor, server.build_server = load_with_template, build_guarded
if __name__ == "__main__":
    main()
