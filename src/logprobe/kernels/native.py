"""The native library of kernels: the variant for this processor, its kernels' arguments, and their calls.

`native/` holds its source (docs/kernels.md). Each kernel is a C function `void(void*)` whose argument is one
of the structures below, declared as in `native/kernels.hpp`.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
from pathlib import Path
from typing import Any, ClassVar, Final

from logprobe.errors import ParameterError

FOLDER: Final = Path(__file__).parent / "_native"
VARIANTS: Final = ("v4", "v3", "neon")  # the best one that this processor can run is chosen
VARIABLE: Final = "LOGPROBE_KERNELS"
MAX_GROUPS: Final = 11

_INT, _POINTER, _DOUBLE = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double


class Work(ctypes.Structure):
    """How the items of a kernel are taken; the beginning of all arguments."""

    _fields_: ClassVar[Any] = (("next", _INT), ("taken", _INT * MAX_GROUPS), ("num_items", _INT))


def _fields(names: str, kind: Any = _INT) -> tuple[tuple[str, Any], ...]:
    return tuple((name, kind) for name in names.split())


class ProductArgs(Work):
    """Of `logprobe_products`."""

    _fields_ = (
        *_fields("x weights bias value_weights value_bias residual out", _POINTER),
        *_fields("x_stride residual_stride out_stride num_rows width num_inputs num_outputs"),
        *_fields("panel_bytes item_panels block_rows form activation"),
        ("factor", _DOUBLE),
    )


class NormArgs(Work):
    """Of `logprobe_norm`."""

    _fields_ = (
        *_fields("x weight bias residual out", _POINTER),
        *_fields("x_stride out_stride width parts num_rows block_rows is_centred"),
        ("epsilon", _DOUBLE),
    )


class RotaryArgs(Work):
    """Of `logprobe_rotary`."""

    _fields_ = (
        *_fields("query key value cosines sines query_scales out key_pool value_pool slots", _POINTER),
        *_fields("query_row query_head key_row key_head value_row value_head"),
        *_fields("num_rows heads kv_heads key_dim value_dim rotary_dim is_paired block_rows"),
    )


class GateArgs(Work):
    """Of `logprobe_gate`."""

    _fields_ = (
        *_fields("gates values out", _POINTER),
        *_fields("gates_stride values_stride out_stride width piece activation"),
    )


class StoreArgs(Work):
    """Of `logprobe_store`."""

    _fields_ = (
        *_fields("keys values key_pool value_pool slots", _POINTER),
        *_fields("key_width value_width num_rows block_rows"),
    )


class AttentionArgs(Work):
    """What `logprobe_attend_rows` and `logprobe_attend_chunk` share."""

    _fields_ = (
        *_fields("query keys values out sinks", _POINTER),
        *_fields("query_row query_head key_row key_head value_row value_head out_row out_head"),
        *_fields("heads kv_heads key_dim value_dim window"),
        *_fields("scale softcap", _DOUBLE),
    )


class AttendRowsArgs(AttentionArgs):
    """Of `logprobe_attend_rows`."""

    _fields_ = (*_fields("rows begins lengths slots", _POINTER), *_fields("parts"))


class AttendChunkArgs(AttentionArgs):
    """Of `logprobe_attend_chunk`."""

    _fields_ = (*_fields("slots", _POINTER), *_fields("num_rows context num_blocks item_lanes"))


class ExtractArgs(Work):
    """Of `logprobe_extract`."""

    _fields_ = (
        *_fields("logits", _POINTER),
        *_fields("row_bytes vocab_size kind"),
        *_fields("chosen num_logprobs token_ids logprobs", _POINTER),
        *_fields("width"),
        *_fields("ranks lse is_valid entropy varentropy margin", _POINTER),
        *_fields("given_offsets given_ids given_logprobs given_ranks", _POINTER),
    )


class DrawArgs(Work):
    """Of `logprobe_draw`."""

    _fields_ = (
        *_fields("logits", _POINTER),
        *_fields("row_stride vocab_size"),
        *_fields("temperatures top_ks top_ps min_ps uniforms", _POINTER),
        *_fields("token_ids cut_logits cut_ids is_valid", _POINTER),
    )


class PeakArgs(Work):
    """Of `logprobe_peak`, which benchmarks run."""

    _fields_ = (*_fields("factors", _POINTER), *_fields("num_turns"))


class StageRecord(ctypes.Structure):
    """One kernel of a series."""

    _fields_ = (("kernel", _POINTER), ("work", _POINTER), ("inside", _INT))


class Library:
    """One variant, loaded."""

    def __init__(self, variant: str) -> None:
        self.variant, self.path = variant, self.path_of(variant)
        self._library = ctypes.CDLL(str(self.path))
        self._run, self._run_series = self._library.logprobe_run, self._library.logprobe_run_series
        self._run.argtypes = self._run_series.argtypes = (_POINTER, _POINTER, _INT)
        self._run_series.argtypes = (_POINTER, _INT, _INT)

    @staticmethod
    def path_of(variant: str) -> Path:
        """Where a variant lies, if it was built."""
        return FOLDER / f"kernels_{variant}.so"

    def can_run(self) -> bool:
        """Whether this processor has the variant's instructions."""
        return bool(self._library.logprobe_can_run())

    @functools.cache  # noqa: B019 - one library a process
    def address(self, kernel: str) -> int:
        """The address of a kernel's function."""
        address = ctypes.cast(getattr(self._library, f"logprobe_{kernel}"), _POINTER).value
        assert address is not None
        return address

    @property
    def num_lanes(self) -> int:
        """Float32 numbers of one register."""
        return int(self._library.logprobe_peak_lanes())

    @functools.cached_property
    def digest(self) -> str:
        """Tells builds apart."""
        return hashlib.sha256(self.path.read_bytes()).hexdigest()[:16]

    @functools.cached_property
    def compiler(self) -> str:
        """What compiled it."""
        self._library.logprobe_compiler.restype = ctypes.c_char_p
        name: bytes = self._library.logprobe_compiler()
        return name.decode()

    def run(self, kernel: str, work: Work, num_threads: int) -> None:
        """Run a kernel until each of its items is done; releases the GIL.

        Raises:
            MemoryError: there is too little for its scratch.
        """
        if self._run(self.address(kernel), ctypes.addressof(work), num_threads):
            raise MemoryError(f"{kernel} needs more memory than there is")

    def run_series(self, stages: ctypes.Array[StageRecord], num_threads: int) -> None:
        """Run stages, each after the one before it is done; releases the GIL.

        Raises:
            MemoryError: there is too little for their scratch.
        """
        if self._run_series(ctypes.addressof(stages), len(stages), num_threads):
            raise MemoryError("a step needs more memory than there is")


@functools.cache
def library() -> Library:
    """Load the variant that `LOGPROBE_KERNELS` names, or else the best one that runs on this processor.

    Raises:
        ParameterError: the named variant is not built, or does not run here.
        OSError: none is named, and none runs here.
    """
    forced = os.environ.get(VARIABLE)
    problems: list[str] = []
    for variant in [forced] if forced else VARIANTS:
        found = _load(variant)
        if isinstance(found, Library):
            return found
        problems.append(f"{variant} {found}")
    if forced:
        built = [variant for variant in VARIANTS if Library.path_of(variant).exists()]
        remedy = f"unset it, or use one that is built and runs here (built: {', '.join(built) or 'none'})"
        raise ParameterError(VARIABLE, f"{problems[0]}; {remedy}")
    raise OSError(f"no variant runs here ({', '.join(problems)})")


def _load(variant: str) -> Library | str:
    """Return a variant, or why it does not run here."""
    if variant not in VARIANTS or not Library.path_of(variant).exists():
        return "is not built"
    try:
        found = Library(variant)
    except OSError as error:
        return f"cannot be loaded: {error}"
    return found if found.can_run() else "needs instructions that this processor lacks"
