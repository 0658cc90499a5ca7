"""Print the tree of errors and a section for each class, from logprobe/errors.py, for docs/errors.md."""

from __future__ import annotations

import inspect

from logprobe import errors


def text() -> str:
    """Return the tree of errors, and a section for each."""
    drawing = (errors.__doc__ or "").split("::\n\n")[1].split("\n\nEach")[0]
    sections = [_section(error) for error in all_errors()]
    tree = inspect.cleandoc(drawing)
    return f"```text\n{tree}\n```\n\n" + "\n".join(sections)


def all_errors() -> list[type[errors.LogprobeError]]:
    """Return the classes in the order of the file."""
    classes = [value for value in vars(errors).values() if inspect.isclass(value)]
    return [error for error in classes if issubclass(error, errors.LogprobeError)]


def _section(error: type[errors.LogprobeError]) -> str:
    when, _, remedy = (inspect.getdoc(error) or "").partition("\n\nRemedy: ")
    if not remedy:
        raise ValueError(f"{error.__name__}: the docstring does not end with a paragraph `Remedy: ...`")
    parents = ", ".join(_link(base) for base in error.__bases__)
    remedy = " ".join(remedy.split())
    return f"## {error.__name__}\n\n{when}\n\n- **Remedy:** {remedy}\n- **Is a** {parents}.\n"


def _link(base: type) -> str:
    own = issubclass(base, errors.LogprobeError)
    return f"[{base.__name__}](#{base.__name__.lower()})" if own else f"`{base.__name__}`"


if __name__ == "__main__":
    print(text(), end="")
