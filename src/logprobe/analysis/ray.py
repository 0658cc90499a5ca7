"""Backward-compatible import path of `logprobe.integrations.ray.RayPool`."""

from __future__ import annotations

from logprobe._lazy import lazy_names

__getattr__ = lazy_names(__name__, {"RayPool": "logprobe.integrations.ray"})
