"""Metadata of a record: the distribution, the number of entries, the model."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from logprobe.errors import InputError, ParameterError

Stage = Literal["raw", "processed"]


class LogprobsInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Metadata needed to interpret the values in a record; None means unknown or not used."""

    stages: tuple[Stage, ...] = ("raw",)  # raw: the model's distribution; processed: the one sampled from
    num_logprobs_asked: int | None = None  # k requested; -1 means the full vocabulary
    num_logprobs: int | None = None  # k returned
    # This and the next six fields define `processed`; with raw values, only files of rollouts have them.
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    # Random number generator that tokens were sampled with; "philox4x64-10" is NumPy's Philox. None: greedy
    # decoding, or the tokens were given.
    generator: str | None = None
    logits_dtype: str | None = None  # such as "float32"
    engine: str | None = None
    model: str | None = None
    logprobe_version: str | None = None  # versions of the package and of its native library
    weights: str | None = None  # weight layout, such as "checkpoint"
    # How matrix products are computed. "fma": float32 fused multiply-adds in the native library, with
    # bit-identical results in all of its variants. "bf16x3": of three bfloat16 numbers for each activation.
    # "bf16": of activations rounded to bfloat16. "torch": torch's matmul. None: another engine.
    arithmetic: str | None = None
    weight_version: str | None = None  # a name chosen by the caller, or a digest or commit with its kind
    quantization: str | None = None  # of the checkpoint, such as "Q4_1"; None if it is not quantized
    lora: str | None = None  # name of the LoRA adapter applied
    lora_version: str | None = None  # digest of the adapter's files
    layers: str | None = None  # decoder that ran the layers, such as "30 by the native decoder"
    probe_difference: float | None = None  # nats; largest difference in the verification at load
    # What the weights were verified against when they were loaded: "transformers 5.23.0", or "reference", the
    # decoder in NumPy float64 (`engine.forward.reference`). None: another engine.
    verified_against: str | None = None
    floor: float | None = None  # number written for -inf in JSON; None in the binary form, which keeps -inf
    unit: Literal["nats"] = "nats"

    def to_json(self) -> str:
        """Encode the fields that differ from their defaults as a JSON object."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> LogprobsInfo:
        """Decode the output of `to_json`.

        Raises:
            InputError: `text` is not the output of `to_json`; the message names the invalid field.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.ValidationError as error:
            # An unknown field may define the distribution, so it is not ignored.
            raise InputError(f"LogprobsInfo: {error}{_written_by(text)}") from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InputError(f"LogprobsInfo: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as a dict of plain values."""
        values: dict[str, Any] = msgspec.to_builtins(msgspec.structs.asdict(self))
        return values


def check_same_info(parameter: str, name: str, info: LogprobsInfo | None, file: LogprobsInfo | None) -> None:
    """Check that `name` has the `info` of the file that it is written to, which is that of the first record.

    Raises:
        ParameterError: it differs; the message names the fields.
    """
    if info == file:
        return
    old, new = ({} if known is None else known.to_dict() for known in (file, info))
    fields = [field for field in LogprobsInfo.__struct_fields__ if old.get(field) != new.get(field)]
    differences = ", ".join(f"{field} {new.get(field)!r:.60}, not {old.get(field)!r:.60}" for field in fields)
    raise ParameterError(
        parameter, f"{name} differs from the file in info ({differences}); write one file per info"
    )


class _Writer(msgspec.Struct, frozen=True):
    logprobe_version: str = ""


def _written_by(text: str | bytes) -> str:
    """Return the end of an error message that names the version of logprobe that wrote an info."""
    try:
        version = msgspec.json.decode(text, type=_Writer).logprobe_version
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    return f"; logprobe {version[:40]} wrote it: upgrade to that version" if version else ""
