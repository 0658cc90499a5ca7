"""Code that vLLM's workers load: a logits processor for both model runners, and a worker extension.

Importing this module registers the loader of GGUF weights. The processor passes logits to `WorkerDraw`.
vLLM's V1 model runner reorders rows and reports the moves (`update_state`). The V2 model runner assigns a
slot to each request and passes a map from rows to slots with each step (`ctx`).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.v1.sample.logits_processor.interface import LogitsProcessor as FirstInterface
from vllm.v1.sample.logits_processor.interface import MoveDirectionality
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as SecondInterface

from logprobe.config import EngineConfig
from logprobe.engine.backends.start import text_edge
from logprobe.integrations.vllm.drawing import WorkerDraw
from logprobe.integrations.vllm.orders import BEFORE, FORMAT, SETTINGS, TAG, WORK
from logprobe.kernels.placement import as_tensor
from logprobe.models import ModelFiles, resolve
from logprobe.models.loading import source_of
from logprobe.processors import ModelFacts

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from torch import Tensor

    from logprobe.integrations.vllm.drawing import Run

DRAWS: Final[dict[str, WorkerDraw]] = {}
"""`WorkerDraw` by engine name, the only public value that a processor and its worker have in common."""


class LogprobeLogitsProcessor(FirstInterface, SecondInterface):
    """Samples tokens for requests from `VllmEngine`; the rows of other requests stay unchanged."""

    def __init__(self, vllm_config: Any, *_: Any) -> None:
        self._rows: dict[
            int, tuple[Run, int, list[int]]
        ] = {}  # used with the V1 runner: row → (sample, number of tokens before, output tokens)
        self._slots: dict[int, Run] = {}  # used with the V2 runner
        settings = vllm_config.additional_config[SETTINGS]
        self._draw = DRAWS[settings["engine"]] = _new_draw(settings, vllm_config)

    def is_argmax_invariant(self) -> bool:
        """Return False, so that vLLM also calls the processor for greedy batches."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Update the rows of our requests; called by the V1 runner."""
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._rows.pop(row, None)
        for row, params, _, output_token_ids in batch_update.added:
            self._rows.pop(row, None)
            run = self._run_of(params)
            if run is not None:
                self._rows[row] = (run, params.extra_args[BEFORE], output_token_ids)
        for source, target, direction in batch_update.moved:
            moved, replaced = self._rows.pop(source, None), self._rows.pop(target, None)
            if moved is not None:
                self._rows[target] = moved
            if replaced is not None and direction == MoveDirectionality.SWAP:
                self._rows[source] = replaced

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Register the slot of a request (V2 runner); return True if the request is ours."""
        self._slots.pop(req_idx, None)
        run = self._run_of(sampling_params)
        if run is not None:
            self._slots[req_idx] = run
        return run is not None

    def apply(self, logits: Tensor, ctx: Any = None) -> Tensor:
        """Sample a token for each of our rows; only vLLM's V2 model runner passes `ctx`."""
        rows = self._moved_rows() if ctx is None else self._slot_rows(ctx)
        if rows:
            self._draw.draw(logits, rows)
        return logits

    def _run_of(self, params: Any) -> Run | None:
        extra = params.extra_args or {}
        return self._draw.open(extra[TAG], extra[WORK]) if TAG in extra else None

    def _moved_rows(self) -> Mapping[int, tuple[Run, int]]:
        return {row: (run, before + len(output)) for row, (run, before, output) in sorted(self._rows.items())}

    def _slot_rows(self, ctx: Any) -> Mapping[int, tuple[Run, int]]:
        rows = {}
        for row, (slot, num_tokens) in enumerate(
            zip(ctx.idx_mapping_np.tolist(), ctx.seq_lens_upper_bound_np.tolist(), strict=False)
        ):
            run = self._slots.get(slot)
            # Skip prompts that are only partly computed.
            if run is not None and num_tokens >= run.sample.num_prompt:
                rows[row] = (run, num_tokens - run.sample.num_prompt)
        return rows


class RowsExtension:
    """A worker extension: a mix-in that vLLM adds to its worker class."""

    vllm_config: Any

    def logprobe_take(self, ask: bytes) -> bytes:
        """Return the new results of samples; of the workers that share a model, only one returns them."""
        draw = DRAWS.get(self.vllm_config.additional_config[SETTINGS]["engine"])
        answer = b"" if draw is None else draw.take(ask)
        is_first = get_tensor_model_parallel_rank() == 0 and get_pp_group().is_last_rank
        return answer if is_first else b""


def _new_draw(settings: Mapping[str, Any], vllm_config: Any) -> WorkerDraw:
    config = EngineConfig(**settings["config"])
    text = text_edge(resolve(config.model))
    facts = ModelFacts(
        vocab_size=vllm_config.model_config.get_vocab_size(),
        eos_token_ids=frozenset(settings["eos_token_ids"]),
        text=text,
    )
    # The last generated token is never run through the model and needs no position in the context.
    return WorkerDraw(config, facts, text, vllm_config.model_config.max_model_len - 1)


@register_model_loader(FORMAT)
class SourceLoader(DefaultModelLoader):
    """Loader for vLLM that reads GGUF weights tensor by tensor."""

    def download_model(self, model_config: Any) -> None:
        """Do nothing, because the files are local."""

    def get_all_weights(self, model_config: Any, _model: Any) -> Generator[tuple[str, Tensor], None, None]:
        """Yield every tensor with its name in transformers."""
        self.counter_before_loading_weights = time.perf_counter()
        source = source_of(ModelFiles(model_config.model, Path(model_config.model)))
        assert source is not None, "the folder has weights"
        for name in source.shapes:
            yield name, as_tensor(source.read(name))
