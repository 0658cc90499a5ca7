"""Where an engine runs: on a thread of this process, or in processes of its own."""
