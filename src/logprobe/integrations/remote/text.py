"""`RemoteText`: a server's tokenizer, fetched when it is first needed; rows need none of it."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, cast, final

import msgspec

from logprobe.errors import ServerError
from logprobe.integrations.remote.link import decoded
from logprobe.transport.http_client import printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from logprobe.models import Vocabulary


class Facts(msgspec.Struct):
    """`/tokenizer_info`."""

    bos_token_id: int | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    chat_template: Any = None


@final
class RemoteText:
    """Implements `ModelText` on what a server tells of its tokenizer; `fetch` gives what it has at a path."""

    def __init__(self, fetch: Callable[[str], bytes]) -> None:
        self._facts = decoded(fetch("/tokenizer_info"), Facts, "/tokenizer_info")
        self._fetch = fetch

    @property
    def bos_token_id(self) -> int | None:
        """What the model puts before a text; None where it has no such token."""
        return self._facts.bos_token_id

    @cached_property
    def tokenizer(self) -> Any:
        """The server's own tokenizer, of this process from now on.

        Raises:
            ServerError: the server cannot be reached any more, failed, or gave no tokenizer.
        """
        from tokenizers import Tokenizer

        from logprobe.models.tokenizer import ExactTokenizer

        facts, make = self._facts, cast("Any", ExactTokenizer)  # transformers' own has no types
        special = {"bos_token": facts.bos_token, "eos_token": facts.eos_token, "pad_token": facts.pad_token}
        data = self._fetch("/v1/tokenizer")
        try:
            whole = Tokenizer.from_str(data.decode())
        except Exception as error:  # `tokenizers` raises this very class
            raise ServerError(f"/v1/tokenizer: gave no tokenizer ({printable(str(error))})") from error
        tokenizer = make(
            tokenizer_object=whole,
            clean_up_tokenization_spaces=False,
            **{name: token for name, token in special.items() if token is not None},
        )
        tokenizer.chat_template = facts.chat_template
        return tokenizer

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The exact bytes of every id; errors as `tokenizer`."""
        from logprobe.models import Vocabulary

        return Vocabulary.from_tokenizer(self.tokenizer)
