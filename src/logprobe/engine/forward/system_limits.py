"""Memory limits of the machine or container: free memory, default KV cache size, and a size check."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from logprobe.errors import ModelError
from logprobe.models.cache import in_words

if TYPE_CHECKING:
    from collections.abc import Iterator

DEFAULT_SHARE: Final = 4  # all KV caches together get a quarter of the free memory
MAX_DEFAULT_BYTES: Final = 1 << 30
MIN_DEFAULT_BYTES: Final = 1 << 26
UNKNOWN_FREE_BYTES: Final = 1 << 31  # assumed where the system does not report free memory
BASE_BYTES: Final = 500_000_000  # libraries, scratch of a step, and the smallest KV cache
_MEMINFO: Final = Path("/proc/meminfo")
_MAPS: Final = Path("/proc/self/maps")
_OWN_CGROUP: Final = Path("/proc/self/cgroup")
_CGROUPS: Final = Path("/sys/fs/cgroup")


def default_kv_bytes(num_pools: int = 1) -> int:
    """Return the default size in bytes of each of `num_pools` KV caches; call it after mapping weights."""
    share = free_bytes() // (DEFAULT_SHARE * num_pools)
    return min(MAX_DEFAULT_BYTES, max(share, MIN_DEFAULT_BYTES))


def free_bytes() -> int:
    """Return the number of bytes that this process can still allocate within its container's limits.

    The system counts cached file pages as available. Files that this process maps are subtracted, because
    they hold the weights, which every step reads.
    """
    free = _meminfo().get("MemAvailable")
    if free is None:
        return UNKNOWN_FREE_BYTES
    for cgroup, limit in _limited_cgroups():
        free = min(free, limit - _held_bytes(cgroup))
    return max(free - _mapped_bytes(), 0)


def check_memory(name: str, num_bytes: int) -> None:
    """Check that weights of `num_bytes` bytes fit into the memory of this machine or container.

    Raises:
        ModelError: the total memory is too small.
    """
    total = _meminfo().get("MemTotal")
    if total is None:
        return
    limit = min((limit for _, limit in _limited_cgroups()), default=total)
    where = "this container" if limit < total else "this machine"
    needed, total = num_bytes + BASE_BYTES, min(total, limit)
    if needed > total:
        raise ModelError(
            f"{name}: needs {in_words(needed)} of memory for its weights and a KV cache, but {where} has "
            f"{in_words(total)}; use a smaller or more strongly quantized model, or more memory"
        )


def _meminfo() -> dict[str, int]:
    """Return the entries of /proc/meminfo in bytes; empty if the file does not exist."""
    try:
        lines = [line.split() for line in _MEMINFO.read_text(encoding="ascii").splitlines()]
        return {name.rstrip(":"): int(size) << 10 for name, size, *_ in lines}
    except (OSError, ValueError):
        return {}


def _limited_cgroups() -> Iterator[tuple[Path, int]]:
    """Yield the folder and the memory limit in bytes of each cgroup (version 2) that limits this process."""
    try:
        lines = _OWN_CGROUP.read_text().splitlines()
    except OSError:
        return
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    # A container may see its own cgroup as the root, whatever its name outside.
    for name in (PurePosixPath(own), *PurePosixPath(own).parents):
        with suppress(OSError, ValueError):  # no such cgroup, or no limit ("max")
            yield _CGROUPS / name, int((_CGROUPS / name / "memory.max").read_text())


def _held_bytes(cgroup: Path) -> int:
    """Return the number of bytes that a cgroup uses, without cached file pages."""
    try:
        held = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return held - int(stat["active_file"]) - int(stat["inactive_file"])
    except (OSError, ValueError, KeyError):
        return 0


def _mapped_bytes() -> int:
    """Return the total size in bytes of read-only file mappings; a part mapped twice counts once."""
    try:
        lines = [line.split(maxsplit=5) for line in _MAPS.read_text().splitlines()]
    except OSError:
        return 0
    sizes: dict[tuple[str, ...], int] = {}
    for addresses, access, *place, _ in (line for line in lines if len(line) > 5):
        if access == "r--s":
            begin, end = (int(part, 16) for part in addresses.split("-"))
            sizes[*place] = max(end - begin, sizes.get((*place,), 0))
    return sum(sizes.values())
