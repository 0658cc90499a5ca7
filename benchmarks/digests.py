"""Measure how far row digests differ between arithmetics, dtypes and quantizations, to choose a tolerance.

The verifier runs the default model, exported to float32, with the native kernels. Its digests of generated
texts are compared with those of other computations: transformers' float32 modules (the same weights in
another arithmetic), narrower dtypes, and quantized weights. For replies of 8 and 32 tokens, prints the
minimum, median and maximum of the mean difference in nats, and how many replies match. docs/audit.md has the
figures of 8 tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from machine import machine_facts
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from logprobe import LLM, SamplingParams
from logprobe.analysis.verification import TOLERANCE
from logprobe.models import resolve
from logprobe.models.export import export_model
from logprobe.models.known import DEFAULT_MODEL
from logprobe.records.digests import STEP, codes_of, digest_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Pairs = list[tuple[list[int], list[int]]]
    Array = np.ndarray[Any, np.dtype[Any]]

TEXT = Path(__file__).resolve().parent / "texts" / "coriolanus.txt"
PROMPT_TOKENS, LENGTHS = 24, (8, 32)
KV_BYTES = 1 << 28


def quantized(folder: Path, target: Path, kind: GGMLQuantizationType) -> Path:
    """Copy a float32 model, and round its matrices to the values of a GGUF type."""
    shutil.copytree(folder, target)
    for path in target.glob("*.safetensors"):
        weights = load_file(path)
        for name, weight in weights.items():
            if weight.ndim == 2:
                values = quants.dequantize(quants.quantize(weight.astype(np.float32), kind), kind)
                weights[name] = values.reshape(weight.shape).astype(np.float32)
        save_file(weights, path, metadata={"format": "pt"})
    return target


def provers(folder: Path, scratch: Path) -> Iterator[tuple[str, Callable[[Pairs], Array]]]:
    """Yield the label of each computation, and a function that returns its codes."""
    yield (
        "the same weights, native kernels, smaller steps",
        partial(loaded, folder, max_num_batched_tokens=64),
    )
    yield "the same weights, native kernels of processors without AVX-512", partial(by_avx2, folder)
    yield "the same weights, transformers' float32 modules", partial(loaded, folder, weights="plain")
    for dtype in (torch.float16, torch.bfloat16):
        yield f"computed in {str(dtype).removeprefix('torch.')}", partial(of_transformers, folder, dtype)
    for kind in (GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0):
        yield (
            f"weights quantized to {kind.name}",
            partial(loaded, quantized(folder, scratch / kind.name, kind)),
        )


def loaded(folder: Path, pairs: Pairs, **settings: Any) -> Array:
    """Return the codes that logprobe computes."""
    with LLM(str(folder), kv_cache_memory_bytes=KV_BYTES, **settings) as llm:
        return codes(llm, pairs)


def by_avx2(folder: Path, pairs: Pairs) -> Array:
    """Return the codes that the kernels for AVX2 compute, in a process of their own."""
    child = subprocess.run(
        [sys.executable, __file__, "--codes", str(folder)],
        input=json.dumps(pairs),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "LOGPROBE_KERNELS": "v3"},
    )
    return np.array(json.loads(child.stdout))


def of_transformers(folder: Path, dtype: torch.dtype, pairs: Pairs) -> Array:
    """Return the codes that transformers computes in a narrower dtype."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    num_prompt, found = len(pairs[0][0]), []
    with torch.no_grad():  # all texts have the same length
        logits = model(torch.tensor([prompt + tokens for prompt, tokens in pairs])).logits
    for (prompt, tokens), rows in zip(pairs, logits[:, num_prompt - 1 : -1], strict=True):
        logprobs = rows.float().log_softmax(-1).numpy()
        ids = [digest_ids(np.array(prompt), place, logprobs.shape[1]) for place in range(len(tokens))]
        found.append(codes_of(np.take_along_axis(logprobs, np.array(ids), axis=1)))
    return np.array(found).astype(np.int64)


def codes(llm: LLM, pairs: Pairs) -> Array:
    """Return the codes of all rows of equally long texts, (texts, tokens, ids)."""
    vocab_size = llm.engine.capabilities().vocab_size
    ids = [
        [digest_ids(np.array(prompt), place, vocab_size) for place in range(len(tokens))]
        for prompt, tokens in pairs
    ]
    found = []
    for score in llm.score(pairs, logprob_token_ids=ids):
        assert score.record is not None
        assert score.record.given is not None
        found.append(codes_of(score.record.given.arrays.logprobs))
    return np.array(found).reshape(len(pairs), len(pairs[0][1]), -1).astype(np.int64)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replies", type=int, default=200)
    parser.add_argument("--codes", type=Path, help="print the codes of this model for the pairs on stdin")
    given = parser.parse_args()
    if given.codes:
        print(json.dumps(loaded(given.codes, json.load(sys.stdin)).tolist()))
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        folder = scratch / "float32"
        export_model(resolve(DEFAULT_MODEL), folder, dtype="float32")
        with LLM(str(folder), kv_cache_memory_bytes=KV_BYTES) as llm:
            text = llm.text.encode(TEXT.read_text()[: 400 * given.replies]).tolist()
            starts = range(0, given.replies * PROMPT_TOKENS, PROMPT_TOKENS)
            prompts = [text[start : start + PROMPT_TOKENS] for start in starts]
            asked = SamplingParams(max_tokens=max(LENGTHS), seed=0, ignore_eos=True)
            outputs = llm.generate(prompts, asked)
            pairs = [(output.prompt_token_ids, output.outputs[0].token_ids) for output in outputs]
            own = codes(llm, pairs)
        for label, compute in provers(folder, scratch):
            differences = np.abs(compute(pairs) - own) * STEP
            for length in LENGTHS:
                means = differences[:, :length].mean(axis=(1, 2))
                row = {"prover": label, "tokens": length, "replies": len(means)}
                row |= dict(
                    zip(("least", "median", "most"), np.quantile(means, [0, 0.5, 1]).tolist(), strict=True)
                )
                rows.append(row | {"matching": int((means <= TOLERANCE).sum())})
                print(json.dumps(rows[-1]), flush=True)
    print(json.dumps({"machine": machine_facts(), "tolerance": TOLERANCE}))


if __name__ == "__main__":
    main()
