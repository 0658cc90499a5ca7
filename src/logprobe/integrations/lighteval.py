"""A custom model for lighteval, in this process or on a server.

    python -m logprobe.integrations.lighteval smollm2 TASKS [lighteval's own options]
    python -m logprobe.integrations.lighteval model_name=smollm2,dtype=float32 TASKS
    python -m logprobe.integrations.lighteval base_url=http://127.0.0.1:8000 TASKS

runs `lighteval custom MODEL THIS_FILE TASKS`; in Python, use `Pipeline(model=LogprobeModel(...))`. Prompts,
splits and truncation are the same as in lighteval's `transformers` model, and so are the scores. Nothing is
cached on disk, because lighteval's cache does not notice changed weights. Needs the extra `lighteval`.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from lighteval.models.abstract_model import LightevalModel, ModelConfig
from lighteval.models.model_output import ModelResponse
from lighteval.models.utils import uses_chat_template
from lighteval.tasks.prompt_manager import PromptManager

from logprobe.engine.truncation import cut_pair
from logprobe.errors import require
from logprobe.integrations.evaluators import open_model, prefix_token_id
from logprobe.sampling import SamplingParams
from logprobe.text.boundary import Split

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lighteval.tasks.requests import Doc

    from logprobe.integrations.evaluators import Pair, Scored


class LogprobeConfig(ModelConfig, extra="allow"):  # type: ignore[misc,call-arg]  # lighteval has no types
    """Settings of `LogprobeModel`.

    Further fields are those of `EngineConfig`; with `base_url`, the only further field is `num_concurrent`.

    Attributes:
        model_name: a known name, a folder, a `.gguf` file or a Hugging Face id; with `base_url`, a name that
            the server serves. None for `smollm2`, or for the server's default model.
        base_url: the address of a server of this library; None to run the model in this process.
        api_key: the server's API key.
        lora: folder of a LoRA adapter; with `base_url`, the name of an adapter that the server has loaded.
        max_length: maximum sequence length in tokens; None for the length of the model's context.
        add_special_tokens: whether the tokenizer may add special tokens, such as BOS, to prompts.
        override_chat_template: whether to use the chat template; None to use the template if there is one.
    """

    model_name: str | None = None
    base_url: str | None = None
    api_key: str | None = None
    lora: str | None = None
    max_length: int | None = None
    add_special_tokens: bool = True
    override_chat_template: bool | None = None


class LogprobeModel(LightevalModel):  # type: ignore[misc]
    """A model of this library for lighteval.

    Args:
        config: a `LogprobeConfig`, or lighteval's config for a custom model, whose model name is parsed by
            `config_of`.

    Raises:
        ModelError: the model cannot be loaded.
        ParameterError: a setting is invalid or unknown.
        ServerError: the server cannot be reached, or failed.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        own = config if isinstance(config, LogprobeConfig) else config_of(config.model_name)
        settings = {name: value_of(value) for name, value in (own.model_extra or {}).items()}
        self.model = open_model(
            own.model_name, base_url=own.base_url, api_key=own.api_key, lora=own.lora, **settings
        )
        self.sampling = own.generation_parameters.to_vllm_dict()
        self._max_length = min(own.max_length or self.model.max_model_len, self.model.max_model_len)
        self._add_special_tokens = own.add_special_tokens
        self.use_chat_template = uses_chat_template(
            tokenizer=self.tokenizer, override_chat_template=own.override_chat_template
        )
        self.prompt_manager = PromptManager(self.use_chat_template, self.tokenizer, own.system_prompt)
        # lighteval registers its tasks in each model's cache; this cache does nothing.
        self._cache = SimpleNamespace(_init_registry=lambda _: None)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.model.tokenizer

    @property
    def add_special_tokens(self) -> bool:
        """True if the tokenizer may add special tokens, such as BOS, to prompts."""
        return bool(self._add_special_tokens)

    @property
    def max_length(self) -> int:
        """Maximum sequence length in tokens."""
        return int(self._max_length)

    def loglikelihood(self, docs: list[Doc]) -> list[ModelResponse]:
        """Return the log-probability (nats) of each choice; long prompts are truncated on the left."""
        pairs = [self._pairs(doc) for doc in docs]
        scores = iter(self.model.score([self._cut(*pair) for own in pairs for pair in own]))
        return [self._response(own, [next(scores) for _ in own]) for own in pairs]

    def loglikelihood_rolling(self, docs: list[Doc]) -> list[ModelResponse]:
        """Return the log-probability (nats) of each text, scored in sliding windows.

        A text without a prompt is scored after BOS, or EOS if there is no BOS.
        """
        pairs = [self._pairs(doc) for doc in docs]
        windows = [[self._windows(*pair) for pair in own] for own in pairs]
        flat = [window for own in windows for of_text in own for window in of_text]
        scores = iter(self.model.score(flat))
        sums = [[_sum([next(scores) for _ in of_text]) for of_text in own] for own in windows]
        return [self._response(*both) for both in zip(pairs, sums, strict=True)]

    def greedy_until(self, docs: list[Doc]) -> list[ModelResponse]:
        """Generate texts up to the stop strings, greedily unless the configuration sets a temperature."""
        prompts = [self._prompt_ids(doc) for doc in docs]
        params = [self._params(doc, len(ids)) for doc, ids in zip(docs, prompts, strict=True)]
        cut = [
            ids[-max(self.max_length - one.max_tokens, 1) :] for ids, one in zip(prompts, params, strict=True)
        ]
        texts = self.model.generate(cut, params)
        return [
            ModelResponse(
                text=[one.text for one in own],
                output_tokens=[one.token_ids for one in own],
                input_tokens=ids,
                truncated_tokens_count=len(whole) - len(ids),
            )
            for own, ids, whole in zip(texts, cut, prompts, strict=True)
        ]

    def _pairs(self, doc: Doc) -> list[Pair]:
        """Return the document's prompt with each of its choices, as token ids divided as lighteval does."""
        context = self.prompt_manager.prepare_prompt(doc)
        contexts, continuations = self.tok_encode_pair(context, doc.choices, pairwise=True)
        return [
            (before or [prefix_token_id(self.model)], after)
            for before, after in zip(contexts, continuations, strict=True)
        ]

    def _cut(self, context: list[int], continuation: list[int]) -> Pair:
        """Return the pair with the context cut such that at most the last `max_length` tokens remain."""
        excess = len(context) + len(continuation) - self.max_length
        return (context[excess:], continuation) if excess > 0 else (context, continuation)

    def _windows(self, context: list[int], continuation: list[int]) -> list[Pair]:
        split = Split(np.array([*context, *continuation], np.int32), len(context))
        parts = cut_pair(split, "window", self.max_length)
        return [(part.context.tolist(), part.continuation.tolist()) for part in parts]

    @staticmethod
    def _response(pairs: Sequence[Pair], scores: Sequence[Scored]) -> ModelResponse:
        return ModelResponse(
            input_tokens=pairs[0][0],
            output_tokens=[continuation for _, continuation in pairs],
            logprobs=[score.logprob for score in scores],
            argmax_logits_eq_gold=[score.is_greedy for score in scores],
        )

    def _prompt_ids(self, doc: Doc) -> list[int]:
        prompt = self.prompt_manager.prepare_prompt(doc)
        return self.model.encode(prompt, add_special_tokens=self.add_special_tokens)

    def _params(self, doc: Doc, num_prompt: int) -> SamplingParams:
        """Return the sampling parameters for a document, from the configuration and the task.

        Raises:
            ParameterError: a parameter is unknown, or several samples are requested with temperature 0.
        """
        asked = {name: value for name, value in self.sampling.items() if value is not None}
        is_greedy = asked.get("temperature", 0) == 0
        require(doc.num_samples == 1 or not is_greedy, "temperature", "must be > 0 for several samples")
        stop = [] if self.use_chat_template else list(doc.stop_sequences or ())
        asked["stop"] = [*asked.get("stop", ()), *(term for term in stop if term)]
        asked.setdefault("max_tokens", doc.generation_size or max(self.max_length - num_prompt, 1))
        return SamplingParams(**{"temperature": 0.0, "n": doc.num_samples, **asked})


def _sum(scores: Sequence[Scored]) -> Scored:
    """Combine the scores of all windows in a text."""
    return scores[0]._replace(
        logprob=sum(score.logprob for score in scores), is_greedy=all(score.is_greedy for score in scores)
    )


def config_of(text: str) -> LogprobeConfig:
    """Parse a model name, or comma-separated `field=value` pairs as in lighteval's commands."""
    config: LogprobeConfig = (
        LogprobeConfig.from_args(text) if "=" in text else LogprobeConfig(model_name=text)
    )
    return config


def value_of(value: Any) -> Any:
    """Parse a string as JSON; return a string that is not JSON, and any other value, unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except msgspec.DecodeError:
        return value


def main() -> None:
    """Run lighteval's command with a model of this library."""
    from lighteval.__main__ import app

    model, *rest = sys.argv[1:] or ["--help"]
    app(["custom", model, *([] if model.startswith("-") else [__file__]), *rest])


if __name__ == "__main__":
    main()
