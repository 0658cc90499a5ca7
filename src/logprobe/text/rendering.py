"""Render possibly expensive chat templates, in a subprocess with limits on time and memory.

The subprocess runs this file: it calls `templates.render_chat` for one request at a time, and exits when its
parent does. Requests and replies are length-prefixed JSON over stdin and stdout.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
import time
from collections import Counter
from threading import Lock
from typing import IO, TYPE_CHECKING, Any, Final

import msgspec

from logprobe.errors import ParameterError, shortened

if TYPE_CHECKING:
    from collections.abc import Mapping

LIMIT_S: Final = 5.0  # time limit for one rendering
START_LIMIT_S: Final = 60.0  # time limit for starting the subprocess
MAX_TEXT_BYTES: Final = 1 << 26  # size limit of a rendered text
MAX_MORE_BYTES: Final = 1 << 29  # address space that rendering may add (RLIMIT_AS)
MAX_TEMPLATES: Final = 64  # templates whose timeouts are counted
MAX_TIMEOUTS: Final = 3  # after this many, a template is rejected without rendering
MAX_REASON_CHARS: Final = 300
_LENGTH_BYTES: Final = 8


class _Reply(msgspec.Struct):
    text: str = ""
    error: str | None = None


class TemplateError(Exception):
    """The template raised an error, or its process died; the message is the template's, if there is one."""


class TemplateProcess:
    """A rendering subprocess shared by all threads; started on first use, and again after it ended."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._timeouts: Counter[str] = Counter()
        self._owner = os.getpid()

    def render(self, template: str, arguments: Mapping[str, Any]) -> str:
        """Return the result of `templates.render_chat(template, **arguments)`.

        Raises:
            ParameterError: the template exceeded the time limit.
            TemplateError: the template raised an error, or the subprocess died, for example out of memory.
        """
        with self._lock:
            if self._timeouts[template] >= MAX_TIMEOUTS:
                raise _too_slow()
            request = json.dumps([template, arguments], default=str).encode()
            try:
                reply = self._reply_to(request)
            except TimeoutError:
                if len(self._timeouts) >= MAX_TEMPLATES:
                    self._timeouts.clear()  # templates may come from clients
                self._timeouts[template] += 1
                self.close()
                raise _too_slow() from None
            except (OSError, EOFError, msgspec.MsgspecError) as error:  # died, maybe out of memory
                self.close()
                raise TemplateError("its process exited, possibly out of memory") from error
        if reply.error is not None:
            raise TemplateError(reply.error)
        return reply.text

    def close(self) -> None:
        """Kill the subprocess."""
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        with process:
            pass

    def _reply_to(self, request: bytes) -> _Reply:
        if self._owner != os.getpid():  # after a fork the pipes belong to the parent's subprocess
            self._process, self._owner = None, os.getpid()
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._start()
        assert self._process is not None
        until = time.monotonic() + LIMIT_S
        assert self._process.stdin is not None
        # No deadlock: the subprocess reads the whole request before it writes.
        _write(self._process.stdin, request)
        return msgspec.json.decode(self._read(until), type=_Reply)

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "logprobe.text.rendering"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self._read(time.monotonic() + START_LIMIT_S)

    def _read(self, until: float) -> bytes:
        length = int.from_bytes(self._read_bytes(_LENGTH_BYTES, until), "little")
        if length > MAX_TEXT_BYTES:
            raise EOFError
        return self._read_bytes(length, until)

    def _read_bytes(self, count: int, until: float) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor, data = self._process.stdout.fileno(), bytearray()
        while len(data) < count:
            readable, _, _ = select.select([descriptor], [], [], max(until - time.monotonic(), 0))
            if not readable:
                raise TimeoutError
            part = os.read(descriptor, min(count - len(data), 1 << 20))
            if not part:
                raise EOFError
            data += part
        return bytes(data)


PROCESS: Final = TemplateProcess()
atexit.register(PROCESS.close)


def _too_slow() -> ParameterError:
    return ParameterError(
        "messages", f"the model's chat template takes longer than {LIMIT_S:g} s; use another one"
    )


def _write(stream: IO[bytes], data: bytes) -> None:
    stream.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
    stream.flush()


def _main() -> None:
    """Render requests until the parent closes the pipe."""
    import resource
    from pathlib import Path

    from logprobe.text.templates import render_chat

    if sys.platform == "linux":  # only Linux has /proc/self/statm
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + MAX_MORE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keep library output off the reply pipe
    _write(out, b"{}")
    while head := sys.stdin.buffer.read(_LENGTH_BYTES):
        data = sys.stdin.buffer.read(int.from_bytes(head, "little"))
        try:
            template, arguments = json.loads(data)
            reply = msgspec.json.encode(_Reply(text=render_chat(template, **arguments)))
        except Exception as error:  # noqa: BLE001 - a template may raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            reply = msgspec.json.encode(_Reply(error=shortened(reason, MAX_REASON_CHARS)))
        _write(out, reply)


if __name__ == "__main__":
    _main()
