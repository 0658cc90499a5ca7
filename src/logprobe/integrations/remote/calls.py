"""Completions and scores from a server, as `LLM.generate` and `LLM.score` return them."""

from __future__ import annotations

from dataclasses import fields
from importlib.util import find_spec
from math import inf, nan
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
import numpy as np

from logprobe.analysis.score import Score
from logprobe.engine.request import CompletionOutput, RequestOutput
from logprobe.errors import InputError, ParameterError, ServerError
from logprobe.integrations.remote.link import FACTS_BYTES, SAMPLES, TOKEN_BYTES, decoded
from logprobe.records import FlatLogprobs, LogprobsInfo
from logprobe.records.forms.finite import IMPOSSIBLE
from logprobe.records.values import ExpertRoutes, IdLists
from logprobe.sampling import SamplingParams
from logprobe.sampling.params import COUNTS, REPORTING_FIELDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from logprobe.engine.protocol import Capabilities
    from logprobe.integrations.remote.link import Link
    from logprobe.records.replies import ReplyRows
    from logprobe.records.values import TokenTable

SCORES: Final = "/v1/loglikelihood"
ARROW_TYPE: Final = "application/vnd.apache.arrow.stream"
ROUTES: Final = {
    "return_hidden_states": "POST /v1/hidden_states (prompts only) or LLM.generate",
    "return_routed_experts": "POST /v1/completions",
}
DEFAULTS: Final = SamplingParams()


class _Entry(msgspec.Struct):
    token_id: int
    logprob: float | None


class _Row(_Entry):
    rank: int
    top_logprobs: list[_Entry]


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None]]  # by `token_id:N`
    ranks: list[int]


class _Choice(msgspec.Struct):
    index: int
    text: str
    token_ids: list[int]
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None = None
    logprobs: _Logprobs | None = None
    digests: list[str] = []
    prompt_token_ids: list[int] = []
    prompt_rows: list[_Row | None] | None = None
    logprobs_info: LogprobsInfo | None = None

    def rows(self, k: int) -> list[_Row] | None:
        """Return the rows of the tokens; `k` is the number of alternatives, -1 for all."""
        if self.logprobs is None:
            return None
        columns = (self.token_ids, self.logprobs.token_logprobs, self.logprobs.ranks)
        # A map has the k most likely tokens, then the chosen one if it is not among them.
        tops = [
            [_Entry(int(name.removeprefix("token_id:")), value) for name, value in top.items()]
            for top in self.logprobs.top_logprobs
        ]
        rows = zip(*columns, [top if k == -1 else top[:k] for top in tops], strict=True)
        return [_Row(*row) for row in rows]


class _Completion(msgspec.Struct):
    id: str
    choices: list[_Choice]


class _Score(msgspec.Struct):
    logprob: float | None
    token_logprobs: list[float | None]
    token_ids: list[int]
    ranks: list[int]
    is_greedy: bool
    num_tokens: int
    num_bytes: int
    num_chars: int
    boundary: Literal["token", "bytes"]
    unconditional_logprob: float | None = None


class _Scores(msgspec.Struct):
    data: list[_Score]


async def ask_completion(
    link: Link,
    prompt: str | Sequence[int],
    params: SamplingParams,
    facts: Capabilities,
    table: TokenTable | None,
    *,
    add_special_tokens: bool,
) -> RequestOutput:
    """Generate completions of one prompt; `table` has the token texts for records.

    Raises:
        LogprobeError: a parameter is not supported, the request failed, or the reply is not valid.
    """
    where, counts = f"{link.url}{SAMPLES}", [getattr(params, name) for name in COUNTS]
    has_rows, is_binary = counts != [None, None], find_spec("pyarrow") is not None
    body = {"prompt": prompt, **_fields_of(params, is_binary=is_binary), "return_token_ids": True}
    if isinstance(prompt, str):
        body["add_special_tokens"] = add_special_tokens
    if has_rows:
        # The last two are used only by a server without pyarrow, which replies with JSON.
        body |= {"logprobs_mode": params.logprobs_mode, "return_tokens_as_token_ids": True}
        body["prompt_rows"] = params.prompt_logprobs is not None
    ids = params.logprob_token_ids
    num_given = int(np.diff(ids.offsets).max(initial=0)) if isinstance(ids, IdLists) else len(ids or ())
    num_new, num_old = (3 + num_given + (facts.vocab_size if k == -1 else k or 0) for k in counts)
    num_new *= 2 if params.logprobs_mode == "both" else 1
    num_entries = params.n * params.max_tokens * num_new + facts.max_model_len * num_old
    accept = f"{ARROW_TYPE}, application/json;q=0.5" if has_rows and is_binary else None
    reply = await link.post(SAMPLES, body, FACTS_BYTES + num_entries * TOKEN_BYTES, accept)
    is_arrow = reply.content_type == ARROW_TYPE
    if not is_arrow:
        _fields_of(params, is_binary=False)
    try:
        return (
            _from_arrow(reply.data, params, table)
            if is_arrow
            else _from_json(reply.data, params, table, where)
        )
    except (ValueError, LookupError) as error:
        raise ServerError(f"{where}: the reply has no valid log-probabilities ({error})") from error


def _from_json(data: bytes, params: SamplingParams, table: TokenTable | None, where: str) -> RequestOutput:
    reply = decoded(data, _Completion, where)
    _check_choices(reply.choices, params)
    first = reply.choices[0]
    return RequestOutput(
        request_id=reply.id,
        prompt_token_ids=first.prompt_token_ids,
        prompt_logprobs=_record(first.prompt_rows, first.logprobs_info, table),
        outputs=[
            _output(choice, params, _record(choice.rows(params.logprobs or 0), choice.logprobs_info, table))
            for choice in reply.choices
        ],
        info=first.logprobs_info,
        params=params,
    )


def _from_arrow(data: bytes, params: SamplingParams, table: TokenTable | None) -> RequestOutput:
    from logprobe.records.replies import read_stream

    rows = read_stream(data)
    reply = msgspec.convert(rows.reply, _Completion)
    _check_choices(reply.choices, params)
    records = {name: record.with_table(table) for name, record in rows.records.items()}
    first, outputs = reply.choices[0], []
    for choice in reply.choices:
        name, ids = f"{choice.index}", choice.token_ids
        if params.logprobs is None:
            outputs.append(_output(choice, params, None))
            continue
        if not ids:  # no token was generated
            records[name] = FlatLogprobs(table=table, info=first.logprobs_info)
        else:
            _check_ids(rows, name, ids)
        output = _output(choice, params, records[name])
        if params.logprobs_mode == "both" and ids:
            _check_ids(rows, f"{name}/processed", ids)
            output.processed_logprobs = records[f"{name}/processed"]
        outputs.append(output)
    if params.prompt_logprobs is not None:
        _check_ids(rows, "0/prompt", first.prompt_token_ids)
    return RequestOutput(
        request_id=reply.id,
        prompt_token_ids=first.prompt_token_ids,
        prompt_logprobs=records["0/prompt"] if params.prompt_logprobs is not None else None,
        outputs=outputs,
        info=first.logprobs_info,
        params=params,
    )


def _check_ids(rows: ReplyRows, name: str, ids: Sequence[int]) -> None:
    if name not in rows.records or rows.token_ids[name].tolist() != ids:
        raise InputError(f"the rows of {name!r} are missing, or are not those of the reply's tokens")


def _check_choices(choices: Sequence[_Choice], params: SamplingParams) -> None:
    if [choice.index for choice in choices] != [*range(params.n)]:
        raise InputError(f"it does not have the {params.n} completions that were requested")


async def ask_scores(
    link: Link, context: str | Sequence[int], continuations: Sequence[str | Sequence[int]], **options: Any
) -> list[Score]:
    """Score continuations of one context; `options` are fields of the request's body.

    Raises:
        LogprobeError: the request failed, or the reply is not valid.
    """
    where = f"{link.url}{SCORES}"
    body = {"context": context, "continuations": continuations, **options}
    num_bytes = len(msgspec.json.encode(continuations))  # at least the number of tokens
    reply = await link.post(SCORES, body, FACTS_BYTES + num_bytes * TOKEN_BYTES)
    scores = decoded(reply.data, _Scores, where).data
    if len(scores) != len(continuations):
        raise ServerError(f"{where}: returned {len(scores)} scores for {len(continuations)} continuations")
    return [
        Score(
            **msgspec.structs.asdict(score)
            | {"logprob": _number(score.logprob), "token_logprobs": [*map(_number, score.token_logprobs)]}
        )
        for score in scores
    ]


def _fields_of(params: SamplingParams, *, is_binary: bool) -> dict[str, Any]:
    """Return the parameters that differ from their defaults; they have the same names in a request's body.

    Raises:
        ParameterError: a report is not supported, or needs an Arrow reply and `is_binary` is False.
    """
    values = {field.name: getattr(params, field.name) for field in fields(params)}
    asked = {name: value for name, value in values.items() if value != getattr(DEFAULTS, name)}
    for name in REPORTING_FIELDS:
        if name in asked and name in ("explain", "kept_ids"):
            raise ParameterError(name, "is not supported by RemoteLLM.generate; use LLM.generate")
        if name in asked and name in ROUTES:
            raise ParameterError(name, f"is not supported by RemoteLLM.generate; use {ROUTES[name]}")
        if name in asked and name not in {*COUNTS, "digest"} and not is_binary:
            raise ParameterError(name, "needs pyarrow here and on the server; pip install 'logprobe[arrow]'")
    if isinstance(params.logprob_token_ids, IdLists):
        lists = params.logprob_token_ids
        asked["logprob_token_ids"] = [lists[place].tolist() for place in range(len(lists))]
    routes = params.routed_experts
    if isinstance(routes, ExpertRoutes):
        data = routes.experts.astype("<u2").tobytes()
        asked["routed_experts"] = {"shape": routes.array.shape, "dtype": "uint16", "data": data}
    return asked


def _output(choice: _Choice, params: SamplingParams, record: FlatLogprobs | None) -> CompletionOutput:
    total = None if record is None else float(record.chosen_entries().logprobs.sum(dtype="float64"))
    return CompletionOutput(
        index=choice.index,
        token_ids=choice.token_ids,
        logprobs=record,
        cumulative_logprob=total,
        text=choice.text,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        digests=[*map(bytes.fromhex, choice.digests)] if params.digest else None,
        raw_logprob=None if params.logprobs_mode == "processed_logprobs" else total,
    )


def _record(
    rows: Iterable[_Row | None] | None, info: LogprobsInfo | None, table: TokenTable | None
) -> FlatLogprobs | None:
    if rows is None:
        return None
    record = FlatLogprobs(info=info, table=table)
    for row in rows:
        if row is None:
            record.append(None)
        else:
            entries = (row, *row.top_logprobs)
            ids, logprobs = [one.token_id for one in entries], [_number(one.logprob) for one in entries]
            record.append_rows([ids], [logprobs], [row.rank])
    return record


def _number(value: float | None) -> float:
    """Return a log-probability from JSON, which has no infinities and no NaN."""
    return nan if value is None else -inf if value <= IMPOSSIBLE else value
