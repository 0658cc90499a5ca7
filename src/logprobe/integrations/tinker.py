"""Tinker's sampling interface on a model of this library, in this process or on a server.

`TinkerSampler` has `sample` and `compute_logprobs` of `tinker.SamplingClient` (package `tinker`), and returns
that package's types. `sample_json` takes and returns the JSON objects of Tinker's requests, as the inference
clients of SkyRL do, and needs no further package.
"""

from __future__ import annotations

import asyncio
import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Self, final

import msgspec
import numpy as np

from logprobe.engine.backends.bridge import LoopThread
from logprobe.errors import MissingPackageError, ParameterError, require, shortened
from logprobe.records.values import IdLists
from logprobe.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    import tinker

    from logprobe.engine.request import CompletionOutput, RequestOutput
    from logprobe.integrations.remote.llm import RemoteLLM
    from logprobe.llm import AsyncLLM
    from logprobe.records import FlatLogprobs
    from logprobe.records.store.columns import Array
    from logprobe.sampling.params import LogprobsMode

NO_LOGPROB: Final = -99999.0  # with id 0: an empty cell of Tinker's top-k matrices


@final
class TinkerSampler:
    """The sampling interface of `tinker.SamplingClient`.

    Results have the log-probabilities of the model's own distribution, as Tinker's results do. With
    `processed_logprobs`, sampled tokens have log-probabilities of the distribution from which they were
    sampled.

    Args:
        model: a model's name or folder, the address of a server (`http://...`), or an `AsyncLLM` or
            `RemoteLLM`, which the caller closes.
        logprobs_mode: `raw_logprobs` or `processed_logprobs`; applies to sampled tokens.
        settings: further arguments of `AsyncLLM`, or of `RemoteLLM` for an address.

    Example:
        ```python
        with TinkerSampler("smollm2") as sampler:
            prompt = tinker.ModelInput.from_ints(sampler.get_tokenizer().encode("The sky is"))
            response = sampler.sample(prompt, 4, tinker.SamplingParams(max_tokens=8)).result()
        ```

    Raises:
        ModelError: the model cannot be loaded.
        ServerError: the server cannot be reached, or failed.
    """

    def __init__(
        self,
        model: str | AsyncLLM | RemoteLLM,
        *,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        **settings: Any,
    ) -> None:
        known = ("raw_logprobs", "processed_logprobs")
        require(logprobs_mode in known, "logprobs_mode", f"must be one of {', '.join(known)}")
        is_name = isinstance(model, str)
        problem = "can be set only if model is a name or an address; leave it out"
        require(is_name or not settings, next(iter(settings), "model"), problem)
        self._is_owner = is_name
        self._model: Any = _open(model, **settings) if isinstance(model, str) else model
        self._mode = logprobs_mode
        self._bridge = LoopThread()

    def close(self) -> None:
        """Close a model opened by name or address, ending its requests; otherwise wait for the requests."""
        is_owner, self._is_owner = self._is_owner, False  # a second call does nothing
        if is_owner:
            self._bridge.run(_close(self._model))
        self._bridge.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer."""
        return self._model.tokenizer

    def sample(
        self,
        prompt: tinker.ModelInput,
        num_samples: int,
        sampling_params: tinker.SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: tinker.TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
    ) -> tinker.APIFuture[tinker.SampleResponse]:
        """Sample completions of a prompt; await the result, or call its `result()`.

        The arguments are those of `tinker.SamplingClient.sample`. `target_prompt_logprobs` must be dense;
        `prompt_alt_tokens_k` is not supported.

        Raises:
            MissingPackageError: the package `tinker` is not installed.
            ParameterError: an argument is invalid or not supported; also raised by the result.
        """
        types = _tinker_types()
        require(
            prompt_alt_tokens_k == 0, "prompt_alt_tokens_k", "is not supported; sample each prefix instead"
        )
        ids = _ids_of(prompt)
        last_n = _checked_last_n(prompt_logprobs_last_n, len(ids), include_prompt_logprobs)
        targets = None if target_prompt_logprobs is None else _targets_of(target_prompt_logprobs, len(ids))
        fields = {name: getattr(sampling_params, name) for name in _SAMPLING}
        params = self._params(fields, num_samples, topk_sample_logprobs)
        scored = _scoring(include_prompt_logprobs, topk_prompt_logprobs, targets)

        async def run() -> tinker.SampleResponse:
            output, prompt_output = await self._generate(ids, params, scored)
            sequences = [_sequence(types, output, one, topk_sample_logprobs) for one in output.outputs]
            about = {} if prompt_output is None else _of_prompt(prompt_output, topk_prompt_logprobs, last_n)
            if targets is not None and prompt_output is not None:
                about["target_prompt_logprobs"] = _of_targets(types, prompt_output, targets)
            if not include_prompt_logprobs:
                about.pop("prompt_logprobs_np", None)
            cached = output.num_cached_tokens or 0
            response: tinker.SampleResponse = types.SampleResponse(
                sequences=sequences, prompt_cache_hit_tokens=cached, **about
            )
            return response

        return _future(types, self._bridge.start(run()))

    async def sample_async(self, *args: Any, **options: Any) -> tinker.SampleResponse:
        """Return the result of `sample`."""
        return await self.sample(*args, **options)

    def compute_logprobs(
        self, prompt: tinker.ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> tinker.APIFuture[list[float | None]]:
        """Score each token of a prompt, in nats; None for the first. Await the result, or call `result()`.

        With `prompt_logprobs_last_n`, all tokens but the last n are None.
        """
        types, ids = _tinker_types(), _ids_of(prompt)
        last_n = _checked_last_n(prompt_logprobs_last_n, len(ids), is_scored=True)

        async def run() -> list[float | None]:
            (output,) = await self._model.generate([ids], SamplingParams(max_tokens=0, prompt_logprobs=0))
            return _as_list(_prompt_logprobs(output, last_n))

        return _future(types, self._bridge.start(run()))

    async def compute_logprobs_async(self, *args: Any, **options: Any) -> list[float | None]:
        """Return the result of `compute_logprobs`."""
        logprobs: list[float | None] = await self.compute_logprobs(*args, **options)
        return logprobs

    async def sample_json(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a Tinker sample request that is a JSON object; needs no further package.

        As in `sample` of SkyRL's `RemoteInferenceClient`, `request` may also have the object under the key
        `json`. Fields: `prompt` (`chunks`, each with `tokens`), `num_samples`, `sampling_params`,
        `include_prompt_logprobs` or `prompt_logprobs`, `topk_prompt_logprobs`; others are ignored.

        Returns:
            `type`, `sequences` (each with `tokens`, `logprobs` in nats and `stop_reason`), `prompt_logprobs`
            and `topk_prompt_logprobs` (each None, or with one entry per prompt token).

        Raises:
            ParameterError: a field is invalid.
        """
        try:
            body = msgspec.convert(request.get("json", request), _Body)
        except msgspec.ValidationError as error:
            reason, _, path = str(error).partition(" - at `$.")
            raise ParameterError(re.split(r"[.\[`]", path)[0] or "request", reason) from error
        for chunk in body.prompt.chunks:
            problem = f"has a chunk of type {shortened(str(chunk.type))!r}; give token ids"
            require(chunk.tokens is not None, "prompt", problem)
        ids = [token_id for chunk in body.prompt.chunks for token_id in chunk.tokens or ()]
        fields = msgspec.structs.asdict(body.sampling_params or _Sampling())
        params = self._params(fields, body.num_samples, 0)
        k = body.topk_prompt_logprobs or 0
        asked = body.include_prompt_logprobs
        is_scored = bool(body.prompt_logprobs if asked is None else asked) or k > 0
        output, prompt_output = await self._generate(ids, params, _scoring(is_scored, k, None))
        scored = None if prompt_output is None else prompt_output.prompt_logprobs
        tops = None if scored is None or not k else _top_k(scored, k)
        return {
            "type": "sample",
            "sequences": [
                {
                    "tokens": completion.token_ids,
                    "logprobs": _chosen(completion).tolist(),
                    "stop_reason": completion.finish_reason,
                }
                for completion in output.outputs
            ],
            "prompt_logprobs": None if prompt_output is None else _as_list(_prompt_logprobs(prompt_output)),
            "topk_prompt_logprobs": None if tops is None else _pairs(*tops),
        }

    def _params(self, fields: Mapping[str, Any], num_samples: int, k: int) -> SamplingParams:
        require(fields["max_tokens"] is not None, "max_tokens", "is not set; set it in sampling_params")
        stop = fields["stop"]
        texts, ids = ([stop], []) if isinstance(stop, str) else ([], [*(stop or ())])
        if ids and isinstance(ids[0], str):
            texts, ids = ids, []
        return SamplingParams(
            n=num_samples,
            max_tokens=fields["max_tokens"],
            seed=fields["seed"],
            temperature=fields["temperature"],
            top_k=fields["top_k"],
            top_p=fields["top_p"],
            stop=texts,
            stop_token_ids=ids,
            ignore_eos=stop is not None and len(stop) == 0,  # Tinker: [] disables every stop
            logprobs=k,
            logprobs_mode=self._mode,
        )

    async def _generate(
        self, ids: list[int], params: SamplingParams, scored: SamplingParams | None
    ) -> tuple[RequestOutput, RequestOutput | None]:
        """Return the completions of a prompt and, if requested, the prompt's rows, without temperature."""
        asked = [params] if scored is None else [params, scored]
        outputs = await self._model.generate([ids] * len(asked), asked)
        return outputs[0], outputs[1] if scored is not None else None


class _Chunk(msgspec.Struct):
    type: str | None = None
    tokens: list[int] | None = None


class _Prompt(msgspec.Struct):
    chunks: list[_Chunk] = []


class _Sampling(msgspec.Struct):
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class _Body(msgspec.Struct):
    prompt: _Prompt
    num_samples: int = 1
    sampling_params: _Sampling | None = None
    include_prompt_logprobs: bool | None = None
    prompt_logprobs: bool | int | None = None
    topk_prompt_logprobs: int | None = None


_SAMPLING: Final = _Sampling.__struct_fields__
"""Fields of Tinker's sampling parameters."""


def _open(name: str, **settings: Any) -> Any:
    if name.startswith(("http://", "https://")):
        from logprobe.integrations.remote.llm import RemoteLLM

        return RemoteLLM(name, **settings)
    from logprobe.llm import AsyncLLM

    return AsyncLLM(name, **settings)


async def _close(model: Any) -> None:
    closing = await asyncio.to_thread(model.close)
    if asyncio.iscoroutine(closing):  # of `AsyncLLM`
        await closing


def _tinker_types() -> Any:
    try:
        import tinker
    except ImportError as error:
        raise MissingPackageError(
            "Tinker's types need the package tinker; pip install 'logprobe[tinker]'"
        ) from error
    return tinker


def _future(types: Any, future: Any) -> Any:
    """Wrap a future in Tinker's `APIFuture`, which can also be awaited."""

    class SamplerFuture(types.APIFuture):  # type: ignore[misc]
        def future(self) -> Any:
            return future

        def result(self, timeout: float | None = None) -> Any:
            return future.result(timeout)

        async def result_async(self, timeout: float | None = None) -> Any:  # noqa: ASYNC109 - Tinker's name
            return await asyncio.wait_for(asyncio.wrap_future(future), timeout)

    return SamplerFuture()


def _ids_of(prompt: tinker.ModelInput) -> list[int]:
    try:
        return [*map(int, prompt.to_ints())]
    except ValueError as error:
        raise ParameterError("prompt", f"must have token ids only ({error})") from error


def _checked_last_n(last_n: int | None, num_tokens: int, is_scored: bool) -> int | None:
    name = "prompt_logprobs_last_n"
    if last_n is not None:
        require(is_scored, name, "applies to prompt logprobs; set include_prompt_logprobs")
        require(1 <= last_n < num_tokens, name, f"must be in [1, {num_tokens - 1}]", got=last_n)
    return last_n


def _targets_of(targets: tinker.TensorData, num_tokens: int) -> Array:
    """Return the requested ids of each prompt position after the first, (num_tokens - 1, K); -1: none."""
    name = "target_prompt_logprobs"
    require(targets.sparse_crow_indices is None, name, "must be dense; sparse tensors are not supported")
    ids = np.asarray(targets.data).reshape(targets.shape or (-1,))
    is_table = ids.ndim == 2 and len(ids) == num_tokens - 1 and ids.dtype == np.int64
    require(is_table, name, f"must be int64 of shape ({num_tokens - 1}, K), got {ids.dtype} {ids.shape}")
    return ids


def _scoring(is_scored: bool, k: int, targets: Array | None) -> SamplingParams | None:
    """Return the parameters of the request that scores the prompt; None if no scores are requested."""
    if not is_scored and not k and targets is None:
        return None
    named = None
    if targets is not None:
        named = IdLists.of([np.empty(0, np.int64), *(np.unique(row[row >= 0]) for row in targets)])
    return SamplingParams(max_tokens=0, prompt_logprobs=k, logprob_token_ids=named)


def _sequence(types: Any, output: RequestOutput, completion: CompletionOutput, k: int) -> Any:
    from tinker.types.topk_logprobs import TopkLogprobs

    assert completion.logprobs is not None, "logprobs were requested"
    return types.SampledSequence(
        stop_reason=completion.finish_reason,
        sequence_id=f"{output.request_id}-{completion.index}",
        tokens_np=np.array(completion.token_ids, np.int32),
        logprobs_np=_chosen(completion),
        topk_logprobs_np=TopkLogprobs(*_top_k(completion.logprobs, k)) if k else None,
    )


def _of_prompt(output: RequestOutput, k: int, last_n: int | None) -> dict[str, Any]:
    """Return the fields of a response about its prompt."""
    from tinker.types.topk_logprobs import TopkLogprobs

    assert output.prompt_logprobs is not None, "prompt_logprobs were requested"
    fields: dict[str, Any] = {"prompt_logprobs_np": _prompt_logprobs(output, last_n)}
    if k:
        ids, logprobs = _top_k(output.prompt_logprobs, k)
        num_hidden = 0 if last_n is None else len(ids) - last_n
        ids[:num_hidden], logprobs[:num_hidden] = 0, NO_LOGPROB
        fields["topk_prompt_logprobs_np"] = TopkLogprobs(ids, logprobs)
    return fields


def _of_targets(types: Any, output: RequestOutput, targets: Array) -> Any:
    """Return the log-probabilities of the requested ids; 0 where a target id is -1."""
    assert output.prompt_logprobs is not None, "prompt_logprobs were requested"
    values = np.zeros(targets.shape, np.float32)
    given = output.prompt_logprobs.given
    if given is not None:
        entries = given.arrays
        for row, (start, stop) in enumerate(pairwise(entries.offsets[1:].tolist())):
            own = dict(zip(entries.token_ids[start:stop].tolist(), entries.logprobs[start:stop], strict=True))
            values[row] = [own.get(token_id, 0.0) for token_id in targets[row].tolist()]
    return types.TensorData(data=values, dtype="float32", shape=[*targets.shape])


def _chosen(completion: CompletionOutput) -> Array:
    """Return the log-probabilities of a completion's tokens, (T,) float32 in nats."""
    assert completion.logprobs is not None, "logprobs were requested"
    return completion.logprobs.chosen_entries().logprobs.astype(np.float32)


def _prompt_logprobs(output: RequestOutput, last_n: int | None = None) -> Array:
    """Return the log-probabilities of a prompt's tokens, (T,) float32 in nats; NaN where there is none."""
    assert output.prompt_logprobs is not None, "prompt_logprobs were requested"
    entries = output.prompt_logprobs.chosen_entries().logprobs
    values: Array = np.ma.filled(entries.astype(np.float32), np.nan)
    values[: 0 if last_n is None else len(values) - last_n] = np.nan
    return values


def _as_list(values: Array) -> list[float | None]:
    return [None if np.isnan(value) else value for value in values.tolist()]


def _top_k(record: FlatLogprobs, k: int) -> tuple[Array, Array]:
    """Return ids and log-probabilities of the k most likely tokens, each (T, k), as Tinker's matrices."""
    entries = record.top_entries()
    num_rows = len(entries.offsets) - 1
    ids, logprobs = np.zeros((num_rows, k), np.int32), np.full((num_rows, k), NO_LOGPROB, np.float32)
    for row, (start, stop) in enumerate(pairwise(entries.offsets.tolist())):
        ids[row, : stop - start] = entries.token_ids[start:stop]
        logprobs[row, : stop - start] = entries.logprobs[start:stop]
    return ids, logprobs


def _pairs(ids: Array, logprobs: Array) -> list[list[tuple[int, float]] | None]:
    rows = [[*zip(*columns, strict=True)] for columns in zip(ids.tolist(), logprobs.tolist(), strict=True)]
    return [row if row[0][1] != NO_LOGPROB else None for row in rows]
