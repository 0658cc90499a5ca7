"""Programs with vLLM's worker in the same process: `python in_process.py PROGRAM MODEL`.

Each runs in its own process, as vLLM on a CPU replaces torch functions in its worker's process.
"""

from __future__ import annotations

import asyncio
import os
import sys
import weakref
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import numpy as np
import torch

from logprobe.errors import EngineClosedError
from logprobe.next_token import AsyncVirtualLM
from logprobe.processors import GlobalLogprobsCapture

TOLERANCE = 2e-4  # nats
OPTIONS: dict[str, Any] = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 23,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "gpu_memory_utilization": 0.9,
    "block_size": 32,
}
PROMPTS = [np.random.default_rng(seed).integers(2, 250, 40).tolist() for seed in range(5)]


def plain_rows(folder: str) -> Any:
    """Return each prompt's row by a separate forward pass of transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    with torch.inference_mode():
        logits = [model(torch.tensor([ids])).logits[0, -1] for ids in PROMPTS]
    return torch.stack(logits).double().log_softmax(-1).float()


def assert_rows(rows: Any, wanted: Any) -> None:
    np.testing.assert_allclose(rows, wanted, atol=TOLERANCE, rtol=0)


def without_our_options(folder: str) -> None:
    """Use an LLM made by its owner as in vLLM's documentation."""
    from vllm import LLM, SamplingParams
    from vllm.v1.sample.logits_processor import LogitsProcessor

    class Capture(LogitsProcessor):
        def __init__(self) -> None:
            self.rows: list[Any] = []

        def apply(self, logits: Any) -> Any:
            self.rows = [*self.rows, torch.log_softmax(logits, dim=-1)]
            return logits

        def is_argmax_invariant(self) -> bool:
            return True

        def update_state(self, batch_update: Any) -> None:
            pass

        def clear(self) -> None:
            self.rows = []

    wanted = plain_rows(folder)
    llm = LLM(model=folder, dtype="float32", seed=0, **OPTIONS)
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    watchers, capture = runner.input_batch.logitsprocs.argmax_invariant, Capture()
    num_before = len(watchers)
    lm = AsyncVirtualLM(llm, capture, 4)
    assert capture in watchers
    assert lm.llm_engine is llm
    assert lm.underlying_model is runner.model
    assert llm.llm_engine.model_config.max_logprobs == 20, "its owner's limit stays"
    assert_rows(lm.batch_next_token_logprobs_sync(token_ids_list=PROMPTS), wanted)
    assert_rows(torch.cat(capture.rows), wanted)
    assert_rows(asyncio.run(lm.batch_next_token_logprobs(PROMPTS[::-1])), wanted.flip(0))
    assert_rows(lm.next_token_logprobs_sync(PROMPTS[2]), wanted[2])
    assert_rows(capture.rows[-1], wanted[2:3])
    greedy = asyncio.run(lm.sample(PROMPTS[0], 3, [], 0))
    assert greedy[0] == wanted[0].argmax()
    capture.clear()
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids in PROMPTS],
        SamplingParams(**AsyncVirtualLM.default_params),
        use_tqdm=False,
    )
    assert len(outputs) == 5
    assert len(torch.cat(capture.rows)) >= 5, "its owner's steps, those of chunks included"
    lm.close()
    assert len(watchers) == num_before
    with AsyncVirtualLM(llm, GlobalLogprobsCapture()) as again:
        assert_rows(again.batch_next_token_logprobs_sync(PROMPTS), wanted)
        assert_rows(again.logprobs_capture.get_all_logprobs(), wanted)
    own = llm.generate([{"prompt_token_ids": PROMPTS[0]}], SamplingParams(max_tokens=3, temperature=0))
    assert own[0].outputs[0].token_ids[:3] == greedy


def with_our_options(folder: str) -> None:
    """Use an LLM made from `engine_options`."""
    from vllm import LLM

    wanted = plain_rows(folder)
    llm = LLM(**AsyncVirtualLM.engine_options(folder, OPTIONS))
    capture = GlobalLogprobsCapture()
    with AsyncVirtualLM(llm, capture) as lm:
        assert_rows(lm.batch_next_token_logprobs_sync(PROMPTS), wanted)
        assert_rows(capture.get_all_logprobs(), wanted)
        assert isinstance(lm.underlying_model, torch.nn.Module)


def freed(folder: str) -> None:
    """Check that an engine ends when its owner deletes the LLM, even if the closed model is kept."""
    from vllm import LLM

    wanted = plain_rows(folder)
    closed = []
    for _ in range(2):  # the second engine needs the memory of the first
        llm = LLM(model=folder, dtype="float32", seed=0, **OPTIONS)
        client = weakref.ref(llm.llm_engine.engine_core)
        lm = AsyncVirtualLM(llm, GlobalLogprobsCapture(), 4)
        assert_rows(lm.batch_next_token_logprobs_sync(PROMPTS), wanted)
        asyncio.run(lm.sample(PROMPTS[0], 3, [], 0))
        assert isinstance(lm.underlying_model, torch.nn.Module)
        lm.close()
        closed.append(lm)
        assert client() is not None, "it is its owner's"
        del llm
        assert client() is None, "as vLLM frees it without this library"


def by_name(folder: str) -> None:
    """Load models by name, one after the other."""
    from vllm import LLM

    wanted = plain_rows(folder)
    for _ in range(2):
        lm = AsyncVirtualLM.from_name(folder, OPTIONS, cache_size=2)
        assert isinstance(lm.llm_engine, LLM)
        assert_rows(lm.batch_next_token_logprobs_sync(PROMPTS), wanted)
        assert_rows(lm.logprobs_capture.get_all_logprobs(), wanted)
        assert isinstance(lm.underlying_model, torch.nn.Module)
        lm.close()
        try:
            lm.next_token_logprobs_sync(PROMPTS[0])
        except EngineClosedError:
            continue
        raise AssertionError("it was cleaned up")


if __name__ == "__main__":
    program, folder = sys.argv[1:]
    programs = {"without": without_our_options, "with": with_our_options, "by_name": by_name, "freed": freed}
    programs[program](folder)
