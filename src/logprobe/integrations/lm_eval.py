"""The model `logprobe` for lm-evaluation-harness, in this process or on a server.

    python -m logprobe.integrations.lm_eval run --model logprobe --model_args pretrained=smollm2 --tasks ...
    python -m logprobe.integrations.lm_eval run --model logprobe --model_args base_url=$URL --tasks ...

runs the harness's own command with this model registered (0.4.13 has no plug-in mechanism for models). In
Python, importing this module makes `simple_evaluate(model="logprobe", ...)` work. Contexts that requests
share are computed once. If the model runs in this process, a whole task is one batch. A server provides its
tokenizer and chat template, so that `--apply_chat_template` needs no local files. Splits, windows and
truncation are the same as in the harness's `hf` model, and so are the scores. Needs the extra `lm-eval`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from logprobe.errors import UnknownParameterError, require
from logprobe.integrations.evaluators import open_model, prefix_token_id
from logprobe.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lm_eval.api.instance import Instance

    from logprobe.integrations.evaluators import Pair

KNOWN_SAMPLING = {"temperature": float, "top_p": float, "top_k": int, "min_p": float, "seed": int}
PASSED_BY = {
    "do_sample",
    "num_beams",
    "use_cache",
    "until",
    "max_gen_toks",
}  # arguments of `hf` that are not passed on as sampling parameters


@register_model("logprobe")
class LogprobeHarnessLM(TemplateLM):  # type: ignore[misc]  # the harness carries no types
    """A model of this library for lm-evaluation-harness.

    Args:
        pretrained: a known name, a local folder, a `.gguf` file or a Hugging Face id; with `base_url`, a name
            that the server serves. None for `smollm2`, or for the server's default model.
        base_url: the address of a server of this library; None to run the model in this process.
        api_key: the server's API key.
        max_length: maximum sequence length in tokens; None for the length of the model's context.
        add_bos_token: whether to add BOS before texts; None to do so if the tokenizer does.
        max_gen_toks: maximum number of generated tokens if a task does not set it.
        lora: folder of a LoRA adapter; with `base_url`, the name of an adapter that the server has loaded.
        batch_size: accepted and ignored, because a task is one batch.
        max_batch_size: accepted and ignored.
        device: `cpu`; any other value uses a GPU if there is one.
        settings: fields of `EngineConfig`; with `base_url`, `num_concurrent` (number of concurrent requests).

    Raises:
        ModelError: the model cannot be loaded.
        UnknownParameterError: a setting is unknown.
        ServerError: the server cannot be reached, or failed.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        max_gen_toks: int = 256,
        lora: str | None = None,
        batch_size: int | str = "auto",
        max_batch_size: int | None = None,
        device: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        del batch_size, max_batch_size
        if base_url is None:
            # The harness passes a GPU by default, even on machines without one.
            settings["device"] = "cpu" if device == "cpu" else "auto"
        self.model = open_model(pretrained, base_url=base_url, api_key=api_key, lora=lora, **settings)
        self.tokenizer = self.model.tokenizer
        limit = self.model.max_model_len
        self.max_length = min(max_length or limit, limit)
        self.add_bos_token = add_bos_token
        self.max_gen_toks = max_gen_toks
        self.name = pretrained or base_url or "smollm2"

    @property
    def eot_token_id(self) -> int:
        """Id of the end-of-sequence token."""
        token_id: int = self.tokenizer.eos_token_id
        return token_id

    @property
    def prefix_token_id(self) -> int:
        """Id of the token to put before a text without context."""
        return prefix_token_id(self.model)

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name for the harness's request cache."""
        return self.name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Encode a text to token ids; BOS is not added to a text that already begins with BOS."""
        if add_special_tokens is None:
            add_special_tokens = True if self.add_bos_token is None else self.add_bos_token
            bos = self.tokenizer.decode(self.prefix_token_id)
            add_special_tokens = add_special_tokens and not (bos and string.startswith(bos))
        return self.model.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Format a conversation with the model's chat template."""
        text: str = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        scores = self._score([(context, continuation) for _, context, continuation in requests])
        for (key, _context, _continuation), answer in zip(requests, scores, strict=True):
            self.cache_hook.add_partial("loglikelihood", key, answer)
        return scores

    def _score(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        scores = self.model.score([self._cut(*pair) for pair in pairs])
        return [(score.logprob, score.is_greedy) for score in scores]

    def _cut(self, context: list[int], continuation: list[int]) -> Pair:
        """Cut the context so that the pair has at most `max_length` + 1 tokens, as in the harness."""
        excess = len(context) + len(continuation) - (self.max_length + 1)
        return (context[excess:], continuation) if excess > 0 else (context, continuation)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probabilities (nats) of whole texts, scored in the harness's windows."""
        del disable_tqdm
        texts = [request.args[0] for request in requests]
        windows = [list(self._windows(text)) for text in texts]
        scores = iter(self._score([window for text_windows in windows for window in text_windows]))
        sums = [sum(next(scores)[0] for _ in text_windows) for text_windows in windows]
        for text, logprob in zip(texts, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), logprob)
        return sums

    def _windows(self, text: str) -> list[Pair]:
        rolling = get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length,
            context_len=1,
        )
        return [make_disjoint_window(window) for window in rolling]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate texts up to the stop strings, for all requests of a task at once."""
        del disable_tqdm
        prompts, params, stops = [], [], []
        for context, settings in (request.args for request in requests):
            kwargs = normalize_gen_kwargs(settings, self.max_gen_toks)
            stops.append(handle_stop_sequences(kwargs.get("until"), eos=None))
            room = self.max_length - kwargs["max_gen_toks"]
            remedy = f"leaves no room for a prompt in max_length={self.max_length} tokens; reduce it"
            require(room > 0, "max_gen_toks", remedy, got=kwargs["max_gen_toks"])
            prompts.append(self.tok_encode(context)[-room:])
            params.append(self._params(kwargs, stops[-1]))
        outputs = self.model.generate(prompts, params)
        texts = [
            postprocess_generated_text(output.text, stop, None)
            for [output], stop in zip(outputs, stops, strict=True)
        ]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _params(self, kwargs: dict[str, Any], stop: list[str]) -> SamplingParams:
        for name in kwargs.keys() - PASSED_BY - KNOWN_SAMPLING.keys():
            raise UnknownParameterError(name, KNOWN_SAMPLING, of="gen_kwargs")
        sampling = {name: kind(kwargs[name]) for name, kind in KNOWN_SAMPLING.items() if name in kwargs}
        return SamplingParams(
            max_tokens=kwargs["max_gen_toks"],
            stop=tuple(term for term in stop if term),
            **{"temperature": 0.0, **sampling},
        )


def main() -> None:
    """Run the harness's command with this model registered."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
