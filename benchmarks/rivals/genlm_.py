"""genlm-backend's AsyncTransformer; best: batches of 64; default: its own batch size of 20."""

import asyncio
from typing import Any

from genlm.backend.llm import AsyncTransformer
from protocol import Read, TokenIds, ask_rounds, serve


class Genlm:
    """Whole next-token rows, which is what this library gives; batches of 64 hold a whole round."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._lm = AsyncTransformer.from_name(
            job["model_folder"], hf_opts={"device_map": "cpu", "torch_dtype": "float32"}
        )
        self._own_batch_size = self._lm.batch_size

    def use(self, variant: str) -> None:
        """Set how many asks make a batch."""
        self._lm.batch_size = 64 if variant == "best" else self._own_batch_size

    def next_token(self, prefixes: list[TokenIds], rounds: list[list[int]]) -> Read:
        """Concurrent asks of all prefixes, round after round; its cache starts empty and is never bounded."""
        self._lm.clear_cache()
        rows = asyncio.run(ask_rounds(self._lm, prefixes, rounds))
        return lambda: rows.argmax(-1).tolist()


if __name__ == "__main__":
    serve(Genlm, packages=("genlm-backend", "torch", "transformers"))
