from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import logprobe

PUBLIC = {
    "__version__",
    "LLM",
    "LoadConfig",
    "AsyncLLM",
    "CacheConfig",
    "CompletionOutput",
    "EngineConfig",
    "FlatLogprobs",
    "Logprob",
    "LogprobeError",
    "ParallelConfig",
    "RemoteLLM",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
    "Score",
}
KERNELS = {
    "batch_logprobs_to_host",
    "extract",
    "extract_top_k_logprobs",
    "head_extract",
    "kernel_info",
}


def test_the_public_names_are_these() -> None:
    assert set(logprobe.__all__) == PUBLIC
    assert len(logprobe.__all__) == len(PUBLIC)
    assert set(dir(logprobe)) == PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC - {"__version__"}))
def test_the_typing_tests_use_the_whole_interface(name: str) -> None:
    tree = ast.parse((Path(__file__).parent / "typing/public_api.py").read_text(encoding="utf-8"))
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    imported = {
        alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert name in imported
    if name in {"LLM", "AsyncLLM", "RemoteLLM"}:
        assert {member for member in dir(getattr(logprobe, name)) if member[0] != "_"} <= used


def test_the_kernels_names_are_these() -> None:
    assert set(importlib.import_module("logprobe.kernels").__all__) == KERNELS


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_name_can_be_imported(name: str) -> None:
    assert getattr(logprobe, name) is not None


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_a_kernels_name_can_be_imported(name: str) -> None:
    assert callable(getattr(importlib.import_module("logprobe.kernels"), name))


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        _ = logprobe.LMM  # type: ignore[attr-defined]


def test_ray_pool_is_found_by_the_path_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = object()
    monkeypatch.setitem(sys.modules, "logprobe.integrations.ray", SimpleNamespace(RayPool=pool))
    assert importlib.import_module("logprobe.analysis.ray").RayPool is pool


def test_every_error_is_of_one_tree_and_drawn_in_it() -> None:
    errors = importlib.import_module("logprobe.errors")
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    raised = [one for one in classes if issubclass(one, Exception)]
    assert all(issubclass(one, errors.LogprobeError) for one in raised)
    assert errors.__doc__ is not None
    assert all(one.__name__ in errors.__doc__ for one in raised)
