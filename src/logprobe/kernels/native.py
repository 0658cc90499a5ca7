"""The native library of kernels: its declarations, and the variant for this processor.

Before it: `native/` (docs/kernels.md), compiled when the package was built. After it: `stages`, which runs
the kernels.
"""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path
from typing import Any, Final

from cffi import FFI

from logprobe.errors import ParameterError

FOLDER: Final = Path(__file__).parent / "_native"
VARIANTS: Final = ("v4", "v3", "neon")  # the best one that this processor can run is chosen
VARIABLE: Final = "LOGPROBE_KERNELS"


@functools.cache
def declarations() -> FFI:
    """The structures and functions of `native/kernels.h`."""
    header = (FOLDER / "kernels.h").read_text(encoding="utf-8")
    ffi = FFI()
    ffi.cdef("".join(line for line in header.splitlines(keepends=True) if not line.startswith("#")))
    return ffi


class Library:
    """One variant, loaded."""

    def __init__(self, variant: str) -> None:
        self.variant, self.path = variant, self.path_of(variant)
        self.functions: Any = declarations().dlopen(str(self.path))

    @staticmethod
    def path_of(variant: str) -> Path:
        """Where a variant lies, if it was built."""
        return FOLDER / f"kernels_{variant}.so"

    def can_run(self) -> bool:
        """Whether this processor has the variant's instructions."""
        return bool(self.functions.logprobe_can_run())

    @functools.cached_property
    def digest(self) -> str:
        """Tells builds apart."""
        return hashlib.sha256(self.path.read_bytes()).hexdigest()[:16]

    @property
    def compiler(self) -> str:
        """What compiled it."""
        name: bytes = declarations().string(self.functions.logprobe_compiler())
        return name.decode()


@functools.cache
def library() -> Library:
    """Load the variant that `LOGPROBE_KERNELS` names, or else the best one that runs on this processor.

    Raises:
        ParameterError: the named variant is not built, or does not run here.
        OSError: none is named, and none runs here.
    """
    forced = os.environ.get(VARIABLE)
    problems: list[str] = []
    for variant in [forced] if forced else VARIANTS:
        found = _load(variant)
        if isinstance(found, Library):
            return found
        problems.append(f"{variant} {found}")
    if forced:
        built = [variant for variant in VARIANTS if Library.path_of(variant).exists()]
        remedy = f"unset it, or use one that is built and runs here (built: {', '.join(built) or 'none'})"
        raise ParameterError(VARIABLE, f"{problems[0]}; {remedy}")
    raise OSError(f"no variant runs here ({', '.join(problems)})")


def _load(variant: str) -> Library | str:
    """Return a variant, or why it does not run here."""
    if variant not in VARIANTS or not Library.path_of(variant).exists():
        return "is not built"
    try:
        found = Library(variant)
    except OSError as error:
        return f"cannot be loaded: {error}"
    return found if found.can_run() else "needs instructions that this processor lacks"
