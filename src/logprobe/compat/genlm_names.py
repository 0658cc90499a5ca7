"""`GenlmNames`: genlm-backend's names for the methods of `next_token`, and `AsyncLM` with these names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic

from logprobe.errors import require
from logprobe.models.lora import resolved_folder
from logprobe.next_token import async_lm
from logprobe.next_token.engine_lm import EngineLM
from logprobe.next_token.rows import ArrayT, Row

if TYPE_CHECKING:
    from pathlib import Path

    from logprobe.next_token.base import TokenIds


class GenlmNames(EngineLM[ArrayT], Generic[ArrayT]):
    """The methods of `next_token` under genlm-backend's names and signatures."""

    def cleanup(self) -> None:
        """Call `close`."""
        self.close()

    def next_token_logprobs_uncached(self, token_ids: TokenIds, *, lora: str | None = None) -> ArrayT:
        """Call `next_token_logprobs_sync` with `use_cache=False`."""
        return self.next_token_logprobs_sync(token_ids, lora=lora, use_cache=False)

    def add_new_lora(self, lora_path: str | Path, lora_name: str = "lora_1") -> None:
        """Load a LoRA adapter from a folder; see `add_lora`.

        Raises:
            ModelError: the folder cannot be read, or the adapter does not fit the model.
        """
        self.add_lora(lora_name, lora_path)

    def set_lora(self, lora_path: str | Path | None = None, lora_name: str = "lora_1") -> None:
        """Set the default LoRA adapter for later requests; requests in flight are not affected.

        Raises:
            ParameterError: no adapter with this name is loaded, or it was loaded from another path.
        """
        loaded_from = self.list_loras().get(lora_name)
        known = {loaded_from, None}
        if loaded_from is not None and lora_path is not None and str(lora_path) not in known:
            is_same = str(resolved_folder(lora_path)) == loaded_from
            require(
                is_same,
                "lora_path",
                f"{lora_name!r} was loaded from {loaded_from}; use that path or another name",
            )
        super().set_lora(lora_name)


class AsyncLM(GenlmNames[Row], async_lm.AsyncLM):
    """`logprobe.next_token.AsyncLM` with genlm-backend's names."""
