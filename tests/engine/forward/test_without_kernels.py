"""Without any built variant of the native library, the reference implementations give the same numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from logprobe import LLM
from logprobe.kernels.native import VARIABLE

if TYPE_CHECKING:
    from pathlib import Path

NATS = 1e-4
CONTEXT = [3, 40, 51, 7, 99, 12, 64, 30, 5, 18, 77, 23, 41, 9, 60, 33, 21, 14, 88, 47]
PAIRS = [(CONTEXT, [50, 8, 31]), ([*CONTEXT, 6], [9, 9]), (CONTEXT[:5], [70, 2, 13, 4, 55])]
SAMPLING = [{"temperature": 0.0}, {"temperature": 1.2, "top_p": 0.9, "top_k": 60, "min_p": 1e-4, "seed": 5}]

CHILD = """
import json, logging, sys
from pathlib import Path
from logprobe.kernels import native
native.FOLDER = Path(sys.argv[1])

warnings = []
handler = logging.Handler(logging.WARNING)
handler.emit = warnings.append
logging.getLogger("logprobe").addHandler(handler)

from logprobe import LLM, SamplingParams
from logprobe.cli.info import facts
from logprobe.errors import ParameterError
from logprobe.kernels import kernel_info

def numbers(scores):
    records = [score.record for score in scores]
    return [one.chosen_entries().logprobs.tolist() + one.arrays.logprobs.tolist() for one in records]

def run(folder, pairs, sampling):
    with LLM(folder, kv_cache_memory_bytes=1 << 24) as llm:
        alone = [numbers(llm.score([pair], logprobs=5)) for pair in pairs]
        scores = llm.score(pairs, logprobs=5)
        params = [SamplingParams(max_tokens=8, ignore_eos=True, logprobs=0, **one) for one in sampling]
        outputs = llm.generate([pairs[0][0]] * len(params), params)
        return {
            "alone": alone,
            "scores": numbers(scores),
            "ids": [output.outputs[0].token_ids for output in outputs],
            "logprobs": [output.outputs[0].cumulative_logprob for output in outputs],
            "info": scores[0].record.info.to_dict(),
        }

def refused(folder):
    try:
        LLM(folder, weights="checkpoint")
    except ParameterError as error:
        return error.parameter

given = json.loads(sys.argv[2])
models = [run(folder, given["pairs"], given["sampling"]) for folder in given["folders"]]
found = {"models": models, "refused": refused(given["folders"][0]), "kernels": kernel_info()}
print(json.dumps(found | {"native": facts()["native"], "num_warnings": len(warnings)}))
"""


def without_kernels(folder: Path, models: list[Path | str], pairs: list[Any] = PAIRS) -> Any:
    given = json.dumps({"folders": [str(model) for model in models], "pairs": pairs, "sampling": SAMPLING})
    command = [sys.executable, "-c", CHILD, str(folder), given]
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def numbers(llm: LLM, pairs: list[Any]) -> list[Any]:
    """Return log-probabilities of each pair: its chosen tokens, then all entries."""
    records = [score.record for score in llm.score(pairs, logprobs=5)]
    return [one.chosen_entries().logprobs.tolist() + one.arrays.logprobs.tolist() for one in records]


def assert_near(ours: list[Any], expected: list[Any]) -> None:
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=NATS, rtol=0)


def assert_same_model(found: Any, llm: LLM, pairs: list[Any]) -> None:
    assert_near(found["scores"], numbers(llm, pairs))
    assert_near([one for (one,) in found["alone"]], found["scores"])
    drawn = llm.score([(pairs[0][0], ids) for ids in found["ids"]])
    assert_near(found["logprobs"], [score.logprob for score in drawn])
    assert (found["info"]["arithmetic"], found["info"]["weights"]) == ("torch", "plain")


def test_numbers_are_those_of_the_native_kernels_and_of_transformers(
    tiny_model_folder: Path, tiny_window_folder: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    folders = [tiny_model_folder, tiny_window_folder]
    found = without_kernels(tmp_path, [*folders])
    assert found["num_warnings"] == 1
    assert found["refused"] == "weights"
    assert (found["kernels"]["cpu"], found["native"]) == ("torch", None)
    for folder, ours in zip(folders, found["models"], strict=True):
        with LLM(str(folder), kv_cache_memory_bytes=1 << 24) as llm:
            assert_same_model(ours, llm, PAIRS)
        module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for (context, continuation), logprobs in zip(PAIRS, ours["scores"], strict=True):
            with torch.inference_mode():
                logits = module(torch.tensor([[*context, *continuation]])).logits[0].double()
            rows = logits[len(context) - 1 : -1].log_softmax(-1)
            chosen = rows[range(len(rows)), continuation]
            np.testing.assert_allclose(logprobs[: len(rows)], chosen, atol=NATS, rtol=0)


@pytest.mark.real_model
def test_the_default_model_gives_the_same_numbers(real_llm: LLM, tmp_path: Path) -> None:
    text = real_llm.text
    pairs = [
        (text.encode(context).tolist(), text.encode(continuation).tolist())
        for context, continuation in [("The capital of France is", " Paris."), ("1 2 3 4", " 5 6 7")]
    ]
    found = without_kernels(tmp_path, ["smollm2"], pairs)
    assert_same_model(found["models"][0], real_llm, pairs)
