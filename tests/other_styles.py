"""Logits processors written for other engines' interfaces, without knowledge of this library."""

# ruff: noqa: ARG002 - an interface's arguments, used or not
from __future__ import annotations

import threading
from typing import Any

import torch


class Capture:
    """Keep the rows of the latest step."""

    def __init__(self, vllm_config: Any = None, device: Any = None, is_pin_memory: bool = False) -> None:
        self.made_with = (vllm_config, device, is_pin_memory)
        self.steps: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: Any) -> None:
        pass

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        rows = torch.log_softmax(logits, dim=-1).clone()
        with self._lock:
            self.steps.append(rows)
        return logits

    def get_all_logprobs(self) -> torch.Tensor | None:
        with self._lock:
            return self.steps[-1].clone() if self.steps else None


class Count:
    """Make requests with `count` continue in steps of one; the engine reports batch changes by index."""

    def __init__(self, _: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.requests: dict[int, tuple[int, list[int], int]] = {}
        self.num_updates = 0

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        args = sampling_params.extra_args
        if args and args.get("count", 0) < 0:
            raise ValueError(f"count must not be negative beside max_tokens {sampling_params.max_tokens}")

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        if batch_update is None:
            return
        self.num_updates += 1
        for index in batch_update.removed:
            self.requests.pop(index, None)
        for index, params, prompt, output in batch_update.added:
            self.requests.pop(index, None)
            args = params.extra_args
            if args and args.get("fail") == "update":
                raise RuntimeError("told to fail")
            if args and args.get("count") is not None:
                self.requests[index] = (args["count"], output, args.get("fail_at", -1))
            assert isinstance(prompt, list)
        for source, target, direction in batch_update.moved:
            moved, replaced = self.requests.pop(source, None), self.requests.pop(target, None)
            if moved is not None:
                self.requests[target] = moved
            if replaced is not None and direction.name == "SWAP":
                self.requests[source] = replaced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for index, (start, output, fail_at) in self.requests.items():
            if len(output) == fail_at:
                raise RuntimeError("told to fail")
            logits[index] = -torch.inf
            logits[index, start + len(output)] = 0.0
        return logits


class Slots:
    """Add to one token's logit for requests with `favour`; record the state of every slot."""

    def __init__(self, fd_config: Any) -> None:
        self.favoured: list[int | None] = []
        self.seen: list[tuple[list[str], list[int | None], int]] = []

    def update_state(self, share_inputs: dict[str, Any]) -> None:
        stop_flags = share_inputs["stop_flags"]
        args = [a for a, f in zip(share_inputs["logits_processors_args"], stop_flags, strict=True) if not f]
        self.favoured = [a.favour for a in args]
        self.seen.append((share_inputs["req_ids"], self.favoured, len(stop_flags)))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        assert len(logits) == len(self.favoured)
        for index, token_id in enumerate(self.favoured):
            logits[index] += 1000.0 if token_id is None else 0.0  # rows of other requests: ignored
            if token_id is not None:
                logits[index, token_id] = 1000.0
        return logits


class Looks:
    """Implement none of the known interfaces."""

    def update_state(self, batch: Any) -> None:
        pass

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits
