"""The pages of docs/ and their examples, run as a reader would run them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from logprobe import LLM

DOCS = Path(__file__).parents[1] / "docs"
PAGES = {page.relative_to(DOCS).as_posix(): page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md")}
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)
SHELL = re.compile(r"```sh\n(.*?)```", re.DOTALL)
# The pages' names for a model and a server.
MODELS = ('"smollm2"', '"HuggingFaceTB/SmolLM2-135M-Instruct"')
SERVER = "http://127.0.0.1:8000"


def examples_of(page: str) -> list[str]:
    """Return the Python examples of a page, in order."""
    return PYTHON.findall(PAGES[page])


def run_examples(page: str, examples: list[str], *, model: Path, url: str = SERVER) -> None:
    """Run examples in order with another model and server; models that they open are closed."""
    names: dict[str, Any] = {}
    try:
        for example in examples:
            code = example.replace(SERVER, url)
            for name in MODELS:
                code = code.replace(name, repr(str(model)))
            exec(compile(code, page, "exec", dont_inherit=True), names)  # noqa: S102 - our own page
    finally:
        for value in names.values():
            if isinstance(value, LLM):
                value.close()
