"""Suppress the warnings and progress bars of other libraries while a model loads."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from logprobe.errors import MissingPackageError

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Suppress tqdm's warning about missing ipywidgets when it is imported in a notebook."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="IProgress not found")
        yield


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppress transformers' progress bar and warnings while a model loads.

    Raises:
        MissingPackageError: transformers is not installed.
    """
    try:
        with quiet_imports():
            from transformers.utils import logging as transformers_logging
    except ImportError as error:
        raise MissingPackageError("transformers is not installed; pip install 'logprobe[torch]'") from error

    logging: Any = transformers_logging  # the module's functions have no type annotations
    verbosity, has_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bar:
            logging.enable_progress_bar()
