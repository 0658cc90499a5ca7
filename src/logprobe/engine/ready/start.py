"""Files and settings → a ready model: recalled where an earlier load left what that takes, else followed."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from logprobe.engine.ready.recall import recall
from logprobe.kernels.layers.widen import can_widen
from logprobe.models import load_model
from logprobe.models.stored.store import LoadStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from logprobe.config import Weights
    from logprobe.engine.ready.model import ReadyModel
    from logprobe.models import ModelFiles

Load: TypeAlias = "Callable[..., Any]"
"""`dtype` and `device` → a transformers module."""

logger = logging.getLogger("logprobe")


def make_ready(
    files: ModelFiles, *, dtype: torch.dtype, device: str, weights: Weights, load: Load | None = None
) -> tuple[ReadyModel, Callable[[bool], None]]:
    """The model, and what to call once it is known whether its steps of few rows run as one launch.

    What `load` gives is the module of other weights than the files', of which nothing is stored.

    Raises:
        UnsupportedModelError: the model cannot be followed, or its numbers differ.
        ParameterError: a form of weights that the device or the dtype does not allow.
    """
    can_store = load is None and device == "cpu" and dtype == torch.float32 and can_widen()
    store = LoadStore.of(files) if can_store and weights in {"auto", "published"} else None
    if store is not None and (recalled := _recalled(files, store)) is not None:
        return recalled, lambda _: None
    from logprobe.engine.ready.follow import Follower  # with all of transformers

    load = load or partial(load_model, files)
    follower = Follower(files, store, load(dtype=dtype, device=device), weights)
    return follower.ready(), follower.remember


def _recalled(files: ModelFiles, store: LoadStore) -> ReadyModel | None:
    stored = store.record()
    if stored is None:
        return None
    record, tensors = stored
    panels = store.panels(is_checked=False)  # what is damaged in them, the logits show
    try:
        recalled = recall(files, record, tensors, panels)
    except KeyError as error:  # a module or tensor that a damaged file lacks
        logger.warning("%s: what is stored of it lacks %s; it is proven again", files.name, error)
        return None
    if recalled is None:
        logger.warning("%s: what is stored of it gives other numbers; it is proven again", files.name)
    return recalled
