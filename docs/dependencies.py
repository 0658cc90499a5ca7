"""Print the table of dependencies from pyproject.toml as Markdown, for docs/dependencies.md.

`--lowest` prints the lowest versions that pyproject.toml allows, as constraints for pip, instead. `--names`
prints the names of the packages that the quick tests run on.
"""

from __future__ import annotations

import itertools
import re
import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
USED_FOR = {
    "torch": "models without a native decoder, GPUs, processors that use tensors",
    "transformers": "models without a native decoder; the reference for the verification of native decoders",
    "tokenizers": "tokenizers",
    "jinja2": "chat templates",
    "safetensors": "reading weights; next-token distributions over HTTP",
    "gguf": "reading GGUF files",
    "huggingface_hub": "downloading models",
    "filelock": "locking entries of the model cache",
    "platformdirs": "the folder of the model cache",
    "cachetools": "LRU caches",
    "numpy": "arrays",
    "ml_dtypes": "bfloat16 arrays",
    "cffi": "calls of the native kernels",
    "msgspec": "request bodies, messages between processes, JSON",
    "pyzmq": "messages between processes",
    "pyarrow": "Arrow and Parquet",
    "regex": "splitting texts into words",
    "typer": "the command line",
    "rich": "progress bars and tables",
    "starlette": "HTTP routes",
    "uvicorn": "HTTP server",
    "uvloop": "the server's event loop",
    "httptools": "parsing HTTP",
    "prometheus-client": "`/metrics`",
    "vllm": '`engine="vllm"`',
    "ray": "data sets on a cluster",
    "llguidance": "grammars",
    "genlm-backend": "`integrations.genlm`",
    "lm-eval": "lm-evaluation-harness, in process and over HTTP",
    "inspect-ai": "Inspect, in process",
    "openai": "types of messages and replies in Inspect",
    "lighteval": "lighteval, in process and over HTTP",
    "triton": "decoder, extraction and sampling on a GPU",
    "matplotlib": "`plot()`",
    "pandas": "`to_pandas()`",
    "polars": "`to_polars()`",
    "nbclient": "running the example notebook",
    "ipykernel": "running the example notebook",
    "anyio": "the remote client",
    "httpx": "the remote client",
    "tinker": "`integrations.tinker`",
    "scikit-learn": "fitting confidence (`calibrate`)",
}
USERS_EXTRAS = (
    "torch",
    "arrow",
    "vllm",
    "ray",
    "grammar",
    "genlm",
    "lm-eval",
    "inspect",
    "lighteval",
    "cuda",
    "plot",
    "frames",
    "notebook",
    "remote",
    "tinker",
    "eval",
)
TESTED = ("torch", "arrow", "test")  # extras that the quick tests need
UNCONSTRAINED = {"torch"}  # the lowest CPU builds are not on the index that pip uses


def requirements() -> dict[str, list[str]]:
    """Return the requirements of each extra; the key "" has those of every installation."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    own = {extra: [one for one in extras[extra] if not one.startswith("logprobe[")] for extra in USERS_EXTRAS}
    return {"": project["dependencies"]} | own


def parts(requirement: str) -> tuple[str, str]:
    """Return the name and the version bounds of a requirement, without extras and markers."""
    match = re.match(r"([\w-]+)(?:\[[^\]]*\])?([^;]*)", requirement)
    assert match is not None, requirement
    return match[1], match[2].strip()


def text() -> str:
    """Return the table of dependencies."""
    lines = ["| library | versions | with | for |", "|---|---|---|---|"]
    for extra, listed in requirements().items():
        for name, bounds in map(parts, listed):
            lines.append(f"| {name} | {bounds} | {f'`[{extra}]`' if extra else 'all'} | {USED_FOR[name]} |")
    return "\n".join(lines) + "\n"


def lowest() -> str:
    """Return the lowest allowed version of each requirement, one constraint per line."""
    listed = itertools.chain.from_iterable(requirements().values())
    found = {name: re.search(r">=([\w.]+)", bounds) for name, bounds in map(parts, listed)}
    return "\n".join(
        f"{name}=={bound[1]}" for name, bound in found.items() if bound and name not in UNCONSTRAINED
    )


def names() -> str:
    """Return the packages that the quick tests run on, without versions, one per line."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    listed = [*project["dependencies"], *(line for extra in TESTED for line in extras.get(extra, []))]
    found = dict.fromkeys(name for name, _ in map(parts, listed))
    return "\n".join(name for name in found if name != project["name"])


if __name__ == "__main__":
    if "--names" in sys.argv:
        print(names())
    else:
        print(lowest() if "--lowest" in sys.argv else text().rstrip("\n"))
