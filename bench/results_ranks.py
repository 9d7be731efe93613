"""Parts of docs/gpu-results.md: two GPUs of one host, networks that draft, rows that follow a grammar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from results_files import read, table, wrapped


def two_gpus(_: Mapping[str, Any]) -> list[str]:
    sums, rows, pair = (read(f"h200x2-{name}.json") for name in ("sums", "expert-rows", "pd-hand-over"))
    micros, ways = sums["micros_by_rows"], rows["micros_by_rows"]
    load = pair["layouts"]["pairs"]["hand-over"]
    first, second = (load[f"token_{number}_ms"]["p50"] for number in (1, 2))
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
            f"model does it, and the transport's own calls with these bytes (`{rows['command']}`). For NIXL these were "
            "measured before rows that came were packed: experts went over all memory for rows that could come."
        ),
        "",
        *table(["", *(f"{way}, {count} rows" for way in ways for count in ways[way]["ours"])], by_rows),
        "",
        wrapped(
            f"A prompt of {load['prompt']:,} tokens of Llama-3.1-8B's shape, computed by one GPU and decoded by "
            f"the other, one at a time (`{pair['command']}`): first token after {first:.0f} ms, second after "
            f"{second:.0f} ms, medians. The KV is gathered into memory of the other GPU. Gathers waited for the steps "
            "that had been launched; they have a stream of their own since, which has not been measured."
        ),
    ]


def draft_networks(_: Mapping[str, Any]) -> list[str]:
    got = read("h200-draft-networks.json")
    rows = [
        [
            f"{case['rows']}",
            f"{case['acceptance']:g}" + (", adaptive" if case["is_adaptive"] else ""),
            *(f"{case[name]:.2f}" for name in ("plain_ms", "ms")),
            f"{case['tokens_a_row']:.2f}",
            f"{case['speed_up']:.2f}",
        ]
        for case in got["results"]
    ]
    return [
        *("## A network that drafts", ""),
        wrapped(
            f"EAGLE-3's layer before {got['shape']}'s shape inside captured steps, 4 drafts a row, which are "
            f"overwritten so that a known share is right, {got['context']} tokens of context (`{got['command']}`). "
            "The network is of random weights: its time is true, its drafts are not used. Trees have not been measured."
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
            {"before": "masks copied to where they are sent from", "now": "masks filled there"}[name],
            *(f"{got[name][case]['out_tok_s']:,.0f}" for case in ("free", "guided")),
            f"{got[name]['guided_of_free']:.3f}",
            f"{got[name]['others_of_free']:.3f}",
        ]
        for name in ("before", "now")
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
