"""Resolve a model's name to the folder with its files, and download or convert them if needed.

The command line and the engine call `resolve`; `loading` and `vocabulary` take the `ModelFiles` it returns.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from logprobe.errors import DownloadError, InputError, ModelNotFoundError, UnsupportedModelError, closest
from logprobe.models.cache import (
    GGUF,
    MANIFEST,
    checksum_of,
    checksums_of,
    entry_folder,
    is_there,
    listed_version,
    new_entry,
    point_at,
)
from logprobe.models.folder import check_counts, check_files, check_shards
from logprobe.models.known import KNOWN_MODELS, KnownModel
from logprobe.models.sources import weight_files


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The folder with a model's config, weights and tokenizer files, and the name that the caller gave."""

    name: str
    folder: Path
    # Version of the weights, if known without reading them: `sha256:` and the digest of a GGUF file, or
    # `commit:` and the commit of a repository.
    version: str | None = None


def resolve(name: str, *, download: bool = True) -> ModelFiles:
    """Find a model's files by known name, local folder, local `.gguf` file or Hugging Face id, in this order.

    Use `./name` for a local folder that has the name of a known model.

    Args:
        name: a known name, path or Hugging Face id.
        download: if True, download missing files; if False, use only files that are on this machine.

    Raises:
        ModelNotFoundError: there is no such model, or the model is not on this machine and `download` is
            False.
        DownloadError: the files could not be downloaded or stored.
        ChecksumError: a downloaded file does not have the published checksum.
        UnsupportedModelError: the model or the format of its files is not supported.
        InputError: a GGUF file cannot be read.
    """
    if known := KNOWN_MODELS.get(name):
        folder = _known_folder(known, download=download)
        return ModelFiles(name, folder, f"sha256:{known.gguf_sha256}")
    path = Path(name).expanduser()
    if name and path.is_dir():
        return ModelFiles(name, checked_folder(path))
    if path.is_file():
        return _gguf_files(name, path)
    if looks_like_hub_id(name):
        folder = checked_folder(_hub_folder(name, download=download))
        return ModelFiles(name, folder, f"commit:{folder.name}")
    raise ModelNotFoundError(_not_found(name))


def weight_version(files: ModelFiles) -> str:
    """Return the version of a model's weights, as stored in records.

    It is `files.version` if known. Otherwise it is `sha256:` and the digest of the weight file or, if there
    are several, the digest of what `sha256sum` prints for them. Unchanged files are not hashed again.

    Raises:
        InputError: a file cannot be read.
    """
    if files.version is not None:
        return files.version
    paths = weight_files(files.folder)
    try:
        digests = checksums_of(paths)
    except OSError as error:
        raise InputError(
            f"{error.filename or files.folder}: cannot be read ({error.strerror}); check the file"
        ) from error
    return f"sha256:{digests[0]}" if len(digests) == 1 else listed_version(paths, digests)


def quantization(files: ModelFiles) -> str | None:
    """Return llama.cpp's name for a GGUF file's quantization, such as `Q4_1`; None for other formats.

    Raises:
        InputError: a GGUF file cannot be read.
    """
    if known := KNOWN_MODELS.get(files.name):
        return known.quantization
    if not has_gguf(files.folder):
        return None
    manifest = json.loads((files.folder / MANIFEST).read_text(encoding="utf-8"))
    if "quantization" in manifest:
        own: str | None = manifest["quantization"]
        return own
    # The manifest was written by an earlier version.
    from logprobe.models.gguf.file import GgufFile

    return GgufFile(files.folder / GGUF).quantization


def known_folder(model: KnownModel) -> Path:
    """Return the folder of a known model in the cache, which need not exist."""
    return entry_folder(model.name, model.gguf_sha256)


def checked_folder(folder: Path) -> Path:
    """Check that a folder has a config, weights and a tokenizer, and return it.

    Weights are safetensors or, in a cache entry, a GGUF file or a link to one.

    Raises:
        ModelNotFoundError: one of the three is missing, or a linked file has been moved or changed.
        UnsupportedModelError: the weights are pickled, or a file fails a check in the module `folder`.
    """
    check_files(folder)
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(f"{folder}: has no config.json; give the folder with the model's files")
    if has_gguf(folder):
        _check_linked(folder)
    elif not any(folder.glob("*.safetensors")):
        pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
        if pickled:
            raise UnsupportedModelError(
                f"{folder}: {pickled[0]} is a pickle, which can execute code and is not loaded; "
                "save the weights as safetensors"
            )
        raise ModelNotFoundError(f"{folder}: has no *.safetensors; give a folder with the weights")
    check_shards(folder)
    if not has_gguf(folder):
        check_counts(folder, weight_files(folder))
    if not (folder / "tokenizer.json").is_file():
        raise ModelNotFoundError(
            f"{folder}: has no tokenizer.json; convert the tokenizer with transformers "
            "(AutoTokenizer.from_pretrained, save_pretrained)"
        )
    return folder


def has_gguf(folder: Path) -> bool:
    """Return True if the folder is a cache entry with a GGUF file."""
    return (folder / MANIFEST).is_file() and ((folder / GGUF).is_symlink() or (folder / GGUF).is_file())


def _check_linked(folder: Path) -> None:
    """Raise `ModelNotFoundError` if the entry links to a file that was moved or changed."""
    link = folder / GGUF
    if not link.is_symlink():
        return
    path = link.readlink()
    if not path.is_file():
        raise ModelNotFoundError(f"{path}: no longer exists; give the current path of the .gguf file")
    try:
        sha256 = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["source_sha256"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelNotFoundError(f"{folder}: {MANIFEST} cannot be read; remove the folder") from error
    if checksum_of(path) != sha256:
        raise ModelNotFoundError(
            f"{path}: has changed since it was converted; load it by its path to convert it again"
        )


def _known_folder(model: KnownModel, *, download: bool) -> Path:
    folder = known_folder(model)
    if is_there(folder):
        return folder
    if not download:
        raise ModelNotFoundError(
            f"{model.name}: not in {folder.parent}; run `logprobe models pull {model.name}`"
        )
    from logprobe.models.fetch import fetch_gguf
    from logprobe.models.gguf.convert import convert

    with new_entry(folder) as partial:
        if partial is not None:
            scratch = partial / "fetched"
            scratch.mkdir()
            gguf = fetch_gguf(model, scratch)
            convert(gguf, partial, name=model.name, sha256=model.gguf_sha256)
            gguf.replace(partial / GGUF)
            _remove_tree(scratch)
    return folder


def _gguf_files(name: str, path: Path) -> ModelFiles:
    if path.suffix != ".gguf":
        raise UnsupportedModelError(f"{path}: is not a .gguf file; give a model folder or a .gguf file")
    sha256 = checksum_of(path)
    folder = entry_folder("gguf", sha256)
    if not is_there(folder):
        from logprobe.models.gguf.convert import convert

        with new_entry(folder) as partial:
            if partial is not None:
                convert(path, partial, name=path.stem, sha256=sha256)
                point_at(partial / GGUF, path)
    _link_anew(folder / GGUF, path)
    return ModelFiles(name, checked_folder(folder), f"sha256:{sha256}")


def _link_anew(link: Path, path: Path) -> None:
    """Make an entry's link point to the path that the caller gave most recently."""
    if link.is_symlink() and link.readlink() != path.absolute():
        try:
            point_at(link, path)
        except OSError as error:
            reason = error.strerror or error
            raise DownloadError(
                f"{link}: cannot be linked to {path} ({reason}); make the link's folder writable"
            ) from error


def _hub_folder(name: str, *, download: bool) -> Path:
    from logprobe.models.fetch import snapshot

    if not download:
        return snapshot(name, download=False)

    return snapshot(name, download=True)


def _remove_tree(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder)


def looks_like_hub_id(name: str) -> bool:
    """Return True if a name has the form `owner/name`."""
    owner, slash, repository = name.partition("/")
    return bool(slash and owner and repository) and "/" not in repository and not name.startswith((".", "~"))


def _not_found(name: str) -> str:
    near = closest(name, KNOWN_MODELS, 0.5)
    hint = f"did you mean {near!r}? " if near else ""
    return (
        f"no model {name!r}: {hint}known names are {', '.join(KNOWN_MODELS)}; "
        "or give a local folder, a .gguf file, or a Hugging Face id (owner/name)"
    )
