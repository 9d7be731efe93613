"""Parts of docs/gpu-results.md: two GPUs of one host, networks that draft, rows that follow a grammar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from results_files import read, table, wrapped


def two_gpus(_: Mapping[str, Any]) -> list[str]:
    sums, rows, pair = (read(f"h200x2-{name}.json") for name in ("sums", "expert-rows", "pd-hand-over"))
    micros, ways = sums["micros_by_rows"], rows["micros_by_rows"]
    load, beyond = pair["layouts"]["pairs"]["hand-over"], pair["beyond_ms"]
    earlier, since, last = read("h100x2-pd.json"), pair["since"], read("h200x2-pd-hand-over-tokens-first.json")
    last = {"commit": last["commit"], "beyond_ms": last["runs"]["pd-8b"]["beyond_ms"]}
    by_numbers = read("h200x2-pd-by-numbers.json")
    others = [
        f"commit {got['commit']} {got['beyond_ms']['token_1']:.1f} and {got['beyond_ms']['token_2']:.1f}"
        for got in (earlier, since, last, by_numbers)
    ]
    beside = [
        [
            {"pairs": "pair", "mixed": "two replicas"}[layout],
            got["commit"],
            f"{case['decodes']['out_tok_s']:,.0f}",
            *(f"{case['decodes']['itl_ms'][name]:.1f}" for name in ("p50", "p99")),
            f"{case['prompts']['ttft_ms']['p50']:.0f}",
        ]
        for got in (pair, by_numbers)
        for layout in ("pairs", "mixed")
        for case in (got["layouts"][layout]["prompts"]["2/s"],)
    ]
    by_rows = [
        [name, *(f"{ways[way][name][count]:,.0f}" for way in ways for count in ways[way][name])]
        for name in ("ours", "own")
    ]
    return [
        *("## Two GPUs of one host", ""),
        wrapped(
            f"Two H200 joined by NVLink. A sum of both ranks' rows of {sums['hidden']:,} numbers in bfloat16, added to "
            f"a residual, in a CUDA graph of {sums['calls_in_a_graph']} (`{sums['command']}`), microseconds:"
        ),
        "",
        *table(["rows", *micros["peer"]], [[way, *(f"{us:,.1f}" for us in micros[way].values())] for way in micros]),
        "",
        wrapped(sums["note"]),
        "",
        wrapped(
            f"Rows of 7,168 numbers to 8 of 256 experts and back, low latency, microseconds a layer: as a layer of a "
            f"model does it, with experts that take no time, and the transport's own calls with these bytes "
            f"(`{rows['command']}`, commit {rows['commit']})."
        ),
        "",
        *table(["", *(f"{way}, {count} rows" for way in ways for count in ways[way]["ours"])], by_rows),
        "",
        wrapped(
            f"A prompt of {load['prompt']:,} tokens of Llama-3.1-8B's shape, computed by one GPU and decoded by the "
            f"other, one at a time (`{pair['command']}`): the first token comes {beyond['token_1']:.1f} ms later than "
            f"from a replica that does both, the second {beyond['token_2']:.1f}, medians; on two H100 with "
            f"{others[0]}; with {others[1]}; with {others[2]}; with {others[3]}. 32 "
            "outputs beside prompts of 8,192 tokens, two a second, through a pair and through two replicas with "
            "chunked prefill:"
        ),
        "",
        *table(["", "commit", "tokens a second", "ITL p50, ms", "p99", "TTFT of prompts p50, ms"], beside),
    ]


def _dense_on_h200() -> list[str]:
    got = read("h200x2-groups.json")
    shape = got["shapes"]["llama-3.1-8b"]
    figures = []
    for name, gain in shape["gain"].items():
        one, two = (shape[of]["workloads"][name] for of in ("1 ranks", "2 ranks"))
        idle = 100 * (1 - two["device_busy"])
        figures.append(f"{name} {one['out_tok_s']:,.0f} and {two['out_tok_s']:,.0f} ({gain:.2f}, idle {idle:.1f}%)")
    text = f"The same on H200, commit {got['commit']}, one GPU and two: {'; '.join(figures)}."
    return [wrapped(text), ""]


def ranks(_: Mapping[str, Any]) -> list[str]:
    got = read("h100x2-groups.json")
    shape = got["dense"]["shapes"]["llama-3.1-8b"]
    dense = [
        [
            name,
            *(f"{shape[of]['workloads'][name]['out_tok_s']:,.0f}" for of in ("1 ranks", "2 ranks")),
            f"{shape['gain'][name]:.2f}",
            f"{100 * (1 - shape['2 ranks']['workloads'][name]['device_busy']):.1f}%",
        ]
        for name in shape["gain"]
    ]
    layouts = ("deepseek-v2-lite: TP 2", "deepseek-v2-lite: DP 2 + EP 2")
    latents = [
        [
            layout.split(": ")[1],
            f"{got[layout]['kv_tokens']:,}",
            *(
                f"{case['rows']:,} rows: {case['steady_tok_s']:,.0f}, {case['itl_ms_p50_p99'][0]:.1f} ms"
                for case in got[layout]["decodes"].values()
            ),
        ]
        for layout in layouts
    ]
    halves = [
        [
            f"{int(case.split('x')[0])}",
            *(
                f"{got[f'two-batch overlap {state}']['decodes'][case]['itl_ms_p50_p99'][0]:.1f}"
                for state in ("off", "on")
            ),
        ]
        for case in got["two-batch overlap on"]["decodes"]
    ]
    ways = got["expert rows"]["micros_by_rows"]["nccl"]
    moves = got["experts that move"]["decodes"]
    longest = max(phase["move_longest_seconds"] for phase in moves.values())
    return [
        *("### Ranks of one model on two H100", ""),
        wrapped(
            f"Llama-3.1-8B's shape, tokens a second of one GPU and of two (`{got['dense']['command']}`). Before "
            "waiting sums looked at the host's word less often, decode-256 of two ranks gave 6,342: in one case of "
            "seven every sum took 0.2 to 1.9 ms."
        ),
        "",
        *table(["workload", "one GPU", "two", "gain", "idle of two"], dense),
        "",
        *_dense_on_h200(),
        wrapped(
            f"DeepSeek-V2-Lite, tokens of KV, and tokens a second once all rows decode, with the median ITL, 256 rows "
            f"of 1,024 tokens and 384 of 8,192 asked for (`{got[layouts[1]]['command']}`). Under TP every rank holds "
            "all latents, so that 200 rows of the longer contexts have room."
        ),
        "",
        *table(["layout", "KV tokens", "contexts of 1,024", "contexts of 8,192"], latents),
        "",
        wrapped(
            "Rows to experts and back, NCCL, microseconds a layer of 7,168 numbers by rows of a rank: "
            + "; ".join(
                f"{count}: {ways['ours'][count]:.0f} ({ways['own'][count]:.0f} by itself)" for count in ways["ours"]
            )
            + ". Two half batches, milliseconds a step by rows of a rank, cost more than they hide between two GPUs of "
            "a host at all sizes measured; they are off by default:"
        ),
        "",
        *table(["rows of a rank", "off", "on"], halves),
        "",
        wrapped(
            f"Experts of a skewed router with 8 redundant ones moved for 15 s: balancedness "
            f"{moves['before']['balancedness']:.2f} before, {moves['after']['balancedness']:.2f} after "
            f"{moves['moving']['placements_total']:.0f} placements, the longest op "
            f"{1e3 * longest:.0f} ms; too few to change the speed."
        ),
    ]


def draft_networks(_: Mapping[str, Any]) -> list[str]:
    got, other = read("h200-draft-networks.json"), read("h100-draft-networks.json")
    of_h100 = [{**case, "label": " (H100, tree)" if case["topk"] > 1 else " (H100)"} for case in other["results"]]
    rows = [
        [
            f"{case['rows']}{case.get('label', '')}",
            f"{case['acceptance']:g}" + (", adaptive" if case["is_adaptive"] else ""),
            *(f"{case[name]:.2f}" for name in ("plain_ms", "ms")),
            f"{case['tokens_a_row']:.2f}",
            f"{case['speed_up']:.2f}",
        ]
        for case in [*got["results"], *of_h100]
    ]
    return [
        *("## A network that drafts", ""),
        wrapped(
            f"EAGLE-3's layer before {got['shape']}'s shape inside captured steps, 4 drafts a row, which are "
            f"overwritten so that a known share is right, {got['context']} tokens of context (`{got['command']}`). "
            "The network is of random weights: its time is true, its drafts are not used. Below, the same on an H100: "
            "trees of 4 levels with 7 drafts a row, of which one path is right as far as told, and 256 rows in chains."
        ),
        "",
        *table(
            ["rows", "share that is right", "plain step, ms", "step with drafts, ms", "tokens a row", "speed"], rows
        ),
    ]


def guided(_: Mapping[str, Any]) -> list[str]:
    got = read("h200-guided-masks.json")
    rows = [
        [
            {
                "before": "masks copied to where they are sent from",
                "filled": "masks filled there",
                "threads": "two threads (H100)",
                "processes": "four processes",
                "rows_kept": "four processes, rows of a step kept",
                "eight_processes": "eight processes",
                "debug_log": "four processes, worker that logs each step",
                "busy_machine": "four processes, cores that others load",
                "halves": "four processes that tell of their rows by halves, cores that others load",
                "chains": "the same, with chains of forced ids",
            }[name],
            *(f"{got[name][case]['out_tok_s']:,.0f}" for case in ("free", "guided")),
            f"{got[name]['guided_of_free']:.3f}",
            f"{got[name]['others_of_free']:.3f}",
        ]
        for name in (
            *("before", "filled", "threads", "processes", "rows_kept", "eight_processes", "debug_log"),
            *("busy_machine", "halves", "chains"),
        )
    ]
    return [
        *("## Rows that follow a grammar", ""),
        wrapped(
            f"{got['rows']} rows of {got['tokens']} tokens of one JSON schema, temperature 1, beside as many without a "
            f"grammar, and those without one of a run in which a quarter has it (`{got['command']}`). {got['note']}"
        ),
        "",
        *table(["", "free, tokens/s", "guided, tokens/s", "guided of free", "others of free"], rows),
    ]
