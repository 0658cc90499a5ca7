"""`LocalLM`: a `NextTokenLM` whose engine is this program's own: it loads LoRA weights and forgets prefixes.

Before it: `AsyncLM` and `AsyncVirtualLM`, which start the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from logprobe.errors import ParameterError
from logprobe.next_token.desk import check_batching
from logprobe.next_token.lm import NextTokenLM
from logprobe.next_token.rows import ArrayT

if TYPE_CHECKING:
    from pathlib import Path

    from logprobe.engine.backends.start import LoadedModel


class LocalLM(NextTokenLM[ArrayT]):
    """A model of this program asked for next-token distributions; see `NextTokenLM` for all that it answers.

    Args:
        loaded: the engine, with its words.
        settings: those of `NextTokenLM`.
    """

    def __init__(self, loaded: LoadedModel, **settings: Any) -> None:
        super().__init__(loaded, **settings)
        self._loaded = loaded

    def add_lora(self, name: str, path: str | Path) -> None:
        """Load LoRA weights from a folder; `set_lora` or `lora=` then use them.

        A name that is loaded again stands for the new weights; answers already asked keep theirs.

        Raises:
            ModelError: the folder cannot be read, or does not fit the model.
        """
        self._loaded.engine.add_lora(name, path)

    def add_new_lora(
        self,
        path: str | Path | None = None,
        name: str = "lora_1",
        *,
        lora_path: str | Path | None = None,
        lora_name: str | None = None,
    ) -> None:
        """`add_lora` in genlm-backend's words: `add_new_lora(lora_path, lora_name="lora_1")`."""
        given = lora_path if path is None else path
        if given is None:
            raise ParameterError("path", "is missing; name the folder with the LoRA weights")
        self.add_lora(lora_name or name, given)

    def remove_lora(self, name: str) -> None:
        """Refuse new asks for LoRA weights; those in flight end as they would have.

        Raises:
            ParameterError: no such weights.
        """
        self._loaded.engine.remove_lora(name)

    def clear_kv_cache(self) -> None:
        """Let the engine forget every prefix that no request stands on."""
        self._loaded.engine.forget_prefixes()

    @property
    def batch_size(self) -> int:
        """Asks that start a step at once where the engine is idle; may be set."""
        return self._desk.batch_size

    @batch_size.setter
    def batch_size(self, batch_size: int) -> None:
        check_batching(batch_size=batch_size)
        self._desk.batch_size = batch_size

    @property
    def timeout(self) -> float:
        """Seconds after which the first of fewer asks starts a step; may be set."""
        return self._desk.timeout_s

    @timeout.setter
    def timeout(self, timeout: float) -> None:
        check_batching(timeout=timeout)
        self._desk.timeout_s = timeout

    @property
    def underlying_model(self) -> Any:
        """The transformers module; None where the model lives in another process.

        Where an earlier load has proven the model here, the module is loaded when it is first asked for.
        """
        load = self._loaded.load_module
        return None if load is None else load()
