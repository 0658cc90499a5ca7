"""`GrammarLogitsProcessor`: constrains text to a JSON schema, a regex or a grammar.

The grammar engine is llguidance (extra `grammar`), applied to the exact bytes of the model's tokens. It
limits its own work with one exception: it follows references recursively, so that a long chain of
references would overflow the stack and kill the process. The parts of a grammar are therefore counted and
limited first, and the grammar is compiled on a thread with a stack that is large enough for the limit.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, TypeVar, final

import msgspec
import numpy as np
from cachetools import LRUCache, cachedmethod

from logprobe.errors import ParameterError, require
from logprobe.kernels.placement import like
from logprobe.processors.arguments import GrammarArgs
from logprobe.processors.batch import BatchRow, BatchState, RowKey, as_batch
from logprobe.processors.builtin.matchers import LlguidanceMatcher, Matcher, allowed_tokens, problem_of
from logprobe.processors.interface import MaskLogitsProcessor, ModelFacts, OverruledError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from logprobe.config import EngineConfig

T = TypeVar("T")

MAX_COMPILED = 64
MAX_GRAMMAR_BYTES: Final = 1 << 18
MAX_GRAMMAR_PARTS: Final = 10_000
"""Limit on objects and lists in a schema, or rules, terminals, groups, classes, repetitions in a grammar."""
MAX_GRAMMAR_DEPTH: Final = 100
MAX_CHOICES: Final = 2_000  # the engine's limit on alternatives tracked at once
# This is address space, not memory; the longest accepted chain of parts used less than a quarter.
COMPILE_STACK_BYTES: Final = 128 << 20
# Limit on parser items for the mask of one token, since an ambiguous grammar would take longer with every
# token. The largest accepted choice and the largest accepted schemas need fewer.
MAX_STEP_ITEMS: Final = 5_000
# Bytes of forced text to encode beyond the next two tokens, so that these are as in the whole text's
# encoding.
CONTEXT_BYTES: Final = 1_000
PART_MARKS: Final = (
    ":([{"  # every part in a grammar, a regex, or a schema within a grammar contains one of these
)
# Each value has one serialization, that of Python's json, so that small models cannot loop on whitespace.
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@final
class GrammarLogitsProcessor(MaskLogitsProcessor):
    """Constrains text to `json_schema`, `json_object`, `regex`, `choice` or `ebnf` (exactly one of them).

    Once the text is complete, only end-of-sequence tokens are possible. A request fails if a token is sampled
    that the grammar does not allow, which only a later processor can cause.
    """

    Args = GrammarArgs

    def __init__(self, config: EngineConfig) -> None:
        del config
        self._model: ModelFacts | None = None
        self._states: dict[RowKey, GrammarState] = {}
        self._masks: list[tuple[int, NDArray[np.bool_]]] = []
        # Requests are checked on other threads. Grammars are compiled without a lock.
        self._templates_lock = threading.Lock()
        self._templates: LRUCache[Any, Any] = LRUCache(MAX_COMPILED)
        self._tokenizer_lock = threading.Lock()
        self._tokenizer: Any = None  # built for the first grammar

    def bind(self, model: ModelFacts) -> None:
        """Receive the model's tokens."""
        self._model = model

    def check_args(self, args: Any) -> None:
        """Raise `ParameterError` if the grammar is invalid."""
        self._template(grammar_of(args))

    def update_state(self, batch: BatchState) -> None:
        """Advance each sample's grammar by the new tokens and compute the tokens allowed next."""
        batch = as_batch(batch, GrammarArgs)
        self._states = {row.key: self._states.get(row.key) or self._new_state(row) for row in batch.rows}
        self._masks = [(index, self._states[row.key].next_mask(row)) for index, row in enumerate(batch.rows)]

    def apply(self, logits: Any) -> Any:
        """Set the logits of tokens that the grammar does not allow to -inf."""
        for index, forbidden in self._masks:
            logits[index][like(forbidden, logits)] = -np.inf
        return logits

    def forbid(self, row: BatchRow, possible: NDArray[np.bool_]) -> None:
        """Set tokens that the grammar does not allow to False in `possible`."""
        possible &= self._new_state(row).allowed(row)

    def matcher(self, args: GrammarArgs) -> LlguidanceMatcher:
        """Return a matcher at the start of the grammar; raises `ParameterError` if the grammar is invalid."""
        return LlguidanceMatcher(self._template(grammar_of(args))).copy()

    def _new_state(self, row: BatchRow) -> GrammarState:
        assert self._model is not None, "bind comes first"
        return GrammarState(self.matcher(row.args), self._model)

    @cachedmethod(attrgetter("_templates"), lock=attrgetter("_templates_lock"))
    def _template(self, grammar: str) -> Any:
        """Compile a grammar to the matcher from which samples copy."""
        llguidance = _llguidance()
        limits = llguidance.LLParserLimits(step_max_items=MAX_STEP_ITEMS, verbose_errors=False)
        with self._tokenizer_lock:
            if self._tokenizer is None:
                assert self._model is not None, "bind comes first"
                self._tokenizer = byte_tokenizer(self._model)
        template = _on_deep_stack(
            lambda: llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        )
        problem = problem_of(template)
        require(problem is None, "grammar", f"cannot be used: {problem}")
        return template


@final
class GrammarState:
    """Position of one sample in its grammar."""

    def __init__(self, matcher: Matcher, model: ModelFacts) -> None:
        self._matcher = matcher
        self._model = model
        self._num_observed = 0

    def next_mask(self, row: BatchRow) -> NDArray[np.bool_]:
        """Return the tokens that are forbidden after the row's output, (vocab_size,) bool."""
        return ~self.allowed(row)

    def allowed(self, row: BatchRow) -> NDArray[np.bool_]:
        """Return the tokens that are allowed after the row's output, (vocab_size,) bool.

        Raises:
            OverruledError: the output has a token that the grammar does not allow.
        """
        for token_id in row.output_token_ids[self._num_observed :]:
            is_end = token_id in self._model.eos_token_ids
            if not self._matcher.accept(token_id) and not is_end:
                raise OverruledError(f"token {token_id} is not allowed by the grammar")
            self._num_observed += 1
        mask = self._matcher.mask()
        if mask is not None:
            return allowed_tokens(mask, self._model.vocab_size)
        allowed = np.zeros(self._model.vocab_size, np.bool_)
        allowed[sorted(self._model.eos_token_ids)] = True
        return allowed


def grammar_of(args: GrammarArgs) -> str:
    """Return the grammar in llguidance's serialized form.

    Raises:
        ParameterError: not exactly one constraint is set, the schema is not JSON, or a limit is exceeded.
    """
    forms = [name for name in GrammarArgs.__struct_fields__ if getattr(args, name) not in (None, False)]
    require(
        len(forms) == 1,
        "grammar",
        f"needs exactly one of its arguments, such as regex or json_schema, got {', '.join(forms) or 'none'}",
    )
    _check_size(forms[0], getattr(args, forms[0]))
    matcher = _llguidance().LLMatcher
    if args.regex is not None:
        return str(matcher.grammar_from_regex(args.regex))
    if args.choice is not None:
        alternatives = " | ".join(msgspec.json.encode(text).decode() for text in args.choice)
        return str(matcher.grammar_from_lark(f"start: {alternatives}"))
    if args.ebnf is not None:
        return str(matcher.grammar_from_lark(args.ebnf))
    schema = {"type": "object"} if args.json_schema is None else _schema(args.json_schema)
    _check_shape(schema)
    return str(matcher.grammar_from_json_schema(schema, overrides=JSON_STYLE))


def byte_tokenizer(model: ModelFacts) -> Any:
    """Build an llguidance tokenizer from the exact bytes of the model's tokens."""
    llguidance = _llguidance()
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Tokens(model)), n_vocab=model.vocab_size)


class _Tokens:
    """The tokenizer as llguidance needs it: the bytes of each token, and a function that encodes text."""

    def __init__(self, model: ModelFacts) -> None:
        self._model = model
        self.eos_token_id = model.text.eos_token_id
        self.bos_token_id = None
        self.special_token_ids = sorted(model.text.special_token_ids)
        # There may be more logits than tokens; the extra ids have no bytes and are never allowed.
        self.tokens = [model.vocabulary.token_bytes(token_id) for token_id in range(model.vocab_size)]
        self._max_token_bytes = max(map(len, self.tokens))

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the first token ids of a text that the grammar forces; `text` begins with their bytes.

        llguidance passes the last token that was generated and all text that is forced after it. It then
        allows only the next token in the result, even if this token does not match the grammar.

        If the tokenizer preserves the text, the result is its encoding. If it prepends a space (Llama 2,
        Mistral), the text is encoded after a line break. If it rewrites the text (Unicode normalization,
        lower-casing, special tokens), the longest matching tokens are used.
        """
        data = text.encode() if isinstance(text, str) else text
        beginning = data[: 2 * self._max_token_bytes + CONTEXT_BYTES].decode("utf-8", "ignore")
        data = beginning.encode()
        for before in ("", "\n"):
            token_ids = self._last_tokens(before + beginning, data)
            if token_ids is not None:
                return token_ids
        return self._longest_tokens(data)

    def _last_tokens(self, text: str, data: bytes) -> list[int] | None:
        """Encode `text` and return the last tokens, whose bytes must be `data`; None if they are not."""
        try:
            token_ids = self._model.encode(text)
        except Exception:  # noqa: BLE001 - no token for a character; raised from here it would be a Rust panic
            return None
        start, num_bytes = len(token_ids), 0
        while num_bytes < len(data) and start:
            start -= 1
            num_bytes += len(self._plain_bytes(token_ids[start]))
        pieces = map(self._plain_bytes, token_ids[start:])
        return token_ids[start:] if b"".join(pieces) == data else None

    def _longest_tokens(self, data: bytes) -> list[int]:
        """Return greedy longest-match tokens, until they have more bytes than the longest token.

        They end earlier if no token matches at a position.
        """
        token_ids: list[int] = []
        place = 0
        while place < len(data) and place <= self._max_token_bytes:
            ends = range(min(len(data), place + self._max_token_bytes), place, -1)
            piece = next((data[place:end] for end in ends if data[place:end] in self._ids), None)
            if piece is None:
                break
            token_ids.append(self._ids[piece])
            place += len(piece)
        return token_ids

    def _plain_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token; empty if it is special or the model has no logit for it."""
        is_plain = token_id < len(self.tokens) and token_id not in self._model.text.special_token_ids
        return self.tokens[token_id] if is_plain else b""

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        """Map from bytes to id; of equal tokens, the highest id wins, as byte fallbacks have low ids."""
        ids = {self._plain_bytes(token_id): token_id for token_id in range(len(self.tokens))}
        ids.pop(b"", None)
        return ids


def _check_size(name: str, value: Any) -> None:
    """Check the numbers of bytes, parts and choices before anything is built."""
    texts = value if name == "choice" else [value] if isinstance(value, str) else []
    require(
        name != "choice" or len(value) <= MAX_CHOICES,
        name,
        f"has {len(texts)} choices; use at most {MAX_CHOICES}",
    )
    _check_bytes(name, sum(map(_num_bytes, texts)))
    if name in {"regex", "ebnf"}:
        _check_parts(name, sum(map(value.count, PART_MARKS)))


def _check_shape(schema: Any) -> None:
    """Check the size and depth of a schema without recursion."""
    level, depth, num_parts, num_bytes = [schema], 0, 0, 0
    while level:
        parts = [value for value in level if isinstance(value, dict | list)]
        num_bytes += sum(_num_bytes(value) for value in level if isinstance(value, str))
        num_parts += len(parts)
        depth += bool(parts)
        _check_parts("json_schema", num_parts)
        require(
            depth <= MAX_GRAMMAR_DEPTH,
            "json_schema",
            f"is nested deeper than {MAX_GRAMMAR_DEPTH}; flatten it",
        )
        level = []
        for part in parts:
            level += [*part, *part.values()] if isinstance(part, dict) else part
    _check_bytes("json_schema", num_bytes)


def _num_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _check_bytes(name: str, num_bytes: int) -> None:
    require(num_bytes <= MAX_GRAMMAR_BYTES, name, f"has {num_bytes} bytes; use at most {MAX_GRAMMAR_BYTES}")


def _check_parts(name: str, num_parts: int) -> None:
    require(
        num_parts <= MAX_GRAMMAR_PARTS,
        name,
        f"has {num_parts} parts or more; use at most {MAX_GRAMMAR_PARTS}",
    )


_STACK_SIZE = threading.Lock()  # guards `threading.stack_size`, which is process-wide


def _on_deep_stack(compile_grammar: Callable[[], T]) -> T:
    """Run a function on a thread with a large stack and return its result."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(compile_grammar())
        except BaseException as error:  # noqa: BLE001 - passed to the caller: a Rust panic is no Exception
            result.set_exception(error)

    thread = threading.Thread(target=run, name="logprobe-grammar", daemon=True)
    with _STACK_SIZE:
        before = threading.stack_size(COMPILE_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return result.result()


def _schema(schema: dict[str, object] | str) -> Any:
    if not isinstance(schema, str):
        return schema
    try:
        return msgspec.json.decode(schema)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ParameterError("json_schema", f"is not JSON: {error}") from error


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ParameterError(
            "grammar", "needs the extra 'grammar': pip install 'logprobe[grammar]'"
        ) from error
    return llguidance
