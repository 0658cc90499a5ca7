"""`RayPool` of `logprobe.integrations.ray`, by the path that it had."""

from __future__ import annotations

from logprobe._lazy import lazy_names

__getattr__ = lazy_names(__name__, {"RayPool": "logprobe.integrations.ray"})
