"""What a record is: which distribution, how many entries, from which model; it travels with all of them.

Before it: the request's parameters and the engine. After it: replies, HTTP objects, file metadata.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from logprobe.errors import InputError

Stage = Literal["raw", "processed"]


class LogprobsInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Everything needed to read a record's numbers without its program; None means not known or not used."""

    stages: tuple[Stage, ...] = ("raw",)  # raw: the model's own distribution; processed: the one drawn from
    num_logprobs_asked: int | None = None  # -1: the whole vocabulary
    num_logprobs: int | None = None  # k delivered
    temperature: float | None = None  # behind `processed`, as are the next six
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logits_dtype: str | None = None  # such as "float32"
    engine: str | None = None
    model: str | None = None
    logprobe_version: str | None = None  # of the package that computed them, and of its native library
    weights: str | None = None  # their layout, such as "published"
    # How products with weights are summed: "fma", float32 fused multiply-adds of the native library, with the
    # same bits in each of its variants; "torch", torch's own products. None for another engine.
    arithmetic: str | None = None
    weight_version: str | None = None  # which weights: a caller's name, or a digest or commit with its kind
    quantization: str | None = None  # of the checkpoint, such as "Q4_1"; None: its weights are not quantised
    lora: str | None = None  # the name of LoRA weights that the numbers are under
    lora_version: str | None = None  # which: a digest of their files
    layers: str | None = None  # how they run, such as "30 by the native decoder"
    probe_difference: float | None = None  # largest difference from transformers that the proof at load found
    floor: float | None = None  # JSON writes this for -inf; None: binary, -inf stays
    unit: Literal["nats"] = "nats"

    def to_json(self) -> str:
        """The fields that differ from their defaults, as one JSON object."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> LogprobsInfo:
        """Read `to_json`'s text.

        Raises:
            InputError: no such object; the message names the field.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InputError(f"LogprobsInfo: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values."""
        values: dict[str, Any] = msgspec.to_builtins(msgspec.structs.asdict(self))
        return values
