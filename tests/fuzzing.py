"""The number of examples in fuzz tests: a few seconds by default, more with `make fuzz`."""

from __future__ import annotations

import os
from typing import Final

from hypothesis import HealthCheck, settings

NUM_EXAMPLES: Final = int(os.environ.get("FUZZ_EXAMPLES", "100"))


def fuzz(share: float = 1.0) -> settings:
    """Return settings of a fuzz test that runs its `share` of the examples (less if each is slow)."""
    return settings(
        max_examples=max(round(NUM_EXAMPLES * share), 1),
        deadline=None,
        derandomize=NUM_EXAMPLES <= 100,  # the same examples in every run of the suite
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
