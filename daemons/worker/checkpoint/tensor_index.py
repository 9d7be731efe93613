"""Index of a model folder's tensors, read from safetensors headers alone."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from radixmesh.daemons.runtime.model_folder.fingerprint import read_json_object
from radixmesh.daemons.worker.checkpoint.config_reader import bad_checkpoint

# The format's own limit: a longer header is no safetensors file.
_MAX_HEADER_BYTES = 100_000_000
DTYPE_TO_BYTES: Mapping[str, int] = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "U8": 1,
    "I64": 8, "BOOL": 1}  # fmt: skip
_KNOWN_DTYPES = ", ".join(DTYPE_TO_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """A tensor of a file: its shape and dtype as the header has them ("F32", "BF16", ...). parts: names and entries of
    the tensors that it is made of, where it is none of the file's own."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[tuple[str, TensorEntry], ...] = ()


def index_tensors(folder: Path) -> dict[str, TensorEntry]:
    """All tensors of a model folder by name: model.safetensors, or the shards of model.safetensors.index.json.

    Checks that every tensor that the index promises is in the file it names, that every file is as long as its header
    says, and that shape, dtype and length of each tensor agree. Raises MeshError BAD_CHECKPOINT naming file and tensor.
    """
    index_file = folder / "model.safetensors.index.json"
    if not index_file.is_file():
        return read_header(folder / "model.safetensors")
    weight_map = read_json_object(index_file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(f, str) for f in weight_map.values()):
        raise bad_checkpoint(index_file, "has no weight_map from tensor to file")
    entries: dict[str, TensorEntry] = {}
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name:
            raise bad_checkpoint(index_file, f"names a file outside its folder: {name!r}")
        entries.update(read_header(folder / name))
    for tensor, name in weight_map.items():
        if tensor not in entries or entries[tensor].file.name != name:
            raise bad_checkpoint(
                folder / name, f"holds no tensor {tensor!r}, which {index_file.name} places there", tensor
            )
    return entries


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file. Raises MeshError BAD_CHECKPOINT, also where the file is truncated."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= _MAX_HEADER_BYTES:
                raise bad_checkpoint(file, "is no safetensors file: its header has no plausible length")
            header = stream.read(length)
    except FileNotFoundError as error:
        raise bad_checkpoint(file, "is missing: the folder must hold the weights as safetensors") from error
    except OSError as error:
        raise bad_checkpoint(file, f"cannot be read ({error})") from error
    if len(header) < length:
        raise bad_checkpoint(file, f"is truncated within its header of {length} bytes: copy it again")
    try:
        values = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise bad_checkpoint(file, f"is no safetensors file: its header is no JSON ({error})") from error
    if not isinstance(values, dict):
        raise bad_checkpoint(file, "is no safetensors file: its header holds no object")
    data_bytes = size - 8 - length
    return {name: _entry(file, name, value, data_bytes) for name, value in values.items() if name != "__metadata__"}


def _entry(file: Path, name: str, value: object, data_bytes: int) -> TensorEntry:
    match value:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
            pass
        case _:
            raise bad_checkpoint(file, f"has a broken header entry for tensor {name!r}", name)
    if dtype not in DTYPE_TO_BYTES:
        raise bad_checkpoint(file, f"holds tensor {name!r} as {dtype}, expected one of {_KNOWN_DTYPES}", name)
    if not all(isinstance(size, int) and size >= 0 for size in shape) or begin < 0:
        raise bad_checkpoint(file, f"has a broken header entry for tensor {name!r}", name)
    expected = math.prod(shape) * DTYPE_TO_BYTES[dtype]
    if end - begin != expected:
        raise bad_checkpoint(
            file, f"gives tensor {name!r} {end - begin} bytes, but {dtype} {shape} needs {expected}", name
        )
    if end > data_bytes:
        raise bad_checkpoint(
            file,
            f"is truncated: tensor {name!r} ends at byte {end} of the data, of which there are {data_bytes}; "
            "copy the file again",
            name,
        )
    return TensorEntry(file=file, shape=tuple(shape), dtype=dtype)
