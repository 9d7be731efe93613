"""Part of docs/gpu-results.md: KV handed from one process to another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from results_files import read, table, wrapped

_WAYS = {
    "direct": "gathered into the other's region",
    "staged": "gathered, then one copy",
    "rows": "an index operation a layer and plane, then one copy",
    "host": "gathered, then through pinned host memory",
}


def kv_transfers(_: Mapping[str, Any]) -> list[str]:
    got = read("h200-kv-transfer.json")
    rows = [
        [
            case["shape"],
            f"{case['num_tokens']:,}",
            f"{case['page_size']}",
            f"{case['mib']:,.0f}",
            _WAYS[case["way"]],
            f"{case['ms']:.2f}",
            f"{case['gb_s']:,.0f}",
        ]
        for case in got["cases"]
    ]
    return [
        *("## KV from process to process", ""),
        wrapped(
            f"Two processes on {got['gpus']} GPU, scattered pages on both sides, the receiver's region mapped by CUDA "
            f"IPC (`{got['command']}`): from the first launch until the receiver has scattered and compared the "
            "stamps, messages included; medians. The kernels are `kernels/kv_copy.py`."
        ),
        "",
        *table(["shape", "tokens", "page size", "MiB", "way", "ms", "GB/s"], rows),
        "",
        *_between_gpus(),
    ]


def _between_gpus() -> list[str]:
    got = read("h200x2-kv-transfer.json")
    cases = {(case["shape"], case["num_tokens"], case["pieces"], case["both_ways"]): case for case in got["cases"]}
    rows = [
        [*_times(case), f"{cases[shape, tokens, pieces, True]['gb_s']:,.0f}"]
        for (shape, tokens, pieces, both_ways), case in cases.items()
        if not both_ways
    ]
    at_once, before = got["at_once"], got["before"]
    return [
        wrapped(
            f"The same with a GPU for each process (two H200 of one host, commit {got['commit']}, "
            f"`{got['command']}`), gathered into the other's region, in pieces of which one is scattered while the "
            "next is gathered, from the end of the step that the gathers are launched behind; both ways: of two "
            "transfers at once, in opposite directions, together. Device times are sums over the pieces."
        ),
        "",
        *table([*_TIMES, "GB/s, both ways"], rows),
        "",
        wrapped(
            f"The same with launches that begin with the transfer, of processes that have waited (`--at-once`, commit "
            f"{at_once['commit']}), and before kernels were launched by numbers (commit {before['commit']}):"
        ),
        "",
        *table([*_TIMES, "GB/s before"], [[*_times(case), _rate_of(case, before)] for case in at_once["cases"]]),
    ]


_TIMES = ["shape", "tokens", "MiB", "pieces", "ms", "gathers, ms", "scatters, ms", "GB/s"]


def _rate_of(case: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """The rate that the same case had in another run."""
    names = ("shape", "num_tokens", "pieces", "both_ways", "way")
    return next(f"{one['gb_s']:,.0f}" for one in before["cases"] if all(one[name] == case[name] for name in names))


def _times(case: Mapping[str, Any]) -> list[str]:
    return [
        case["shape"],
        f"{case['num_tokens']:,}",
        f"{case['mib']:,.0f}",
        f"{case['pieces']}",
        f"{case['ms']:.2f}",
        f"{case['gather_ms']:.2f}",
        f"{case['scatter_ms']:.2f}",
        f"{case['gb_s']:,.0f}",
    ]
