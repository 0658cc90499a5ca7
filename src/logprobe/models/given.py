"""Save the caller's loaded transformers model and tokenizer to a temporary folder for `resolve`."""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from logprobe.errors import InputError, ParameterError, require

if TYPE_CHECKING:
    from collections.abc import Iterator


# file that marks a folder as a temporary copy, which is removed together with the engine
COPY: Final = ".logprobe-copy"


def is_copy(folder: Path) -> bool:
    """Return True if `as_name` made the folder as a temporary copy of a loaded model."""
    return (folder / COPY).is_file()


def drop_copied_weights(name: str) -> None:
    """Remove the weights in a temporary copy, but not its configuration, which is still needed."""
    folder = Path(name)
    if is_copy(folder):
        for file in folder.glob("*.safetensors*"):
            file.unlink()


@contextmanager
def as_name(model: Any, tokenizer: Any = None) -> Iterator[str]:
    """Yield a name that `resolve` accepts: `model` itself, or the folder of a temporary copy.

    Raises:
        InputError: the loaded model cannot be saved.
        ParameterError: `model` is neither a name nor a loaded model with a fast tokenizer.
    """
    if isinstance(model, str | os.PathLike):
        name = os.fspath(model)
        by_name = os.fspath(tokenizer) if isinstance(tokenizer, os.PathLike) else tokenizer
        is_own = by_name is None or by_name == name
        require(
            is_own,
            "tokenizer",
            "must be None unless model is a loaded model; a model given by name uses its own tokenizer",
        )
        yield name
        return
    if not hasattr(model, "save_pretrained"):
        raise ParameterError("model", f"must be a name, a path or a loaded model, got {model!r:.60}")
    is_peft = hasattr(model, "peft_config") and hasattr(model, "get_base_model")
    require(
        not is_peft,
        "model",
        "is a PeftModel; give model.merge_and_unload(), or load its base model and call add_lora",
    )
    is_fast = getattr(tokenizer, "is_fast", False) is True
    require(is_fast, "tokenizer", "must be a fast one (PreTrainedTokenizerFast) if model is a loaded model")
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
