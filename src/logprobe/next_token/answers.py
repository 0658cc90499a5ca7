"""`Answers`: async methods in `NextTokenLM` that classify, rerank, judge and measure uncertainty."""

from __future__ import annotations

import asyncio
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, TypeVar

from logprobe.analysis.client import ScoringClient
from logprobe.analysis.labels import SCALE, as_asked, classify_plan, judge_plan, rerank_plan
from logprobe.analysis.spellings import MAX_ROWS
from logprobe.analysis.uncertainty import draw_plan
from logprobe.next_token.base import BaseLM
from logprobe.next_token.fields import FieldSums, SpellingTools
from logprobe.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from logprobe.analysis.labels import Asked, Classification, Correction, Judgement, Labels, Plan
    from logprobe.analysis.members import FieldDistribution
    from logprobe.analysis.uncertainty import LowConfidence, Same, Uncertainty
    from logprobe.engine.backends.start import LoadedModel
    from logprobe.engine.client import Prompt
    from logprobe.engine.request import RequestOutput
    from logprobe.text.chat import Conversation
    from logprobe.text.edge import TextEdge

T = TypeVar("T")
SCORED: Final = SamplingParams(max_tokens=0, prompt_logprobs=0)


class Answers(BaseLM):
    """Classification, reranking, judging, JSON field probabilities, and uncertainty of sampled answers."""

    _loaded: LoadedModel

    async def classify(
        self,
        prompts: Asked | Sequence[Asked],
        labels: Labels,
        *,
        correction: Correction = "none",
        content_free: Asked | None = None,
        lora: str | None = None,
    ) -> Classification | list[Classification]:
        """Async version of `LLM.classify`.

        Raises:
            ParameterError: an argument is invalid, or the LoRA name is unknown.
            BatchError: some requests failed.
        """

        def lay_out(text: TextEdge) -> Plan[list[Classification]]:
            return classify_plan(text, prompts, labels, correction=correction, content_free=content_free)

        return as_asked(prompts, await self._summed_up(lay_out, lora))

    async def rerank(
        self, query: str, documents: Sequence[str], *, lora: str | None = None, **layout: Any
    ) -> list[float]:
        """Async version of `LLM.rerank`; raises the same errors as `classify`."""
        return await self._summed_up(lambda text: rerank_plan(text, query, documents, **layout), lora)

    async def judge(
        self,
        prompts: Asked | Sequence[Asked],
        scale: Sequence[float] = SCALE,
        *,
        lora: str | None = None,
    ) -> Judgement | list[Judgement]:
        """Async version of `LLM.judge`; raises the same errors as `classify`."""
        return as_asked(prompts, await self._summed_up(lambda text: judge_plan(text, prompts, scale), lora))

    async def fields(
        self,
        output: RequestOutput,
        schema: dict[str, Any] | None = None,
        *,
        index: int = 0,
        max_rows: int = MAX_ROWS,
    ) -> list[FieldDistribution]:
        """Async version of `LLM.fields`.

        Raises:
            ParameterError: an argument is invalid.
            EngineError: the engine failed, was closed or aborted a request, or its weights were replaced
                meanwhile.
        """
        self._check_open()
        loaded = self._loaded
        sums = await asyncio.to_thread(
            lambda: FieldSums(loaded, self._spelling_tools, output, schema, index, max_rows)
        )
        while asks := await asyncio.to_thread(sums.next_asks):
            rows = await self._rows([ask.token_ids for ask in asks], sums.lora, is_urgent=True)
            await asyncio.to_thread(sums.take, asks, rows)
        return sums.answer()

    async def uncertainty(
        self,
        prompt: Prompt | Conversation,
        n: int = 10,
        params: SamplingParams | None = None,
        *,
        same: Same | None = None,
        stop_when: LowConfidence | None = None,
        window: int | None = None,
        k: int | None = None,
        self_certainty: bool = False,
        lora: str | None = None,
    ) -> Uncertainty:
        """Async version of `LLM.uncertainty`; `same` is called on a worker thread.

        Raises:
            ParameterError: an argument is invalid, or the LoRA name is unknown.
            BatchError: some answers failed.
            WeightsReplacedError: the weights were replaced while the answers were generated.
        """
        self._check_open()
        loaded, chosen = self._loaded, self._chosen_lora(lora)
        plan = draw_plan(n, params, stop_when=stop_when, window=window, k=k, self_certainty=self_certainty)
        answers = await ScoringClient(loaded.engine, loaded.text, lora=chosen).draw(prompt, plan)
        return await asyncio.to_thread(plan.sum_up, answers, same)

    async def _summed_up(self, lay_out: Callable[[TextEdge], Plan[T]], lora: str | None) -> T:
        self._check_open()
        loaded = self._loaded
        chosen = self._chosen_lora(lora)
        plan = await asyncio.to_thread(lay_out, loaded.text)  # tokenizing many texts is slow
        scores = await ScoringClient(loaded.engine, loaded.text, lora=chosen).score(plan.pairs, SCORED)
        return plan.sum_up(scores)

    @cached_property
    def _spelling_tools(self) -> SpellingTools:
        return SpellingTools(self._loaded)
