"""Distribution of a cluster's resources among actors, tested without Ray."""

from __future__ import annotations

from typing import Any

import pytest

from logprobe.analysis import DataSettings
from logprobe.analysis.datasets.settings import RaySettings, Share
from logprobe.errors import ParameterError
from refusals import raises

SMALL, LARGE = {"CPU": 4.0}, {"CPU": 16.0, "memory": 1e9}
GPUS = {"CPU": 8.0, "GPU": 4.0}


@pytest.mark.parametrize(
    ("machines", "asked", "share"),
    [
        ([SMALL], {}, (1, 4, 0)),
        ([SMALL, LARGE], {}, (2, 4, 0)),  # one actor per machine, each with the CPUs of the smallest machine
        ([SMALL, LARGE], {"ray_actors": 5}, (5, 4, 0)),
        ([LARGE], {"ray_actors": 3}, (3, 5, 0)),
        ([LARGE], {"ray_cpus": 2}, (1, 2, 0)),
        ([GPUS, GPUS], {}, (8, 2, 1)),  # one actor per GPU
        ([GPUS, SMALL], {}, (4, 2, 1)),
        ([GPUS], {"ray_gpus": 0}, (1, 8, 0)),
        ([GPUS], {"ray_gpus": 0.5}, (8, 1, 0.5)),
        ([GPUS], {"ray_gpus": 2}, (2, 4, 2)),
        ([{"CPU": 2.0}], {"ray_actors": 4, "ray_cpus": 0.5}, (4, 0.5, 0)),
    ],
)
def test_the_cluster_is_shared_out_evenly(machines: Any, asked: dict[str, Any], share: Any) -> None:
    actors, cpus, gpus = share
    want = Share(num_actors=actors, num_cpus=cpus, num_gpus=gpus)
    assert RaySettings(**asked).share(machines) == want


@pytest.mark.parametrize(
    ("machines", "asked"),
    [
        ([], {}),
        ([SMALL], {"ray_actors": 5}),
        ([SMALL, SMALL], {"ray_cpus": 6}),
        ([SMALL], {"ray_gpus": 1}),
        ([{"node:1": 1.0}], {}),
    ],
)
def test_more_than_there_is_is_refused(machines: Any, asked: dict[str, Any]) -> None:
    with pytest.raises(
        ParameterError, match=r"ray_actors: the cluster has room for [0-4] actors of"
    ) as caught:
        RaySettings(**asked).share(machines)
    assert caught.value.parameter == "ray_actors"


@pytest.mark.parametrize(
    "asked",
    [{"ray_actors": 0}, {"ray_actors": True}, {"ray_cpus": 0}, {"ray_gpus": -1}, {"ray_cpus": float("nan")}],
)
def test_a_number_that_means_nothing_is_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(ParameterError) as caught:
        RaySettings(**asked)
    assert caught.value.parameter == next(iter(asked))


def test_a_boundary_rule_needs_a_context_to_split() -> None:
    with raises(ParameterError, parameter="boundary"):
        DataSettings(boundary="token")
    for column in ("context_column", "choices_column"):
        assert DataSettings(boundary="token", **{column: "c"}).boundary == "token"
