"""The bits of one scored text and one generation: the same with any number of threads, and as recorded."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from logprobe import LLM, SamplingParams
from logprobe.kernels import threads

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.real_model
TEXT = (Path(__file__).parents[2] / "examples" / "lighthouse.txt").read_text(encoding="utf-8")[:1500]
# Digests of the scored text, the generated ids and their numbers, equal on all processors.
KNOWN = ("cd92814f0469a225", "f4f9aaa433ddfc23", "5dead4ae16bd7fce")


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    """Restore the number of threads afterwards."""
    own = threads.num_threads()
    yield
    threads.set_num_threads(own)


def digest(numbers: object) -> str:
    return hashlib.sha256(np.asarray(numbers, dtype=np.float64).tobytes()).hexdigest()[:16]


def digests() -> tuple[str, str, str]:
    with LLM("smollm2", kv_cache_memory_bytes=1 << 27) as llm:
        scored = llm.generate([TEXT], SamplingParams(max_tokens=0, prompt_logprobs=0))[0].prompt_logprobs
        greedy = SamplingParams(max_tokens=40, temperature=0, logprobs=0, ignore_eos=True)
        made = llm.generate(["The keeper of the light"], greedy)[0].outputs[0]
        assert scored is not None
        assert made.logprobs is not None
        return digest(scored.logprobs), digest(made.token_ids), digest(made.logprobs.logprobs)


def test_the_bits_are_those_that_are_stored_on_any_number_of_threads() -> None:
    found = []
    for number in (1, 3, 64):  # also more than there are cores
        threads.set_num_threads(number)
        found.append(digests())
    assert set(found) == {KNOWN}
