"""`OutputBuilder`: builds the output of a request from its engine events.

The reader of the request applies the events; nothing else modifies the output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from logprobe.engine.plan.sample import GENERATOR
from logprobe.engine.request import RequestOutput, end_with_error, keep_best
from logprobe.records import FlatLogprobs
from logprobe.records.digests import digests_of, split_given
from logprobe.records.rows import EXTRAS
from logprobe.sampling.params import distribution_fields
from logprobe.transport.messages import Failure

if TYPE_CHECKING:
    from logprobe.engine.request import CompletionOutput
    from logprobe.records import LogprobsInfo, TokenTable
    from logprobe.records.info import Stage
    from logprobe.records.rows import HostRows
    from logprobe.records.store.columns import Array
    from logprobe.sampling import SamplingParams
    from logprobe.transport.messages import Delta, Event, Finish, Request

STAGES: dict[str, tuple[Stage, ...]] = {
    "raw_logprobs": ("raw",),
    "processed_logprobs": ("processed",),
    "both": ("raw", "processed"),
}


class Describer:
    """Creates the outputs and records of an engine's requests, and sets their `LogprobsInfo`.

    Args:
        source: engine, model and initial weights.
        vocab_size: number of tokens in the vocabulary.
        table: maps token ids to text.
    """

    def __init__(self, source: LogprobsInfo, vocab_size: int, table: TokenTable) -> None:
        self._sources = {0: source}  # by load number of the weights
        self.weights_number = 0  # of the load in use
        self._vocab_size = vocab_size
        self.table = table

    def expect(self, number: int, source: LogprobsInfo, oldest: int) -> None:
        """Register `source` for the weights of load `number`; drop entries of loads before `oldest`."""
        kept = {load: known for load, known in self._sources.items() if load >= oldest}
        self._sources = kept | {number: source}

    def open(self, request: Request, lora_version: str | None = None) -> RequestOutput:
        """Return a new output with one empty completion per sample and the records that were requested.

        `lora_version` is the version of the request's LoRA weights, if it has any.
        """
        params, output = request.params, RequestOutput.for_request(request)
        if params.prompt_logprobs is not None:
            first = [None] if request.first_scored == 1 else []
            output.prompt_logprobs = FlatLogprobs(first, table=self.table)
        for completion in output.outputs:
            self._open_completion(completion, params)
        self.describe(output, request, self.weights_number, lora_version)
        return output

    def _open_completion(self, completion: CompletionOutput, params: SamplingParams) -> None:
        if params.explain:
            completion.explanations = []
        if params.digest:
            completion.digests = []
        if params.logprobs is None:
            return
        completion.logprobs = FlatLogprobs(table=self.table)
        completion.cumulative_logprob = 0.0
        if params.logprobs_mode == "both":
            completion.processed_logprobs = FlatLogprobs(table=self.table)

    def describe(
        self, output: RequestOutput, request: Request, number: int, lora_version: str | None
    ) -> None:
        """Set the `LogprobsInfo` of an output and of its records, for the weights of load `number`."""
        params, source = request.params, self._sources[number]
        if params.lora is not None:
            source = msgspec.structs.replace(source, lora=params.lora, lora_version=lora_version)
        output.weights_number = number
        output.info = self._of_request(source, request)
        if output.prompt_logprobs is not None:
            output.prompt_logprobs.info = self._of_prompt(source, request)
        if params.logprobs is None:
            return
        source = _with_generator(source, request)
        infos = [self._of_completion(source, params, (stage,)) for stage in STAGES[params.logprobs_mode]]
        for completion in output.outputs:
            records = (completion.logprobs, completion.processed_logprobs)
            for record, info in zip(records, infos, strict=False):
                assert record is not None, "records are opened together"
                record.info = info

    def _of_prompt(self, source: LogprobsInfo, request: Request) -> LogprobsInfo:
        """Return the info of prompt rows: raw, unless the request has `scored_as`."""
        if request.scored_as is not None:
            return self._of_completion(source, request.scored_as, ("processed",))
        return self._of(source, request.params.prompt_logprobs, stages=("raw",))

    def _of_completion(
        self, source: LogprobsInfo, params: SamplingParams, stages: tuple[Stage, ...]
    ) -> LogprobsInfo:
        """Return the info of rows of generated tokens at these stages."""
        fields = distribution_fields(params) if "processed" in stages else {}
        return self._of(source, params.logprobs, stages=stages, **fields)

    def _of_request(self, source: LogprobsInfo, request: Request) -> LogprobsInfo | None:
        """Return the info of the whole output.

        Whole rows and a lens have raw info. Otherwise it is the info of the completions' log-probabilities,
        else of the prompt's, else the model's own if activations were requested, else None.
        """
        params = request.params
        if request.wants_row:
            return self._of(source, -1, stages=("raw",))
        if request.lens is not None:
            return self._of(source, request.lens.k, stages=("raw",))
        if params.logprobs is not None:
            return self._of_completion(_with_generator(source, request), params, STAGES[params.logprobs_mode])
        if params.prompt_logprobs is not None:
            return self._of_prompt(source, request)
        return source if params.captures else None

    def _of(self, source: LogprobsInfo, asked: int | None, **fields: Any) -> LogprobsInfo:
        assert asked is not None, "only requested log-probabilities are described"
        delivered = self._vocab_size if asked == -1 else min(asked, self._vocab_size)
        return msgspec.structs.replace(source, num_logprobs_asked=asked, num_logprobs=delivered, **fields)


def _with_generator(source: LogprobsInfo, request: Request) -> LogprobsInfo:
    """Add the name of the random number generator, if the request's tokens are sampled with it."""
    is_sampled = request.forced_token_ids is None and not request.params.is_greedy
    return msgspec.structs.replace(source, generator=GENERATOR) if is_sampled else source


class OutputBuilder:
    """Builds one request's `output` from its events."""

    def __init__(self, request: Request, describer: Describer, lora_version: str | None = None) -> None:
        self.output = describer.open(request, lora_version)
        self._lora_version = lora_version
        self._describer, self._request = describer, request
        self._params = request.params
        # A column that has a flag of the same name is kept if the flag is set; other columns always.
        self._extras = [name for name in EXTRAS if getattr(request.params, name, True)]
        self._activations: ActivationBuilder | None = None
        if request.params.captures or request.lens is not None:
            self._activations = ActivationBuilder(request, describer.table)

    def is_wide(self, width: int) -> bool:
        """Return True if the request asks for `width` or more alternatives per row, or for all."""
        return any(
            k == -1 or k >= width for k in (self._params.logprobs or 0, self._params.prompt_logprobs or 0)
        )

    def add(self, event: Event) -> None:
        """Apply one event to the output."""
        if isinstance(event, Failure):
            end_with_error(self.output, event.error)
            return
        # The request was held while other weights were loaded.
        if event.weights_number > self.output.weights_number:
            self._describer.describe(self.output, self._request, event.weights_number, self._lora_version)
        completion = self.output.outputs[event.index]
        if event.prompt is not None and self.output.prompt_logprobs is not None:
            self._append(self.output.prompt_logprobs, event.prompt)
        self._add_rows(completion, event)
        completion.token_ids += event.token_ids
        if completion.explanations is not None and event.effects is not None:
            completion.explanations += event.effects
        if event.row is not None:
            completion.row = event.row
        if self._activations is not None:
            self._activations.add(event, self.output)
        if event.finish is not None:
            completion.drafts = event.drafts
            if event.index == 0:  # the other samples find this one's prompt in the cache
                self.output.num_cached_tokens = event.num_cached_tokens
            self._end(completion, event.finish)

    def _add_rows(self, completion: CompletionOutput, delta: Delta) -> None:
        is_alone = self._params.logprobs_mode == "processed_logprobs"
        if delta.raw is not None:
            completion.raw_logprob = _plus_chosen(completion.raw_logprob, delta.raw)
            if completion.digests is not None:
                assert delta.raw.given is not None, "digests are computed from given ids"
                assert self.output.info is not None, "digests need logprobs"
                _, sampled = split_given(delta.raw.given)
                completion.digests += digests_of(sampled, len(completion.digests), self.output.info)
            if completion.logprobs is not None and not is_alone:
                self._append(completion.logprobs, delta.raw, has_digests=self._params.digest)
                completion.cumulative_logprob = completion.raw_logprob
        if delta.processed is not None:
            container = completion.logprobs if is_alone else completion.processed_logprobs
            assert container is not None
            self._append(container, delta.processed, has_digests=self._params.digest)
            if is_alone:
                completion.cumulative_logprob = _plus_chosen(completion.cumulative_logprob, delta.processed)

    def _append(self, record: FlatLogprobs, rows: HostRows, *, has_digests: bool = False) -> None:
        # The rows may have more columns, which other requests in the step asked for.
        given = rows.given if self._params.logprob_token_ids else None
        if has_digests and given is not None:
            given, _ = split_given(given)
        record.append_rows(
            rows.token_ids,
            rows.logprobs,
            rows.ranks,
            given=None if given is None else given.columns(),
            kept=(rows.kept.offsets, rows.kept.token_ids) if self._params.kept_ids and rows.kept else None,
            **{name: rows.extras[name] for name in self._extras if name in rows.extras},
        )

    def _end(self, completion: CompletionOutput, finish: Finish) -> None:
        completion.stop_reason = finish.stop_reason
        completion.num_text_bytes = finish.num_text_bytes
        completion.error = finish.error
        completion.finish_reason = finish.reason
        if self.output.is_finished:
            keep_best(self.output, self._params)


class ActivationBuilder:
    """Collects the activations of one request; adds each sample's activations to the output at its end."""

    def __init__(self, request: Request, table: TokenTable) -> None:
        asked = request.params.return_hidden_states
        self._num_layers = 1 if asked is None or asked == "last" else len(asked)
        self._prompt: list[Array] = []
        self._hidden: dict[int, list[Array]] = {}  # by sample
        self._prompt_routes: list[Array] = []
        self._routes: dict[int, list[Array]] = {}  # by sample
        self._lens = [FlatLogprobs(table=table) for _ in request.lens.layers] if request.lens else None

    def add(self, delta: Delta, output: RequestOutput) -> None:
        """Add a step's activations; set the output's arrays if the sample has ended."""
        if delta.prompt_hidden is not None:
            self._prompt.append(delta.prompt_hidden)
        if delta.hidden is not None:
            self._hidden.setdefault(delta.index, []).append(delta.hidden)
        if delta.prompt_routes is not None:
            self._prompt_routes.append(delta.prompt_routes)
        if delta.routes is not None:
            self._routes.setdefault(delta.index, []).append(delta.routes)
        for record, rows in zip(self._lens or (), delta.lens or (), strict=False):
            extras: dict[str, Any] = dict(rows.extras)
            record.append_rows(rows.token_ids, rows.logprobs, rows.ranks, **extras)
        if delta.finish is None:
            return
        if delta.index == 0:
            num_prompt = len(output.prompt_token_ids)
            output.prompt_hidden_states = self._states(self._prompt)
            output.prompt_routed_experts = _routes(self._prompt_routes, num_prompt)
            output.lens = self._lens
        completion = output.outputs[delta.index]
        completion.hidden_states = self._states(self._hidden.pop(delta.index, []))
        completion.routed_experts = _routes(self._routes.pop(delta.index, []), len(completion.token_ids))

    def _states(self, parts: list[Array]) -> Array | None:
        """Join states, (positions, layers * size) each, to (positions, layers, size); free the parts."""
        if not parts:
            return None
        whole: Array = np.concatenate(parts)
        parts.clear()
        return whole.reshape(len(whole), self._num_layers, -1)


def _routes(parts: list[Array], num_positions: int) -> Array | None:
    """Join routes, (positions * layers, experts per token) each, to (positions, layers, experts per token).

    Returns None if routes of some positions are missing, because the request has ended early.
    """
    if not parts:
        return None
    whole: Array = np.concatenate(parts)
    num_layers, rest = divmod(len(whole), num_positions)
    return None if rest else whole.reshape(num_positions, num_layers, -1)


def _plus_chosen(total: float | None, rows: HostRows) -> float:
    # Add one at a time, so that the sum does not depend on how the rows were batched.
    result = total or 0.0
    for logprob in rows.logprobs[:, 0].tolist():
        result += logprob
    return result
