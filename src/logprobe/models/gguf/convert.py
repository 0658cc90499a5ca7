"""Write the configuration and tokenizer files for a GGUF file, in the format of transformers.

The tensors are not copied: `weights.GgufSource` reads them from the GGUF file. `resolve` stores the folder in
the cache, and `loading` reads it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from logprobe.errors import InputError, LogprobeError
from logprobe.models.cache import MANIFEST, say
from logprobe.models.config_files import CONFIG, parse_config
from logprobe.models.gguf.config import build_config
from logprobe.models.gguf.file import GgufFile
from logprobe.models.gguf.tokenizer import write_tokenizer
from logprobe.models.gguf.weights import GgufSource

if TYPE_CHECKING:
    from pathlib import Path


def convert(path: Path, folder: Path, *, name: str, sha256: str) -> None:
    """Write config and tokenizer files into the existing `folder`, and then the manifest.

    Raises:
        InputError: the file is not a GGUF file, or is damaged.
        UnsupportedModelError: the model cannot be reproduced exactly.
        OSError: the folder cannot be written.
    """
    say(f"{name}: reading {path.name}")
    try:
        gguf = GgufFile(path)
        config = build_config(gguf)
        GgufSource(path, parse_config(config)).check()
        write_tokenizer(gguf, folder)
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except (LogprobeError, OSError):
        raise
    except Exception as error:  # libraries parse values from the file and may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"{path}: cannot be converted ({reason:.300}); fetch it again") from error
    manifest = {
        "name": name,
        "source": path.name,
        "source_sha256": sha256,
        "quantization": gguf.quantization,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
