"""Part of docs/gpu-results.md: four GPUs of one host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from results_files import read, table, wrapped

_EXPERTS = {"deepseek-v2-lite": "DeepSeek-V2-Lite", "deepseek-v3-12-layers": "DeepSeek-V3, 12 layers, FP8"}
_LAYOUTS = {"TP 4": "TP 4", "DP + EP 4, nccl": "DP 4 + EP 4, NCCL", "DP + EP 4, nixl": "DP 4 + EP 4, NIXL EP"}
_TWO_BATCH = "two-batch overlap on"


def four_gpus(_: Mapping[str, Any]) -> list[str]:
    got = read("h200x4-groups.json")
    parts = {name: part["results"] for name, part in got["parts"].items() if "results" in part}
    return [
        *("### Four GPUs of one host", ""),
        wrapped(
            f"{got['machine']}, joined by NVLink, commit {got['commit']} where nothing else is said "
            f"(`{got['command']}`). Rows are those of all ranks; tokens a second once all of them decode, the median "
            "ITL, and the share of the time in which the least busy rank's steps ran."
        ),
        "",
        *_dense(parts),
        *_experts(parts),
        *_rows(parts),
        *_halves(parts),
        *_moves(parts),
        *_kills(parts),
        *_pairs(parts),
    ]


def _speed(case: Mapping[str, Any]) -> list[str]:
    busy = f"{100 * min(case['steady_busy']):.1f}%" if "steady_busy" in case else ""
    return [f"{case['steady_tok_s']:,.0f}", f"{case['itl_ms_p50_p99'][0]:.1f}", busy]


def _dense(parts: Mapping[str, Any]) -> list[str]:
    rows = []
    for name, part in parts.items():
        if name.startswith("dense: "):
            for replica, result in enumerate(part):
                label = name.removeprefix("dense: ") + (f", replica {replica + 1}" if len(part) > 1 else "")
                room = f"{result['kv_tokens']:,}"
                rows += [[label, f"{case['rows']:,}", room, *_speed(case)] for case in result["decodes"].values()]
    return [
        wrapped("Llama-3.1-70B's shape in bfloat16, prompts of 128 tokens:"),
        "",
        *table(["layout", "rows", "KV tokens", "tokens a second", "ITL ms", "busy"], rows),
        "",
    ]


def _experts(parts: Mapping[str, Any]) -> list[str]:
    rows = []
    for shape, title in _EXPERTS.items():
        for layout, label in _LAYOUTS.items():
            (result,) = parts[f"{shape}: {layout}"]
            for name, case in result["decodes"].items():
                context = int(name.split("x")[1])
                rows.append(
                    [title, label, f"{result['kv_tokens']:,}", f"{case['rows']:,} x {context:,}", *_speed(case)]
                )
    gains = []
    for shape, title in _EXPERTS.items():
        (of_tp,), (of_dp,) = (parts[f"{shape}: {layout}"] for layout in ("TP 4", "DP + EP 4, nccl"))
        longest = "128x8192"
        gain = of_dp["decodes"][longest]["steady_tok_s"] / of_tp["decodes"][longest]["steady_tok_s"]
        gains.append(f"{gain:.2f} times with {title.split(',')[0]}")
    return [
        wrapped(
            "Latents are every rank's under TP, where fewer rows have room; under DP attention each rank has its own. "
            f"At contexts of 8,192 that gives {' and '.join(gains)}:"
        ),
        "",
        *table(["model", "layout", "KV tokens", "rows x context", "tokens a second", "ITL ms", "busy"], rows),
        "",
    ]


def _rows(parts: Mapping[str, Any]) -> list[str]:
    rows = []
    for way in ("nccl", "nixl"):
        (result,) = parts[f"rows: {way}"]
        micros = result["micros_by_rows"][way]
        for count, ours in micros["ours"].items():
            own = micros["own"][count]
            rows.append(
                [{"nccl": "NCCL", "nixl": "NIXL EP"}[way], count, f"{ours:,.0f}", f"{own:,.0f}", f"{ours / own:.2f}"]
            )
    (sums,) = parts["sums"]
    micros, since = sums["micros_by_rows"], read("h200x4-groups.json")["since"]["sums in two shots"]
    ways = {"peer": micros["peer"], "peer, two shots": since["micros_by_rows"]["peer"], "nccl": micros["nccl"]}
    ways = {way: list(by_rows.values()) for way, by_rows in ways.items()}
    return [
        wrapped(
            "Rows of 7,168 numbers to 8 of 256 experts and back at low latency, microseconds a layer, as a layer of a "
            "model does it, with experts that copy what they read, and the transport's own calls with these bytes. "
            "Since then experts compute rows where they lie, and the bench has them take no time: on two GPUs the "
            f"ratio of NIXL EP is {_ratios('nixl')}, of NCCL {_ratios('nccl')}."
        ),
        "",
        *table(["transport", "rows of a rank", "ours", "own calls", "ratio"], rows),
        "",
        wrapped(
            f"Sums of four ranks' rows of {sums['hidden']:,} numbers, microseconds: `peer` in one shot, in two (commit "
            f"{since['commit']}; 16 rows and fewer in one), and NCCL. From 160 rows on two are taken since then."
        ),
        "",
        *table(["rows", *micros["peer"]], [[way, *(f"{us:,.1f}" for us in times)] for way, times in ways.items()]),
        "",
    ]


def _ratios(way: str) -> str:
    """At 16, 128 and 512 rows, on two GPUs."""
    micros = read("h200x2-expert-rows.json")["micros_by_rows"][way]
    return ", ".join(f"{ours / micros['own'][count]:.2f}" for count, ours in micros["ours"].items())


def _halves(parts: Mapping[str, Any]) -> list[str]:
    rows = []
    for name, part in parts.items():
        if not name.startswith(_TWO_BATCH):
            continue
        shape, transport = name.removeprefix(f"{_TWO_BATCH}: ").split(", ")
        off = parts[f"{shape}: DP + EP 4, {transport}"][0]["decodes"]
        for case, on in part[0]["decodes"].items():
            if case in off:
                times = [f"{each['itl_ms_p50_p99'][0]:.1f}" for each in (off[case], on)]
                rows.append([_EXPERTS[shape], case.split("x")[0], *times])
    return [
        wrapped("Two half batches, milliseconds a step: they do not pay between four GPUs of a host either."),
        "",
        *table(["model", "rows of a rank", "off", "on"], rows),
        "",
    ]


def _moves(parts: Mapping[str, Any]) -> list[str]:
    rows = []
    for name, part in parts.items():
        if name.startswith("EPLB"):
            for phase, found in part[0]["decodes"].items():
                (case,) = found["decodes"].values()
                rows.append(
                    [
                        _EXPERTS[name.split(": ")[1]],
                        phase,
                        f"{found['balancedness']:.3f}",
                        f"{found['placements_total']:.0f}",
                        f"{1e3 * found['move_longest_seconds']:.0f}",
                        *_speed(case)[:2],
                    ]
                )
    return [
        wrapped(
            "A skewed router, with redundant experts that are placed while the ranks serve: balancedness, layers "
            "placed in the phase, and the longest op that moved weights:"
        ),
        "",
        *table(["model", "phase", "balancedness", "layers placed", "longest op ms", "tokens a second", "ITL ms"], rows),
        "",
    ]


def _kills(parts: Mapping[str, Any]) -> list[str]:
    (timed,), (compared,) = parts["kill of a rank: time"], parts["kill of a rank: tokens"]
    (case,) = timed["decodes"].values()
    cells = compared["cells"]
    wrong = sum(
        cell["requests_failed"] + cell["answers_with_tokens_lost_repeated_or_changed"] for cell in cells.values()
    )
    faults = sum(cell["faults"] for cell in cells.values())
    later, matrix = read("h200x2-rank-kill.json"), read("h200x2-rank-faults.json")
    (of_two,) = later["decodes"].values()
    stages = of_two["stages"]["rank-1"]
    seen = {name: cell for name, cell in matrix["cells"].items() if "(" not in name}
    failed = sum(
        cell["requests_failed"] + cell["answers_with_tokens_lost_repeated_or_changed"] for cell in seen.values()
    )
    times, longest = (
        min(cell["faults"] for cell in seen.values()),
        max(cell["longest_stall_s"] for cell in seen.values()),
    )
    return [
        wrapped(
            f"A rank of DeepSeek-V2-Lite killed (-9) under {case['rows']:,} rows: its process served again after "
            f"{case['rank_back_s']:.1f} s, and {case['longest_gap_s']:.1f} s went by without a token. Tiny models on "
            f"two GPUs: {faults} kills of a rank, {wrong} answers failed, lost or repeated a token."
        ),
        "",
        wrapped(
            f"With commit {later['commit']} on two GPUs, {of_two['rows']} rows: {of_two['longest_gap_s']:.1f} s "
            f"without a token. The process listens after {stages['listening']:.1f} s, has its weights after "
            f"{stages['weights_loaded']['at_s']:.1f}, kernels after {stages['kernels_compiled']['at_s']:.1f}, graphs "
            f"after {stages['graphs_captured']['at_s']:.1f}, and the group is formed after "
            f"{stages['group_formed']:.1f}. {len(seen)} of 18 cells of the fault matrix (ranks and the scheduler, "
            f"killed or stopped; TP 2 and DP 2 + EP 2), {times} faults or more each, ran on two GPUs (commit "
            f"{matrix['commit']}): "
            f"{failed} answers failed, lost or repeated a token, longest stall {longest:.1f} s. "
            + (f"Not seen: {matrix['not_seen'].split('.')[0]}." if "not_seen" in matrix else "")
        ),
        "",
    ]


def _pairs(parts: Mapping[str, Any]) -> list[str]:
    (result,) = parts["2P2D"]
    rows = []
    for layout, title in (("pairs", "two pairs"), ("mixed", "four replicas")):
        load = result["layouts"][layout]["streams"]
        itl = load["itl_ms"]
        times = [f"{itl['p50']:.1f}", f"{itl['p99']:.1f}", f"{load['ttft_ms']['p50']:,.0f}"]
        rows.append([title, f"{load['out_tok_s']:,.0f}", *times])
    return [
        wrapped(
            "Llama-3.1-8B's shape, 192 prompts of 4,096 tokens with 256 tokens of output, by 64 clients at a time:"
        ),
        "",
        *table(["layout", "tokens a second", "ITL p50, ms", "p99", "TTFT p50, ms"], rows),
    ]
