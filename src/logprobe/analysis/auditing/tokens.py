"""Identify tokens by id or bytes, and convert prompts to token ids."""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Final, final

from logprobe.errors import ParameterError
from logprobe.text.chat import Layout, read_messages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.analysis.auditing.forms import Ask, Entry
    from logprobe.models import Vocabulary
    from logprobe.text.edge import TextEdge

SENTENCEPIECE_SPACE: Final = "▁"


@final
class Tokens:
    """The vocabulary and tokenizer of the model that computes the exact rows."""

    def __init__(self, text: TextEdge) -> None:
        self.edge = text
        self.vocabulary: Vocabulary = text.vocabulary

    # -- entries of replies --------------------------------------------------------------------------------

    def id_of(self, entry: Entry | None) -> int | None:
        """Return an entry's token id, or that of the only token with the entry's bytes, or None."""
        if entry is None:
            return None
        if entry.token_id is not None:
            return entry.token_id if 0 <= entry.token_id < len(self.vocabulary) else None
        return None if entry.data is None else self._by_bytes.get(entry.data)

    @cached_property
    def _by_bytes(self) -> dict[bytes, int | None]:
        """Token id by bytes; None if several tokens have the same bytes."""
        named = [(self.vocabulary.token_bytes(one), one) for one in range(len(self.vocabulary))]
        if self.edge.backend.token_to_id(SENTENCEPIECE_SPACE) is not None:
            # Texts, and bytes made from them, may lack a token's leading space.
            named += [(data[1:], token_id) for data, token_id in named if data.startswith(b" ")]
        table: dict[bytes, int | None] = {}
        for data, token_id in named:
            table[data] = token_id if table.get(data, token_id) == token_id else None
        return table

    def is_special(self, token_id: int) -> bool:
        """Return True for a special token, which does not appear in texts."""
        return token_id in self.edge.special_token_ids

    def show(self, token_id: int) -> str:
        """Return the text of a token, shortened for reports."""
        return self.vocabulary.token_text(token_id)[:40]

    # -- texts and prompts ---------------------------------------------------------------------------------

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text, with the special tokens that the tokenizer adds by default."""
        return tuple(self.edge.encode(text).tolist())

    def can_encode(self, text: str) -> bool:
        """Return True if the tokenizer has tokens for every byte of a text."""
        return {*self.vocabulary.missing_bytes}.isdisjoint(text.encode())

    def cut(self, text: str, num_tokens: int) -> str:
        """Return the beginning of a text, cut to at most `num_tokens` tokens."""
        ids = self.encode(text)
        if len(ids) <= num_tokens:
            return text
        return self.edge.bytes_of(ids[:num_tokens]).decode("utf-8", "ignore")

    def of_word(self, word: str) -> int:
        """Return the id of the word's token, or of its longest token if the word has several."""
        return max(self.edge.plain_ids(word), key=lambda one: len(self.vocabulary.token_text(one).strip()))

    def encode_ask(self, ask: Ask) -> tuple[int, ...]:
        """Return the token ids of a request's prompt, or () for a chat if there is no chat template."""
        if isinstance(ask.prompt, str):
            return self.encode(ask.prompt)
        if ask.ids is not None:
            return ask.ids
        return self._lay_out(ask.messages) if self.has_template else ()

    @property
    def has_template(self) -> bool:
        """True if the tokenizer has a chat template."""
        return self.edge.tokenizer.chat_template is not None

    def beginnings(self, ids: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Return variants of a prompt's ids by description: without BOS, with BOS once or twice, with EOS.

        Variants that equal `ids` are left out.
        """
        own = tuple(ids)
        bos, eos = self.edge.bos_token_id, self.edge.eos_token_id
        bare = own[1:] if own and own[0] == bos else own
        found = {"without BOS": bare}
        if bos is not None:
            found |= {"with BOS": (bos, *bare), "with BOS twice": (bos, bos, *bare)}
        if eos is not None and eos != bos:
            found["with EOS before"] = (eos, *bare)
        return {name: other for name, other in found.items() if other != own and len(other) > 1}

    def layouts(self, ask: Ask, systems: Sequence[str]) -> dict[str, tuple[int, ...]]:
        """Return other layouts of a chat: with a system prompt, or without the generation prompt.

        Layouts that the template rejects are left out; Gemma's template, for example, has no system prompt.
        """
        messages = ask.messages
        found = {}
        with suppress(ParameterError):
            found["without the beginning of the answer"] = self._lay_out(messages, begins_answer=False)
        for text in systems if messages[0]["role"] != "system" else ():
            with suppress(ParameterError):
                system = {"role": "system", "content": text}
                found[f"with a system text {text!r}"] = self._lay_out([system, *messages])
        return found

    def _lay_out(self, messages: list[dict[str, str]], *, begins_answer: bool = True) -> tuple[int, ...]:
        layout = Layout(add_generation_prompt=begins_answer)
        return tuple(read_messages(messages, self.edge, layout).tolist())
