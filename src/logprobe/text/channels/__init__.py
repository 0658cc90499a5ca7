"""What a chat model writes → its channels: content, reasoning and tool calls, token by token.

Which marks a model sets stands in a response template (`forms`); `split` follows them through the tokens of a
completion, and `grammar` makes the calls of a model a form that its text must have.
"""

from logprobe.text.channels.calls import ToolCall
from logprobe.text.channels.forms import ResponseForm, template_of
from logprobe.text.channels.grammar import call_format
from logprobe.text.channels.split import Channels, Part

__all__ = ["Channels", "Part", "ResponseForm", "ToolCall", "call_format", "template_of"]
