"""The command line `logprobe`: one file a noun; results on standard output, talk on standard error."""

from logprobe.cli.app import command, main

__all__ = ["command", "main"]
