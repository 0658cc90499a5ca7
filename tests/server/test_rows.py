"""The cost of parts of replies, which decides whether a worker thread writes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from logprobe.server.http.workers import QUICK_ENTRIES
from logprobe.server.rows import num_ending_entries


def test_routes_of_a_long_prompt_are_not_written_on_the_event_loop() -> None:
    routes = np.zeros((4096, 48, 8), np.uint8)
    completion = SimpleNamespace(token_ids=[5], routed_experts=routes[:1])
    piece: Any = SimpleNamespace(completion=completion, finish_reason="stop", index=0)
    outputs = {0: SimpleNamespace(prompt_routed_experts=routes)}
    generation: Any = SimpleNamespace(outputs=outputs, prompt_of=lambda _: 0)
    body: Any = SimpleNamespace(field_logprobs=None, return_routed_experts=True)
    assert num_ending_entries(body, generation, [piece]) > QUICK_ENTRIES
    piece.finish_reason = None
    assert num_ending_entries(body, generation, [piece]) == 0
