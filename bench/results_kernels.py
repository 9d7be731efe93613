"""Of the page of GPU results: the kernels' own figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from results_files import read, table, wrapped

# As bench/gpu/attention.py has it.
_ATTENTION_POOL_TOKENS = 1 << 21


def gemm(_: Mapping[str, Any]) -> list[str]:
    jobs = read("h200-products90.json")["jobs"]
    timed = sorted((job for name, job in jobs.items() if name.startswith("time_")), key=lambda job: job["rows"])
    rows = [
        ["cuBLASLt's, tuned", *(f"{job['layer_us']['library']:.1f}" for job in timed)],
        ["the project's own", *(f"{job['layer_us']['streamed']:.1f}" for job in timed)],
    ]
    gemv = read("h200-gemv.json")["step"]
    tuned = ", ".join(
        f"{step['rows']} rows {step['torch_ms']:.2f} -> {step['best_ms']:.2f} ms"
        for step in read("h200-products.json")["steps"]
        if step["rows"] in (8, 64, 128, 256)
    )
    return [
        *("## GEMMs", ""),
        "Microseconds a layer of a decode step at context 384, all 28 layers in a burst, by number of rows:",
        "",
        *table(["", *(str(job["rows"]) for job in timed)], rows),
        "",
        wrapped(
            f"One row: the GEMV kernels take {gemv['ours_pdl_ms']:.2f} ms for all matrices of a step "
            f"({gemv['ours_pdl_tb_s']:.1f} TB/s, {gemv['ours_tb_s']:.1f} without PDL), torch's take "
            f"{gemv['torch_ms']:.2f} ms. The fastest of cuBLASLt's algorithms against its first: {tuned}."
        ),
    ]


def few_rows(_: Mapping[str, Any]) -> list[str]:
    got = read("h200-few-rows.json")
    alone, layer_us = got["alone"], got["layer_us"]
    counts = [count for count in next(iter(alone.values()))["best"] if count != "1"]

    def cell(figures: Mapping[str, float]) -> str:
        return f"{figures['us']:.1f} us, {figures['tb_s']:.2f} TB/s"

    rows = [
        [
            name,
            cell(each["gemv_1_row"]),
            f"{each['others_best_tb_s']:.2f} TB/s",
            *(cell(each["best"][n]) for n in counts),
        ]
        for name, each in alone.items()
    ]
    chains = {
        "all but head, kernel behind kernel": [
            f"{layer_us['gemv_1_row']:.1f} us",
            f"{layer_us['others']['5']:.1f} us",
            *(f"{layer_us['few_rows'][count]:.1f} us" for count in counts),
        ]
    }
    return [
        *("### A few rows", ""),
        wrapped(
            f"{got['shape']}, a layer's matrices and the head, each launch with the weights of another layer "
            f"(`{got['command']}`): GEMVs at one row; at 5 rows the fastest of those that serve more rows; and those "
            "of few_rows.cu by their rows, with the tiling that is the fastest at 5."
        ),
        "",
        *table(
            ["", "GEMV, 1 row", "5 rows, the others", *(f"{count} rows" for count in counts)],
            [*rows, *([name, *cells] for name, cells in chains.items())],
        ),
    ]


def _cell(row: Mapping[str, Any]) -> str:
    # Rows beyond the pool share pages, which the L2 cache serves: no figure of memory.
    is_shared = row["case"]["batch"] * row["case"]["context"] > _ATTENTION_POOL_TOKENS
    return "-" if is_shared else f"{row['us']:.0f} us, {row['tb_s']:.1f} TB/s"


def attention(_: Mapping[str, Any]) -> list[str]:
    decode = [
        row
        for row in read("h200-decode-attention.json")["defaults"]
        if row["kind"] == "decode" and (row["case"]["lengths"], row["case"]["page_size"]) == ("uniform", 1)
    ]
    contexts = sorted({row["case"]["context"] for row in decode})
    batches = sorted({row["case"]["batch"] for row in decode})
    by_case = {(row["case"]["batch"], row["case"]["context"]): row for row in decode}
    rows = [[str(batch), *(_cell(by_case[batch, context]) for context in contexts)] for batch in batches]
    others = read("h200-attention.json")["defaults"]
    shared = [
        [f"{case['groups']} x {case['rows']}", f"{case['prefix']:,}", f"{row['us']:.0f}", f"{row['plain_us']:,.0f}"]
        for row in others
        if row["kind"] == "shared" and (case := row["case"])
    ]
    extend = [
        [
            f"{case['chunks']} x {case['chunk_len']:,}",
            f"{case['context']:,}",
            f"{row['us']:,.0f}",
            f"{row['tflop_s']:.0f}",
        ]
        for row in others
        if row["kind"] == "extend" and (case := row["case"])["page_size"] == 1
    ]
    return [
        *("## Attention", ""),
        "Decode, one layer, by rows and context:",
        "",
        *table(["rows", *(f"{context:,}" for context in contexts)], rows),
        *("", "Decode of groups that share a prefix, one layer:", ""),
        *table(["groups x rows", "shared tokens", "us", "us if each row reads the prefix"], shared),
        *("", "Extend, one layer:", ""),
        *table(["chunks x tokens", "context", "us", "TFLOP/s"], extend),
    ]
