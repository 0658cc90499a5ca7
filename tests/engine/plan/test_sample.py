"""The random numbers of a sample: Philox4x64-10, addressed by seed, sample and position."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from logprobe.engine.plan.sample import Sample, new_generator
from logprobe.sampling import SamplingParams
from logprobe.transport.messages import Request

MASK = 2**64 - 1
# of the first sample with seed 1
STREAM = [
    0.078375195455204,
    0.573634227660987,
    0.8250777828516757,
    0.43847250290748474,
    0.8797639278186833,
    0.13723274809940889,
]


def philox(counter: int, key: tuple[int, int]) -> tuple[int, int, int, int]:
    """The four numbers of a block, as in Salmon et al. 2011 (Philox4x64-10)."""
    first, second = key
    a, b, c, d = (counter >> (64 * word) & MASK for word in range(4))
    for _ in range(10):
        left, right = 0xD2E7470EE14C6C93 * a, 0xCA5A826395121157 * c
        a, b, c, d = (right >> 64) ^ b ^ first, right & MASK, (left >> 64) ^ d ^ second, left & MASK
        first, second = (first + 0x9E3779B97F4A7C15) & MASK, (second + 0xBB67AE8584CAA73B) & MASK
    return a, b, c, d


def sample_of(seed: int | None, *, index: int = 0, number: int = 0, engine_seed: int = 0) -> Sample:
    params = SamplingParams(seed=seed, temperature=1.0, max_tokens=50)
    request = Request(request_id="a", prompt_token_ids=np.arange(3, dtype=np.int32), params=params)
    return Sample(request, index, 100, partial(new_generator, request, number, index, engine_seed))


def numbers(sample: Sample, count: int = 10) -> list[float]:
    found = []
    for _ in range(count):
        found.append(sample.uniform())
        sample.append_token(7)
    return found


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**80 + 3])
@pytest.mark.parametrize("index", [0, 3])
def test_a_number_follows_from_key_and_position(seed: int, index: int) -> None:
    words: Any = np.random.SeedSequence([index, 0, 0, seed]).generate_state(2, np.uint64)
    key = (int(words[0]), int(words[1]))
    expected = [(philox(place // 4 + 1, key)[place % 4] >> 11) * 2**-53 for place in range(10)]
    assert numbers(sample_of(seed, index=index)) == expected


def test_the_stream_stays_the_same() -> None:
    """Published results with a seed must be reproducible by later versions."""
    assert numbers(sample_of(1), 6) == STREAM


def test_numbers_ahead_are_those_of_the_later_positions() -> None:
    expected = numbers(sample_of(5))
    sample = sample_of(5)
    assert [sample.uniform(ahead) for ahead in (3, 0, 2)] == [expected[3], expected[0], expected[2]]
    sample.append_token(7)
    assert sample.uniform() == expected[1]


def test_tokens_that_are_not_sampled_use_up_their_numbers() -> None:
    expected = numbers(sample_of(5))
    sample = sample_of(5)
    for _ in range(4):
        sample.append_token(7)
    assert [sample.uniform(), sample.uniform(2)] == [expected[4], expected[6]]


def test_seeds_samples_and_requests_have_their_own_streams() -> None:
    streams = [
        *(numbers(sample_of(seed)) for seed in (0, 1, -1)),
        numbers(sample_of(0, index=1)),
        numbers(sample_of(None)),
        numbers(sample_of(None, number=1)),
        numbers(sample_of(None, engine_seed=1)),
    ]
    assert len({number for stream in streams for number in stream}) == 70
    assert numbers(sample_of(0, number=5)) == streams[0]
