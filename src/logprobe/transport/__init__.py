"""From who makes rows to who reads them, at the reader's speed."""

from logprobe.transport.collector import StreamingLogprobsCollector

__all__ = ["StreamingLogprobsCollector"]
