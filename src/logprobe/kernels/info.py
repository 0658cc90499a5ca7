"""Which kernel serves which device."""

from __future__ import annotations

from importlib.util import find_spec


def kernel_of(device_type: str) -> str:
    """'native', 'triton' or 'torch': what extracts on a device of that type."""
    if device_type == "cpu":
        return "native"
    return "triton" if device_type == "cuda" and find_spec("triton") is not None else "torch"


def kernel_info() -> dict[str, str]:
    """Device type to the kernel that serves it."""
    return {device_type: kernel_of(device_type) for device_type in ("cpu", "cuda")}
