"""Make the 8-bit file that llama.cpp runs: the default model's published weights, every matrix as Q8_0."""

import sys
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize

from logprobe.models import DEFAULT_MODEL, resolve
from logprobe.models.cache import GGUF

Q8_0 = GGMLQuantizationType.Q8_0
FILE_TYPE_Q8_0 = 7
# Written by the writer itself, or no longer true.
REPLACED = ("general.architecture", "general.file_type", "general.quantization_version")


def copy_metadata(reader: GGUFReader, writer: GGUFWriter) -> None:
    """Carry over every field of the source but those that describe its own quantisation."""
    for name, entry in reader.fields.items():
        if not name.startswith("GGUF.") and name not in REPLACED:
            kind = entry.types[0]
            item_kind = entry.types[-1] if kind == GGUFValueType.ARRAY else None
            writer.add_key_value(name, entry.contents(), kind, item_kind)
    writer.add_file_type(FILE_TYPE_Q8_0)


def add_tensor(tensor: Any, writer: GGUFWriter) -> None:
    """Write a matrix as Q8_0 and a vector as float32."""
    values = dequantize(tensor.data, tensor.tensor_type)
    if values.ndim == 1:
        writer.add_tensor(tensor.name, values)
    else:
        writer.add_tensor(tensor.name, quantize(values, Q8_0), raw_dtype=Q8_0)


def write_q8_0(source: Path, target: Path) -> None:
    """Re-quantise a GGUF file; the target appears only once it is whole."""
    reader = GGUFReader(source)
    partial = target.with_suffix(".partial")
    writer = GGUFWriter(partial, str(reader.fields["general.architecture"].contents()))
    copy_metadata(reader, writer)
    for tensor in reader.tensors:
        add_tensor(tensor, writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(target)


def main() -> None:
    """Fetch the published file and write the 8-bit one to the path given, unless it is there."""
    target = Path(sys.argv[1])
    if not target.exists():
        write_q8_0(resolve(DEFAULT_MODEL).folder / GGUF, target)


if __name__ == "__main__":
    main()
