"""How a `NextTokenLM` ends, by `cleanup` or when it is dropped."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from logprobe.engine.bridge import LoopThread
    from logprobe.next_token.desk import Desk
    from logprobe.next_token.seam import RowEngine


def shut_down(desk: Desk, bridge: LoopThread, engine: RowEngine | None) -> None:
    """End every ask, the engine if it is ours, and the bridge."""
    desk.close()
    if engine is not None:
        engine.close()
    bridge.close()


def shut_down_elsewhere(desk: Desk, bridge: LoopThread, engine: RowEngine | None) -> None:
    """`shut_down` on a thread of its own, since the object may be dropped on any."""
    threading.Thread(target=shut_down, args=(desk, bridge, engine), name="logprobe-cleanup").start()
