# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
r"""The library's own `transformers serve` and `transformers chat`, which look architectures up in the library only.

    python examples/serve.py serve runs/train_clm/model --port 8000
    python examples/serve.py chat runs/train_clm/model http://localhost:8000/v1 spectral_budget=6 max_new_tokens=200

A request says its budget in its generation_config, a JSON string, beside whatever else `generate` takes:

    curl localhost:8000/v1/completions -H "Content-Type: application/json" -d '{"model": "runs/train_clm/model",
        "prompt": "def main(", "generation_config": "{\"spectral_budget\": 6, \"max_new_tokens\": 40}"}'

An OpenAI client passes it as extra_body={"generation_config": ..}. Needs `pip install "transformers[serving]"`.
"""

import transformers
from transformers import GenerationConfig
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.transformers import main

from modeling_essm import ESSMForCausalLM

transformers.ESSMForCausalLM = ESSMForCausalLM
GenerationConfig.spectral_budget = None  # else chat drops the flag: it takes names that a GenerationConfig has

# What a model that was not trained on conversations reads for one: the messages, a line each.
PLAIN = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
load_processor = ModelManager._load_processor


def load_with_template(self, *args, **kwargs):
    tokenizer = load_processor(self, *args, **kwargs)
    tokenizer.chat_template = tokenizer.chat_template or PLAIN
    return tokenizer


ModelManager._load_processor = load_with_template
if __name__ == "__main__":
    main()
