"""Rows of logits are computed without torch, with the same bits as from torch tensors."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import numpy_rows
from logprobe.kernels.placement import as_tensor

IMPORTS = """
import importlib, sys
from numpy_rows import RefusingFinder
sys.meta_path.insert(0, RefusingFinder())
importlib.import_module(sys.argv[1])
"""
FOLDER = str(Path(__file__).parent)


@pytest.mark.parametrize(
    "module",
    [
        "logprobe.cli",
        "logprobe.compat.extraction",
        "logprobe.compat.fastdeploy",
        "logprobe.compat.genlm",
        "logprobe.compat.logprobs_processor",
        "logprobe.engine.overlap",
        "logprobe.engine.prompt_rows",
        "logprobe.engine.recorder",
        "logprobe.engine.sampling_stage",
        "logprobe.kernels.draw.api",
        "logprobe.kernels.extraction.head",
        "logprobe.kernels.extraction.rows",
        "logprobe.model",
        "logprobe.next_token.lm",
        "logprobe.processors.builtin.grammar",
        "logprobe.processors.foreign",
        "logprobe.processors.pipeline",
        "logprobe.records.padded",
        "logprobe.sampling.sampler",
        "logprobe.transport.copy",
    ],
)
def test_a_module_is_imported_without_torch(module: str) -> None:
    command = [sys.executable, "-c", IMPORTS, module]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=FOLDER)
    assert done.returncode == 0, done.stderr[-2000:]


def test_arrays_without_torch_give_the_bits_of_tensors(tmp_path: Path) -> None:
    command = [sys.executable, numpy_rows.__file__, str(tmp_path / "rows")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    got: list[Any] = pickle.loads((tmp_path / "rows").read_bytes())  # noqa: S301 - our own
    want = numpy_rows.results(as_tensor)
    assert len(got) == len(want)
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == theirs.dtype
        assert mine.tobytes() == theirs.tobytes()


def test_tensors_are_what_the_other_side_gets() -> None:
    tensor = as_tensor(numpy_rows.logits_of("bfloat16"))
    assert tensor.dtype == torch.bfloat16
    assert np.isnan(float(tensor[3, 7]))


STYLED = """
import sys
from numpy_rows import Letters, RefusingFinder
sys.meta_path.insert(0, RefusingFinder())
from logprobe.config import EngineConfig
from logprobe.errors import MissingPackageError
from logprobe.processors import ModelFacts, Pipeline, adapt_callable, adapt_transformers
class Vllm:
    def __init__(self): pass
    def is_argmax_invariant(self): return False
    def update_state(self, batch_update): pass
    def apply(self, logits): return logits
class Slots:
    arg_names = ("a",)
    def __init__(self): pass
    def update_state(self, share_inputs): pass
    def apply(self, logits): return logits
facts = ModelFacts(vocab_size=9, eos_token_ids=frozenset(), text=Letters())
adapted = [adapt(lambda args: None, name="Adapted") for adapt in (adapt_callable, adapt_transformers)]
for processor in (Vllm, Slots, *adapted):
    try:
        Pipeline(EngineConfig(logits_processors=[processor]), facts)
    except MissingPackageError as error:
        assert "pip install 'logprobe[torch]'" in str(error), error
    else:
        raise SystemExit(f"{processor} was made")
"""


def test_processors_in_torchs_style_name_the_extra() -> None:
    command = [sys.executable, "-c", STYLED]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=FOLDER)
    assert done.returncode == 0, done.stderr[-2000:]
