"""`FieldSums`: requests next-token rows for a JSON reply's fields; `analysis.members` sums probabilities."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from logprobe.analysis.measures import logsumexp
from logprobe.analysis.members import FieldDistribution, MemberSum
from logprobe.analysis.schemas import Schema
from logprobe.analysis.spellings import token_index
from logprobe.config import EngineConfig
from logprobe.errors import ParameterError, WeightsReplacedError, require
from logprobe.processors.arguments import format_args
from logprobe.records.fields import Spelt

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from logprobe.analysis.spellings import Path
    from logprobe.engine.backends.start import LoadedModel
    from logprobe.engine.request import CompletionOutput, RequestOutput
    from logprobe.next_token.engine_lm import EngineLM
    from logprobe.next_token.rows import Row
    from logprobe.processors.arguments import GrammarArgs
    from logprobe.processors.builtin.matchers import LlguidanceMatcher
    from logprobe.records import FlatLogprobs
    from logprobe.records.fields import Field, Split
    from logprobe.records.values import IntArray
    from logprobe.sampling import SamplingParams

    Allowed = npt.NDArray[np.bool_]

ROWS_AT_ONCE: Final = 64  # rows requested at a time, for all values together
MEMBERS_A_ROW: Final = 100  # limit on the enumerated values ("members") per row in `max_rows_in_all`
REMEDY: Final = "generate it again with logprobs=0"


class RowAsk(NamedTuple):
    """Request for the next-token row after `token_ids`; `take` is called with the row."""

    token_ids: IntArray
    take: Callable[[Row], None]


class SpellingTools:
    """Objects that are built once per model: an index of tokens by bytes, and compiled grammars."""

    def __init__(self, loaded: LoadedModel) -> None:
        from logprobe.processors.builtin.grammar import GrammarLogitsProcessor
        from logprobe.processors.interface import ModelFacts

        text, self.vocab_size = loaded.text, loaded.engine.capabilities().vocab_size
        self.index = token_index(text, self.vocab_size)
        self._grammars = GrammarLogitsProcessor(EngineConfig())
        facts = ModelFacts(
            vocab_size=self.vocab_size,
            eos_token_ids=frozenset(self.index.special_ids.tolist()),
            text=text,
        )
        self._grammars.bind(facts)

    def matcher(self, args: GrammarArgs) -> LlguidanceMatcher:
        """Return a grammar matcher in its initial state."""
        return self._grammars.matcher(args)

    def allowed(self, matcher: LlguidanceMatcher) -> Allowed:
        """Return the tokens that the grammar allows next, (V,) bool; at the end, only special tokens."""
        from logprobe.processors.builtin.matchers import allowed_tokens

        mask = matcher.mask()
        if mask is not None:
            allowed: Allowed = allowed_tokens(mask, self.vocab_size)
            return allowed
        ended = np.zeros(self.vocab_size, np.bool_)
        ended[self.index.special_ids] = True
        return ended


async def field_distributions(
    lm: EngineLM[Row],
    tools: Callable[[], SpellingTools],
    output: RequestOutput,
    schema: dict[str, Any] | None,
    *,
    index: int,
    max_rows: int,
) -> list[FieldDistribution]:
    """Compute the distributions of `FieldSums` with rows from `lm`; `tools` is called on a worker thread."""
    sums = await asyncio.to_thread(
        lambda: FieldSums(lm._loaded, tools(), output, schema, index, max_rows)  # noqa: SLF001 - same package
    )
    while asks := await asyncio.to_thread(sums.next_asks):
        rows = await lm._rows([ask.token_ids for ask in asks], sums.lora, is_urgent=True)  # noqa: SLF001 - same package
        await asyncio.to_thread(sums.take, asks, rows)
    return sums.answer()


class FieldSums:
    """Compute a distribution over the possible values ("members") of each field in a JSON completion.

    Call `next_asks` and `take` in turn until `next_asks` returns an empty list, then call `answer`.

    Args:
        loaded: the model that generated the completion.
        tools: the index and grammars of that model.
        output: the request's output, with its parameters.
        schema: JSON schema of the reply; None for the schema in the request's `response_format`.
        index: index of the completion in `output.outputs`.
        max_rows: maximum number of rows for the members of one field.
        max_rows_in_all: maximum number of rows for all fields. Exact probabilities of values that share
            tokens with the text around them take some of these rows; if they would take more than half, `raw`
            and `processed` have bounds instead. If the schema enumerates very many members, fields at the end
            of the reply get no members.

    Raises:
        ParameterError: the completion has no raw log-probabilities, its weights were replaced, or its text is
            not JSON; the schema is missing, enumerates no values, or is not supported; or `index` or
            `max_rows` is invalid.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        tools: SpellingTools,
        output: RequestOutput,
        schema: dict[str, Any] | None,
        index: int,
        max_rows: int,
        max_rows_in_all: int = sys.maxsize,
    ) -> None:
        is_count = isinstance(max_rows, int) and max_rows > 0
        require(is_count, "max_rows", "must be a positive number of rows", got=max_rows)
        self._params = _params_of(output)
        self._completion = _completion_of(output, index)
        self._loaded, self._weights_number = loaded, output.weights_number
        self._max_len = loaded.engine.capabilities().max_model_len
        require(self._has_weights, "output", f"the weights that generated it were replaced; {REMEDY}")
        grammar = None if self._params.response_format is None else format_args(self._params.response_format)
        self._has_grammar = grammar is not None
        known = _schema_of(schema, grammar)
        self._tools, self._prompt = tools, np.array(output.prompt_token_ids, np.int32)
        token_ids = self._completion.token_ids
        pieces = [loaded.text.vocabulary.token_bytes(token_id) for token_id in token_ids]
        self._spelt = Spelt(pieces, self._completion.text)
        self._sums: dict[int, MemberSum] = {}  # by node number of the value
        members_left = MEMBERS_A_ROW * max_rows_in_all
        for number, node in enumerate(self._spelt.nodes):
            members = known.members(node.pointer) if members_left > 0 else None
            if members is not None and len(members) <= members_left:
                self._sums[number] = MemberSum(
                    self._spelt, node, members, tools.index, max_rows=max_rows, has_grammar=self._has_grammar
                )
            members_left -= len(members or ())
        self._turn = deque(self._sums.values())
        self._rows_left = max_rows_in_all
        self._splits = self._spelt.splits()
        self._masses: tuple[dict[Split, float], dict[Split, float]] = ({}, {})
        self._asks = self._split_asks()
        self._is_exact = len(self._asks) <= max_rows_in_all // 2
        if not self._is_exact:
            self._asks = []
        self._matchers = self._matchers_at(
            {split.token for split in self._splits} | {one.token for one in self._sums.values()}, grammar
        )

    @property
    def lora(self) -> str | None:
        """Name of the LoRA adapter that generated the reply; None for the base model."""
        return self._params.lora

    def next_asks(self, most: int = ROWS_AT_ONCE) -> list[RowAsk]:
        """Return up to `most` row requests; an empty list if no rows are needed or the limit is reached."""
        most = min(most, self._rows_left)
        asks, self._asks = self._asks[:most], self._asks[most:]
        for num_waiting in range(len(self._turn), 0, -1):
            if len(asks) >= most:
                break
            # Round robin over the fields, so that each gets a share of a small limit.
            one = self._turn.popleft()
            self._turn.append(one)
            asks += self._member_asks(one, -(-(most - len(asks)) // num_waiting))
        self._rows_left -= len(asks)
        return asks

    def take(self, asks: Sequence[RowAsk], rows: Sequence[Row]) -> None:
        """Process the rows that were requested with `asks`, in the same order.

        Raises:
            WeightsReplacedError: the weights that generated the reply were replaced.
        """
        if not self._has_weights:
            raise WeightsReplacedError(
                f"the model's weights were replaced while the fields of a reply were computed; {REMEDY}"
            )
        for ask, row in zip(asks, rows, strict=True):
            ask.take(row)

    def answer(self) -> list[FieldDistribution]:
        """Return the distribution of each value in the reply; objects and arrays precede their members."""
        raw, processed = self._completion.logprobs, self._completion.processed_logprobs
        assert raw is not None, "it was checked"
        sums = {number: one.members() for number, one in self._sums.items()}
        members = [sums.get(number, (None, None)) for number in range(len(self._spelt.nodes))]
        fields = self._spelt.fields(raw, self._masses[0] if self._is_exact else None)
        others: Sequence[Field | None] = [None] * len(fields)
        if processed is not None:
            masses = self._masses[1] if self._is_exact and self._has_grammar_alone else None
            others = self._spelt.fields(processed, masses)
        return [
            FieldDistribution(
                pointer=field.pointer,
                value=field.value,
                raw=field,
                processed=other,
                log_kept_mass=_log_kept_mass(processed, field),
                members=raw_members,
                grammar_members=grammar_members,
            )
            for field, other, (raw_members, grammar_members) in zip(fields, others, members, strict=True)
        ]

    @property
    def _has_weights(self) -> bool:
        """True if the weights that generated the reply are still loaded."""
        return self._loaded.engine.weights_number == self._weights_number

    @property
    def _has_grammar_alone(self) -> bool:
        """True if only the grammar changes the distribution (no temperature, truncation or processors)."""
        params, pipeline = self._params, self._loaded.processors
        if pipeline is not None and pipeline.applies_to_all:
            return False
        is_plain = (params.temperature in (0, 1), params.top_k <= 0, params.top_p == 1, params.min_p == 0)
        others = replace(params, response_format=None)
        return self._has_grammar and all(is_plain) and not others.asks_processors

    def _matchers_at(self, tokens: set[int], grammar: GrammarArgs | None) -> dict[int, LlguidanceMatcher]:
        """Return a copy of the grammar matcher before each of the given token indices in the reply."""
        if grammar is None:
            return {}
        matcher, place, found = self._tools.matcher(grammar), 0, {}
        for token in sorted(tokens):
            for token_id in self._completion.token_ids[place:token]:
                remedy = "pass the output that was generated with this grammar"
                require(matcher.accept(token_id), "output", f"has a token that the grammar rejects; {remedy}")
            place, found[token] = token, matcher.copy()
        return found

    def _split_asks(self) -> list[RowAsk]:
        by_token: dict[int, list[Split]] = {}
        for split in sorted(self._splits):
            by_token.setdefault(split.token, []).append(split)
        return [
            RowAsk(self._prefix(token), partial(self._take_split, splits))
            for token, splits in by_token.items()
        ]

    def _take_split(self, splits: Sequence[Split], row: Row) -> None:
        token = splits[0].token
        allowed = self._tools.allowed(self._matchers[token]) if token in self._matchers else None
        records = (self._completion.logprobs, self._completion.processed_logprobs)
        for masses, record, mask in zip(self._masses, records, (None, allowed), strict=True):
            if record is None:
                continue
            own = np.float64(record[token : token + 1].chosen_entries().logprobs[0])
            for split in splits:
                ids = self._tools.index.beginning_with(self._spelt.pieces[token][: split.num_bytes])
                like = ids if mask is None else ids[mask[ids]]
                # Their probability relative to the chosen token's, so that the row's normalizer cancels.
                share = logsumexp(row[like]) - np.float64(row[self._completion.token_ids[token]])
                masses[split] = float(own + share)

    def _member_asks(self, one: MemberSum, most: int) -> list[RowAsk]:
        prefix, asks = self._prefix(one.token), []
        for path in one.paths.next_paths(most):
            token_ids = np.concatenate([prefix, np.array(path.token_ids, np.int32)])
            if len(token_ids) <= self._max_len:
                asks.append(RowAsk(token_ids, partial(self._take_path, one, path)))
            else:  # the prefix is longer than the model's context
                one.paths.give_up(path)
        return asks

    def _take_path(self, one: MemberSum, path: Path, row: Row) -> None:
        one.paths.take(path, row, self._allowed_after(one.token, path))

    def _allowed_after(self, token: int, path: Path) -> Allowed | None:
        """Return the tokens that the grammar allows after a path; None without a grammar."""
        if token not in self._matchers or path.logprobs[1] == -np.inf:
            return None
        matcher = self._matchers[token].copy()
        for token_id in path.token_ids:
            is_allowed = matcher.accept(token_id)
            assert is_allowed, "the mask allowed it"
        return self._tools.allowed(matcher)

    def _prefix(self, token: int) -> IntArray:
        return np.concatenate([self._prompt, np.array(self._completion.token_ids[:token], np.int32)])


def _params_of(output: RequestOutput) -> SamplingParams:
    params: SamplingParams | None = getattr(output, "params", None)
    if params is None:
        raise ParameterError("output", "must be a RequestOutput, as returned by generate, chat and stream")
    return params


def _completion_of(output: RequestOutput, index: int) -> CompletionOutput:
    is_place = isinstance(index, int) and 0 <= index < len(output.outputs)
    require(is_place, "index", f"must be the index of one of {len(output.outputs)} completions", got=index)
    completion = output.outputs[index]
    is_raw = completion.logprobs is not None and _params_of(output).logprobs_mode != "processed_logprobs"
    remedy = "set logprobs=0, with logprobs_mode='both' if you also need the processed ones"
    require(is_raw, "logprobs", f"raw log-probabilities were not requested; {remedy}")
    return completion


def _schema_of(schema: Any, grammar: GrammarArgs | None) -> Schema:
    """Return the reply's schema; raise `ParameterError` if it does not enumerate the values of any field."""
    if schema is None and grammar is not None:
        schema = grammar.json_schema
    remedy = "completion.fields() needs no schema"
    missing = "is missing, and the request's response_format has none; pass a schema"
    require(schema is not None, "schema", f"{missing}, or do without: {remedy}")
    known = Schema(schema)
    names = "enumerates no values: it has no enum, const, boolean or bounded integer"
    require(known.has_members(), "schema", f"{names}; {remedy}")
    return known


def _log_kept_mass(record: FlatLogprobs | None, field: Field) -> float | None:
    column = None if record is None else record.log_kept_mass
    if column is None:
        return None
    return float(column[field.tokens.start : field.tokens.stop].sum(dtype=np.float64))
