"""Find, download and load models and their tokenizers, and look up the exact bytes of every token."""

from __future__ import annotations

from logprobe.models.known import DEFAULT_MODEL, KNOWN_MODELS
from logprobe.models.loading import load_config, load_model, load_tokenizer
from logprobe.models.resolution import ModelFiles, quantization, resolve, weight_version
from logprobe.models.vocabulary import Vocabulary

__all__ = [
    "DEFAULT_MODEL",
    "KNOWN_MODELS",
    "ModelFiles",
    "Vocabulary",
    "load_config",
    "load_model",
    "load_tokenizer",
    "quantization",
    "resolve",
    "weight_version",
]
