"""`LoraTable`: maps LoRA names to loads and counts the references to each load.

A load is one reading of an adapter's files; loading a name again makes a new load with a new number. `Front`
guards the table with a lock; a core identifies loads by number only.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from logprobe.errors import require, shortened

if TYPE_CHECKING:
    from logprobe.transport.messages import LoadLora


class LoraTable:
    """Table of loads by name. A load is kept while a name refers to it or a request uses it."""

    def __init__(self) -> None:
        self._loads: dict[str, LoadLora] = {}
        self._holds: Counter[int] = Counter()  # references by load number: one for its name, one per request
        self._versions: dict[int, str] = {}  # by load number

    def paths(self) -> dict[str, str]:
        """Return the folders of the loads that a name refers to, by name."""
        return {name: load.path for name, load in self._loads.items()}

    def number(self, name: str) -> int:
        """Return the number of the load that a name refers to.

        Raises:
            ParameterError: no LoRA weights with this name are loaded.
        """
        known, asked = ", ".join(self._loads) or "none", shortened(name)
        require(name in self._loads, "lora", f"no LoRA weights {asked!r} are loaded; loaded: {known}")
        return self._loads[name].number

    def put(self, load: LoadLora, version: str) -> int | None:
        """Make `load.name` refer to `load`, whose weights have the given version.

        Returns:
            The number of the load that the name referred to before, if nothing uses that load any more.
        """
        before = self._loads.get(load.name)
        self._loads[load.name] = load
        self._versions[load.number] = version
        self._holds[load.number] += 1
        return None if before is None else self.release(before.number)

    def remove(self, name: str) -> int | None:
        """Unregister a name; return the number of its load if nothing uses the load any more.

        Raises:
            ParameterError: no LoRA weights with this name are loaded.
        """
        number = self.number(name)
        del self._loads[name]
        return self.release(number)

    def has(self, number: int) -> bool:
        """Return True if the load with this number is still kept."""
        return number in self._holds

    def version(self, number: int) -> str | None:
        """Return the version of a load's weights; None if there is no such load."""
        return self._versions.get(number)

    def hold(self, number: int) -> None:
        """Add a request's reference to a load; call `release` when the request ends."""
        self._holds[number] += 1

    def release(self, number: int) -> int | None:
        """Drop a reference to a load; return the load's number if that was the last reference."""
        self._holds[number] -= 1
        if self._holds[number]:
            return None
        del self._holds[number], self._versions[number]
        return number
