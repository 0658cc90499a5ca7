"""A model as transformers loads it, followed, made faster, and proven: what every first load does.

Before it: the model's files. After it: the engine, and the record that later loads build on (`recall`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from logprobe.engine.forward.attention import CurrentStep
from logprobe.engine.forward.decoder import OutputHead
from logprobe.engine.forward.layout import layout_of
from logprobe.engine.forward.proof import Proof, refusing
from logprobe.engine.layers.fused import fuse_
from logprobe.engine.layers.packed import choose_layout, pack_
from logprobe.engine.layers.published import named_panels, publish_, published_forms
from logprobe.engine.ready.model import ReadyModel
from logprobe.engine.ready.remember import remember
from logprobe.errors import UnsupportedModelError
from logprobe.kernels.compiling import compiled_beside, kernel_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from logprobe.config import Weights
    from logprobe.engine.forward.pool import KVPool
    from logprobe.models import ModelFiles
    from logprobe.models.stored.store import LoadStore


class Follower:
    """Makes a transformers module ready, and keeps its proof for the record."""

    def __init__(
        self, files: ModelFiles, store: LoadStore | None, model: PreTrainedModel, weights: Weights
    ) -> None:
        self._files, self._store = files, store
        self.model: Any = model
        self.context_len = refusing(self.model, lambda: _context_len(self.model))
        self.weights = choose_layout(self.model, weights)
        self.step = CurrentStep()

    def ready(self) -> ReadyModel:
        """Follow the model, put faster modules in the places of its own, and prove the numbers.

        Raises:
            UnsupportedModelError: the model cannot be followed, or the numbers differ.
        """
        probe = refusing(self.model, self._prove)
        decoder = self.decoder.module
        self._ready = ReadyModel(
            model=self.model,
            decoder=self.decoder,
            head=OutputHead(self.model, self.proof.place),
            step=self.step,
            probe=probe,
            layout=layout_of(decoder, self.weights, self.proof),
            vocab_size=_text_config(self.model).vocab_size,
            context_len=self.context_len,
            hidden_size=self.proof.hidden_size,
            eos_token_ids=_eos_token_ids(self.model),
        )
        return self._ready

    def remember(self, is_recorded: bool) -> None:
        """Store what was proven, and let the proof go, which holds the model's own layers."""
        if self._store is not None and self.weights == "published":
            remembered = remember(self._ready, self.proof, is_recorded=is_recorded)
            if remembered is not None:
                self._store.write_record(*remembered)
        self.proof.references.clear()

    @torch.inference_mode()
    def _prove(self) -> KVPool:
        """The pool of the proof: what every layer stores for a token."""
        self.proof = Proof(self.model, self.step, context_len=self.context_len)
        self.decoder = self.proof.observe()
        pool = self.proof.prove(self.decoder)
        if self.weights == "plain":
            return pool
        panels = self._panels() if self.weights == "published" else {}
        fuse_(self.model, self.step, self.proof.references)
        if self.weights == "packed":
            pack_(self.model)
        elif self.weights == "published":
            publish_(self.model, panels)
            with compiled_beside(kernel_names(published_forms(self.model))):
                pass
        return self.proof.prove(self.decoder)

    def _panels(self) -> dict[str, Any]:
        """Those that are stored, or those of the module, stored now; none where nothing may be stored."""
        if self._store is None:
            return {}
        return self._store.panels() or self._store.write_panels(named_panels(self.model))


def _text_config(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)


def _context_len(model: Any) -> int:
    length = getattr(_text_config(model), "max_position_embeddings", None)
    if not isinstance(length, int):
        raise UnsupportedModelError(
            "its positions have no end (it keeps a state of its own, or biases scores by distance)"
        )
    return length


def _eos_token_ids(model: Any) -> frozenset[int]:
    """Every id that ends a text, by the model's settings."""
    ids: set[int | None] = set()
    for source in (model.generation_config, model.config):
        named = getattr(source, "eos_token_id", None)
        ids.update(named if isinstance(named, list) else [named])
    return frozenset(ids) - {None}  # type: ignore[return-value]
