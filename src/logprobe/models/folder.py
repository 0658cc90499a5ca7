"""Validate a model's folder, whose files are untrusted, before any library reads the files.

Files must be regular and of bounded size, and the counts in config.json must match the tensors that exist.
A malformed model therefore fails quickly, and in bounded memory, with a `ModelError`.
"""

from __future__ import annotations

import errno
import json
import re
import stat
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, TypeVar

import msgspec

from logprobe.errors import LogprobeError, ModelNotFoundError, UnsupportedModelError, shortened

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

INDEX: Final = "model.safetensors.index.json"
MAX_BYTES: Final = {
    "tokenizer.json": 1 << 27,  # four times the largest published one
    "config.json": 1 << 22,
}
MAX_OTHER_BYTES: Final = 1 << 24  # for an index, a chat template, tokenizer_config.json, ...
MAX_HEADER_BYTES: Final = 1 << 25  # header of a safetensors file: names and shapes
MAX_LAYERS: Final = 1024
# Layers allowed for any weights: config.json may have defaults for a part without weights (an image encoder).
FREE_LAYERS: Final = 128
MAX_REASON_CHARS: Final = 200
# Slack for experts without tensors: a default in config.json may be unused, or only some layers have experts.
FREE_EXPERTS: Final = 1024
EXPERT_SLACK: Final = 8
# Slack for parameters: weights may take one bit each, and a configuration may describe modules without
# weights.
NUMBERS_PER_BYTE: Final = 8
FREE_NUMBERS: Final = 1 << 24
# Files that transformers, tokenizers and this library read.
_LIBRARY_FILES: Final = (
    "config.json",
    "generation_config.json",
    INDEX,
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "chat_template*",
    "*.jinja",
    "additional_chat_templates/*.jinja",
    "*.model",
    "*.safetensors",
    "*.gguf",
)
# Errors that mean that file descriptors, disk or memory ran out; the files are not at fault.
_OUT_OF: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.ENOMEM})
_LAYERS: Final = re.compile(r"(layers?|blocks?|depth)$")
_EXPERTS: Final = re.compile(r"experts$")
T = TypeVar("T")


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


class _Tensor(msgspec.Struct, frozen=True):
    """An entry in a safetensors header; the entry `__metadata__` has no shape."""

    shape: Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(max_length=16)] | None = None


class _Held(NamedTuple):
    """Number of tensors and of matrices in a folder's safetensors files."""

    tensors: int
    matrices: int  # a tensor with more than two dimensions counts as a stack of matrices


@contextmanager
def reading_errors(what: str) -> Iterator[None]:
    """Convert any exception of a library that reads model files to `UnsupportedModelError`.

    Errors of this package are not converted, nor are errors that mean that memory, disk or file descriptors
    ran out.
    """
    try:
        yield
    except (LogprobeError, MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except Exception as error:
        if is_exhausted(error):
            raise
        raise UnsupportedModelError(_cannot_be_read(what, error)) from error
    except BaseException as error:
        # pyo3's PanicException derives from `BaseException` and cannot be imported.
        if type(error).__name__ != "PanicException":
            raise
        raise UnsupportedModelError(_cannot_be_read(what, error)) from None


def is_exhausted(error: BaseException) -> bool:
    """Return True if an error means that memory, disk or file descriptors ran out."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"  # torch's, which is not imported here
        or (isinstance(error, OSError) and error.errno in _OUT_OF)
    )


def check_files(folder: Path) -> None:
    """Check that all files that a library would read are regular files of bounded size.

    Raises:
        UnsupportedModelError: a file is a FIFO, a device or a socket, or is too large.
    """
    for path in sorted({path for pattern in _LIBRARY_FILES for path in folder.glob(pattern)}):
        try:
            facts = path.stat()
        except OSError:  # a dangling link, which is reported when the file is needed
            continue
        is_weights = path.suffix in {".safetensors", ".gguf"}
        if stat.S_ISDIR(facts.st_mode) and not is_weights:
            continue
        if not stat.S_ISREG(facts.st_mode):
            raise UnsupportedModelError(f"{path}: is not a regular file; fetch the model again")
        limit = MAX_BYTES.get(path.name, MAX_OTHER_BYTES)
        if not is_weights and facts.st_size > limit:
            raise UnsupportedModelError(
                f"{path}: has {facts.st_size} bytes, more than the limit of {limit}; fetch the model again"
            )


def shard_names(folder: Path) -> list[str] | None:
    """Return the sorted names of the weight files in a folder's index; None if there is no index.

    Raises:
        UnsupportedModelError: the index cannot be read, or names files outside the folder.
    """
    index = folder / INDEX
    if not index.is_file():
        return None
    names = sorted(set(_decoded(index.read_bytes(), _Index, str(index)).weight_map.values()))
    for name in names:
        if "/" in name or "\\" in name or not name.endswith(".safetensors"):
            raise UnsupportedModelError(
                f"{index}: {shortened(name)!r} is not the name of a safetensors file in this folder; "
                "fetch the model again"
            )
    return names


def check_shards(folder: Path) -> None:
    """Check that all weight files in a folder's index exist.

    Raises:
        ModelNotFoundError: a weight file is missing.
        UnsupportedModelError: for the reasons given in `shard_names`.
    """
    names = shard_names(folder) or []
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelNotFoundError(
            f"{folder}: {len(missing)} of {len(names)} weight files are missing, such as {missing[0]}; "
            "fetch the model again"
        )


def check_counts(folder: Path, files: list[Path]) -> None:
    """Check that config.json does not claim more layers or experts than the weights can have.

    Args:
        folder: the model's folder.
        files: the safetensors files in the folder.

    Raises:
        UnsupportedModelError: a count is too large, or the file is not a JSON object.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())  # not msgspec: transformers also accepts Infinity and NaN
    except (ValueError, RecursionError) as error:
        raise UnsupportedModelError(_cannot_be_read(str(path), error)) from error
    if not isinstance(config, dict):
        raise UnsupportedModelError(f"{path}: must be a JSON object; fetch the model again")
    held = _held(files)
    layers = experts = 0
    for name, value in _integers(config):
        if _LAYERS.search(name):
            layers = max(layers, value)
            claim = f"{path}: {shortened(name)} is {value}"
            if value > MAX_LAYERS:
                raise UnsupportedModelError(f"{claim}, but at most {MAX_LAYERS} layers are supported")
            if value > max(held.tensors, FREE_LAYERS):
                raise UnsupportedModelError(
                    f"{claim}, but the weights have only {held.tensors} tensors; fetch the model again"
                )
        elif _EXPERTS.search(name):
            experts = max(experts, value)
    if layers * experts > EXPERT_SLACK * held.matrices + FREE_EXPERTS:
        raise UnsupportedModelError(
            f"{path}: has {experts} experts in {layers} layers, but the weights have {held.matrices} "
            "matrices; fetch the model again"
        )


def check_numbers(name: str, num_numbers: int, num_bytes: int) -> None:
    """Check, before allocation, that a model does not have far more parameters than its files can hold.

    Raises:
        UnsupportedModelError: the sizes in config.json do not match the weights.
    """
    if num_numbers > NUMBERS_PER_BYTE * num_bytes + FREE_NUMBERS:
        raise UnsupportedModelError(
            f"{name}: its config.json describes {num_numbers} parameters, but its weight files have "
            f"{num_bytes} bytes; fetch the model again"
        )


def _held(files: list[Path]) -> _Held:
    """Count tensors and matrices; an unreadable file counts as empty and is reported when it is loaded."""
    tensors = matrices = 0
    for file in files:
        with file.open("rb") as opened:
            num_bytes = int.from_bytes(opened.read(8), "little")
            data = opened.read(num_bytes) if num_bytes <= MAX_HEADER_BYTES else b""
        try:
            header = msgspec.json.decode(data, type=dict[str, _Tensor])
        except (msgspec.MsgspecError, RecursionError):
            continue
        shapes = [tensor.shape for tensor in header.values() if tensor.shape is not None]
        tensors += len(shapes)
        matrices += sum(prod(shape[:-2]) for shape in shapes)
    return _Held(tensors, matrices)


def _integers(config: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield (key, value) for every integer in a configuration, including nested dicts."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _integers(value)
        elif isinstance(value, int):
            yield name, value


def _decoded(data: bytes, kind: type[T], what: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise UnsupportedModelError(_cannot_be_read(what, error)) from error


def _cannot_be_read(what: str, error: BaseException) -> str:
    reason = " ".join(f"{error}".split()) or type(error).__name__
    return f"{what} cannot be read ({shortened(reason, MAX_REASON_CHARS)}); fetch the model again"
