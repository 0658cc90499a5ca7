"""Command-line interface `logprobe`: results on standard output, progress and errors on standard error."""

from logprobe.cli.app import command

__all__ = ["command"]
