"""Split a chat model's output into content, reasoning and tool calls, token by token.

A response template (`forms`) describes the markers that a model writes. `split` looks for these markers in
the tokens of a completion. `grammar` turns a model's call syntax into a grammar for constrained decoding.
"""

from logprobe.text.channels.calls import ToolCall
from logprobe.text.channels.forms import ResponseForm, template_of
from logprobe.text.channels.grammar import call_format
from logprobe.text.channels.split import Channels, Part

__all__ = ["Channels", "Part", "ResponseForm", "ToolCall", "call_format", "template_of"]
