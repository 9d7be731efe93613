"""Sliding windows of a decoder's layers, as the config files of the families give them."""

from __future__ import annotations

from radixmesh.daemons.worker.checkpoint.config_reader import ConfigReader

Windows = tuple[int | None, ...]

_SLIDING, _FULL = "sliding_attention", "full_attention"


def read_window(reader: ConfigReader, default: int | None) -> int | None:
    """sliding_window; null switches it off, and where the key is absent the family's default holds."""
    if not reader.has("sliding_window") and (default is None or reader.is_null("sliding_window")):
        return None
    return reader.integer("sliding_window", default)


def read_late_windows(reader: ConfigReader, num_layers: int) -> Windows:
    """Windows by use_sliding_window: in the layers from max_window_layers on, or those of layer_types."""
    window = read_window(reader, 4096) if reader.boolean("use_sliding_window", False) else None
    if reader.has("layer_types"):
        return _of_layer_types(reader, window, num_layers)
    first = reader.integer("max_window_layers", 28, low=0)
    return tuple(window if layer >= first else None for layer in range(num_layers))


def _of_layer_types(reader: ConfigReader, window: int | None, num_layers: int) -> Windows:
    kinds = reader.strings("layer_types")
    if len(kinds) != num_layers:
        raise reader.error("layer_types", f"one entry for each of num_hidden_layers ({num_layers})")
    if not set(kinds) <= {_SLIDING, _FULL}:
        raise reader.unsupported("layer_types", f"{_FULL}, {_SLIDING}")
    if _SLIDING in kinds and window is None:
        raise reader.error("layer_types", f"no {_SLIDING} while use_sliding_window or sliding_window is off")
    return tuple(window if kind == _SLIDING else None for kind in kinds)
