"""Log-probability records: per-step arrays, per-request containers, and byte, Arrow and JSON formats."""

from __future__ import annotations

from typing import TYPE_CHECKING

from logprobe._lazy import lazy_names
from logprobe.records.cut import cut_to_mass
from logprobe.records.flat import FlatLogprobs
from logprobe.records.forms.json import ChatEncoder
from logprobe.records.info import LogprobsInfo
from logprobe.records.padded import PaddedLogprobs, to_padded
from logprobe.records.rows import DeviceRows, GivenLists, GivenLogprobs, HostRows
from logprobe.records.values import Logprob, LogprobsOnePosition, TokenTable

if TYPE_CHECKING:
    from logprobe.records.parquet import (
        ParquetWriter,
        from_arrow,
        iter_parquet,
        read_parquet,
        to_arrow,
        write_parquet,
    )
    from logprobe.records.replies import ReplyRows, read_reply

# Names imported on first use, because they need pyarrow -> their module.
_HOMES = {
    "ParquetWriter": "logprobe.records.parquet",
    "ReplyRows": "logprobe.records.replies",
    "from_arrow": "logprobe.records.parquet",
    "iter_parquet": "logprobe.records.parquet",
    "read_parquet": "logprobe.records.parquet",
    "read_reply": "logprobe.records.replies",
    "to_arrow": "logprobe.records.parquet",
    "write_parquet": "logprobe.records.parquet",
}

__all__ = [
    "ChatEncoder",
    "DeviceRows",
    "FlatLogprobs",
    "GivenLists",
    "GivenLogprobs",
    "HostRows",
    "Logprob",
    "LogprobsInfo",
    "LogprobsOnePosition",
    "PaddedLogprobs",
    "ParquetWriter",
    "ReplyRows",
    "TokenTable",
    "cut_to_mass",
    "from_arrow",
    "iter_parquet",
    "read_parquet",
    "read_reply",
    "to_arrow",
    "to_padded",
    "write_parquet",
]


__getattr__ = lazy_names(__name__, _HOMES)
