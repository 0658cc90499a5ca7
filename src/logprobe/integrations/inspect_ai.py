"""The model provider `logprobe` for Inspect, in this process: `inspect eval TASK --model logprobe/smollm2`.

Inspect finds the provider through this package's entry point `inspect_ai`. Concurrent samples share the
engine's steps, and common prefixes of conversations are computed once. Needs the extra `inspect`.
"""

from __future__ import annotations

import atexit
import secrets
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import msgspec
from inspect_ai.model import (
    ChatMessageUser,
    GenerateConfig,
    ModelAPI,
    ModelOutput,
    messages_to_openai,
    model_output_from_openai,
    modelapi,
)
from inspect_ai.tool import ToolFunction

from logprobe.errors import ParameterError, PromptTooLongError, UnknownParameterError, require
from logprobe.llm import LLM
from logprobe.records.forms.json import ChatEncoder, id_rows
from logprobe.sampling import SamplingParams
from logprobe.text.channels import Channels, call_format, template_of
from logprobe.text.chat import Layout, variables_of
from logprobe.text.pieces import Cutter
from logprobe.text.reasoning import lay_out_reasoning

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from logprobe.engine.request import CompletionOutput, RequestOutput
    from logprobe.text.channels import ResponseForm

MAX_TOKENS: Final = 2048  # default length of a reply, as in Inspect's `hf` provider
SAMPLING: Final = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "seed": "seed",
    "stop_seqs": "stop",
    "num_choices": "n",
    "best_of": "best_of",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "logit_bias": "logit_bias",
    "prompt_logprobs": "prompt_logprobs",
}
"""Map from fields of `GenerateConfig` to fields of `SamplingParams`."""
READ: Final = frozenset(SAMPLING) | {
    "max_tokens",
    "logprobs",
    "top_logprobs",
    "response_schema",
    "reasoning_effort",
    "parallel_tool_calls",
    "extra_body",
}
OF_INSPECT: Final = frozenset(
    {"max_retries", "timeout", "attempt_timeout", "max_connections", "adaptive_connections", "system_message"}
    | {"max_tool_output", "internal_tools", "reasoning_history", "cache"}
)
"""Fields that are handled by Inspect."""
OF_HTTP: Final = frozenset({"extra_headers", "cache_prompt", "reasoning_summary", "batch"})
"""Fields that are ignored, because they have no meaning for a model in this process."""
TEMPLATE: Final = "chat_template_kwargs"


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A request from Inspect, converted."""

    token_ids: list[int]
    params: SamplingParams
    functions: list[dict[str, Any]]  # functions that may be called
    begun: str  # the prompt, which may contain the start of the reply; "" if the reply must have a format
    room: int  # number of tokens that fit after the prompt


@modelapi(name="logprobe")
class LogprobeAPI(ModelAPI):  # type: ignore[misc]  # untyped without inspect-ai
    """A model of this library for Inspect.

    Args:
        model_name: a known name, a local folder, a `.gguf` file or a Hugging Face id.
        base_url: not supported; use the providers `vllm/NAME` or `openai-api/NAME` for a server.
        api_key: accepted and ignored.
        config: default settings of requests.
        use_chat_template: if True, format messages with the model's chat template. If False, the prompt is
            the text of a single user message, for perplexities and for models without a template.
        lora: folder of a LoRA adapter.
        settings: fields of `EngineConfig`.

    Raises:
        ModelError: the model cannot be loaded.
        ParameterError: a setting is invalid or unknown.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008 - as in Inspect's own providers
        *,
        use_chat_template: bool = True,
        lora: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(model_name=model_name, base_url=base_url, api_key=api_key, config=config)
        remedy = "is not supported in process; use vllm/NAME or openai-api/NAME (docs/evaluators.md)"
        require(base_url is None, "base_url", remedy, got=base_url)
        self.use_chat_template = use_chat_template
        self.llm = LLM(model_name, **settings)
        atexit.register(self.llm.close)  # Inspect does not close models that it keeps
        if lora is not None:
            self.llm.add_lora("lora", lora)
        view = self.llm if lora is None else self.llm.with_lora("lora")
        self.client = view._client  # noqa: SLF001 - same package; it runs on the event loop of Inspect
        self.text = self.llm.text
        self._encoder = ChatEncoder(self.text.vocabulary)

    async def generate(
        self,
        input: list[Any],  # noqa: A002 - Inspect's name for it
        tools: list[Any],
        tool_choice: Any,
        config: GenerateConfig,
    ) -> ModelOutput:
        """Generate the next message in a conversation, with the requested log-probabilities (nats).

        `logprobs` has an entry for each token in the reply, including markers of reasoning and tool calls. If
        the prompt is too long, or the reply fills the model's context, the stop reason is `model_length`.

        Raises:
            ParameterError: a field is not supported, or the chat template rejects the messages.
        """
        asked = await self._asked(input, tools, tool_choice, config)
        try:
            [output] = await self.client.generate([asked.token_ids], asked.params)
        except PromptTooLongError as error:
            return ModelOutput.from_content(self.model_name, str(error), stop_reason="model_length")
        reply = await model_output_from_openai(self._reply(asked, output))
        if asked.params.max_tokens == asked.room:
            for choice in reply.choices:
                if choice.stop_reason == "max_tokens":
                    choice.stop_reason = "model_length"
        return reply

    async def tokenize(self, text: str) -> list[int]:
        """Encode a text without special tokens."""
        ids: list[int] = self.text.encode(text, add_special_tokens=False).tolist()
        return ids

    async def count_text_tokens(self, text: str) -> int:
        """Return the number of tokens in a text."""
        return len(await self.tokenize(text))

    def max_connections(self) -> int:
        """Return the maximum number of concurrent samples, which is `max_num_seqs`."""
        return self.llm.config.scheduler_config.max_num_seqs

    def connection_key(self) -> str:
        """Return the model's name, because each model has its own engine."""
        return str(self.model_name)

    def collapse_user_messages(self) -> bool:
        """Return True: chat templates expect alternating turns."""
        return True

    def collapse_assistant_messages(self) -> bool:
        """Return True: chat templates expect alternating turns."""
        return True

    def close(self) -> None:
        """Close the engine."""
        self.llm.close()

    async def _asked(
        self, messages: list[Any], tools: list[Any], tool_choice: Any, config: GenerateConfig
    ) -> Asked:
        functions = [_function(tool) for tool in tools]
        further = dict(config.extra_body or {})
        variables = self._template_variables(config, further.pop(TEMPLATE, None))
        if self.use_chat_template:
            layout = Layout(
                tools=functions or None,
                continue_final_message=messages[-1].role == "assistant",
                chat_template_kwargs=variables,
            )
            prompt, _ = lay_out_reasoning(await messages_to_openai(messages), self.text, layout)
            ids = self.text.encode(prompt, add_special_tokens=False).tolist()
        else:
            prompt, ids = self._plain_prompt(messages, functions, variables)
        room = max(self.llm.engine.capabilities().max_model_len + 1 - len(ids), 1)
        wanted = min(room, MAX_TOKENS if config.max_tokens is None else config.max_tokens)
        params = _params(config, further | {"max_tokens": wanted})
        calls = self._calls(functions, tool_choice, config, prompt)
        if calls is not None:
            is_free = params.response_format is None
            require(
                is_free,
                "response_schema",
                "cannot be combined with tool_choice='any' or a named tool; leave one of them out",
            )
            params = replace(params, response_format=calls)
        is_formed = calls is None and params.response_format is not None
        begun = "" if is_formed else prompt
        return Asked(token_ids=ids, params=params, functions=functions, begun=begun, room=room)

    def _plain_prompt(
        self, messages: list[Any], functions: Sequence[Any], variables: Mapping[str, Any]
    ) -> tuple[str, list[int]]:
        """Return a single user message's text and token ids (`prompt_token_ids` in its metadata, if set)."""
        [*before, message] = messages
        is_one = not before and isinstance(message, ChatMessageUser) and not functions and not variables
        remedy = "supports only a single user message without tools or template variables; leave it out"
        require(is_one, "use_chat_template=false", remedy)
        ids = (message.metadata or {}).get("prompt_token_ids")
        return message.text, self.text.encode(message.text).tolist() if ids is None else ids

    def _template_variables(self, config: GenerateConfig, given: Mapping[str, Any] | None) -> dict[str, Any]:
        variables, effort = dict(given or {}), config.reasoning_effort
        if effort is None:
            return variables
        known = variables_of(str(self.text.template_source.chat_template))
        ways = [{"reasoning_effort": effort}, *([{"enable_thinking": False}] if effort == "none" else [])]
        read = [way for way in ways if way.keys() <= known]
        require(read, "reasoning_effort", "is not supported by the model's chat template; leave it out")
        return variables | read[0]

    def _calls(
        self, functions: Sequence[dict[str, Any]], tool_choice: Any, config: GenerateConfig, prompt: str
    ) -> dict[str, Any] | None:
        """Return the response format that enforces a tool call; None if no call is required."""
        is_named = isinstance(tool_choice, ToolFunction)
        is_single = config.parallel_tool_calls is False
        if not functions or not (is_named or tool_choice == "any"):
            remedy = (
                "False requires tool_choice='any' or a named tool; set one, or leave parallel_tool_calls out"
            )
            require(not (functions and is_single), "parallel_tool_calls", remedy)
            return None
        form = self._form()
        if form is None or form.tools is None:
            raise ParameterError(
                "tool_choice", "the format of this model's tool calls is not known; use auto"
            )
        wanted = tool_choice.name if is_named else "required"
        return call_format(form, functions, wanted, parallel=not is_single, prefix=prompt)

    def _form(self) -> ResponseForm | None:
        """Return the syntax of the model's replies; None if unknown, or if the chat template is not used."""
        return template_of(self.text) if self.use_chat_template else None

    def _reply(self, asked: Asked, output: RequestOutput) -> dict[str, Any]:
        """Convert an output to an OpenAI chat completion, with vLLM's extension `prompt_logprobs`."""
        num_prompt, num_tokens = (
            len(output.prompt_token_ids),
            sum(len(one.token_ids) for one in output.outputs),
        )
        reply = {
            "id": output.request_id,
            "object": "chat.completion",
            "created": 0,
            "model": self.model_name,
            "choices": [self._choice(asked, completion) for completion in output.outputs],
            "usage": {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_tokens,
                "total_tokens": num_prompt + num_tokens,
            },
        }
        if output.prompt_logprobs is not None:
            reply["prompt_logprobs"] = id_rows(output.prompt_logprobs, self.text.vocabulary)
        return reply

    def _choice(self, asked: Asked, completion: CompletionOutput) -> dict[str, Any]:
        message, reason = self._message(asked, completion), completion.finish_reason
        record = completion.logprobs
        rows = None if record is None else {"content": msgspec.json.decode(self._encoder.content(record))}
        return {
            "index": completion.index,
            "message": message,
            "logprobs": rows,
            "finish_reason": "tool_calls" if "tool_calls" in message and reason == "stop" else reason,
        }

    def _message(self, asked: Asked, completion: CompletionOutput) -> dict[str, Any]:
        """Return a completion as a message, split into content, reasoning and calls if possible."""
        form = self._form()
        may_call = bool(asked.functions) and form is not None and form.tools is not None
        if form is None or not (form.has_reasoning or may_call):
            return {"role": "assistant", "content": completion.text}
        cutter: Cutter[CompletionOutput] = Cutter(self.text.bytes_of, (), 0)
        piece = cutter.take(completion)
        assert piece is not None, "the completion has ended"
        channels = Channels(form, asked.begun, self.text, asked.functions)
        parts = channels.take(piece)
        said = {
            channel: "".join(part.text for part in parts if part.channel == channel)
            for channel in ("content", "reasoning")
        }
        calls = [part.call for part in parts if part.call is not None]
        message: dict[str, Any] = {"role": "assistant", "content": said["content"]}
        if said["reasoning"]:
            message["reasoning_content"] = said["reasoning"]
        if calls:
            message["tool_calls"] = [
                {
                    "id": f"call_{secrets.token_hex(12)}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in calls
            ]
        return message


def _function(tool: Any) -> dict[str, Any]:
    """Convert a tool to OpenAI's format, which chat templates expect."""
    return {"type": "function", "function": tool.model_dump(exclude={"options"}, exclude_none=True)}


def _params(config: GenerateConfig, further: Mapping[str, Any]) -> SamplingParams:
    """Convert a configuration to `SamplingParams`; the fields in `further` override the configuration's.

    Raises:
        ParameterError: a field is not supported.
    """
    given = {name: value for name, value in config.model_dump().items() if value is not None}
    for name in given.keys() - READ - OF_INSPECT - OF_HTTP:
        raise UnknownParameterError(name, READ, of="logprobe/")
    asked = {own: given[name] for name, own in SAMPLING.items() if name in given}
    require(config.logprobs or not config.top_logprobs, "top_logprobs", "needs logprobs; set logprobs=True")
    if config.logprobs:
        asked["logprobs"] = config.top_logprobs or 0
    if config.response_schema is not None:
        schema = config.response_schema.json_schema.model_dump(exclude_none=True)
        named = {"name": config.response_schema.name, "schema": schema}
        asked["response_format"] = {"type": "json_schema", "json_schema": named}
    return SamplingParams(**{**asked, **further})
