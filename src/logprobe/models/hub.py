"""A Hugging Face id → a folder in the hub's own cache, holding only files that cannot run code."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from logprobe.errors import DownloadError, ModelNotFoundError

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
    """Fetch the repository's safetensors, config and tokenizer files, or find them in the cache.

    Raises:
        ModelNotFoundError: the hub has no such repository, or `download` is False and it is not in the cache.
        DownloadError: the hub cannot be reached, refuses access, or the cache cannot be written.
    """
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
            f"{repository}: access must be asked for on the hub; then run `hf auth login`"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelNotFoundError(
            f"{repository}: no such folder here, and no such model on the hub"
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        if not download:
            raise ModelNotFoundError(
                f"{repository}: not on this machine; run `logprobe models pull {repository}`"
            ) from error
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise DownloadError(
            f"{repository}: the hub could not be used ({reason[:160]}); check the network, "
            "HF_HUB_OFFLINE and the free disk space, or name a local folder"
        ) from error
