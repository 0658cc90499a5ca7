"""Make the files that llama.cpp runs: the default model's published weights, every matrix in one form.

`quantise.py FILE.q8_0.gguf` or `FILE.f32.gguf`: the form is the one that the file is named by.
"""

import sys
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize

from logprobe.models import DEFAULT_MODEL, resolve
from logprobe.models.cache import GGUF

# Form by its name in a file's → the matrices' type, and the number of a file of them.
FORMS = {"q8_0": (GGMLQuantizationType.Q8_0, 7), "f32": (GGMLQuantizationType.F32, 0)}
# Written by the writer itself, or no longer true.
REPLACED = ("general.architecture", "general.file_type", "general.quantization_version")


def copy_metadata(reader: GGUFReader, writer: GGUFWriter, file_type: int) -> None:
    """Carry over every field of the source but those that describe its own quantisation."""
    for name, entry in reader.fields.items():
        if not name.startswith("GGUF.") and name not in REPLACED:
            kind = entry.types[0]
            item_kind = entry.types[-1] if kind == GGUFValueType.ARRAY else None
            writer.add_key_value(name, entry.contents(), kind, item_kind)
    writer.add_file_type(file_type)


def add_tensor(tensor: Any, writer: GGUFWriter, form: GGMLQuantizationType) -> None:
    """Write a matrix in a form and a vector as float32."""
    values = dequantize(tensor.data, tensor.tensor_type)
    if values.ndim == 1 or form == GGMLQuantizationType.F32:
        writer.add_tensor(tensor.name, values)
    else:
        writer.add_tensor(tensor.name, quantize(values, form), raw_dtype=form)


def write_form(source: Path, target: Path) -> None:
    """Write a GGUF file in the form of the target's name; the target appears only once it is whole."""
    form, file_type = FORMS[target.name.split(".")[-2]]
    reader = GGUFReader(source)
    partial = target.with_suffix(".partial")
    writer = GGUFWriter(partial, str(reader.fields["general.architecture"].contents()))
    copy_metadata(reader, writer, file_type)
    for tensor in reader.tensors:
        add_tensor(tensor, writer, form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(target)


def main() -> None:
    """Fetch the published file and write another to the path given, unless it is there."""
    target = Path(sys.argv[1])
    if not target.exists():
        write_form(resolve(DEFAULT_MODEL).folder / GGUF, target)


if __name__ == "__main__":
    main()
