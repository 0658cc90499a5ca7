"""`ScoringClient`: score continuations and sample answers with engine requests."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from logprobe.analysis import measures
from logprobe.analysis.healing import Healer
from logprobe.analysis.score import Score, joined
from logprobe.analysis.score_requests import admit_splits, scored, scored_total
from logprobe.analysis.uncertainty import check_loads, self_certainty
from logprobe.engine.client import Client, admit_each, check_on_error, checked
from logprobe.engine.request import check_vocabulary
from logprobe.engine.truncation import check_truncation, cut_pair
from logprobe.errors import LogprobeError, ParameterError, require
from logprobe.records.values import IdLists
from logprobe.sampling import SamplingParams
from logprobe.sampling.params import named_ids
from logprobe.text.boundary import Split, check_rule, split_texts
from logprobe.text.edge import as_token_ids
from logprobe.text.prompts import as_list, plain_prompt

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from logprobe.analysis.uncertainty import DrawPlan, SampledAnswer
    from logprobe.engine.client import OnError, Watch
    from logprobe.engine.request import RequestOutput, Requests
    from logprobe.engine.truncation import Truncation
    from logprobe.records.values import IntArray
    from logprobe.text.boundary import BoundaryRule
    from logprobe.text.chat import Conversation
    from logprobe.text.prompts import Prompt
    from logprobe.transport.messages import Admitted

ROWS_BYTES = 1 << 26  # maximum size of the whole-vocabulary rows held at once


class PairRequests(NamedTuple):
    """The requests that score one (context, continuation) pair.

    Each request scores one `Split`. Truncation by windows cuts a long pair into several splits.
    """

    whole: Split  # the pair before truncation
    splits: list[Split]  # the splits of the pair, then the splits of the continuation without its context
    num_parts: int  # number of splits of the pair
    admitted: list[Admitted]  # one request per split


class ScoringClient(Client):
    """A `Client` that also scores continuations and samples answers."""

    async def score(
        self,
        pairs: Iterable[tuple[Prompt, Prompt] | Split],
        params: SamplingParams,
        *,
        watch: Watch | None = None,
        sampling: SamplingParams | None = None,
        unconditional: bool = False,
        on_error: OnError = "raise",
        truncation: Truncation = "error",
        logprob_token_ids: Iterable[Any] | None = None,
        boundary: BoundaryRule = "auto",
    ) -> list[Score]:
        """Score each continuation given its context; see `LLM.score`."""
        check_on_error(on_error)
        check_truncation(truncation)
        check_rule(boundary)
        pairs = as_list(pairs, "pairs", "must be an iterable of (context, continuation) pairs")
        is_params = sampling is None or isinstance(sampling, SamplingParams)
        require(is_params, "sampling_params", "must be a SamplingParams", got=sampling)
        if logprob_token_ids is not None:
            known = "must be an iterable with a list of token ids for each pair"
            logprob_token_ids = as_list(logprob_token_ids, "logprob_token_ids", known)
            remedy = (
                "cannot be combined with truncation='window', which has no records; use truncation='left'"
            )
            require(truncation != "window", "logprob_token_ids", remedy)
            is_each = len(logprob_token_ids) == len(pairs)
            require(
                is_each,
                "logprob_token_ids",
                f"must have one entry per pair, got {len(logprob_token_ids)} for {len(pairs)}",
            )
        params = self.allowed_params(params)
        sampling = None if sampling is None else self.allowed_params(sampling)
        limit, requests = self.engine.capabilities().max_model_len, self.requests.of_one_call()

        def admit(row: int) -> PairRequests:
            split = self.split(pairs[row], boundary)
            asked = (
                params
                if logprob_token_ids is None
                else self.with_named_ids(params, logprob_token_ids[row], split)
            )
            parts = cut_pair(split, truncation, limit)
            alone = cut_pair(self.alone(split), truncation, limit) if unconditional else []
            admitted = admit_splits(parts, asked, requests, sampling=sampling)
            admitted += admit_splits(alone, params, requests, sampling=sampling)
            return PairRequests(split, [*parts, *alone], len(parts), admitted)

        admitted = admit_each(admit, len(pairs), on_error)
        good = [pair for pair in admitted if not isinstance(pair, LogprobeError)]
        outputs = await self.run([one for pair in good for one in pair.admitted], watch)
        splits = [split for pair in good for split in pair.splits]
        healed = await self.heal(splits, outputs, params.lora, requests, sampling)
        results = zip(outputs, healed, strict=True)
        scores = [
            Score.failed(pair)
            if isinstance(pair, LogprobeError)
            else self._score_of(pair, [*islice(results, len(pair.splits))])
            for pair in admitted
        ]
        return checked(scores, on_error)

    def _score_of(
        self, pair: PairRequests, results: Sequence[tuple[RequestOutput, float | LogprobeError | None]]
    ) -> Score:
        """Build the score of a pair from the outputs of its splits and their healed log-probabilities."""
        numbers = [(output, healed) for output, healed in results if not isinstance(healed, LogprobeError)]
        errors = [output.error for output, _ in results]
        errors += [healed for _, healed in results if isinstance(healed, LogprobeError)]
        error = next((error for error in errors if error is not None), None)
        if error is not None:
            return Score.failed(error)
        parts = zip(pair.splits[: pair.num_parts], numbers, strict=False)
        scores = [self.as_score(split, *number) for split, number in parts]
        alone = [scored_total(*number) for number in numbers[pair.num_parts :]]
        unconditional = measures.total(alone) if alone else None
        if len(scores) == 1:
            return replace(scores[0], unconditional_logprob=unconditional)
        return joined(scores, self._scored_bytes(pair.whole), unconditional_logprob=unconditional)

    def _scored_bytes(self, split: Split) -> bytes:
        """Return the bytes of a continuation: its UTF-8 text, or its tokens' bytes if it was given as ids."""
        if split.data is not None:
            return split.data
        data = self.text.vocabulary.bytes_of(split.continuation.tolist())
        return data if split.healing is None else data[len(data) - split.healing.num_bytes :]

    async def heal(
        self,
        splits: Sequence[Split],
        outputs: Sequence[RequestOutput],
        lora: str | None,
        requests: Requests,
        sampling: SamplingParams | None = None,
    ) -> list[float | LogprobeError | None]:
        """Compute the byte-level log-probability of each split; see `Healer.logprobs`.

        The result is None for a split that needs no healing: its boundary lies between two tokens.
        """
        if all(split.healing is None for split in splits):
            return [None] * len(splits)
        return await Healer(self, lora, requests, sampling).logprobs(splits, outputs)

    async def draw(
        self, prompt: Prompt | Conversation, plan: DrawPlan, *, watch: Watch | None = None
    ) -> list[SampledAnswer]:
        """Sample answers to one prompt, one request per answer; see `LLM.uncertainty`."""
        has_cap = self.max_logprobs != -1
        allowed = f"must be {self.max_logprobs} or less (max_logprobs)"
        require(not has_cap or plan.k <= self.max_logprobs, "k", allowed, got=plan.k)
        remedy = "requires whole-vocabulary rows, which max_logprobs does not allow; set max_logprobs to -1"
        require(not (has_cap and plan.reads_rows), "self_certainty", remedy)
        ids, requests = self.ids_of(prompt), self.requests.of_one_call()
        admitted = [requests.admit(ids, self.allowed_params(params)) for params in plan.params]
        outputs = checked(await self.run(admitted, watch, plan.growing), "raise")
        answers = plan.answers(outputs, self.text)
        if plan.reads_rows:
            lora = plan.params[0].lora
            answers = [await self._with_self_certainty(ids, answer, lora) for answer in answers]
            check_loads({outputs[0].weights_number, self.engine.weights_number})
        return answers

    async def _with_self_certainty(
        self, prompt: IntArray, answer: SampledAnswer, lora: str | None
    ) -> SampledAnswer:
        """Add the self-certainty to an answer by scoring it again, a few whole-vocabulary rows at a time."""
        params = self.allowed_params(SamplingParams(max_tokens=0, prompt_logprobs=-1, lora=lora))
        size = max(ROWS_BYTES // (8 * self.engine.capabilities().vocab_size), 1)
        ids = np.concatenate([prompt, np.array(answer.token_ids, np.int32)])
        total = 0.0
        for start in range(len(prompt), len(ids), size):
            [score] = await self.score([(ids[:start], ids[start : start + size])], params)
            assert score.record is not None, "a pair that fits into the context has a record"
            total += float((await asyncio.to_thread(self_certainty, score.record)).sum())
        return replace(answer, self_certainty=total / answer.num_tokens)

    def split(self, pair: tuple[Prompt, Prompt] | Split, boundary: BoundaryRule = "auto") -> Split:
        """Convert a (context, continuation) pair to a `Split`; two texts are split by `split_texts`.

        Raises:
            ParameterError: `pair` is not a pair, pairs a text with ids, or has an empty continuation.
        """
        if isinstance(pair, Split):
            return pair
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2
        require(is_pair, "pairs", "must hold (context, continuation) pairs", got=pair)
        context, continuation = map(plain_prompt, pair)
        if isinstance(context, str) and isinstance(continuation, str):
            return split_texts(self.text, context, [continuation], rule=boundary)[0]
        if isinstance(context, str) or isinstance(continuation, str):
            raise ParameterError("pairs", "context and continuation must both be texts or both be ids")
        before = as_token_ids(context, "context") if len(context) else self.text.prefix()
        after = as_token_ids(continuation, "continuation")
        require(len(after) > 0, "continuation", "is empty; there is nothing to score")
        return Split(np.concatenate([before, after]), len(before))

    def alone(self, split: Split) -> Split:
        """Return the continuation with only BOS (or EOS if the model has no BOS) as its context."""
        prefix, healing = self.text.prefix(), split.healing
        ids = np.concatenate([prefix, split.continuation])
        if healing is None:
            return Split(ids, len(prefix))
        moved = healing.moved(split.start - len(prefix))
        bare = replace(moved, first=len(prefix), tail=b"", text=healing.text[len(healing.tail) :])
        return Split(ids, len(prefix), bare)

    def with_named_ids(
        self, params: SamplingParams, token_ids: Any, split: Split, *, name: str = "logprob_token_ids"
    ) -> SamplingParams:
        """Return `params` that also request the log-probabilities of `token_ids`.

        `token_ids` is one list of ids for all tokens of the continuation, or one list per token; errors
        call it `name`.

        Raises:
            ParameterError: `token_ids` has invalid ids, or has lists but not one per token.
        """
        count = len(split.continuation)
        ids = named_ids(name, token_ids)
        if ids is None and token_ids is not None:  # an empty list: report no ids
            ids = IdLists.of([np.empty(0, np.int64)] * count)
        if isinstance(ids, IdLists):
            fits = len(ids) == count
            require(
                fits,
                name,
                f"has {len(ids)} lists for a continuation of {count} tokens; give one list per token",
            )
        check_vocabulary(name, ids, self.engine.capabilities().vocab_size)
        return replace(params, logprob_token_ids=ids)

    def as_score(
        self, split: Split, output: RequestOutput, healed: float | None = None, alone: float | None = None
    ) -> Score:
        """Build the score of a split from the output of its request.

        Args:
            split: the context and continuation.
            output: the request's output.
            healed: log-probability of the continuation's bytes, nats; None without healing.
            alone: log-probability of the continuation without its context, nats, for the PMI.
        """
        ids = split.continuation.tolist()
        score = Score.of(ids, scored(output), self._scored_bytes(split), unconditional_logprob=alone)
        if split.healing is None:
            return score
        assert healed is not None, "splits with healing have a byte-level sum"
        return replace(score, logprob=healed, boundary="bytes")
