"""What vLLM's workers load: a logits processor for both of its model runners, and a worker's one more method.

Importing it registers the loader of weights that are no safetensors. The logits go to `WorkerDraw`. The first
runner moves rows about and reports it (`update_state`); the second gives each request a slot and each step a
map (`ctx`).
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
from logprobe.models import ModelFiles, resolve
from logprobe.models.loading import source_of
from logprobe.processors import ModelFacts

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from torch import Tensor

    from logprobe.integrations.vllm.drawing import Run

DRAWS: Final[dict[str, WorkerDraw]] = {}
"""By the name of the engine: a processor and its worker know each other by nothing else that is public."""


class LogprobeLogitsProcessor(FirstInterface, SecondInterface):
    """Draws for the requests that `VllmEngine` sends; the rows of others stay as they are."""

    def __init__(self, vllm_config: Any, *_: Any) -> None:
        self._rows: dict[
            int, tuple[Run, int, list[int]]
        ] = {}  # of the first runner: row → sample, before, output
        self._slots: dict[int, Run] = {}  # of the second runner
        settings = vllm_config.additional_config[SETTINGS]
        self._draw = DRAWS[settings["engine"]] = _new_draw(settings, vllm_config)

    def is_argmax_invariant(self) -> bool:
        """No: a greedy batch would pass it by."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Learn whose rows come, in the first runner."""
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
        """Learn whose slot it is, in the second runner."""
        self._slots.pop(req_idx, None)
        run = self._run_of(sampling_params)
        if run is not None:
            self._slots[req_idx] = run
        return run is not None

    def apply(self, logits: Tensor, ctx: Any = None) -> Tensor:
        """Draw; `ctx` is the second runner's."""
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
            # A prompt that is only partly computed draws nothing.
            if run is not None and num_tokens >= run.sample.num_prompt:
                rows[row] = (run, num_tokens - run.sample.num_prompt)
        return rows


class RowsExtension:
    """A worker's one more method; vLLM mixes it into its own."""

    vllm_config: Any

    def logprobe_take(self, ask: bytes) -> bytes:
        """What was found for some samples; of the workers that share a model one alone tells."""
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
    # The last token generated is never run, so it needs no place in the context.
    return WorkerDraw(config, facts, text, vllm_config.model_config.max_model_len - 1)


@register_model_loader(FORMAT)
class SourceLoader(DefaultModelLoader):
    """vLLM's loader of weights that are no safetensors: they are read in place, tensor by tensor."""

    def download_model(self, model_config: Any) -> None:
        """Do nothing: the files are here."""

    def get_all_weights(self, model_config: Any, _model: Any) -> Generator[tuple[str, Tensor], None, None]:
        """Yield every tensor by its name in transformers."""
        self.counter_before_loading_weights = time.perf_counter()
        source = source_of(ModelFiles(model_config.model, Path(model_config.model)))
        assert source is not None, "the folder was resolved"
        for name in source.shapes:
            yield name, source.read(name)
