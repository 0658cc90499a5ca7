"""The engine's side of `bench_transport.py`, in a process of its own: the same rows, sent in several ways.

A step is a list of deltas, one row each, as an engine publishes them; for the queue it is a list of the same
rows as dicts, which is how they are usually kept.
"""

import functools
from pathlib import Path
from typing import Any

import numpy as np

from logprobe.records.rows import HostRows
from logprobe.transport.messages import Delta


@functools.cache
def rows(num_rows: int, k: int) -> HostRows:
    """Rows with k alternatives each, whose numbers differ."""
    generator = np.random.default_rng(k)
    descending = np.sort(-generator.exponential(5, (num_rows, k + 1)).astype(np.float32))[:, ::-1]
    return HostRows(
        np.tile(np.arange(k + 1, dtype=np.int32), (num_rows, 1)),
        np.ascontiguousarray(descending),  # as a kernel writes them: a view would be copied in each message
        np.ones(num_rows, np.int32),
    )


@functools.cache
def step(num_rows: int, k: int) -> list[Delta]:
    """What one step says of so many requests."""
    whole = rows(num_rows, k)
    return [
        Delta(request_id=f"request-{row}", index=0, token_ids=[7], raw=whole.rows(row, row + 1))
        for row in range(num_rows)
    ]


def as_dicts(whole: HostRows) -> list[dict[int, tuple[float, int | None]]]:
    """The same rows as a list of dicts: token id → log-probability and rank."""
    made = []
    for ids, logprobs in zip(whole.token_ids.tolist(), whole.logprobs.tolist(), strict=True):
        ranks = (1, *range(1, len(ids)))
        entries = zip(ids, logprobs, ranks, strict=True)
        made.append({token_id: (logprob, rank) for token_id, logprob, rank in entries})
    return made


def send_by_queue(queue: Any, orders: Any) -> None:
    """Answer each order (rows a step, k, steps) by that many steps; None ends it."""
    while (order := orders.get()) is not None:
        num_rows, k, num_steps = order
        whole = rows(num_rows, k)
        for _ in range(num_steps):
            # Made anew for each step, as an engine has to; the queue pickles them.
            queue.put(as_dicts(whole))


def send_by_channel(folder: str, lifeline: Any, file: Any, orders: Any) -> None:
    """The same over our channel; an order says also from how many bytes rows lie in shared memory."""
    import zmq

    from logprobe.transport import codec as codecs
    from logprobe.transport.channel import Channel
    from logprobe.transport.codec import Codec
    from logprobe.transport.shm import PageWriter

    context: zmq.Context[Any] = zmq.Context()
    codec: Codec[str] = Codec(str, writer=PageWriter(file.detach()))  # nothing comes back by this way
    link = Channel.connect(context, Path(folder), codec, lifeline)
    link.wait_for_peer()
    while (order := orders.get()) is not None:
        num_rows, k, num_steps, shared_bytes = order
        codecs.SHARED_BYTES = shared_bytes
        events = step(num_rows, k)
        for _ in range(num_steps):
            link.send(events)
    link.close()
    context.term()
