"""lm-evaluation-harness on this library: the model `logprobe`, in process or behind a server's address.

    python -m logprobe.integrations.lm_eval run --model logprobe --model_args pretrained=smollm2 --tasks ...
    python -m logprobe.integrations.lm_eval run --model logprobe --model_args base_url=$URL --tasks ...

is the harness's own command with that model known to it (0.4.13 has no way for a package to add one from
outside); in Python, importing this module makes `simple_evaluate(model="logprobe", ...)` work. Contexts that
requests share are computed once, and in process a whole task is one batch. A server gives its tokenizer and
chat template, so that `--apply_chat_template` needs no files here either. Splits, windows and truncation are
those of the harness's `hf` model, and so are the scores. Needs the extra `lm-eval`.
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
PASSED_BY = {"do_sample", "num_beams", "use_cache", "until", "max_gen_toks"}  # of `hf`, answered otherwise


@register_model("logprobe")
class LogprobeHarnessLM(TemplateLM):  # type: ignore[misc]  # the harness carries no types
    """A model of this library for lm-evaluation-harness.

    Args:
        pretrained: a known name, a local folder, a `.gguf` file or a Hugging Face id; of a server, a name
            that it serves. None: `smollm2`, or the server's own.
        base_url: the address of a server of this library; None: the model runs in this process.
        api_key: a key that the server lets in.
        max_length: longest sequence in tokens; None: the model's context.
        add_bos_token: put BOS before texts, or do not; None: as the tokenizer does.
        max_gen_toks: most tokens to generate where a task does not say.
        lora: a folder of LoRA weights to run on; of a server, the name of weights that are loaded there.
        batch_size: taken and not needed: a task is one batch.
        max_batch_size: likewise.
        device: `cpu`; anything else is a GPU where there is one.
        settings: those of `EngineConfig`; beside `base_url`, `num_concurrent` exchanges at once.

    Raises:
        ModelError: the model cannot be had or used.
        UnknownParameterError: a setting of that name does not exist.
        ServerError: there is no such server.
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
            # The harness names a GPU unless told otherwise, also where there is none.
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
        """The token that ends a text."""
        token_id: int = self.tokenizer.eos_token_id
        return token_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context."""
        return prefix_token_id(self.model)

    @property
    def tokenizer_name(self) -> str:
        """What the harness's cache of requests knows the tokenizer by."""
        return self.name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids of a text; one that begins with BOS gets no other."""
        if add_special_tokens is None:
            add_special_tokens = True if self.add_bos_token is None else self.add_bos_token
            bos = self.tokenizer.decode(self.prefix_token_id)
            add_special_tokens = add_special_tokens and not (bos and string.startswith(bos))
        return self.model.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as the text that the model's own template makes."""
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
        """The last `max_length` + 1 tokens, as the harness cuts."""
        excess = len(context) + len(continuation) - (self.max_length + 1)
        return (context[excess:], continuation) if excess > 0 else (context, continuation)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The logprob of whole texts, in the harness's windows; nats."""
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
        """Completions up to their stop strings; all requests of a task at once."""
        del disable_tqdm
        prompts, params, stops = [], [], []
        for context, settings in (request.args for request in requests):
            kwargs = normalize_gen_kwargs(settings, self.max_gen_toks)
            stops.append(handle_stop_sequences(kwargs.get("until"), eos=None))
            room = self.max_length - kwargs["max_gen_toks"]
            remedy = f"leaves no room for a prompt in max_length={self.max_length} tokens; ask for fewer"
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
    """Be the harness's own command, with this model known to it."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
