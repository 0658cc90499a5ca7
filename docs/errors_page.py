"""docs/errors.md from logprobe/errors.py: its tree, and what the docstring of each class says."""

from __future__ import annotations

import inspect

from logprobe import errors

HEADER = """# Errors

Every error that this library raises on purpose, when it comes, and what to do. This page is written by
`python docs/errors_page.py` (`make docs`) from `logprobe/errors.py`. Each is also what Python has for its
kind, so that `except ValueError` catches a wrong parameter; each message names the thing at fault and the
remedy in one line. The command line prints that line and ends with exit code 1 (2: wrong use); a server
answers it as `{"error": {"message", "type", "param", "code"}}`: 400 for a `ParameterError`, 503 for an
`EngineClosedError`, 500 for the rest ([Failures](api.md#failures)).

```python
from logprobe import LLM, SamplingParams
from logprobe.errors import BatchError, ParameterError

llm = LLM("smollm2")
try:
    SamplingParams(temprature=0.5)
except ParameterError as error:
    print(error.parameter, error)  # ... has no such parameter; did you mean 'temperature'?

try:
    outputs = llm.generate(["the cat", "the dog"], SamplingParams(max_tokens=4))
except BatchError as error:  # some failed: the others are whole
    outputs = error.outputs
    print(error.errors)  # index → error

for output in llm.generate(["the cat", []], on_error="return"):
    print(output.error or output.outputs[0].text)  # nothing is raised: each failure is its output's own
```

"""


def page() -> str:
    """The page as it should stand."""
    drawing = (errors.__doc__ or "").split("::\n\n")[1].split("\n\nEach")[0]
    sections = [_section(error) for error in all_errors()]
    tree = inspect.cleandoc(drawing)
    return f"{HEADER}```text\n{tree}\n```\n\n" + "\n".join(sections)


def all_errors() -> list[type[errors.LogprobeError]]:
    """The classes in the order of the file."""
    kinds = [one for one in vars(errors).values() if inspect.isclass(one)]
    return [one for one in kinds if issubclass(one, errors.LogprobeError)]


def _section(error: type[errors.LogprobeError]) -> str:
    when, _, remedy = (inspect.getdoc(error) or "").partition("\n\nRemedy: ")
    if not remedy:
        raise ValueError(f"{error.__name__}: its docstring ends with no paragraph `Remedy: ...`")
    parents = ", ".join(_link(base) for base in error.__bases__)
    remedy = " ".join(remedy.split())
    return f"## {error.__name__}\n\n{when}\n\n- **Remedy:** {remedy}\n- **Is a** {parents}.\n"


def _link(base: type) -> str:
    own = issubclass(base, errors.LogprobeError)
    return f"[{base.__name__}](#{base.__name__.lower()})" if own else f"`{base.__name__}`"


if __name__ == "__main__":
    print(page(), end="")
