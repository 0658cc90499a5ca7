"""The threads of the native library: each item once, for several callers, and in a child process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch

from logprobe.kernels.layers.norm import norm_stage
from logprobe.kernels.stages import Stage


def adding(num_items: int) -> tuple[Stage, torch.Tensor]:
    """A stage of so many items, each of which adds ones to a row of the tensor."""
    out = torch.zeros(num_items, 8)
    stage = norm_stage(torch.ones(num_items, 8), torch.ones(8), out, 0.0, out)
    return Stage("norm", "NormArgs", num_items=num_items, **stage.fields | {"block_rows": 1}), out


@pytest.mark.parametrize("num_threads", range(1, 9))
@pytest.mark.parametrize("num_items", [0, 1, 2, 7, 1000])
def test_every_item_runs_exactly_once(num_items: int, num_threads: int) -> None:
    stage, out = adding(num_items)
    for times in range(1, 4):
        stage.run(num_threads=num_threads)
        assert (out == times).all()


def test_runs_from_several_python_threads_do_not_mix() -> None:
    wrong: list[int] = []

    def run_often(index: int) -> None:
        stage, out = adding(50 + index)
        for times in range(1, 201):
            stage.run(num_threads=2)
            if not (out == times).all():
                wrong.append(index)

    callers = [threading.Thread(target=run_often, args=(index,)) for index in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


def test_torch_computes_the_same_between_runs() -> None:
    matrix = torch.randn(200, 200, generator=torch.Generator().manual_seed(0))
    want = matrix @ matrix
    for num_threads in (2, 3, 1, 8):
        stage, out = adding(100)
        stage.run(num_threads=num_threads)
        assert (out == 1).all()
        assert torch.equal(matrix @ matrix, want)


FORK = """
import os, sys, torch
from logprobe.kernels.layers.norm import rms_norm
torch.set_num_threads(3)
x, weight = torch.randn(500, 64), torch.ones(64)
want = rms_norm(x, weight, 1e-5)
child = os.fork()
if child == 0:
    os._exit(0 if all(torch.equal(rms_norm(x, weight, 1e-5), want) for _ in range(100)) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert torch.equal(rms_norm(x, weight, 1e-5), want)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_has_threads_of_its_own() -> None:
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=120)
