"""Where an engine runs: on a thread of this process, or behind a server."""
