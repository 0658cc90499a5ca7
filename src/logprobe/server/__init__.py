"""HTTP: OpenAI's routes with exact log-probabilities, and binary and scoring routes of our own."""

from logprobe.server.settings import ServerSettings

__all__ = ["ServerSettings"]
