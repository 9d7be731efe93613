"""FP8 (e4m3) weights as a config.json describes them, in the forms that are in use.

quant_method "fp8", with weight_block_size [128, 128]     a scale for every block of 128 x 128
quant_method "fp8", without                               a scale a tensor
quant_method "compressed-tensors", "float-quantized"      a scale a tensor, an output channel or a block
quant_method "mxfp4"                                      experts of GPT-OSS, dequantised when loaded (`mxfp4.py`)

Rows that meet such weights are quantised as they come (activation_scheme "dynamic"); the scales that "static" brings
for them are not needed, and not used.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from radixmesh.daemons.worker.checkpoint.config_reader import ConfigReader

BLOCK = 128
"""Rows and columns of a block that has a scale of its own."""


class Fp8Form(StrEnum):
    """Of a weight [out, in]: a scale a row, which is an output channel (one for all rows is the same number in each),
    or a scale a block."""

    CHANNEL = "fp8"
    BLOCK = "fp8-block"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointQuantization:
    """kept: names of modules that are said to have stayed as they were; "re:..." is a pattern."""

    form: Fp8Form
    kept: tuple[str, ...] = ()

    def keeps(self, module: str) -> bool:
        """True if the config says that the module, or one that it is part of, was not quantised."""
        return any(_names(pattern, module) for pattern in self.kept)


def read_quantization(reader: ConfigReader) -> CheckpointQuantization | None:
    """None where the weights are what they seem. Raises MeshError UNSUPPORTED or BAD_CHECKPOINT."""
    section = reader.section("quantization_config")
    if section is None:
        return None
    match section.string("quant_method", ""):
        case "fp8":
            return _read_fp8(section)
        case "compressed-tensors":
            return _read_compressed(section)
        case "mxfp4":
            # Its tensors say it themselves.
            return None
    raise reader.unsupported(
        "quantization_config",
        'quant_method "fp8", "mxfp4" and "compressed-tensors" (float-quantized); for others use unquantised weights, '
        "which --quantization fp8 or fp8-block quantises on a GPU",
    )


def features_in_unit(reader: ConfigReader) -> int:
    """Ranks cut features in at multiples of this: scales of blocks belong to one rank each. Raises as the above."""
    quantization = read_quantization(reader)
    return BLOCK if quantization is not None and quantization.form is Fp8Form.BLOCK else 1


def _read_fp8(section: ConfigReader) -> CheckpointQuantization:
    if section.string("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise section.unsupported("fmt", "e4m3")
    if section.string("activation_scheme", "dynamic") not in ("dynamic", "static"):
        raise section.unsupported("activation_scheme", "dynamic, static")
    form = Fp8Form.CHANNEL
    if section.has("weight_block_size"):
        _check_block(section, "weight_block_size")
        form = Fp8Form.BLOCK
    kept = [*_strings(section, "modules_to_not_convert"), *_strings(section, "ignored_layers")]
    return CheckpointQuantization(form=form, kept=tuple(kept))


def _read_compressed(section: ConfigReader) -> CheckpointQuantization:
    if section.string("format", "float-quantized") not in ("float-quantized", "naive-quantized"):
        raise section.unsupported("format", "float-quantized")
    groups = section.section("config_groups")
    names = section.keys("config_groups")
    if groups is None or not names:
        raise section.error("config_groups", "at least one group")
    forms = {_read_group(group) for name in names if (group := groups.section(name)) is not None}
    if len(forms) != 1:
        raise section.unsupported("config_groups", "groups that are all quantised in the same way")
    return CheckpointQuantization(form=forms.pop(), kept=tuple(_strings(section, "ignore")))


def _read_group(group: ConfigReader) -> Fp8Form:
    weights, rows = group.section("weights"), group.section("input_activations")
    if weights is None:
        raise group.error("weights", "how they are quantised")
    if rows is None:
        raise group.unsupported("input_activations", "rows of 8 bits as the weights are: --quantization none")
    for part in (weights, rows):
        if part.integer("num_bits") != 8:
            raise part.unsupported("num_bits", "8")
        if part.string("type", "int") != "float":
            raise part.unsupported("type", "float")
        if not part.boolean("symmetric", True):
            raise part.unsupported("symmetric", "true")
    match weights.string("strategy", "tensor"):
        case "tensor" | "channel":
            return Fp8Form.CHANNEL
        case "block":
            _check_block(weights, "block_structure")
            return Fp8Form.BLOCK
    raise weights.unsupported("strategy", "tensor, channel, block")


def _check_block(section: ConfigReader, key: str) -> None:
    if section.integers(key) != (BLOCK, BLOCK):
        raise section.unsupported(key, f"[{BLOCK}, {BLOCK}]")


def _strings(section: ConfigReader, key: str) -> Sequence[str]:
    return section.strings(key) if section.has(key) and section.length(key) else ()


def _names(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    # Also what is inside a module that is named, and a module named by its end alone, as "lm_head" often is.
    return module == pattern or module.startswith(f"{pattern}.") or module.endswith(f".{pattern}")
