"""Identify tokens from what servers report: an id, bytes, a text, or the token's string in the vocabulary."""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property
from typing import TYPE_CHECKING, final

from logprobe.errors import ParameterError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.analysis.auditing.forms import Ask, Entry
    from logprobe.models import Vocabulary
    from logprobe.text.edge import TextEdge

REPLACEMENT = "�"  # stands for bytes that are not a whole character
ERRORS = ("replace", "ignore")  # servers either replace such bytes or leave them out


@final
class Tokens:
    """The vocabulary and tokenizer of the model that computes the exact rows."""

    def __init__(self, text: TextEdge) -> None:
        self.edge = text
        self.vocabulary: Vocabulary = text.vocabulary

    # -- what an entry names -------------------------------------------------------------------------------

    @cached_property
    def _by_bytes(self) -> dict[bytes, list[int]]:
        table: dict[bytes, list[int]] = defaultdict(list)
        for token_id in range(len(self.vocabulary)):
            table[self.vocabulary.token_bytes(token_id)].append(token_id)
        return dict(table)

    @cached_property
    def _by_text(self) -> dict[str, list[int]]:
        """For each text, the ids of the tokens that may be reported as that text, exact matches first."""
        table: dict[str, list[int]] = defaultdict(list)
        pieces = self.edge.tokenizer.convert_ids_to_tokens(list(range(len(self.vocabulary))))
        for token_id, piece in enumerate(pieces):
            data = self.vocabulary.token_bytes(token_id)
            texts = {self.vocabulary.token_text(token_id), *(data.decode("utf-8", how) for how in ERRORS)}
            texts |= {piece} if isinstance(piece, str) else set()
            texts |= {"bytes:" + "".join(f"\\x{byte:02x}" for byte in data)} if data else set()
            for text in texts:
                table[text].append(token_id)
        for token_id in range(len(self.vocabulary)):
            text = self.vocabulary.token_text(token_id)
            if text.startswith(" "):  # SentencePiece drops the leading space of a text
                table[text[1:]].append(token_id)
        return dict(table)

    def ids_of(self, entry: Entry) -> list[int]:
        """Return the ids of the tokens that an entry may mean, judged by the entry's most reliable field."""
        if entry.token_id is not None:
            return [entry.token_id] if 0 <= entry.token_id < len(self.vocabulary) else []
        by_text = [] if entry.text is None else self._by_text.get(entry.text, [])
        by_bytes = [] if entry.data is None else self._by_bytes.get(entry.data, [])
        return [token_id for token_id in by_text if token_id in by_bytes] or by_text or by_bytes

    def options(self, entry: Entry) -> list[int]:
        """Return the ids of the tokens that match either the text or the bytes of an entry."""
        ids = self.ids_of(entry)
        if entry.token_id is None and entry.data is not None:
            ids = list(dict.fromkeys([*ids, *self._by_bytes.get(entry.data, [])]))
        return ids

    def named(self, entry: Entry) -> list[int]:
        """Return `ids_of(entry)`, or [] if the text may come from several tokens with partial characters."""
        ids = self.ids_of(entry)
        if entry.token_id is not None or entry.data is not None or len(ids) == 1:
            return ids
        partial = (self.vocabulary.token_bytes(token_id) for token_id in ids if not self.is_whole(token_id))
        is_lossy = any(entry.text in {data.decode("utf-8", how) for how in ERRORS} for data in partial)
        return [] if is_lossy else ids

    def may_be(self, entry: Entry, token_id: int) -> bool:
        """Return True if an entry may mean the token, as an entry without id, text and bytes always may."""
        if entry.token_id is not None:
            return entry.token_id == token_id
        is_empty = entry.text is None and entry.data is None
        return is_empty or token_id in self.ids_of(entry) or self.is_partial(entry.text)

    def is_right_text(self, entry: Entry, token_id: int) -> bool:
        """Return True if the entry's text is one that servers write for this token."""
        text = entry.text
        if text is None or token_id in self._by_text.get(text, ()) or self.is_partial(text):
            return True
        if self.is_special(token_id):
            return text == ""
        whole = self.vocabulary.token_bytes(token_id).decode("utf-8", "ignore")
        return text == "" or text.strip() == whole.strip() or text == self.edge.tokenizer.decode([token_id])

    def is_right_bytes(self, entry: Entry, token_id: int) -> bool:
        """Return True if the entry's bytes are this token's bytes, or empty for a special token."""
        data, own = entry.data, self.vocabulary.token_bytes(token_id)
        if data is None or data == own:
            return True
        if self.is_special(token_id):
            return not data
        return bool(data) and data.strip() == own.strip() and data.lstrip() == own.lstrip()

    @staticmethod
    def is_partial(text: str | None) -> bool:
        """Return True if a text contains U+FFFD, which replaces bytes that are not a whole character."""
        return text is not None and REPLACEMENT in text

    def is_whole(self, token_id: int) -> bool:
        """Return True if the token's bytes are whole characters, so that a text identifies the token."""
        data = self.vocabulary.token_bytes(token_id)
        return data.decode("utf-8", "ignore").encode() == data

    def is_special(self, token_id: int) -> bool:
        """Return True for a special token, which texts leave out."""
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
        """Return the id of a word's token, or of the longest token if the word has several."""
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
        """Return variants of a prompt's ids by description: without BOS, with one or two BOS, and with EOS.

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

    def layouts(self, ask: Ask, systems: Sequence[str]) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
        """Return other layouts of a chat: with a system prompt, or without the generation prompt.

        The second result has the template's error message for each layout that the template rejects; Gemma's
        template, for example, has no system prompt.
        """
        messages = ask.messages
        conversations = {"without the beginning of the answer": messages}
        if messages[0]["role"] != "system":
            for text in systems:
                system = {"role": "system", "content": text}
                conversations[f"with a system text {text!r}"] = [system, *messages]
        found, refused = {}, {}
        for name, conversation in conversations.items():
            try:
                found[name] = self._lay_out(conversation, begins_answer=conversation is not messages)
            except ParameterError as error:
                refused[name] = str(error)
        return found, refused

    def _lay_out(self, messages: list[dict[str, str]], *, begins_answer: bool = True) -> tuple[int, ...]:
        from logprobe.text.chat import Layout, read_messages

        layout = Layout(add_generation_prompt=begins_answer)
        return tuple(read_messages(messages, self.edge, layout).tolist())
