"""Test utilities for programs that use this library: a real engine without a model, and fault injection.

`fake_model()` is a whole engine (scheduler, prefix cache, processors, sampler, records) on `FakeForward`, a
forward pass whose logits are pseudo-random numbers seeded by the whole prefix. A test can therefore compute
the exact log-probabilities (`FakeForward.logits_after`) and detect errors in caching, batching or chunking.

The other functions inject faults into an engine, fake or real, and inspect its state.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import numpy as np

from logprobe.config import EngineConfig
from logprobe.engine.backends.process.engine import ProcessEngine
from logprobe.engine.backends.start import LoadedModel
from logprobe.engine.backends.thread import EngineThread
from logprobe.engine.engine import Engine
from logprobe.engine.front import Front
from logprobe.engine.protocol import Capabilities, ModelShape
from logprobe.errors import ParameterError, require
from logprobe.models.fast_tokenizer import FastTokenizer
from logprobe.text.edge import TextEdge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from logprobe.engine.protocol import ForwardBackend, Layout, StepBatch
    from logprobe.kernels.arrays import Array
    from logprobe.model import Model
    from logprobe.models.loading import State
    from logprobe.models.lora import LoraWeights
    from logprobe.next_token.lm import NextTokenLM
    from logprobe.records.values import IntArray

    AnyModel = Model | NextTokenLM[Any] | LoadedModel | Front

__all__ = [
    "FakeForward",
    "StepHold",
    "check_integrity",
    "failing_steps",
    "fake_model",
    "holding_steps",
    "open_requests",
    "process_ids",
    "watching_steps",
]

NUM_STATES = 1 << 20  # number of prefix states; float32 represents each of them exactly
BOS, EOS = "<|bos|>", "<|eos|>"
HELD_S: Final = 0.005  # polling interval in seconds
LIMIT_S: Final = 120.0  # timeout in seconds, long enough for a busy machine


class FakeForward:
    """A `ForwardBackend` whose logits depend on every token of the prefix, and on nothing else.

    Each cache slot stores only its token, so that reading a wrong slot gives another prefix and other logits.

    Args:
        vocab_size: width of the logits.
        num_slots: capacity of the cache in tokens.
        context_len: maximum length of a sequence in tokens.
        seed: seed of the pseudo-random logits.
    """

    def __init__(
        self, vocab_size: int = 258, num_slots: int = 4096, context_len: int = 512, seed: int = 0
    ) -> None:
        self.vocab_size, self.num_slots, self.context_len = vocab_size, num_slots, context_len
        self.dtype = np.dtype(np.float32)
        self.rope_boundary: int | None = None
        self.layout: Layout | None = None
        self.shape = ModelShape(hidden_size=1, num_layers=1, why_no_layers="a fake model has no layers")
        self._seed = seed
        self._token_ids: IntArray = np.zeros(num_slots, np.int32)
        self._states = np.zeros((num_slots, 1), np.float32)

    def run(self, batch: StepBatch) -> None:
        """Store the tokens in a step, and the state of the prefix that ends with each token."""
        self._token_ids[batch.slots] = batch.token_ids
        for index, context in enumerate(batch.context_slots):
            span = batch.span(index)
            prefix = self._token_ids[context].tolist()
            num_known = len(prefix) - (span.stop - span.start)
            for place, slot in enumerate(batch.slots[span].tolist(), start=num_known + 1):
                self._states[slot] = self._state_of(prefix[:place])

    def hidden_rows(self, slots: IntArray) -> Array:
        """Return the states of the prefixes that end in these slots, (len(slots), 1) float32."""
        return self._states[slots]

    def head(
        self,
        hidden: Array,
        lora: LoraWeights | None = None,  # noqa: ARG002 - the interface
    ) -> Array:
        """Return logits (rows, vocab_size) float32 for hidden states (rows, 1)."""
        rows = [self._logits_of(int(state)) for state in hidden[:, 0].tolist()]
        return np.stack(rows) if rows else np.empty((0, self.vocab_size), np.float32)

    def load_lora(self, name: str, path: str, number: int) -> LoraWeights:  # noqa: ARG002 - the interface
        """Raise `ParameterError`: not supported."""
        raise ParameterError("name", f"{name!r} from {path}: a fake model does not support LoRA adapters")

    def make_room(self, lora: LoraWeights) -> None:
        """Do nothing, because a fake model has no LoRA weights."""

    def with_weights(self, config: EngineConfig, state: State) -> ForwardBackend:  # noqa: ARG002 - as above
        """Raise `ParameterError`: not supported."""
        raise ParameterError("weights", "cannot be replaced in a fake model; create one with another seed")

    def normed(self, hidden: Array) -> Array:
        """Return the states as they are, because a fake model has no norm."""
        return hidden

    def close(self) -> None:
        """Do nothing."""

    def logits_after(self, token_ids: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return the logits after a prefix, (vocab_size,) float32."""
        return self._logits_of(self._state_of(token_ids))

    def _state_of(self, token_ids: Sequence[int]) -> int:
        state = 1 + self._seed
        for token_id in token_ids:
            state = (state * 48271 + token_id + 1) % (2**31 - 1)
        return state % NUM_STATES

    def _logits_of(self, state: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return np.random.default_rng([self._seed, state]).normal(0, 3, self.vocab_size).astype(np.float32)


def fake_model(
    forward: FakeForward | None = None, *, tokens: Sequence[bytes] = (), **settings: Any
) -> LoadedModel:
    """Start an engine on a fake forward pass, with a byte tokenizer; close its `engine` when done.

    Ids [0, 256) are bytes, 256 is BOS and 257 is EOS; no BOS is put before texts. The ids from 258 on are
    `tokens` with several bytes, which the model can generate but the tokenizer never produces.

    Args:
        forward: the forward pass; None creates one with the tokenizer's vocabulary size.
        tokens: additional tokens.
        settings: fields of `EngineConfig`.

    Raises:
        ParameterError: a setting is invalid, or the vocabulary of `forward` is too small for the tokenizer.
    """
    text = _byte_tokenizer(tokens)
    num_tokens = text.backend.get_vocab_size()
    forward = forward or FakeForward(num_tokens)
    require(forward.vocab_size >= num_tokens, "vocab_size", f"must be {num_tokens} or more")
    config = EngineConfig(model="fake", **settings)
    assert text.facts.eos_token_id is not None
    engine = Engine(config, forward, text, frozenset([text.facts.eos_token_id]))
    capabilities = Capabilities(
        engine="fake",
        model="fake",
        device="cpu",
        dtype="float32",
        weights="plain",
        vocab_size=forward.vocab_size,
        max_model_len=engine.max_len,
        num_slots=forward.num_slots,
        max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        prompt_logprobs_with_prefix_cache=True,
        stages=("raw_logprobs", "processed_logprobs"),
        speculate=bool(config.scheduler_config.speculate),
        shape=forward.shape,
    )
    core = EngineThread(engine, capabilities, overlap=config.scheduler_config.async_scheduling)
    front = Front(core, text.vocabulary)
    return LoadedModel(front, text, None, engine.sampling.pipeline)


def _byte_tokenizer(tokens: Sequence[bytes]) -> TextEdge:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # The byte-level alphabet of GPT-2, in the order of the bytes that its characters represent.
    order = [*range(33, 127), *range(161, 173), *range(174, 256)]
    characters = {byte: chr(byte) for byte in order}
    others = (byte for byte in range(256) if byte not in characters)
    characters |= {byte: chr(256 + place) for place, byte in enumerate(others)}
    pieces = [BOS, EOS, *("".join(map(characters.__getitem__, token)) for token in tokens)]
    ids = {characters[byte]: byte for byte in range(256)} | {piece: i for i, piece in enumerate(pieces, 256)}
    backend = Tokenizer(models.BPE(vocab=ids, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([BOS, EOS])
    names = {"bos_token": BOS, "eos_token": EOS}
    fast = FastTokenizer(
        backend=backend,
        special_tokens_map=names,
        extra_special_tokens=(),
        chat_template=None,
        response_template=None,
        split_special_tokens=False,
    )

    def load() -> Any:
        from logprobe.models.tokenizer import ExactTokenizer

        make: Any = ExactTokenizer  # transformers' own has no types
        return make(tokenizer_object=backend, clean_up_tokenization_spaces=False, **names)

    return TextEdge.of_fast(fast, load)


@contextmanager
def watching_steps(model: AnyModel, watch: Callable[[StepBatch], None]) -> Iterator[None]:
    """Call `watch` with each step's batch on the engine's thread, before the forward pass.

    An exception in `watch` fails the step like an exception in the model.

    Raises:
        ParameterError: the engine does not run on a thread of this process.
    """
    forward = _engine_of(model).forward
    run = forward.run

    def watched(batch: StepBatch) -> None:
        watch(batch)
        run(batch)

    with mock.patch.object(forward, "run", watched):
        yield


@contextmanager
def failing_steps(model: AnyModel, error: Exception) -> Iterator[None]:
    """Make the forward pass of each step raise this error within the block.

    Raises:
        ParameterError: the engine does not run on a thread of this process.
    """

    def fail(_: StepBatch) -> None:
        raise error

    with watching_steps(model, fail):
        yield


class StepHold:
    """Controls the steps that `holding_steps` blocks."""

    def __init__(self) -> None:
        self._has_begun, self._is_released = threading.Event(), threading.Event()

    def wait(self, timeout_s: float = LIMIT_S) -> None:
        """Wait until a step has begun; later requests then join a later step.

        Raises:
            TimeoutError: no step has begun within `timeout_s`.
        """
        if not self._has_begun.wait(timeout_s):
            raise TimeoutError(f"no step has begun in {timeout_s} s")

    def release(self) -> None:
        """Release the blocked step and all later steps."""
        self._is_released.set()


@contextmanager
def holding_steps(model: AnyModel) -> Iterator[StepHold]:
    """Block each step until it is released, the block ends or the engine is being closed.

    Raises:
        ParameterError: the engine does not run on a thread of this process.
    """
    core, hold = _thread_of(model), StepHold()

    def held(_: StepBatch) -> None:
        hold._has_begun.set()
        while not (hold._is_released.wait(HELD_S) or core._is_closed):
            continue

    with watching_steps(model, held):
        try:
            yield hold
        finally:
            hold.release()


def open_requests(model: AnyModel) -> list[str]:
    """Return the ids of accepted requests whose output was not read to its end.

    Raises:
        ParameterError: `model` is not an `LLM`, `AsyncLLM`, `AsyncLM`, a loaded model, or its engine.
    """
    front = _front_of(model)
    return sorted({*front._builders, *front._streams._inboxes})


def check_integrity(model: AnyModel) -> None:
    """Wait until the engine is idle; assert that each slot has one owner and each lock belongs to a request.

    Raises:
        ParameterError: the engine does not run on a thread of this process.
        TimeoutError: the engine is still busy after two minutes.
    """
    core, until = _thread_of(model), time.monotonic() + LIMIT_S
    while not core.check_integrity_at_rest():
        if time.monotonic() > until:
            raise TimeoutError(f"the engine is still busy after {LIMIT_S:g} s")
        time.sleep(HELD_S)


def process_ids(model: AnyModel) -> list[int]:
    """Return the process id of each engine replica; a replica that is being restarted has its previous id.

    Raises:
        ParameterError: the engine has no processes.
    """
    core = _front_of(model).core
    if not isinstance(core, ProcessEngine):
        raise ParameterError(
            "model", "has no engine processes; create it with process=True or data_parallel_size=2"
        )
    return [replica.pid for replica in core._replicas if replica.pid is not None]


def _front_of(model: AnyModel) -> Front:
    loaded: Any = getattr(model, "_loaded", model)
    front = getattr(loaded, "engine", loaded)
    is_front = isinstance(front, Front)
    require(is_front, "model", "must be an LLM, AsyncLLM or AsyncLM, a loaded model or its engine", got=model)
    return front  # type: ignore[no-any-return]


def _thread_of(model: AnyModel) -> EngineThread:
    core = _front_of(model).core
    if not isinstance(core, EngineThread):
        raise ParameterError(
            "model", "must run on a thread of this process; create it without process or vLLM"
        )
    return core


def _engine_of(model: AnyModel) -> Engine:
    return _thread_of(model).engine
