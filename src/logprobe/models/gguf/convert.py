"""A GGUF file → a folder with the configuration and tokenizer files of its model, as transformers has them.

Its tensors stay where they are: `weights.GgufSource` reads them. `fetch` or the user brings the file;
`resolve` puts the folder into the cache; `loading` reads it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from logprobe.errors import InputError, LogprobeError
from logprobe.models.cache import MANIFEST, say
from logprobe.models.gguf.config import build_config
from logprobe.models.gguf.file import GgufFile
from logprobe.models.gguf.tokenizer import build_tokenizer
from logprobe.models.gguf.weights import GgufSource

if TYPE_CHECKING:
    from pathlib import Path


def convert(path: Path, folder: Path, *, name: str, sha256: str) -> None:
    """Write what the file says into `folder`, which exists; a manifest of name and source is written last.

    Raises:
        InputError: the file is no GGUF file, or is broken.
        UnsupportedModelError: the model cannot be read without a change of its results.
        OSError: the folder cannot be written.
    """
    say(f"{name}: reading {path.name}")
    try:
        gguf = GgufFile(path)
        config = build_config(gguf)
        GgufSource(path, config).check()
        build_tokenizer(gguf).save_pretrained(folder)
        config.save_pretrained(folder)
    except (LogprobeError, OSError):
        raise
    except Exception as error:  # libraries read the file's own words, each with errors of its own
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"{path}: cannot be converted ({reason:.300}); fetch it again") from error
    manifest = {
        "name": name,
        "source": path.name,
        "source_sha256": sha256,
        "quantization": gguf.quantization,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
