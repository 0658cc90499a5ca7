"""Which token an entry of a reply is: by id, by bytes or by text, and whether these agree.

Servers write a token as its text, as its piece in the vocabulary, by id, or with marks for bytes that are no
whole character; each of these is known here, and a text may be that of several ids.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.analysis.auditing.dialects import Ask, Entry
    from logprobe.models import Vocabulary
    from logprobe.text.edge import TextEdge

REPLACEMENT = "�"  # of bytes that are no whole character
ERRORS = ("replace", "ignore")


@final
class Tokens:
    """The tokens of a model, found by what servers say of them."""

    def __init__(self, text: TextEdge) -> None:
        self._edge = text
        self.vocabulary: Vocabulary = text.vocabulary
        self._tokenizer: Any = text.tokenizer

    @cached_property
    def _by_bytes(self) -> dict[bytes, list[int]]:
        table: dict[bytes, list[int]] = defaultdict(list)
        for token_id in range(len(self.vocabulary)):
            table[self.vocabulary.token_bytes(token_id)].append(token_id)
        return dict(table)

    @cached_property
    def _by_text(self) -> dict[str, list[int]]:
        """Every way to write a token → the ids it may mean, the exact ones first."""
        table: dict[str, list[int]] = defaultdict(list)
        pieces = self._tokenizer.convert_ids_to_tokens(list(range(len(self.vocabulary))))
        for token_id, piece in enumerate(pieces):
            for text in self._texts(token_id, piece):
                table[text].append(token_id)
        for token_id in range(len(self.vocabulary)):
            # SentencePiece leaves the first space of a text out.
            text = self.vocabulary.token_text(token_id)
            if text.startswith(" "):
                table[text[1:]].append(token_id)
        return dict(table)

    def _texts(self, token_id: int, piece: Any) -> set[str]:
        data = self.vocabulary.token_bytes(token_id)
        # Bytes that are no whole character are replaced by some servers, and left out by others.
        texts = {self.vocabulary.token_text(token_id), *(data.decode("utf-8", how) for how in ERRORS)}
        if isinstance(piece, str):
            texts.add(piece)
        if data:
            texts.add("bytes:" + "".join(f"\\x{one:02x}" for one in data))
        return texts

    def ids_of(self, entry: Entry) -> list[int]:
        """The ids that an entry may mean, by the surest of what it says; [] where nothing fits."""
        if entry.token_id is not None:
            return [entry.token_id] if 0 <= entry.token_id < len(self.vocabulary) else []
        by_text = [] if entry.text is None else self._by_text.get(entry.text, [])
        by_bytes = [] if entry.data is None else self._by_bytes.get(entry.data, [])
        both = [one for one in by_text if one in by_bytes]
        return both or by_text or by_bytes

    def ids_by_bytes(self, data: bytes) -> list[int]:
        """The ids whose bytes these are."""
        return self._by_bytes.get(data, [])

    def word(self, text: str) -> int:
        """The token of a text's that says most of it."""
        return max(
            self.encode_plain(text.encode()), key=lambda one: len(self.vocabulary.token_text(one).strip())
        )

    def can_encode(self, text: str) -> bool:
        """Whether the tokenizer has tokens for all of a text."""
        missing = set(self.vocabulary.missing_bytes)
        return missing.isdisjoint(text.encode())

    def encode_plain(self, data: bytes) -> list[int]:
        """Ids of a piece of a text, without special tokens."""
        text = data.decode("utf-8", "replace")
        return self._edge.plain_ids(text)

    def may_be(self, entry: Entry, token_id: int) -> bool:
        """Whether an entry's words fit a token; what says nothing fits all."""
        if entry.token_id is not None:
            return entry.token_id == token_id
        if entry.text is None and entry.data is None:
            return True
        return token_id in self.ids_of(entry) or self.is_partial(entry.text)

    def is_right_text(self, entry: Entry, token_id: int) -> bool:
        """Whether the text is one that servers write for this token."""
        text = entry.text
        if text is None or token_id in self._by_text.get(text, ()) or self.is_partial(text):
            return True
        if token_id in self._edge.special_token_ids:
            return text == ""
        whole = self.vocabulary.token_bytes(token_id).decode("utf-8", "ignore")
        return text == "" or text.strip() == whole.strip() or text == self._tokenizer.decode([token_id])

    def is_right_bytes(self, entry: Entry, token_id: int) -> bool:
        """Whether the bytes are this token's; of a special token none are right, too."""
        data = entry.data
        own = self.vocabulary.token_bytes(token_id)
        if data is None or data == own:
            return True
        if token_id in self._edge.special_token_ids:
            return not data
        return bool(data) and data.strip() == own.strip() and data.lstrip() == own.lstrip()

    @staticmethod
    def is_partial(text: str | None) -> bool:
        """Whether a text stands for bytes that are no whole character, of which it says nothing."""
        return text is not None and REPLACEMENT in text

    def is_whole(self, token_id: int) -> bool:
        """Whether the token's bytes are whole characters, so that a text may name it."""
        data = self.vocabulary.token_bytes(token_id)
        return data.decode("utf-8", "ignore").encode() == data

    def is_lossy(self, text: str | None, ids: Sequence[int]) -> bool:
        """Whether a text of several tokens is what is left of one within a character, and so names none."""
        parts = (self.vocabulary.token_bytes(one) for one in ids if not self.is_whole(one))
        return len(ids) > 1 and any(text in {data.decode("utf-8", how) for how in ERRORS} for data in parts)

    def is_special(self, token_id: int) -> bool:
        """Whether a text leaves the token out."""
        return token_id in self._edge.special_token_ids

    def show(self, token_id: int | None) -> str | None:
        """A token for people."""
        return None if token_id is None else self.vocabulary.token_text(token_id)[:40]

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids by the tokenizer's own rule."""
        return tuple(self._edge.encode(text).tolist())

    def variants(self, ids: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """How else a prompt may begin: without BOS, with it, with it twice, with EOS in its place."""
        own = tuple(ids)
        bos, eos = self._edge.bos_token_id, self._edge.eos_token_id
        bare = own[1:] if own and own[0] == bos else own
        found = {"without BOS": bare}
        if bos is not None:
            found |= {"with BOS": (bos, *bare), "with BOS twice": (bos, bos, *bare)}
        if eos is not None and eos != bos:
            found["with EOS before"] = (eos, *bare)
        return {name: one for name, one in found.items() if one != own and len(one) > 1}

    def encode_ask(self, ask: Ask) -> tuple[int, ...]:
        """The ids of an ask's prompt by the tokenizer and the chat template; () where it has no template."""
        if isinstance(ask.prompt, str):
            return self.encode(ask.prompt)
        if ask.ids is not None:
            return ask.ids
        from logprobe.text.chat import read_messages

        if self._tokenizer.chat_template is None:
            return ()
        return tuple(read_messages(ask.messages, self._edge).tolist())

    @property
    def has_template(self) -> bool:
        """Whether chats can be laid out here."""
        return self._tokenizer.chat_template is not None

    def layouts(self, ask: Ask, systems: Sequence[str]) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
        """Ids of a chat laid out otherwise: with a system text of the server's, or open at its end.

        And the ways that the template refuses, with its words: Gemma's has no system text.
        """
        from logprobe.errors import ParameterError
        from logprobe.text.chat import Layout, read_messages

        messages = ask.messages
        ways: dict[str, tuple[list[dict[str, str]], Layout]] = {
            "without the beginning of the answer": (messages, Layout(add_generation_prompt=False))
        }
        if messages[0]["role"] != "system":
            for text in systems:
                added = [{"role": "system", "content": text}, *messages]
                ways[f"with a system text {text!r}"] = (added, Layout())
        found, refused = {}, {}
        for name, (conversation, layout) in ways.items():
            try:
                found[name] = tuple(read_messages(conversation, self._edge, layout).tolist())
            except ParameterError as error:
                refused[name] = str(error)
        return found, refused

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of ids without special tokens."""
        return self._edge.text_of(ids)

    def cut(self, text: str, num_tokens: int) -> str:
        """The beginning of a text, no longer than so many tokens."""
        ids = self.encode(text)
        if len(ids) <= num_tokens:
            return text
        return self._edge.bytes_of(ids[:num_tokens]).decode("utf-8", "ignore")
