"""vLLM's loader for models whose weights are no safetensors: they are read where they lie, tensor by tensor.

Before it: `start`, which names FORMAT. After it: vLLM's own model takes each tensor as it comes.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from logprobe.integrations.vllm.orders import FORMAT
from logprobe.models import ModelFiles
from logprobe.models.loading import source_of

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import Tensor


@register_model_loader(FORMAT)
class SourceLoader(DefaultModelLoader):
    """What vLLM asks for weights, in each of its workers."""

    def download_model(self, model_config: Any) -> None:
        """Nothing: the files are here."""

    def get_all_weights(self, model_config: Any, _model: Any) -> Generator[tuple[str, Tensor], None, None]:
        """Every tensor by its name in transformers."""
        self.counter_before_loading_weights = time.perf_counter()
        source = source_of(ModelFiles(model_config.model, Path(model_config.model)))
        assert source is not None, "the folder was resolved"
        for name in source.shapes:
            yield name, source.read(name)
