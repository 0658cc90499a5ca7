"""Make the tiny models that `make test-core` uses where torch is not installed: core_models.py FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

from conftest import save_tiny_gemma2, save_tiny_llama, save_tiny_mixture

if __name__ == "__main__":
    root = Path(sys.argv[1])
    save_tiny_gemma2(root / "gemma2")
    save_tiny_llama(root / "llama")
    save_tiny_mixture(root / "mixture", root / "llama")
    # The context of `long_llm`.
    for name, value in {"max_position_embeddings": 2048}.items():
        save_tiny_llama(root / f"llama-{name}={value}", **{name: value})
