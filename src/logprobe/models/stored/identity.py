"""Cache keys, which depend on the model's files and on the code and libraries that wrote the cached files.

If any of these changes, the key changes too, so that stale files are never read.
"""

from __future__ import annotations

import functools
import hashlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from logprobe.kernels.info import native_library
from logprobe.kernels.layers.layout import LAYOUT
from logprobe.models.cache import MANIFEST, home

if TYPE_CHECKING:
    from collections.abc import Iterable

# bytes hashed at the start of a large safetensors file: names, shapes and offsets
_HEADER_BYTES: Final = 1 << 20
_SMALL_BYTES: Final = 1 << 25  # largest file that is hashed whole
_SETTINGS: Final = ("config.json", "generation_config.json")
_LIBRARIES: Final = ("torch", "transformers", "tokenizers", "numpy")
_CODE: Final = ("engine", "kernels", "models")


def source_key(folder: Path) -> str:
    """Return a key for a model's config and weights; for large files, it covers size, time and header only.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for name in (*_SETTINGS, MANIFEST):  # the manifest has the checksum of a GGUF file
        if (folder / name).is_file():
            digest.update((folder / name).read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        facts = file.stat()
        digest.update(f"{file.name} {facts.st_size} ".encode())
        if facts.st_size > _SMALL_BYTES:
            digest.update(f"{facts.st_mtime_ns} ".encode())
        with file.open("rb") as weights:
            digest.update(weights.read(_HEADER_BYTES if facts.st_size > _SMALL_BYTES else -1))
    return digest.hexdigest()[:16]


def panels_folder(folder: Path, source: str) -> Path:
    """Return the cache folder for the panels of a model with this source key."""
    return home() / "panels" / f"{_stem(folder)}-{source}-{_digest([LAYOUT])}"


def record_folder(folder: Path, source: str) -> Path:
    """Return the cache folder for the verification record of a model with this source key."""
    return home() / "loads" / f"{_stem(folder)}-{source}-{_digest([LAYOUT, *_code()])}"


def _stem(folder: Path) -> str:
    return folder.resolve().name[:40]


def _digest(parts: Iterable[Any]) -> str:
    return hashlib.sha256(repr([*parts]).encode()).hexdigest()[:16]


@functools.cache
def _code() -> tuple[str, ...]:
    """Return what a verification record depends on: digests of this package's code, library versions."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[2]
    for name in _CODE:
        for pattern in ("*.py", "*.json"):
            for file in sorted((root / name).rglob(pattern)):
                digest.update(file.read_bytes())
    native = native_library()
    return digest.hexdigest(), "" if native is None else native.digest, *map(_version, _LIBRARIES)


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return ""
