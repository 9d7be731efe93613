"""Sliding windows of a decoder's layers, as the config files of the families give them."""

from __future__ import annotations

from radixmesh.daemons.worker.checkpoint.config_reader import ConfigReader

Windows = tuple[int | None, ...]

SLIDING, FULL = "sliding_attention", "full_attention"


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


def alternating(period: int, num_layers: int) -> tuple[str, ...]:
    """Layer types where every `period`-th layer sees all and the others have a window."""
    return tuple(SLIDING if (layer + 1) % period else FULL for layer in range(num_layers))


def read_layer_types(reader: ConfigReader, default: tuple[str, ...]) -> tuple[str, ...]:
    """One of each layer; `default` where the config has no layer_types."""
    kinds = reader.strings("layer_types") if reader.has("layer_types") else default
    if len(kinds) != len(default):
        raise reader.error("layer_types", f"one entry for each of num_hidden_layers ({len(default)})")
    if not set(kinds) <= {SLIDING, FULL}:
        raise reader.unsupported("layer_types", f"{FULL}, {SLIDING}")
    return kinds


def _of_layer_types(reader: ConfigReader, window: int | None, num_layers: int) -> Windows:
    kinds = read_layer_types(reader, (FULL,) * num_layers)
    if SLIDING in kinds and window is None:
        raise reader.error("layer_types", f"no {SLIDING} while use_sliding_window or sliding_window is off")
    return tuple(window if kind == SLIDING else None for kind in kinds)
