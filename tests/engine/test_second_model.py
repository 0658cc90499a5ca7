"""A second real model of another architecture: sliding windows, large vocabulary, tied head, BOS."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from logprobe import LLM, SamplingParams
from logprobe.models import load_model, resolve

TEXT = (Path(__file__).parent.parent.parent / "examples" / "lighthouse.txt").read_text(encoding="utf-8")


@pytest.mark.real_model
def test_gemma_scores_a_text_longer_than_its_window_as_transformers_does() -> None:
    files = resolve("gemma3-270m")
    with LLM("gemma3-270m", kv_cache_memory_bytes=1 << 26, weights="checkpoint") as llm:
        ids = llm.text.encode(TEXT)[:560]
        wanted = SamplingParams(max_tokens=0, prompt_logprobs=1)
        alone, batched, _ = (
            llm.generate(ids.tolist(), wanted)[0],
            *llm.generate([[*ids[:-1].tolist(), 7], ids[:40].tolist()], wanted),
        )
    model = load_model(files, dtype=torch.float32, attn_implementation="eager")
    assert len(ids) > model.config.get_text_config().sliding_window
    with torch.inference_mode():
        logits = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, :-1]
    targets = torch.from_numpy(ids[1:].astype(np.int64))[:, None]
    # Row by row, as the whole array in float64 would take a gigabyte.
    normalisers = torch.stack([row.double().logsumexp(-1) for row in logits])
    expected = (logits.gather(1, targets)[:, 0].double() - normalisers).numpy()

    for output in (alone, batched):
        assert output.prompt_logprobs is not None
        chosen = [output.prompt_logprobs.chosen(position) for position in range(1, len(ids) - 1)]
        found = np.array([entry[1].logprob for entry in chosen if entry is not None])
        assert np.abs(found - expected[:-1]).max() < 2e-4
