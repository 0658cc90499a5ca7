"""A model's name → the folder with its files, fetched and read if they are not there yet.

The command line and the engine call `resolve`; `loading` and `vocabulary` take what it returns.
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
    """A folder with config, weights and tokenizer files, and the name it was asked for by."""

    name: str
    folder: Path
    version: str | None = (
        None  # of the weights, where the name alone tells: `sha256:` of a GGUF file, or `commit:`
    )


def resolve(name: str, *, download: bool = True) -> ModelFiles:
    """Find a model's files by known name, local folder, local `.gguf` file or Hugging Face id, in this order.

    With `download=False` only what is on this machine is used. `./name` means a folder that is named like a
    known model.

    Raises:
        ModelNotFoundError: there is no such model, or it is not here and `download` is False.
        DownloadError: the files could not be fetched or stored.
        ChecksumError: what was fetched is not what was published.
        UnsupportedModelError: the files are not such as can be used here.
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
    """Which weights some files hold, as records say it.

    Of a folder: `sha256:` and the digest of its one file of weights; of several, that of the lines that
    `sha256sum` writes of them. Files that have not changed since they were read are not read again.

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
            f"{files.folder}: cannot be read ({error.strerror}); look who may read it"
        ) from error
    return f"sha256:{digests[0]}" if len(digests) == 1 else listed_version(paths, digests)


def quantization(files: ModelFiles) -> str | None:
    """Quantisation of a checkpoint by llama.cpp's name, such as `Q4_1`; None for weights that have none.

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
    # An entry of an earlier version.
    from logprobe.models.gguf.file import GgufFile

    return GgufFile(files.folder / GGUF).quantization


def known_folder(model: KnownModel) -> Path:
    """Give the folder of a known model, whether it is there or not."""
    return entry_folder(model.name, model.gguf_sha256)


def checked_folder(folder: Path) -> Path:
    """Give the folder back if it holds a config, weights and a tokenizer.

    Weights are safetensors; or, in an entry of the cache, a GGUF file or a link to one.

    Raises:
        ModelNotFoundError: one of the three is missing, or a linked file has been moved or changed.
        UnsupportedModelError: the weights or the tokenizer are only there in a form that is not read, or a
            file is not what its name says.
    """
    check_files(folder)
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(
            f"{folder}: no config.json there; name the folder that holds the model's files"
        )
    if has_gguf(folder):
        _check_linked(folder)
    elif not any(folder.glob("*.safetensors")):
        pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
        if pickled:
            raise UnsupportedModelError(
                f"{folder}: {pickled[0]} is a pickle, which can run code, and is not read; "
                "save the weights as safetensors"
            )
        raise ModelNotFoundError(f"{folder}: no *.safetensors there; the weights are missing")
    check_shards(folder)
    if not has_gguf(folder):
        check_counts(folder, weight_files(folder))
    if not (folder / "tokenizer.json").is_file():
        raise ModelNotFoundError(
            f"{folder}: no tokenizer.json there; convert the tokenizer with transformers "
            "(AutoTokenizer.from_pretrained, save_pretrained)"
        )
    return folder


def has_gguf(folder: Path) -> bool:
    """Whether it is an entry of the cache whose weights are a GGUF file's."""
    return (folder / MANIFEST).is_file() and ((folder / GGUF).is_symlink() or (folder / GGUF).is_file())


def _check_linked(folder: Path) -> None:
    """Refuse a user's file that is not what the entry was made of."""
    link = folder / GGUF
    if not link.is_symlink():
        return
    path = link.readlink()
    if not path.is_file():
        raise ModelNotFoundError(f"{path}: is not there any more; name the .gguf file where it is now")
    try:
        sha256 = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["source_sha256"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelNotFoundError(f"{folder}: its {MANIFEST} cannot be read; remove the folder") from error
    if checksum_of(path) != sha256:
        raise ModelNotFoundError(f"{path}: is another file by now; name it to read it anew")


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
        raise UnsupportedModelError(
            f"{path}: is a file, but no .gguf file; name a model folder or a .gguf file"
        )
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
    """Let an entry be of the same file at the place where it was named last."""
    if link.is_symlink() and link.readlink() != path.absolute():
        try:
            point_at(link, path)
        except OSError as error:
            reason = error.strerror or error
            raise DownloadError(f"{link}: cannot be made to point at {path} ({reason})") from error


def _hub_folder(name: str, *, download: bool) -> Path:
    from logprobe.models.fetch import snapshot

    if not download:
        return snapshot(name, download=False)

    return snapshot(name, download=True)


def _remove_tree(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder)


def looks_like_hub_id(name: str) -> bool:
    """Whether a name has the form owner/name."""
    owner, slash, repository = name.partition("/")
    return bool(slash and owner and repository) and "/" not in repository and not name.startswith((".", "~"))


def _not_found(name: str) -> str:
    near = closest(name, KNOWN_MODELS, 0.5)
    hint = f"did you mean {near!r}? " if near else ""
    return (
        f"no model {name!r}: {hint}known names are {', '.join(KNOWN_MODELS)}; "
        "else name a local folder, a .gguf file, or a Hugging Face id (owner/name)"
    )
