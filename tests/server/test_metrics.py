"""Latency metrics, as a server process reports them to Prometheus."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from server_process import Attacked, eventually, serving_process

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ASK = {"prompt": "the cat sat on the mat", "max_tokens": 3, "ignore_eos": True}


@pytest.fixture(scope="module", params=[(), ("--engine-process",)], ids=["thread", "process"])
def served(request: pytest.FixtureRequest, tiny_model_folder: Path) -> Iterator[Attacked]:
    with serving_process(tiny_model_folder, "--served-model-name", "base", *request.param) as server:
        yield server


def samples(server: Attacked) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Return sample name → labels → value."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    text = server.get("/metrics").data.decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def count(server: Attacked, name: str, **labels: str) -> float:
    return samples(server).get(f"logprobe_{name}_count", {}).get(tuple(sorted(labels.items())), 0)


def test_each_completion_waits_once_for_its_first_step(served: Attacked) -> None:
    before, steps = count(served, "queue_seconds"), count(served, "engine_step_seconds")
    assert served.post("/v1/completions", n=3, temperature=1, **ASK).status == 200
    # An engine process reports its stats several times a second.
    eventually(lambda: count(served, "queue_seconds") == before + 3, "they are not counted")
    eventually(lambda: count(served, "engine_step_seconds") >= steps + 3, "no step is counted")


def test_the_rows_of_prompts_are_told_by_route_and_model(served: Attacked) -> None:
    where = {"route": "/v1/completions", "model": "base"}
    before = count(served, "prompt_rows", **where)
    ended = count(served, "request_seconds", **where)
    assert served.post("/v1/completions", echo=True, logprobs=2, **ASK).status == 200
    assert served.post("/v1/completions", **ASK).status == 200
    assert count(served, "prompt_rows", **where) == before + 1
    assert count(served, "request_seconds", **where) == ended + 2


def test_every_histogram_is_whole(served: Attacked) -> None:
    assert served.post("/v1/completions", stream=True, logprobs=1, **ASK).status == 200
    found = samples(served)
    names = [name.removesuffix("_bucket") for name in found if name.endswith("_bucket")]
    assert {"logprobe_queue_seconds", "logprobe_engine_step_seconds", "logprobe_request_seconds"} <= {*names}
    for name in names:
        for labels, total in found[f"{name}_count"].items():
            buckets = {
                dict(key)["le"]: value
                for key, value in found[f"{name}_bucket"].items()
                if tuple(label for label in key if label[0] != "le") == labels
            }
            ordered = sorted(buckets, key=float)
            assert all(buckets[one] <= buckets[more] for one, more in pairwise(ordered))
            assert (ordered[-1], buckets[ordered[-1]]) == ("+Inf", total)
        assert all(value >= 0 for value in found[f"{name}_sum"].values())


def test_an_engine_that_takes_requests_is_up(served: Attacked) -> None:
    assert samples(served)["logprobe_engine_up"] == {(): 1.0}
