"""Hidden states and expert routes of outputs as Arrow tables, and as Parquet and safetensors files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from logprobe.analysis.io.files import writing
from logprobe.errors import ParameterError, require
from logprobe.records.forms.versions import parquet_metadata

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from logprobe._arrow import pa
    from logprobe.engine.request import RequestOutput

INFO_KEY: Final = b"logprobe.info"
LAYERS_KEY: Final = b"logprobe.layers"
COLUMNS: Final = {"hidden_states": "prompt_hidden_states", "routed_experts": "prompt_routed_experts"}
"""Maps a column (also the name of a completion's attribute) to the prompt's attribute of `RequestOutput`."""


class _Part:
    """Activations of the tokens of a prompt or a completion."""

    def __init__(self, output: RequestOutput, index: int | None) -> None:
        completion = None if index is None else output.outputs[index]
        self.completion = None if completion is None else completion.index
        self.token_ids = output.prompt_token_ids if completion is None else completion.token_ids
        self.columns: dict[str, Any] = {
            name: getattr(output, prompt) if completion is None else getattr(completion, name)
            for name, prompt in COLUMNS.items()
        }


def _parts(output: RequestOutput) -> Iterator[_Part]:
    for index in (None, *range(len(output.outputs))):
        part = _Part(output, index)
        if any(array is not None for array in part.columns.values()):
            yield part


def activations_to_arrow(outputs: RequestOutput | Sequence[RequestOutput]) -> pa.Table:
    """Convert the activations of outputs to a table with one row per token.

    Columns: `request_id`; `completion` (index, null for prompt tokens); `position` (in the prompt or
    completion); `token_id`; `hidden_states`, a fixed-size list of layers, each a fixed-size list of float32;
    `routed_experts`, a fixed-size list of layers with experts, each a fixed-size list of expert numbers. In a
    completion, row i has the id of token i and the activations that predicted it, those of the token before.
    The metadata has the `LogprobsInfo` (`logprobe.info`) and the requested layers (`logprobe.layers`) as
    JSON.

    Raises:
        ParameterError: an output has no activations, or outputs have different models, settings, layers or
            shapes.
    """
    from logprobe._arrow import pa

    many = _checked(outputs)
    parts = [(output.request_id, part) for output in many for part in _parts(output)]
    lengths = [len(part.token_ids) for _, part in parts]
    table: dict[str, Any] = {
        "request_id": pa.array(np.repeat([name for name, _ in parts], lengths)),
        "completion": pa.chunked_array(
            [pa.array([part.completion] * len(part.token_ids), pa.int32()) for _, part in parts]
        ),
        "position": pa.array(np.concatenate([np.arange(length) for length in lengths])),
        "token_id": pa.array(np.concatenate([np.asarray(part.token_ids, np.int32) for _, part in parts])),
    }
    for name in COLUMNS:
        arrays = [part.columns[name] for _, part in parts]
        if any(array is not None for array in arrays):
            table[name] = _nested(name, arrays, lengths)
    return pa.table(table).replace_schema_metadata(parquet_metadata("activations") | _metadata(many[0]))


def _nested(name: str, arrays: Sequence[Any], lengths: Sequence[int]) -> Any:
    """Return a column of nested fixed-size lists for (positions, layers, width) arrays."""
    from logprobe._arrow import pa

    shapes = {array.shape[1:] for array in arrays if array is not None}
    require(len(shapes) == 1, "outputs", f"have {name} of different shapes; convert each shape separately")
    [(layers, width)] = shapes
    require(
        not any(array is None for array in arrays), "outputs", f"only some have {name}; pass those separately"
    )
    assert sum(lengths) == sum(map(len, arrays)), "each token has its activations"
    flat = np.concatenate([array.reshape(-1) for array in arrays])
    inner = pa.FixedSizeListArray.from_arrays(pa.array(flat), width)
    return pa.FixedSizeListArray.from_arrays(inner, layers)


def _checked(outputs: RequestOutput | Sequence[RequestOutput]) -> list[RequestOutput]:
    from logprobe.engine.request import RequestOutput

    many = [outputs] if isinstance(outputs, RequestOutput) else [*outputs]
    remedy = "have no activations; set return_hidden_states or return_routed_experts"
    require(many and all(any(True for _ in _parts(output)) for output in many), "outputs", remedy)
    first = _metadata(many[0])
    is_one_kind = all(_metadata(output) == first for output in many)
    require(is_one_kind, "outputs", "have different models, settings or layers; save one file for each")
    return many


def _metadata(output: RequestOutput) -> dict[bytes, bytes]:
    metadata = {}
    info, params = output.info, output.params
    if info is not None:
        metadata[INFO_KEY] = info.to_json().encode()
    if params is not None and params.return_hidden_states is not None:
        metadata[LAYERS_KEY] = json.dumps(params.return_hidden_states).encode()
    return metadata


def save_activations(path: str | Path, outputs: RequestOutput | Sequence[RequestOutput]) -> None:
    """Write the activations of outputs to a file; the suffix selects the format.

    `.safetensors` has a (tokens, layers, width) tensor for each kind of activation of each prompt and
    completion, named `OUTPUT.prompt.KIND` or `OUTPUT.COMPLETION.KIND` with the indices of the output and the
    completion, such as `0.prompt.hidden_states` and `0.1.routed_experts`. `.parquet` has the table of
    `activations_to_arrow`.

    Raises:
        ParameterError: the suffix is neither `.safetensors` nor `.parquet`, an output has no activations, or
            outputs have different models, settings or layers.
        OutputError: the file cannot be written.
    """
    where = Path(path)
    if where.suffix == ".parquet":
        from logprobe._arrow import pq

        table = activations_to_arrow(outputs)
        with writing(where):
            pq.write_table(table, where, compression="zstd")
        return
    if where.suffix != ".safetensors":
        raise ParameterError("path", f"must end with .safetensors or .parquet, got {where.name!r}")
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    many = _checked(outputs)
    tensors = {
        f"{number}.{'prompt' if part.completion is None else part.completion}.{name}": np.ascontiguousarray(
            array
        )
        for number, output in enumerate(many)
        for part in _parts(output)
        for name, array in part.columns.items()
        if array is not None
    }
    metadata = {key.decode(): value.decode() for key, value in _metadata(many[0]).items()}
    with writing(where):
        try:
            save_file(tensors, where, metadata=metadata)
        except SafetensorError as error:
            raise OSError(str(error)) from error
