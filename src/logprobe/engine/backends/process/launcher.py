"""`Launcher`: starts an engine process and connects to it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import zmq

from logprobe.engine.backends.process.orders import Report
from logprobe.transport.channel import Channel
from logprobe.transport.codec import Codec
from logprobe.transport.shm import PageReader, unnamed_file

if TYPE_CHECKING:
    from contextlib import ExitStack

THREAD_NUMBERS: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
MAIN: Final = "from logprobe.engine.backends.process.child import main; main()"
STDERR: Final = 2


class Launched(NamedTuple):
    """An engine process and the connection to it."""

    process: subprocess.Popen[bytes]
    channel: Channel[list[Report]]
    folder: Path  # folder of the sockets; not needed once both sockets are connected


class Launcher:
    """Starts engine processes, each with `threads` compute threads."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def launch(self, resources: ExitStack, *, is_restart: bool) -> Launched:
        """Start a process; closing `resources` releases everything except the process itself.

        Raises:
            OSError: the folder, a file descriptor, shared memory or the process cannot be created.
        """
        folder = Path(tempfile.mkdtemp(prefix="logprobe-"))
        resources.callback(shutil.rmtree, folder, ignore_errors=True)
        rows = unnamed_file()
        resources.callback(os.close, rows)
        own, others = socket.socketpair()
        resources.callback(own.close)
        resources.enter_context(others)
        codec: Codec[list[Report]] = Codec(list[Report], reader=PageReader(rows))
        channel = Channel.bind(self._context, folder, codec, own)
        resources.callback(channel.close)
        process = self._spawn(folder, others, rows, is_restart=is_restart)
        others.close()
        return Launched(process, channel, folder)

    def close(self) -> None:
        """Wait until all channels are closed, and release ZeroMQ's threads."""
        self._context.term()

    def _spawn(
        self, folder: Path, lifeline: socket.socket, rows: int, *, is_restart: bool
    ) -> subprocess.Popen[bytes]:
        arguments = [str(folder), str(lifeline.fileno()), str(rows)]
        path = os.pathsep.join(filter(None, sys.path))  # the process can import what this one can
        return subprocess.Popen(  # noqa: S603 - this interpreter
            [sys.executable, "-P", "-c", MAIN, *arguments],
            pass_fds=(lifeline.fileno(), rows),
            # Set MKL's number too, which torch prefers; more threads than cores would make replicas spin.
            env=os.environ
            | {"PYTHONPATH": path}
            | dict.fromkeys(THREAD_NUMBERS, str(self._threads))
            # A restart must load the revision of the first start, which the hub may have replaced since.
            | ({"HF_HUB_OFFLINE": "1"} if is_restart else {}),
            stdin=subprocess.DEVNULL,
            stdout=STDERR,  # standard output belongs to the front
        )
