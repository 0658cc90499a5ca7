"""A model that transformers has loaded → a folder like any other.

Before it: a caller's own module and tokenizer. After it: `resolve`, which then finds what it always finds.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from logprobe.errors import InputError, ParameterError, require

if TYPE_CHECKING:
    from collections.abc import Iterator


COPY: Final = ".logprobe-copy"  # marks a folder that lasts as long as the engine that reads it


def is_copy(folder: Path) -> bool:
    """Whether a folder is the copy of a loaded model."""
    return (folder / COPY).is_file()


def drop_copied_weights(name: str) -> None:
    """Remove the weights of a copy once they are loaded; later loads read its configuration."""
    folder = Path(name)
    if is_copy(folder):
        for file in folder.glob("*.safetensors*"):
            file.unlink()


@contextmanager
def as_name(model: Any, tokenizer: Any = None) -> Iterator[str]:
    """A name that `resolve` knows while the block lasts: the one given, or a folder that holds a copy.

    Raises:
        InputError: the model cannot be written down.
        ParameterError: neither a name nor a loaded model with its fast tokenizer.
    """
    if isinstance(model, str | os.PathLike):
        name = os.fspath(model)
        by_name = os.fspath(tokenizer) if isinstance(tokenizer, os.PathLike) else tokenizer
        is_own = by_name is None or by_name == name
        require(is_own, "tokenizer", "comes with a loaded model; a model by name brings its own")
        yield name
        return
    if not hasattr(model, "save_pretrained"):
        raise ParameterError("model", f"must be a name, a path or a loaded model, got {model!r:.60}")
    is_peft = hasattr(model, "peft_config") and hasattr(model, "get_base_model")
    require(
        not is_peft,
        "model",
        "is a PeftModel; give model.merge_and_unload(), or load its base and its folder by add_lora",
    )
    is_fast = getattr(tokenizer, "is_fast", False) is True
    require(is_fast, "tokenizer", "of a loaded model must be given, a fast one (a PreTrainedTokenizerFast)")
    with tempfile.TemporaryDirectory(prefix="logprobe-") as parent:
        given = Path(str(getattr(model, "name_or_path", "") or type(model).__name__)).name
        folder = Path(parent) / given
        try:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            (folder / COPY).touch()
        except (OSError, RuntimeError, ValueError) as error:
            raise InputError(f"model: the loaded model cannot be copied to {folder}: {error}") from error
        yield str(folder)
