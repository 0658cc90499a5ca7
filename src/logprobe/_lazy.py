"""Lazy attributes of packages: the module that defines a name is imported when the name is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module-level `__getattr__` (PEP 562) that imports a name's module on first use.

    Args:
        package: the package's name.
        homes: maps each public name to the module that defines it; a module with a leading dot is relative
            to `package`.
    """

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name], package), name)

    return load
