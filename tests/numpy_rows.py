"""Results of extraction, sampling and processors from the same logits as arrays or as tensors.

Run as a program, it refuses to import torch and transformers, and writes the results of arrays to a file.
"""

from __future__ import annotations

import pickle
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

REFUSED = ("torch", "transformers")
VOCAB_SIZE = 700


class RefusingFinder(MetaPathFinder):
    """Raise for modules that must not be imported, as if they were not installed."""

    def find_spec(self, fullname: str, *_: object) -> None:
        if fullname.partition(".")[0] in REFUSED:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


class Letters:
    """A tokenizer without a model."""

    eos_token_id = 9
    special_token_ids = frozenset({9})
    tokenizer: Any = None

    @property
    def vocabulary(self) -> Letters:
        return self

    def plain_ids(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id % 128])


def logits_of(dtype: Any) -> Any:
    """Return rows with ties, masked tokens and an invalid one."""
    logits = np.random.default_rng(5).normal(0, 4, (8, VOCAB_SIZE))
    logits[1] = np.round(logits[1])
    logits[2, 30:] = -np.inf
    logits[3, 7] = np.nan
    logits[4] = -np.inf
    return logits.astype(dtype)


def results(as_kind: Callable[[Any], Any]) -> list[Any]:
    """Return arrays of results from the same logits, given as `as_kind` converts them."""
    extraction = [
        part
        for dtype in (np.float32, np.float16, ml_dtypes.bfloat16)
        for part in _extracted(as_kind(logits_of(dtype)))
    ]
    return extraction + _sampled(as_kind) + _processed(as_kind)


def _extracted(logits: Any) -> list[Any]:
    from logprobe.kernels import batch_logprobs_to_host, extract, extract_top_k_logprobs
    from logprobe.kernels.extraction import reference
    from logprobe.records.rows import KERNEL_EXTRAS, host_array

    found: list[Any] = []
    for function in (extract, reference.extract):
        columns = dict.fromkeys(KERNEL_EXTRAS, True)
        rows = function(logits, range(8), 5, given_ids=[1, 699], **columns)
        found += [rows.token_ids, rows.logprobs, rows.ranks, rows.lse, *rows.extras.values()]
        found += [rows.given.logprobs, rows.given.ranks]
    assert all(isinstance(column, np.ndarray) for column in found)
    found += map(host_array, extract_top_k_logprobs(logits, 3))
    return [*found, *batch_logprobs_to_host(logits, [[1, 2]] * 8)]


def _sampled(as_kind: Callable[[Any], Any]) -> list[Any]:
    from logprobe.sampling import Sampler, SamplingParams

    params = [
        SamplingParams(
            temperature=temperature, top_k=top_k, top_p=top_p, logprobs=3, logprobs_mode="both", kept_ids=True
        )
        for temperature, top_k, top_p in [(0, 0, 1), (1, 0, 1), (0.7, 9, 1), (1e-5, 0, 0.8), (1, 0, 0.9)]
    ]
    logits = logits_of(np.float32)[[0, 1, 2, 5, 3]]
    changed = logits[:2] + np.float32(0.25)
    uniforms = np.random.default_rng(1).random(5)
    sampled = Sampler().sample(as_kind(logits), params, uniforms, as_kind(changed))
    raw: Any = sampled.logprobs
    processed: Any = sampled.processed_logprobs
    return [
        np.array(sampled.sampled_token_ids),
        np.array(sampled.is_valid),
        *(raw.token_ids, raw.logprobs, raw.ranks),
        *(processed.token_ids, processed.logprobs, processed.ranks),
        *(processed.extras["log_kept_mass"], processed.kept.token_ids),
    ]


def _processed(as_kind: Callable[[Any], Any]) -> list[Any]:
    from logprobe.config import EngineConfig
    from logprobe.processors import BatchRow, ModelFacts, Pipeline
    from logprobe.sampling import SamplingParams

    text: Any = Letters()
    facts = ModelFacts(vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({9}), text=text)
    pipeline = Pipeline(EngineConfig(logits_processors=["CaptureLogitsProcessor"]), facts)
    params = [
        SamplingParams(logit_bias={3: 2.5}, presence_penalty=0.5, repetition_penalty=1.3),
        SamplingParams(allowed_token_ids=[4, 5, 600], logits_processors_args={"capture": "row"}),
        SamplingParams(bad_words=["ab"], min_tokens=4, frequency_penalty=-0.25),
    ]
    samples = []
    for index, asked in enumerate(params):
        row = BatchRow(
            request_id=str(index), args=None, prompt_token_ids=[7], output_token_ids=[1, 97], params=asked
        )
        sample = pipeline.open(row, pipeline.admit(asked))
        assert sample is not None
        samples.append(sample)
    pipeline.prepare(samples)
    done = pipeline.apply(as_kind(logits_of(np.float32)[[0, 1, 5]]))
    assert not done.errors, done.errors
    capture: Any = pipeline.registered["CaptureLogitsProcessor"]
    return [done.logits, *capture.get_rows("row").values()]


if __name__ == "__main__":
    sys.meta_path.insert(0, RefusingFinder())
    Path(sys.argv[1]).write_bytes(pickle.dumps(results(lambda logits: logits)))
    assert not {name.partition(".")[0] for name in sys.modules} & {*REFUSED}
