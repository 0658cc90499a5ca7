"""docs/dependencies.md from pyproject.toml, and the lowest versions that it allows as constraints for pip.

`python docs/dependencies.py` prints the page, `python docs/dependencies.py --lowest` the constraints.
"""

from __future__ import annotations

import itertools
import re
import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
USED_FOR = {
    "torch": "tensors, devices, the model's modules where no native decoder runs",
    "transformers": "configurations, modules, tokenizers; what every native decoder is proven against",
    "tokenizers": "fast tokenizers, and those rebuilt from GGUF files",
    "jinja2": "chat templates",
    "safetensors": "reading weights; whole rows over HTTP",
    "gguf": "what GGUF's blocks hold",
    "huggingface_hub": "fetching models",
    "filelock": "one process at a time in an entry of the cache",
    "platformdirs": "where the cache lies",
    "cachetools": "rows that are kept, the least used go first",
    "numpy": "arrays of the host",
    "cffi": "declarations and calls of the native kernels",
    "msgspec": "bodies, messages between processes, JSON",
    "pyzmq": "messages between processes",
    "pyarrow": "Arrow and Parquet",
    "regex": "how words are cut for surprisals",
    "typer": "the command line",
    "rich": "progress bars and tables",
    "starlette": "routes",
    "uvicorn": "HTTP",
    "uvloop": "the server's event loop",
    "httptools": "reading HTTP",
    "prometheus-client": "`/metrics`",
    "vllm": '`engine="vllm"`',
    "ray": "data sets on a cluster",
    "peft": "LoRA weights on the transformers decoder",
    "llguidance": "grammars",
    "genlm-backend": "`integrations.genlm`",
    "lm-eval": "lm-evaluation-harness, in process and over HTTP",
    "inspect-ai": "Inspect in process",
    "openai": "the shapes of messages and replies in Inspect",
    "lighteval": "lighteval, in process and over HTTP",
    "triton": "the decoder, extraction and draw on a GPU",
    "matplotlib": "`plot()`",
    "pandas": "`to_pandas()`",
    "polars": "`to_polars()`",
    "nbclient": "running the example notebook",
    "ipykernel": "running the example notebook",
    "anyio": "the remote client",
    "httpx": "the remote client",
}
USERS_EXTRAS = (
    "vllm",
    "ray",
    "peft",
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
)
AS_IT_COMES = {"torch"}  # whose lowest builds for a CPU are not where pip looks

HEADER = """# Dependencies

What is installed with logprobe, and with its extras, and what for. Written by `python docs/dependencies.py`
from pyproject.toml. An upper bound stands where a break was seen; `make test-lowest` tries the lowest ones
(torch as pip gives it): generations, scores, records, GGUF files and a server. Known holes are for whoever
installs to look up, in the versions that pip chose (`pip-audit`): no such run is part of this project's own
checks, since it needs a database over the network.

"""


def requirements() -> dict[str, list[str]]:
    """Extra ("" of all) → requirements."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    return {"": project["dependencies"]} | {
        extra: project["optional-dependencies"][extra] for extra in USERS_EXTRAS
    }


def parts(requirement: str) -> tuple[str, str]:
    """Name and bounds, without extras and markers."""
    match = re.match(r"([\w-]+)(?:\[[^\]]*\])?([^;]*)", requirement)
    assert match is not None, requirement
    return match[1], match[2].strip()


def page() -> str:
    """The whole page."""
    lines = ["| library | versions | with | for |", "|---|---|---|---|"]
    for extra, listed in requirements().items():
        for name, bounds in map(parts, listed):
            lines.append(f"| {name} | {bounds} | {f'`[{extra}]`' if extra else 'all'} | {USED_FOR[name]} |")
    return HEADER + "\n".join(lines) + "\n"


def lowest() -> str:
    """The lowest version of each, one constraint a line."""
    listed = itertools.chain.from_iterable(requirements().values())
    found = {name: re.search(r">=([\w.]+)", bounds) for name, bounds in map(parts, listed)}
    return "\n".join(
        f"{name}=={bound[1]}" for name, bound in found.items() if bound and name not in AS_IT_COMES
    )


if __name__ == "__main__":
    print(lowest() if "--lowest" in sys.argv else page().rstrip("\n"))
