# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The classes of the installed package. `save_pretrained` and `essm-push` put their code in the place of this file."""

try:
    from modeling_essm import ESSMConfig, ESSMForCausalLM, ESSMForSequenceClassification, ESSMModel  # noqa: F401
except ModuleNotFoundError as error:
    needed = "this model's code is that of the package in its repository; run `pip install .` in a clone of it"
    raise ImportError(f"{error}: {needed}") from None
