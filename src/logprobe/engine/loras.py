"""`LoraTable`: the names of LoRA weights, and how long each load of one must last.

`Front` guards it; a core knows loads by their numbers alone.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from logprobe.errors import require, shortened

if TYPE_CHECKING:
    from logprobe.transport.messages import LoadLora


class LoraTable:
    """Name → load. A load lasts while its name stands for it, or a request runs on it."""

    def __init__(self) -> None:
        self._loads: dict[str, LoadLora] = {}
        self._holds: Counter[int] = Counter()  # of each load: one for its name, and one a request
        self._versions: dict[int, str] = {}  # of each load that is held

    def paths(self) -> dict[str, str]:
        """Name → path of all that requests may name."""
        return {name: load.path for name, load in self._loads.items()}

    def number(self, name: str) -> int:
        """The load that a name stands for now.

        Raises:
            ParameterError: no such weights.
        """
        known, asked = ", ".join(self._loads) or "none", shortened(name)
        require(name in self._loads, "lora", f"no LoRA weights {asked!r} are loaded; known: {known}")
        return self._loads[name].number

    def put(self, load: LoadLora, version: str) -> int | None:
        """Let a name stand for a load; the one that it stood for, where nothing holds that any more.

        `version` tells its weights from others.
        """
        before = self._loads.get(load.name)
        self._loads[load.name] = load
        self._versions[load.number] = version
        self._holds[load.number] += 1
        return None if before is None else self.release(before.number)

    def remove(self, name: str) -> int | None:
        """Let a name stand for nothing; its load, where nothing holds that any more; errors as `number`."""
        number = self.number(name)
        del self._loads[name]
        return self.release(number)

    def has(self, number: int) -> bool:
        """Whether a load is still there."""
        return number in self._holds

    def version(self, number: int) -> str | None:
        """What tells the weights of a load from others; None where it is none, or gone."""
        return self._versions.get(number)

    def hold(self, number: int) -> None:
        """Keep a load for a request, until its `release`."""
        self._holds[number] += 1

    def release(self, number: int) -> int | None:
        """Keep a load no longer for a request that has ended; the load, where nothing else holds it."""
        self._holds[number] -= 1
        if self._holds[number]:
            return None
        del self._holds[number], self._versions[number]
        return number
