"""Import pyarrow (extra `arrow`) for the modules that read or write Arrow and Parquet."""

from __future__ import annotations

from logprobe.errors import MissingPackageError

try:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq
except ImportError as error:
    raise MissingPackageError("Arrow and Parquet need pyarrow; pip install 'logprobe[arrow]'") from error

__all__ = ["pa", "pc", "pq"]
