"""The fake model of the simulation: its logits are a hash of the prefix, the weights and the LoRA weights.

A slot of the KV cache holds a hash of its token, its position and the weights that computed it, as keys and
values do. A row's logits follow from all slots of its context, so reading a slot of another prefix, of old
weights or of other LoRA weights gives other logits. A part of them depends on the last two tokens alone,
which makes texts repeat themselves, so that drafts are accepted and rejected.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np

from logprobe.engine.protocol import Capabilities, Layout
from logprobe.errors import UnsupportedModelError
from logprobe.models.lora import LoraWeights, LowRank
from logprobe.processors import LogitsProcessor
from logprobe.testing import _byte_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from logprobe.config import EngineConfig
    from logprobe.engine.engine import Engine
    from logprobe.engine.protocol import StepBatch
    from logprobe.models.loading import State
    from logprobe.records.values import IntArray
    from logprobe.text.edge import TextEdge

    Array = np.ndarray[Any, np.dtype[Any]]

VOCAB_SIZE, EOS = 258, 257
LETTERS = np.arange(97, 105)  # the tokens that have a chance
CONTEXT_LEN = 40
POISON_PERIOD = 31  # one in so many rows of poisoned weights is NaN
ODD, SHIFT = np.uint64(0x9E3779B97F4A7C15), np.uint64(29)


@functools.cache
def text_edge() -> TextEdge:
    return _byte_tokenizer(())


def mixed(values: Any) -> Any:
    """Hash 64-bit integers (the finalizer of splitmix64)."""
    with np.errstate(over="ignore"):
        values = np.asarray(values, np.uint64) * ODD
        values = (values ^ (values >> SHIFT)) * np.uint64(0xBF58476D1CE4E5B9)
        return values ^ (values >> SHIFT)


PLACES = mixed(np.arange(4096)) | np.uint64(1)


class HashedForward:
    """A `ForwardBackend` whose weights are one number.

    Args:
        num_slots: size of the KV cache in tokens.
        letters: number of tokens that have a chance; fewer make texts repeat themselves more often.
        weights: which weights these are; those of negative numbers give NaN now and then.
        before_run: called before each step, to let time pass or to fail.
    """

    vocab_size, context_len, dtype = VOCAB_SIZE, CONTEXT_LEN, np.dtype(np.float32)

    def __init__(
        self,
        num_slots: int,
        letters: int = 8,
        weights: int = 0,
        rope_boundary: int | None = None,
        before_run: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.num_slots, self.letters, self.weights, self.rope_boundary = (
            num_slots,
            letters,
            weights,
            rope_boundary,
        )
        self.before_run = before_run
        self.is_closed = False
        self._cells = np.zeros(num_slots, np.uint64)
        self._token_ids = np.zeros(num_slots, np.int32)
        self._hidden = np.zeros((num_slots, 3), np.float32)
        self._ready: set[int] = set()

    @property
    def layout(self) -> Layout:
        return Layout(
            weights="plain",
            num_layers=1,
            why_transformers=None,
            rope_boundary=self.rope_boundary,
            probe_difference=0.0,
            verified_against="nothing",
        )

    def run(self, batch: StepBatch) -> None:
        """Store the tokens' cells, then the hash of each token's context."""
        self.before_run("run")
        assert not self.is_closed, "a step after the model was released"
        assert len(set(batch.slots.tolist())) == len(batch.slots), "two tokens of a step in one slot"
        keys = np.zeros(len(batch.token_ids), np.uint64)
        for index, lora in enumerate(batch.loras):
            assert lora is None or lora.number in self._ready, "LoRA weights without `make_room`"
            keys[batch.span(index)] = self._key(lora, is_long=batch.are_long[index])
        self._token_ids[batch.slots] = batch.token_ids
        self._cells[batch.slots] = mixed(keys ^ mixed(batch.token_ids + 1) ^ PLACES[batch.positions])
        for index, context in enumerate(batch.context_slots):
            span = batch.span(index)
            known, end = len(context) - (span.stop - span.start), len(context)
            assert np.array_equal(batch.slots[span], context[known:]), "a span's slots end its context"
            assert np.array_equal(batch.positions[span], np.arange(known, end)), "positions follow each other"
            with np.errstate(over="ignore"):
                states = np.cumsum(self._cells[context] * PLACES[:end], dtype=np.uint64)[known:]
            states = mixed(states ^ keys[span])
            ids = self._token_ids[context].astype(np.uint64)
            pairs = ids * np.uint64(1000) + np.concatenate([[0], ids[:-1]]).astype(np.uint64)
            hidden = (states >> np.uint64(44), (states >> np.uint64(24)) & np.uint64(0xFFFFF), pairs[known:])
            self._hidden[context[known:]] = np.stack(hidden, axis=1)

    def _key(self, lora: LoraWeights | None, *, is_long: bool) -> int:
        own = 0 if lora is None else int(lora.path.rpartition("-")[2])
        return int(mixed((self.weights * 10007 + own * 101 + is_long) % (1 << 64)))

    def hidden_rows(self, slots: IntArray) -> Array:
        return self._hidden[slots]

    def head(self, hidden: Array, lora: LoraWeights | None = None) -> Array:
        """Return logits; LoRA weights of the head change them once more."""
        self.before_run("head")
        parts = hidden.astype(np.uint64)
        states = mixed(parts[:, 0] * np.uint64(1 << 20) + parts[:, 1] + np.uint64(lora is not None))
        tokens = mixed(np.arange(VOCAB_SIZE))
        noise = (mixed(states[:, None] ^ tokens) >> np.uint64(40)).astype(np.float32) / 2**24
        habits = (mixed(mixed(parts[:, 2])[:, None] ^ tokens) >> np.uint64(40)).astype(np.float32) / 2**24
        logits = 2 * noise - 12
        few = LETTERS[: self.letters]
        logits[:, few] += 10 + 3 * habits[:, few]
        logits[:, EOS] += 8.5
        if self.weights < 0:
            logits[states % np.uint64(POISON_PERIOD) == 0] = np.nan
        return logits

    def load_lora(self, name: str, path: str, number: int) -> LoraWeights:
        """Read which LoRA weights these are from `adapter_config.json`; "broken" fails."""
        self.before_run("load")
        with open(f"{path}/adapter_config.json") as file:  # noqa: PTH123 - short
            own = file.read()
        if own == "broken":
            raise UnsupportedModelError(f"lora {name!r}: is broken on purpose")
        parts = {"head": LowRank} if int(own) % 2 else {}  # type: ignore[dict-item]
        return LoraWeights(name, f"lora-{own}", number, parts, head="head")  # type: ignore[arg-type]

    def make_room(self, lora: LoraWeights) -> None:
        self._ready.add(lora.number)

    def with_weights(self, config: EngineConfig, state: State) -> HashedForward:  # noqa: ARG002 - the interface
        self.before_run("load")
        weights = int(state["w"][0])
        if weights == 99:
            raise UnsupportedModelError("weights: are broken on purpose")
        return HashedForward(self.num_slots, self.letters, weights, self.rope_boundary, self.before_run)

    def close(self) -> None:
        self.is_closed = True


class FussyArgs(msgspec.Struct, forbid_unknown_fields=True):
    """Arguments of `Fussy`."""

    raise_after: int = 99  # tokens


class Fussy(LogitsProcessor):
    """Makes a token less likely that depends on the text, and raises after so many tokens."""

    Args: ClassVar[Any] = FussyArgs

    def __init__(self, config: Any) -> None:
        del config
        self._rows: list[Any] = []

    def update_state(self, batch: Any) -> None:
        self._rows = list(batch.rows)

    def apply(self, logits: Any) -> Any:
        for row, own in zip(logits, self._rows, strict=True):
            if len(own.output_token_ids) >= own.args.raise_after:
                raise RuntimeError("on purpose")
            row[97 + (len(own.output_token_ids) + sum(own.output_token_ids)) % 8] -= 5
        return logits


def capabilities(engine: Engine) -> Capabilities:
    """Return the properties of an engine on this model."""
    config = engine.config.scheduler_config
    return Capabilities(
        engine="hashed",
        model="hashed",
        device="cpu",
        dtype="float32",
        weights="plain",
        vocab_size=VOCAB_SIZE,
        max_model_len=engine.max_len,
        num_slots=engine.forward.num_slots,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        prompt_logprobs_with_prefix_cache=True,
        stages=("raw_logprobs", "processed_logprobs"),
        speculate=config.speculate,
        layout=engine.forward.layout,
        weight_version="weights-0",
    )
