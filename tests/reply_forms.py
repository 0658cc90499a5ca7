"""Replies in models' own formats, and chat templates that contain each format's markers.

The templates are short ones of our own with the markers, roles and generation prompts of the published
templates, which we may not redistribute.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from logprobe.models import Vocabulary
from logprobe.models.fast_tokenizer import TokenizerFacts
from logprobe.text.channels import Channels, Part, ResponseForm, template_of
from logprobe.text.edge import TextEdge
from logprobe.text.pieces import Cutter

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Sequence

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at something",
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "string"}, "times": {"type": "integer"}},
            "required": ["at"],
            "additionalProperties": False,
        },
    },
}
OTHER = {"type": "function", "function": {"name": "now"}}
TOOLS = [TOOL, OTHER]
CHATML = (
    "{% if tools %}<|im_start|>system\n<tools>{{ tools | tojson }}</tools>{% MARKS %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chatml(marks: str) -> str:
    return CHATML.replace("{% MARKS %}", marks)


def turns(marks: str, role: str, end: str, begin: str) -> str:
    """Return a chat template that presents tools with the call markers, followed by the turns."""
    return (
        "{% if tools %}{{ tools | tojson }}" + marks + "{% endif %}{% for m in messages %}"
        f"{role}{{{{ m.content }}}}{end}{{% endfor %}}{{% if add_generation_prompt %}}{begin}{{% endif %}}"
    )


@dataclass(frozen=True)
class Reply:
    """A reply and the expected contents of its channels."""

    name: str  # of the format
    template: str
    special: tuple[str, ...]
    prefix: str
    text: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    bodies: tuple[str, ...] = field(default=())  # of the calls, as written


LOOK = '{"name": "look", "arguments": {"at": "the dög 😀", "times":  1}}'
NOW = '{"name": "now", "arguments": {}}'
ARGUMENTS = '{"at": "the dög 😀", "times":  1}'
CALLED = (("look", ARGUMENTS), ("now", "{}"))
QWEN = ("<|im_start|>", "<|im_end|>")
DEEPSEEK = tuple(f"<｜{name}｜>" for name in ("User", "Assistant", "end▁of▁sentence"))
HARMONY = tuple(
    f"<|{name}|>" for name in ("start", "end", "message", "channel", "constrain", "return", "call")
)
QWEN3 = chatml("<tool_call></tool_call>") + "{# what came before </think> is left out #}"
LLAMA = turns(
    '<|python_tag|>{"name": function name, "parameters": dictionary}',
    "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n",
    "<|eot_id|>",
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
)
LLAMA_SPECIAL = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>")
LLAMA_PREFIX = "<|start_header_id|>assistant<|end_header_id|>\n\n"

REPLIES = {
    "qwen3": Reply(
        "hermes",
        QWEN3,
        QWEN,
        "<|im_start|>user\n<think>hi<|im_end|>\n<|im_start|>assistant\n",
        "<think>\nA café?\n\nLook.\n</think>\n\nLet me\n look.\n"
        f"<tool_call>\n{LOOK}\n</tool_call>\n<tool_call>\n{NOW}\n</tool_call><|im_end|>",
        content="Let me\n look.",
        reasoning="A café?\n\nLook.",
        calls=CALLED,
        bodies=(LOOK, NOW),
    ),
    "qwen3, not thinking": Reply(
        "hermes",
        QWEN3,
        QWEN,
        "<|im_start|>assistant\n<think>\n\n</think>\n\n",
        "It is 😀.\n<|im_end|>",
        content="It is 😀.\n",
    ),
    "qwq, thinking already": Reply(
        "hermes",
        QWEN3,
        QWEN,
        "<|im_start|>assistant\n<think>\n",
        f"Hm.\n</think>\n\nYes. <tool_call>{LOOK}</tool_call><|im_end|>",
        content="Yes.",
        reasoning="Hm.",
        calls=CALLED[:1],
        bodies=(LOOK,),
    ),
    "qwen2.5": Reply(
        "hermes",
        chatml("<tool_call></tool_call>"),
        QWEN,
        "<|im_start|>assistant\n",
        f"<tool_call>\n{LOOK}\n</tool_call><|im_end|>",
        calls=CALLED[:1],
        bodies=(LOOK,),
    ),
    "llama": Reply(
        "llama",
        LLAMA,
        LLAMA_SPECIAL,
        LLAMA_PREFIX,
        '{"name": "look", "parameters": {"at": "the dog"}}<|eot_id|>',
        calls=(("look", '{"at": "the dog"}'),),
        bodies=('{"name": "look", "parameters": {"at": "the dog"}}',),
    ),
    "llama, with a tag": Reply(
        "llama",
        LLAMA,
        LLAMA_SPECIAL,
        LLAMA_PREFIX,
        '<|python_tag|>{"type": "function", "name": "look", "parameters": {"at": "é"}}<|eom_id|>',
        calls=(("look", '{"at": "é"}'),),
        bodies=('{"type": "function", "name": "look", "parameters": {"at": "é"}}',),
    ),
    "llama, in words": Reply(
        "llama",
        LLAMA,
        LLAMA_SPECIAL,
        LLAMA_PREFIX,
        'I say {"name": "look"}.<|eot_id|>',
        content='I say {"name": "look"}.',
    ),
    "mistral": Reply(
        "mistral",
        turns("[TOOL_CALLS] [", "[INST]", "[/INST]", ""),
        ("[INST]", "[/INST]", "[TOOL_CALLS]", "</s>"),
        "[INST]hi[/INST]",
        f"[TOOL_CALLS] [{LOOK}, {NOW}]</s>",
        calls=CALLED,
        bodies=(LOOK, NOW),
    ),
    "mistral-named": Reply(
        "mistral-named",
        turns("[TOOL_CALLS]name[ARGS]", "[INST]", "[/INST]", ""),
        ("[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "</s>"),
        "[INST]hi[/INST]",
        f"Well. [TOOL_CALLS]look[ARGS]{ARGUMENTS}[TOOL_CALLS]now[ARGS]{{}}</s>",
        content="Well.",
        calls=CALLED,
        bodies=(ARGUMENTS, "{}"),
    ),
    "magistral": Reply(
        "mistral-named",
        turns("[TOOL_CALLS]name[ARGS]", "[INST]", "[/INST]", "") + "{# [THINK][/THINK] #}",
        ("[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "</s>"),
        "[INST]hi[/INST]",
        f"[THINK]Hm, hm.[/THINK]Well.[TOOL_CALLS]look[ARGS]{ARGUMENTS}</s>",
        content="Well.",
        reasoning="Hm, hm.",
        calls=CALLED[:1],
        bodies=(ARGUMENTS,),
    ),
    "deepseek": Reply(
        "deepseek",
        turns(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>```json</think>", "<｜User｜>", "", "<｜Assistant｜>"
        ),
        DEEPSEEK,
        "<｜User｜>hi<｜Assistant｜><think>\n",
        "Hm.\n</think>\n\nWell.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n"
        f"```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>\n"
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
        content="Well.",
        reasoning="Hm.",
        calls=CALLED,
        bodies=(ARGUMENTS, "{}"),
    ),
    "deepseek-v3.1": Reply(
        "deepseek-v3.1",
        turns("<｜tool▁call▁begin｜>name<｜tool▁sep｜></think>", "<｜User｜>", "", "<｜Assistant｜>"),
        (*DEEPSEEK, "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),  # the others are ordinary tokens
        "<｜User｜>hi<｜Assistant｜></think>",
        f"Well.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
        content="Well.",
        calls=CALLED,
        bodies=(ARGUMENTS, "{}"),
    ),
    "gemma4": Reply(
        "gemma4",
        turns(
            "<|tool_call>call:x{}<tool_call|><|channel>thought",
            "<|turn>user\n",
            "<turn|>\n",
            "<|turn>model\n",
        ),
        ("<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>", '<|"|>', "<eos>"),
        "<|turn>user\nhi<turn|>\n<|turn>model\n",
        "<|channel>thought\nA dog.<channel|>Well."
        '<|tool_call>call:look{at:<|"|>the dög "😀"<|"|>,times:1}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|><turn|>",
        content="Well.",
        reasoning="A dog.",
        calls=(("look", '{"at": "the dög \\"😀\\"", "times": 1}'), ("now", "{}")),
        bodies=('{at:<|"|>the dög "😀"<|"|>,times:1}', "{}"),
    ),
    "gpt-oss": Reply(
        "harmony",
        turns("", "<|start|>user<|message|>", "<|end|>", "<|start|>assistant") + "{# <|channel|> <|call|> #}",
        HARMONY,
        "<|start|>user<|message|>hi<|end|><|start|>assistant",
        "<|channel|>analysis<|message|>A dog.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>Well.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>"
        f"{ARGUMENTS}<|call|>",
        content="Well.",
        reasoning="A dog.",
        calls=CALLED[:1],
        bodies=(ARGUMENTS,),
    ),
    "gpt-oss, the recipient first": Reply(
        "harmony",
        turns("", "<|start|>user<|message|>", "<|end|>", "<|start|>assistant") + "{# <|channel|> <|call|> #}",
        HARMONY,
        "<|start|>user<|message|>hi<|end|><|start|>assistant",
        "<|channel|>analysis<|message|>A dog.<|end|>"
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
        reasoning="A dog.",
        calls=CALLED[1:],
        bodies=("{}",),
    ),
    "gpt-oss, an answer": Reply(
        "harmony",
        turns("", "<|start|>user<|message|>", "<|end|>", "<|start|>assistant") + "{# <|channel|> <|call|> #}",
        HARMONY,
        "<|start|>assistant",
        "<|channel|>analysis<|message|>A dog.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Two\ndogs.<|return|>",
        content="Two\ndogs.",
        reasoning="A dog.",
    ),
    "qwen-coder": Reply(
        "qwen-xml",
        chatml("<tool_call>\n<function=name>\n</function></tool_call>"),
        QWEN,
        "<|im_start|>assistant\n",
        "Well.\n\n<tool_call>\n<function=look>\n<parameter=at>\nthe dög\n</parameter>\n"
        "<parameter=times>\n2\n</parameter>\n</function>\n</tool_call><|im_end|>",
        content="Well.",
        calls=(("look", '{"at": "the dög", "times": 2}'),),
        bodies=("<parameter=at>\nthe dög\n</parameter>\n<parameter=times>\n2\n</parameter>",),
    ),
    "glm": Reply(
        "glm",
        turns(
            "<tool_call>name\n<arg_key>k</arg_key>\n</tool_call></think>", "<|user|>\n", "", "<|assistant|>"
        ),
        ("<|user|>", "<|assistant|>", "<|endoftext|>"),
        "<|user|>\nhi<|assistant|>",
        "\n<think>Hm.</think>\nWell.\n"
        "<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>the dög</arg_value>\n"
        "<arg_key>times</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n"
        "<tool_call>now\n</tool_call><|endoftext|>",
        content="Well.",
        reasoning="Hm.",
        calls=(("look", '{"at": "the dög", "times": 2}'), ("now", "{}")),
        bodies=(
            (
                "<arg_key>at</arg_key>\n<arg_value>the dög</arg_value>\n"
                "<arg_key>times</arg_key>\n<arg_value>2</arg_value>"
            ),
            "",
        ),
    ),
    "no tools taken": Reply(
        "hermes",
        turns("", "", "", "").replace("{% if tools %}{{ tools | tojson }}{% endif %}", ""),
        QWEN,
        "hi",
        f"  Well.\n\n<tool_call>\n{LOOK}\n</tool_call>\n<|im_end|>",
        content="  Well.",
        calls=CALLED[:1],
        bodies=(LOOK,),
    ),
}


@dataclass
class Growing:
    """A completion that a test can extend."""

    token_ids: list[int]
    finish_reason: str | None = None
    num_text_bytes: int | None = None


def edge_of(
    pieces: Iterable[bytes], special: Iterable[str] = (), template: str = "", **more: Any
) -> TextEdge:
    """Return the edge of a model with these pieces as tokens, in order, followed by the special tokens."""
    known = [*pieces]
    first = len(known)
    known += [mark.encode() for mark in special]
    tokenizer = SimpleNamespace(chat_template=template, response_template=None, **more)
    facts = TokenizerFacts(
        bos_token_id=None,
        eos_token_id=None,
        special_token_ids=frozenset(range(first, len(known))),
        splits_special_tokens=False,
    )
    none: Any = None  # the tests encode no text
    return TextEdge(none, facts, Vocabulary(known), lambda: tokenizer)


def tokens_of(
    text: str, special: Sequence[str], rng: random.Random, longest: int = 6
) -> tuple[list[bytes], list[int]]:
    """Cut a text's bytes at random into a vocabulary (special tokens last); return it with the text's ids."""
    pieces: list[bytes] = []
    ids: list[int] = []
    marks: list[tuple[int, str]] = []
    pattern = "|".join(map(re.escape, special)) or "(?!)"
    for piece in re.split(f"({pattern})", text):
        if piece in special:
            marks.append((len(ids), piece))
            ids.append(-1)
            continue
        data = piece.encode()
        while data:
            size = rng.randint(1, longest)
            ids.append(len(pieces))
            pieces.append(data[:size])
            data = data[size:]
    for place, mark in marks:
        ids[place] = len(pieces) + special.index(mark)
    return pieces, ids


def parts_of(
    form: ResponseForm,
    edge: TextEdge,
    ids: list[int],
    *,
    prefix: str = "",
    tools: Any = None,
    steps: Iterable[int] = (),
    num_text_bytes: int | None = None,
) -> list[Part]:
    """Return the channel parts of a completion that grows by these numbers of tokens, then to its end."""
    channels, cutter = Channels(form, prefix, edge, tools), Cutter[Growing](edge.bytes_of, [], 0)
    parts: list[Part] = []
    stop = 0
    for step in steps:
        stop += step
        if stop < len(ids) and (piece := cutter.take(Growing(ids[:stop]))) is not None:
            parts += channels.take(piece)
    last = cutter.take(Growing(ids, "stop", num_text_bytes))
    assert last is not None
    return parts + channels.take(last)


def joined(parts: Iterable[Part]) -> dict[tuple[str, int], Part]:
    """Merge the parts of each channel and call."""
    whole: dict[tuple[str, int], Part] = {}
    for part in parts:
        key = (part.channel, part.index)
        before = whole.get(key)
        if before is not None:
            assert part.channel != "tool_call", "a call comes whole"
            part = Part(*key, before.text + part.text, before.rows + part.rows)  # noqa: PLW2901 - what is kept
        whole[key] = part
    return whole


def form_of(reply: Reply, edge: TextEdge) -> ResponseForm:
    form = template_of(edge)
    assert form is not None
    assert form.name == reply.name
    return form


def stop_in(text: str) -> str:
    """Return two characters of the later half of a text, whole ones: others are parts of a character."""
    pairs = (text[at : at + 2] for at in range(len(text) // 2, len(text) - 1))
    return next(pair for pair in pairs if "\ufffd" not in pair)
