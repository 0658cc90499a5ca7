"""Unmodified evaluation tools, in an environment that has only this project's source on its path."""

from __future__ import annotations

import os
import subprocess
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from server_process import serving_process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = REPOSITORY / ".rivals/evaluators"
TIMEOUT_S = 1200  # per tool run, also on a busy machine
QUESTIONS = [
    ("What colour is the sky on a clear day?", ["blue", "green", "a dog"], 0),
    ("Which animal barks?", ["the cat", "the dog", "the fish"], 1),
    ("How many legs does a cat have?", ["two", "three", "four"], 2),
    ("What do bees make?", ["honey", "milk and the", "stones"], 0),
    ("Where do fish live?", ["in the water", "on the moon", "in a book"], 0),
    ("What is frozen water called?", ["ice", "fire", "sand é"], 0),
]
ROWS = [
    {
        "question": question,
        "choices": choices,
        "answer": answer,
        "text": f"{question} It is {choices[answer]}, the cat and the dog said. One é.",
    }
    for question, choices, answer in QUESTIONS
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = "evaluation tools have an environment of their own: `make test-evaluators` builds it"
    for item in items:
        if Path(__file__).parent in item.path.parents and not (ENVIRONMENT / "bin/python").exists():
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def rows() -> list[dict[str, Any]]:
    return ROWS


@pytest.fixture(scope="session")
def path_of_us(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Make a path with this project's source and the entry points that an installation would have."""
    told = tmp_path_factory.mktemp("installed") / "logprobe-0.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: logprobe\nVersion: 0\n")
    groups = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [
        line
        for group, points in groups.items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in points.items()))
    ]
    (told / "entry_points.txt").write_text("\n".join(lines))
    return os.pathsep.join([str(REPOSITORY / "src"), str(told.parent)])


@pytest.fixture(scope="session")
def run(path_of_us: str) -> Callable[..., str]:
    """Run a command of the environment; return its standard output."""

    def run_command(*command: Any, **variables: str) -> str:
        quiet = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment = os.environ | quiet | {"PYTHONPATH": path_of_us} | variables
        [program, *arguments] = map(str, command)
        done = subprocess.run(
            [str(ENVIRONMENT / "bin" / program), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        return done.stdout

    return run_command


@pytest.fixture(scope="session")
def versions(run: Callable[..., str]) -> str:
    """Return the versions of the tools."""
    names = ("inspect-ai", "lighteval", "lm-eval", "openai", "transformers", "torch")
    code = f"from importlib.metadata import version; print({{name: version(name) for name in {names}}})"
    return run("python", "-c", code)


@pytest.fixture(scope="session")
def served(smollm2_folder: Path) -> Iterator[str]:
    """Serve SmolLM2 and yield the address."""
    flags = ("--served-model-name", "smollm2", "--kv-cache-memory-bytes", "200000000")
    with serving_process(smollm2_folder, *flags) as server:
        yield f"http://127.0.0.1:{server.port}"
