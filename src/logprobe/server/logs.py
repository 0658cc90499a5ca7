"""Log formats of the server, text or JSON.

Log lines contain no client input except the `X-Request-Id` and, with `enable_log_requests`, request bodies.
Control characters are escaped, so that a client cannot inject lines.
"""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from logprobe.server.http.gate import access_logger, request_id
from logprobe.server.http.replies import one_line

if TYPE_CHECKING:
    from logprobe.server.settings import ServerSettings


class TextLines(logging.Formatter):
    """Formats records as `time LEVEL logger: message [request id]`; traceback lines begin with `  | `."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as one line, followed by the lines of the traceback, if any."""
        head, name = f"{self.formatTime(record)} {record.levelname} {record.name}", request_id.get()
        lines = [f"{head}: {_printable(record.getMessage())}{'' if name is None else f' [{name}]'}"]
        if record.exc_info:
            lines += [f"  | {_printable(line)}" for line in self.formatException(record.exc_info).split("\n")]
        return "\n".join(lines)


class JsonLines(logging.Formatter):
    """Formats log records as JSON lines.

    Every line has the keys time (UTC), level, logger and message. A line also has the request_id, the
    record's `facts` (one key each) and the traceback, if they exist.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as one line of JSON."""
        facts: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (name := request_id.get()) is not None:
            facts["request_id"] = name
        facts |= getattr(record, "facts", {})
        if record.exc_info:
            facts["traceback"] = self.formatException(record.exc_info)
        return one_line(msgspec.json.encode(facts)).decode()


def configure(settings: ServerSettings) -> None:
    """Log to standard error: this library's records from `log_level` on, other libraries' from WARNING on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if settings.log_format == "json" else TextLines())
    logging.basicConfig(handlers=[handler])
    logging.getLogger("logprobe").setLevel(settings.log_level.upper())
    access_logger.disabled = not settings.access_log


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(part if part.isprintable() else repr(part)[1:-1] for part in text)
