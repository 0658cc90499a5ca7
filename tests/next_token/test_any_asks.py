"""Any requests, in any order, concurrent, cancelled or not: each row is that of its own prefix.

Rows are compared with a float64 pass. On the tiny Llama, whose logits spread over 20 nats, a plain float32
pass is off by 3e-5 as well: its last hidden state is off by 1e-6 of its norm, which is 8, and the head's
rows have norm 4. Here they are a tenth of that, so that 1e-5 tells a wrong row from rounding.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from logprobe.next_token import AsyncLM
from logprobe.testing import check_integrity, open_requests

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

TOLERANCE = 1e-5  # nats
HEAD_SHARE = 0.1
IDS = (2, 3, 4)
# Few ids and short prefixes, so that many requests share tokens.
PREFIX = st.lists(st.sampled_from(IDS), min_size=1, max_size=6)
PREFIXES = st.one_of(PREFIX.map(lambda ids: [ids]), st.lists(PREFIX, min_size=2, max_size=5))
ASK = st.tuples(PREFIXES, st.booleans(), st.sampled_from([0, 0, 0, 1, 3]))  # prefixes, cancelled, pause (ms)
Ask = tuple[list[list[int]], bool, int]
FORGETS = st.sampled_from(["nothing", "prefixes", "rows", "both"])


def float64_norm(self: Any, hidden: Any) -> Any:
    """Compute in the input's precision, as transformers' own norm always uses float32."""
    scale = torch.rsqrt((hidden * hidden).mean(-1, keepdim=True) + self.variance_epsilon)
    return self.weight * (hidden * scale)


class ExactRows:
    """Compute a prefix's row by a separate float64 pass; only the rotary table stays float32."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype="float64").eval()
        for module in self.model.modules():
            if type(module).__name__ == "LlamaRMSNorm":
                module.forward = float64_norm.__get__(module)
        self._known: dict[tuple[int, ...], Any] = {}

    def __call__(self, token_ids: Sequence[int]) -> Any:
        key = tuple(token_ids)
        if key not in self._known:
            with torch.inference_mode():
                logits = self.model(torch.tensor([list(key)])).logits[0, -1]
            self._known[key] = torch.log_softmax(logits, -1).numpy()
        return self._known[key]


@pytest.fixture(scope="module")
def gentle_folder(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with scaled-down logits."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("gentle-llama")
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    model.lm_head.weight.data *= HEAD_SHARE
    model.save_pretrained(folder)
    for file in tiny_model_folder.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def exact_row(gentle_folder: Path) -> ExactRows:
    return ExactRows(gentle_folder)


@pytest.fixture(scope="module", params=[0, 3000, 1 << 20])
def bounded_lm(request: Any, gentle_folder: Path) -> Iterator[AsyncLM]:
    """An AsyncLM that caches no row, two rows, or all; 3 batch rows, 16 tokens per step, 48 slots."""
    bounds = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "kv_cache_memory_bytes": 48 * 1300}
    with AsyncLM.from_name(str(gentle_folder), cache_bytes=request.param, **bounds) as lm:
        yield lm


async def ask_all(lm: AsyncLM, asks: list[Ask]) -> list[Any]:
    """Run requests and return their results or errors; several prefixes form a batch."""
    tasks: list[asyncio.Task[Any]] = []
    for prefixes, is_given_up, pause_ms in asks:
        is_batch = len(prefixes) > 1
        one = lm.batch_next_token_logprobs(prefixes) if is_batch else lm.next_token_logprobs(prefixes[0])
        tasks.append(asyncio.create_task(one))
        await asyncio.sleep(pause_ms / 1000)
        if is_given_up:
            tasks[-1].cancel()
    return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 120)


def forget(lm: AsyncLM, what: str) -> None:
    if what in {"prefixes", "both"}:
        lm.clear_kv_cache()
    if what in {"rows", "both"}:
        lm.clear_cache()


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(asks=st.lists(ASK, min_size=1, max_size=12), forgotten=FORGETS)
def test_every_ask_ends_in_its_own_row(
    bounded_lm: AsyncLM, exact_row: ExactRows, asks: list[Ask], forgotten: str
) -> None:
    forget(bounded_lm, forgotten)
    ends = asyncio.run(ask_all(bounded_lm, asks))
    owners: dict[int, tuple[int, ...]] = {}
    for (prefixes, is_given_up, _), end in zip(asks, ends, strict=True):
        if isinstance(end, BaseException):
            assert is_given_up
            assert isinstance(end, asyncio.CancelledError)
            continue
        for ids, row in zip(prefixes, end if end.ndim == 2 else [end], strict=True):
            np.testing.assert_allclose(row, exact_row(ids), atol=TOLERANCE, rtol=0)
            place = row.__array_interface__["data"][0]
            assert owners.setdefault(place, tuple(ids)) == tuple(ids)
    cache = bounded_lm._cache
    assert cache.num_bytes <= cache.max_bytes
    assert cache.num_bytes == sum(row.nbytes + len(key[-1]) for key, (row, _) in cache._kept.items())


def test_afterwards_every_slot_has_one_owner_and_nothing_is_in_flight(bounded_lm: AsyncLM) -> None:
    bounded_lm.next_token_logprobs_sync([5])
    assert bounded_lm._batcher._in_flight == {}
    assert bounded_lm._batcher._held == []
    assert open_requests(bounded_lm) == []
    check_integrity(bounded_lm)


def test_rows_err_from_float64_by_no_more_than_twice_what_a_plain_float32_pass_does(
    lm: AsyncLM, exact_row: ExactRows, plain_row: Any
) -> None:
    asked = [list(ids) for length in range(1, 6) for ids in itertools.product(IDS, repeat=length)]
    rows = lm.batch_next_token_logprobs_sync(asked)
    want = np.stack([exact_row(ids) for ids in asked])
    plain = np.stack([plain_row(ids) for ids in asked])
    error, plain_error = np.abs(rows - want), np.abs(plain - want)
    # The summation order differs, and so does the rounding, but not its magnitude.
    assert error.max() <= 2 * plain_error.max()
    assert np.sqrt((error**2).mean()) <= 2 * np.sqrt((plain_error**2).mean())
