"""HTTP server: OpenAI-compatible routes with exact log-probabilities, further scoring and binary routes."""

from logprobe.server.settings import ServerSettings

__all__ = ["ServerSettings"]
