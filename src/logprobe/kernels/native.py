"""Loads the native kernel library: its C declarations, and the variant for this processor.

The library is compiled from `native/` when the package is built (docs/dev/kernels.md).
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
from pathlib import Path
from typing import Any, Final

from logprobe.errors import ParameterError

FOLDER: Final = Path(__file__).parent / "_native"
VARIANTS: Final = ("v4", "v3", "neon")  # in order of preference
VARIABLE: Final = "LOGPROBE_KERNELS"


@functools.cache
def declarations() -> Any:
    """Return cffi's `FFI` with the structs and functions of `native/kernels.h`, written by the build."""
    return importlib.import_module("logprobe.kernels._native.declarations").ffi


class Library:
    """A loaded variant of the native library."""

    def __init__(self, variant: str) -> None:
        self.variant, self.path = variant, self.path_of(variant)
        self.functions: Any = declarations().dlopen(str(self.path))

    @staticmethod
    def path_of(variant: str) -> Path:
        """Return the path of a variant's file, which may not exist."""
        return FOLDER / f"kernels_{variant}.so"

    def can_run(self) -> bool:
        """Return True if this processor supports the variant's instructions."""
        return bool(self.functions.logprobe_can_run())

    @functools.cached_property
    def has_tiles(self) -> bool:
        """True if this process can use AMX tiles for bfloat16; the first read requests Linux's permission."""
        return bool(self.functions.logprobe_has_tiles())

    @functools.cached_property
    def digest(self) -> str:
        """First 16 hex digits of the SHA-256 of the library file."""
        return hashlib.sha256(self.path.read_bytes()).hexdigest()[:16]

    @property
    def compiler(self) -> str:
        """Name of the compiler that built the variant."""
        name: bytes = declarations().string(self.functions.logprobe_compiler())
        return name.decode()


@functools.cache
def library() -> Library:
    """Load the variant named in `LOGPROBE_KERNELS`, or the first in VARIANTS that runs on this processor.

    Raises:
        ParameterError: the variant named in `LOGPROBE_KERNELS` is not built, or cannot run on this processor.
        OSError: `LOGPROBE_KERNELS` is not set, and no variant can run on this processor.
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
    """Load a variant, or return the reason why it cannot run on this processor."""
    if variant not in VARIANTS or not Library.path_of(variant).exists():
        return "is not built"
    try:
        found = Library(variant)
    except OSError as error:
        return f"cannot be loaded: {error}"
    return found if found.can_run() else "needs instructions that this processor lacks"
