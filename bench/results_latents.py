"""Part of docs/gpu-results.md: attention over latents by configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from results_files import read, table, wrapped

_HEAD = ["heads", "rows", "context", "us", "TB/s", "TFLOP/s", "Triton's layouts, us", "TFLOP/s"]


def latent_attention(_: Mapping[str, Any]) -> list[str]:
    got = read("h200-mla.json")
    rows = [row for row in got["rows"] if "error" not in row]
    decodes = [
        [f"{heads}", f"{num_rows}", f"{context:,}", *_best(of)]
        for (heads, num_rows, context), of in _by(rows, "decode", ("heads", "rows", "kv")).items()
    ]
    shared = [
        ["16", f"{groups} x {each}", f"{prefix:,} + {own}", *_best(of)]
        for ((groups, each, prefix, own),), of in _by(rows, "shared", ("groups",)).items()
    ]
    few = [
        [f"{row['rows']}", f"{row['kv']:,}", f"{row['separate_us']}", f"{row['merged_us']}"]
        for row in rows
        if row["kind"] == "few"
    ]
    prompts = []
    for ((heads, chunks, new, before, sharing),), of in _by(rows, "prompt", ("case",)).items():
        prefix = f"{before:,}" + (f", of {sharing}" if sharing > 1 else "")
        fastest = min(of, key=lambda row: row["projected_us"])
        figures = [f"{fastest['absorbed_us']:,.0f}", f"{fastest['projected_us']:,.0f}"]
        prompts.append([f"{heads}", f"{chunks} x {new:,}", prefix, *figures])
    return [
        *("## Attention over latents", ""),
        wrapped(
            f"DeepSeek's sizes (512 + 64 numbers a token) in bf16 (`{got['command']}`): one layer's decodes, 16 heads "
            "as of V2-Lite and 128 as of V3, by the fastest configuration. Where 64 query rows fill a program, that is "
            "the kernel written for Hopper, beside the one whose layouts are Triton's. Groups x rows share a prefix."
        ),
        "",
        *table(_HEAD, decodes + shared),
        "",
        *(_few(few) if few else ()),
        "Chunks of prompts from queries to results by head, us.",
        "",
        *table(["heads", "chunks", "tokens before each", "absorbed", "up-projected"], prompts),
        "",
        wrapped(got["mesh"]),
    ]


def _few(rows: list[list[str]]) -> list[str]:
    return [
        "Few rows of 16 heads with the value expansion behind them, us: parts merged before it, and in it.",
        "",
        *table(["rows", "context", "merged before", "merged in it"], rows),
        "",
    ]


def _by(rows: Iterable[Mapping[str, Any]], kind: str, names: tuple[str, ...]) -> dict[tuple[Any, ...], list[Any]]:
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for row in rows:
        if row["kind"] == kind:
            key = tuple(tuple(row[name]) if isinstance(row[name], list) else row[name] for name in names)
            groups.setdefault(key, []).append(row)
    return groups


def _best(rows: list[Mapping[str, Any]]) -> list[str]:
    """The fastest's figures, then those of Triton's layouts beside it where it is not among them."""
    best = min(rows, key=lambda row: row["us"])
    figures = [f"{best['us']:,.0f}", f"{best['tb_s']:.2f}", f"{best['tflop_s']:,.0f}"]
    triton = min((row for row in rows if row["config"][2]), key=lambda row: row["us"], default=best)
    return [*figures, *(("", "") if triton is best else (f"{triton['us']:,.0f}", f"{triton['tflop_s']:,.0f}"))]
