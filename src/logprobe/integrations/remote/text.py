"""`RemoteText`: a server's tokenizer, fetched on first use."""

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
    """Reply of `/tokenizer_info`."""

    bos_token_id: int | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    chat_template: Any = None


@final
class RemoteText:
    """`ModelText` with a server's tokenizer; `fetch` returns the server's reply at a path."""

    def __init__(self, fetch: Callable[[str], bytes]) -> None:
        self._facts = decoded(fetch("/tokenizer_info"), Facts, "/tokenizer_info")
        self._fetch = fetch

    @property
    def bos_token_id(self) -> int | None:
        """Id of the model's BOS token; None if there is none."""
        return self._facts.bos_token_id

    @cached_property
    def tokenizer(self) -> Any:
        """The server's tokenizer, which then runs in this process.

        Raises:
            ServerError: the server cannot be reached, failed, or returned no valid tokenizer.
        """
        from tokenizers import Tokenizer

        from logprobe.models.tokenizer import ExactTokenizer

        facts, make = self._facts, cast("Any", ExactTokenizer)  # transformers' own has no types
        special = {"bos_token": facts.bos_token, "eos_token": facts.eos_token, "pad_token": facts.pad_token}
        data = self._fetch("/v1/tokenizer")
        try:
            whole = Tokenizer.from_str(data.decode())
        except Exception as error:  # `tokenizers` raises plain `Exception`
            raise ServerError(
                f"/v1/tokenizer: returned no valid tokenizer ({printable(str(error))})"
            ) from error
        tokenizer = make(
            tokenizer_object=whole,
            clean_up_tokenization_spaces=False,
            **{name: token for name, token in special.items() if token is not None},
        )
        tokenizer.chat_template = facts.chat_template
        return tokenizer

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Map from token id to exact bytes; raises the same errors as `tokenizer`."""
        from logprobe.models import Vocabulary

        return Vocabulary.from_tokenizer(self.tokenizer)
