"""HTTP server: OpenAI-compatible routes with exact log-probabilities, and routes for scoring."""

from logprobe.server.settings import ServerSettings

__all__ = ["ServerSettings"]
