"""Default sampling of a model, as its folder's generation_config.json says; fields as vLLM and SGLang take them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.model_folder.fingerprint import read_json_object
from radixmesh.daemons.runtime.sampling import sampling_from_proto
from radixmesh.daemons.runtime.telemetry.logs import get_logger

log = get_logger(__name__)

_FLOATS = ("repetition_penalty", "temperature", "top_p", "min_p")
# Published files have some hundred bytes; this one is read before anything else is known of the folder.
_MAX_BYTES = 1 << 20


def read_sampling_defaults(folder: Path) -> common_pb2.SamplingDefaults:
    """The fields that the file sets; empty without a file. A value outside its range is left out, with a warning.

    do_sample is not looked at: temperature 0 is greedy. Raises BAD_CHECKPOINT for a file that holds no JSON object, or
    more than a MiB.
    """
    path = folder / "generation_config.json"
    defaults = common_pb2.SamplingDefaults()
    if not path.is_file():
        return defaults
    if path.stat().st_size > _MAX_BYTES:
        message = f"{path} has more than {_MAX_BYTES} bytes: that is no generation config"
        raise MeshError(common_pb2.ERROR_REASON_BAD_CHECKPOINT, message, {"file": str(path)})
    content = read_json_object(path)
    for name in (*_FLOATS, "top_k"):
        value = content.get(name)
        if value is None:
            continue
        try:
            number = _number(name, value)
            # The range of a default is that of a request.
            sampling_from_proto(common_pb2.SamplingParams(**{name: number}))  # type: ignore[arg-type]
        except (MeshError, TypeError, ValueError, OverflowError):
            log.warning("generation_config_ignored", field=name, value=repr(value)[:80], file=str(path))
            continue
        setattr(defaults, name, number)
    return defaults


def with_sampling_defaults(
    sampling: common_pb2.SamplingParams, defaults: Mapping[str, float]
) -> common_pb2.SamplingParams:
    """A copy of sampling in which what is unset is what defaults, by the names of their fields, say."""
    merged = common_pb2.SamplingParams()
    for name, value in defaults.items():
        setattr(merged, name, value)
    merged.MergeFrom(sampling)
    return merged


def _number(name: str, value: object) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is no number")
    if name != "top_k":
        return float(value)
    if value != int(value):
        raise ValueError("top_k is no whole number")
    return 0 if value == -1 else int(value)  # -1 is "all" in the files of some.
