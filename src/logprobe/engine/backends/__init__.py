"""Execution backends of the native engine: a thread of this process, or separate processes."""
