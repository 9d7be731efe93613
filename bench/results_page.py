"""Writes docs/gpu-results.md from bench/results/h200-*.json. Run it after a GPU run has changed one of them.

python bench/results_page.py [--check]

--check writes nothing, and fails if the page is not what the files give.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from results_files import read, table, wrapped
from results_four import four_gpus
from results_kernels import attention, few_rows, gemm
from results_latents import latent_attention
from results_models import fp8_pages, routed_experts, serving, shapes, small_models, starts
from results_ranks import draft_networks, guided, ranks, two_gpus
from results_transfers import kv_transfers

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "gpu-results.md"
_WORKLOADS = {
    "single_stream": "one stream, 128 in, 256 out",
    "decode_256": "256 streams, 128 in, 512 out",
    "seed_random_500": "500 requests, up to 4,096 in, up to 2,048 out",
    "shared_prefix_512": "32 groups of 16, 2,048 shared + 128 in, 128 out",
}
_PARTS = {  # The files keep the names of their time.
    "products": "GEMMs (of decodes with SwiGLU's gate)",
    "SiLU and product": "SiLU and product of prompts",
    "rotation and KV write": "RoPE and KV write",
    "drawing": "sampling",
    "a step's numbers": "fetching step inputs",
    "norms, rows made FP8": "norms",
    "idle": "no kernel runs",
}
_STEPS = {
    "steps_now": "default",
    "steps_before": "before the project's own GEMMs",
    "steps_fp8": "`--quantization fp8`, cuBLASLt's GEMMs",
    "steps_fp8_block": "`--quantization fp8-block`, cuBLASLt's GEMMs",
    "steps_untuned": "GEMM tuning off",
    "steps_flashinfer": "`--attention-backend flashinfer`",
    "steps_deterministic": "`--deterministic`",
    "steps_compiled": "`--kernels compiled`",
}


def page() -> str:
    """The whole page, as the files of this checkout give it."""
    dense = read("h200-dense.json")
    versions = ", ".join(f"{name} {version}" for name, version in dense["versions"].items())
    head = [
        "# The GPU worker: results",
        "",
        "<!-- Written by bench/results_page.py from bench/results/h200-*.json: change those, then run it. -->",
        "",
        wrapped(
            f"One GPU ({dense['machine']}; {versions}), Llama-3.2-3B's shape with random weights in bf16, if not "
            f"said otherwise. `{dense['command']} --out FOLDER` measures it anew, "
            "file by file, and `bench/gpu/mesh.py --runs 3` the first table alone. The roofline is the least time that "
            "4.3 TB/s and 770 TFLOP/s allow. How the worker reaches these figures: [gpu-design.md](gpu-design.md)."
        ),
        "",
    ]
    parts: list[Callable[[Mapping[str, Any]], list[str]]] = [
        *(
            _throughput,
            _logprobs,
            _whole_mesh,
            _steps,
            _drafts,
            _speculation,
            _prompts,
            _where,
            _idle,
            gemm,
            few_rows,
            attention,
            routed_experts,
            latent_attention,
            kv_transfers,
            two_gpus,
            ranks,
            four_gpus,
            draft_networks,
            guided,
            fp8_pages,
            small_models,
            *(shapes, starts, serving),
        ),
        *(_numerics, _endurance, _notes),
    ]
    return "\n".join(head + [line for part in parts for line in (*part(dense), "")]).rstrip() + "\n"


def _throughput(dense: Mapping[str, Any]) -> list[str]:
    others = read("h200-other-engines.json")
    rows = [
        [
            text,
            "; ".join(f"{run:,.0f}" for run in dense["workloads"][name]["runs"]),
            f"{dense['workloads'][name]['roofline_share']:.2f}",
            f"{dense['mesh_over_replay'][name]:.1%}" if name in dense["mesh_over_replay"] else "",
            *(f"{figures[name]:,}" for figures in others["out_tok_s"].values()),
        ]
        for name, text in _WORKLOADS.items()
    ]
    titles = ["workload", "tokens/s, runs in order", "of the roofline", "of a replay"]
    more = [
        [f"{label}, {name}", "; ".join(f"{run:,.0f}" for run in figures["runs"]), f"{figures['roofline_share']:.2f}"]
        for label, group in _other_runs(dense)
        for name, figures in group.items()
    ]
    return [
        *("## Tokens a second through scheduler and worker", ""),
        *table([*titles, *others["out_tok_s"]], rows),
        "",
        wrapped(
            "A replay sends the same plans to the worker with no scheduler and no wire. A worker's first run takes one "
            "stream 60 ms longer, because an idle GPU is at 345 MHz. 256 streams run at the power limit of 700 W: the "
            "clock falls from 1,980 to some 1,600 MHz, and a step takes 6-9% longer than in a burst of 40. The columns "
            f"of other engines: {others['note']}."
        ),
        "",
        *table(["variant, workload", "tokens/s", "of the roofline"], more),
    ]


def _other_runs(dense: Mapping[str, Any]) -> Iterable[tuple[str, Mapping[str, Any]]]:
    yield "`--quantization fp8`", dense["workloads_fp8"]
    yield "`--dtype float16`", dense["workloads_float16"]
    yield from dense["other_shapes"].items()


def _logprobs(_: Mapping[str, Any]) -> list[str]:
    got = read("h200-logprobs.json")
    rows = [[f"{got['asking'][name]}", f"{tok_s:,.0f}"] for name, tok_s in got["out_tok_s"].items()]
    return [
        *("## Logprobs", ""),
        wrapped(
            f"{got['requests']} streams, of which some ask for {got['alternatives']} alternatives of every token "
            f"(`{got['command']}`). {got['asking']['some']} of them leave {got['ratio']['some']:.1%} of the tokens a "
            f"second, all of them {got['ratio']['all']:.1%}."
        ),
        "",
        *table(["streams that ask", "tokens/s"], rows),
    ]


def _whole_mesh(dense: Mapping[str, Any]) -> list[str]:
    mesh, start = dense["whole_mesh"], dense["start_s"]
    compiled_s = start.get("kernels compiled", start.get("kernels of products compiled"))
    ttft, itl = mesh["ttft_ms"], mesh["itl_ms"]
    cores = ", ".join(f"{name} {value:g}" for name, value in mesh["cores"].items())
    return [
        *("## The whole mesh", ""),
        wrapped(
            f"All five daemons and {mesh['streams']} streaming text clients (`{mesh['command']}`): "
            f"{mesh['out_tok_s']:,.0f} tokens/s. Time to first token p50 {ttft['p50']:.0f} ms, p99 {ttft['p99']:.0f} "
            f"ms (all prompts come at once); inter-token latency p50 {itl['p50']:.1f} ms, p99 {itl['p99']:.1f} ms; "
            f"{mesh['coalescing']} tokens a message. Cores busy: {cores}."
        ),
        "",
        wrapped(
            f"From start to serving, without weights from disk: {start['warm kernel caches']:.0f} s with warm kernel "
            f"caches, {compiled_s:.0f} s where the project's own GEMMs are compiled too."
        ),
    ]


def _steps(dense: Mapping[str, Any]) -> list[str]:
    sizes = (1, 8, 64, 256, 512)
    rows = []
    for key, label in _STEPS.items():
        by_rows = {entry["rows"]: entry for entry in dense.get(key, {"decode": []})["decode"]}
        if not by_rows:
            continue
        rows.append([label, *(_step_cell(by_rows[size]) if size in by_rows else "" for size in sizes)])
    return [
        *("## A decode step of the worker alone", ""),
        "Milliseconds at context 384, in brackets the share of the roofline in bf16, by number of rows:",
        "",
        *table(["", *map(str, sizes)], rows),
    ]


def _drafts(_: Mapping[str, Any]) -> list[str]:
    got = read("h200-verify.json")
    steps, shape = got["steps"], got["shape"]
    positions = sorted({step["positions"] for step in steps})
    cells = {(step["rows"], step["context"], step["positions"]): step for step in steps}
    rows = []
    for num_rows, context in dict.fromkeys((step["rows"], step["context"]) for step in steps):
        of_case = [cells.get((num_rows, context, count)) for count in positions]
        plain = next(f"{case['plain_ms']:.2f}" for case in of_case if case)
        ratios = (f"{case['ms']:.2f} ({case['ratio']:.2f})" if case else "" for case in of_case)
        rows.append([f"{num_rows}", f"{context:,}", plain, *ratios])
    return [
        *("## Steps that verify drafts", ""),
        wrapped(
            f"{shape}, milliseconds a step by positions of a row (its last token and the drafts), in brackets over a "
            f"plain step (`{got['command']}`). A row whose drafts are all accepted yields as many tokens as it has "
            "positions."
        ),
        "",
        *table(["rows", "context", "plain", *(f"{count} positions" for count in positions)], rows),
        "",
        *_draft_parts(),
    ]


def _draft_parts() -> list[str]:
    """Time of a step of one row by kind of kernel, with and without drafts, from the traces among the results."""
    steps = [s for s in read("h200-verify.json")["steps"] if s["rows"] == 1 and "verify_trace" in s]
    context = min(step["context"] for step in steps)
    traced = sorted((s for s in steps if s["context"] == context), key=lambda step: step["positions"])
    columns = [traced[0]["plain_trace"], *(step["verify_trace"] for step in traced)]
    parts = sorted(columns[0]["us_per_step"], key=lambda part: -columns[0]["us_per_step"][part])
    parts = list(dict.fromkeys([*parts, *(part for column in columns for part in column["us_per_step"])]))
    rows = [
        [_PARTS.get(part, part), *(f"{column['us_per_step'].get(part, 0.0):,.0f}" for column in columns)]
        for part in parts
        if any(column["us_per_step"].get(part, 0.0) >= 0.5 for column in columns)
    ]
    return [
        f"Microseconds of a step of one row at context {context:,}, by kind of kernel, under the profiler:",
        "",
        *table(["", "plain", *(f"{step['positions']} positions" for step in traced)], rows),
    ]


def _speculation(_: Mapping[str, Any]) -> list[str]:
    got = read("h200-speculation.json")
    rows = [
        [
            *(r["drafter"], f"{r['rows']}", f"{r['plain_tokens_per_s']:,.0f}", f"{r['tokens_per_s']:,.0f}"),
            *(f"{r[key]:.2f}" for key in ("tokens_a_row", "ms", "speed_up")),
        ]
        for r in (*got["results"], *got["mixed"]["results"])
    ]
    return [
        *("### Tokens a second with drafts", ""),
        wrapped(
            f"{got['shape']}, context {got['context']}, up to {got['results'][0]['drafts']} drafts a row, of the "
            f"worker alone (`{got['command']}`). forced: each draft of the host is right with that probability; ngram: "
            "all are right, but the first; wrong: none is. Adaptive steps draft only while that pays. mixed: drafts of "
            f"half of the rows are right with 0.9, of the others with 0.1 (`{got['mixed']['command']}`); chains: all "
            "rows have all drafts; by row: as adaptive steps do it; all or nothing: as they did before."
        ),
        "",
        *table(["drafter", "rows", "plain, tokens / s", "tokens / s", "tokens of a row", "ms", "over plain"], rows),
    ]


def _step_cell(entry: Mapping[str, Any]) -> str:
    share = f" ({entry['roofline']:.2f})" if entry.get("roofline") else ""
    return f"{entry['ms']:.2f}{share}"


def _prompts(dense: Mapping[str, Any]) -> list[str]:
    lengths = (128, 1024, 2048, 8192)
    rows = []
    for key, label in {"steps": "default, an earlier commit", **_STEPS}.items():
        by_len = {entry["tokens"]: entry["ms"] for entry in dense.get(key, {}).get("prefill", [])}
        mixed = [f"{entry['ms']:.2f}" for entry in dense.get(key, {}).get("mixed", [])]
        if by_len:
            cells = [f"{by_len[length]:.1f}" if length in by_len else "" for length in lengths]
            rows.append([label, *cells, *(mixed or [""])])
    return [
        *("## Prompts", ""),
        "Milliseconds of a step with one prompt, by its tokens, and of one with 256 decodes beside a chunk of 128:",
        "",
        *table(["", *(f"{length:,}" for length in lengths), "256 + 128"], rows),
    ]


def _where(dense: Mapping[str, Any]) -> list[str]:
    traced = dense["where"]["where"]
    names = ("single-stream", "decode-256", "shared-prefix")
    parts = sorted({part for name in names for part in traced[name]["shares"]} - {"others"})
    parts.sort(key=lambda part: -traced["decode-256"]["shares"].get(part, 0.0))
    rows = [
        [_PARTS.get(part, part), *(f"{traced[name]['shares'].get(part, 0.0):.1%}" for name in names)] for part in parts
    ]
    rows.append(["a step, us", *(f"{sum(traced[name]['us_per_step'].values()):,.0f}" for name in names)])
    return [
        *("## Where the time goes", ""),
        f"Traces of the workloads' own runs, prompts included (`{dense['where']['command']}`):",
        "",
        *table(["", "one stream", "256 streams", "shared prefixes"], rows),
    ]


def _idle(dense: Mapping[str, Any]) -> list[str]:
    rows = [
        [f"depth {depth}" if depth != "auto" else "chosen by the lookahead rule", *(f"{v:.2%}" for v in by.values())]
        for depth, by in dense["idle_ratio"].items()
    ]
    sizes = next(iter(dense["idle_ratio"].values()))
    return [
        *("## GPU idle in steady decode through the mesh", ""),
        f"Share of the time in which no kernel runs, while traced (`{dense['idle']['command']}`):",
        "",
        *table(["pipeline depth", *(f"{size} row{'s' * (size != '1')}" for size in sizes)], rows),
    ]


def _numerics(dense: Mapping[str, Any]) -> list[str]:
    figures = dense["numerics"]["results"][0] | dense["numerics_fp8"]["results"][0]
    labels = {
        "transformers_bf16": "transformers in bf16",
        "triton_chunks_of_256": "worker, bf16, one chunk",
        "triton_one_row": "worker, bf16, token by token",
        "flashinfer_chunks_of_256": "worker, bf16, FlashInfer",
        "fp8_chunks_of_256": "worker, fp8, one chunk",
        "fp8_one_row": "worker, fp8, token by token",
        "fp8-block_chunks_of_256": "worker, fp8-block, one chunk",
        "fp8-block_one_row": "worker, fp8-block, token by token",
    }
    rows = [
        [label, f"{figures[key]['relative']:.1%}", f"{figures[key]['same_argmax']:.0%}"]
        for key, label in labels.items()
    ]
    return [
        *("## Numerics", ""),
        f"Random weights, 256 tokens, against float32 (`{dense['numerics']['command']}`):",
        "",
        *table(["", "error of logits, of their norm", "same argmax"], rows),
    ]


def _endurance(_: Mapping[str, Any]) -> list[str]:
    soak = read("h200-soak.json")
    requests, kills = soak["requests"], soak["kills"]
    by_service = {name: [kill for kill in kills if kill["service"] == name] for name in ("scheduler", "worker")}
    rows = [
        [service, str(len(group)), _range(group, "back_s"), _range(group, "stall_s"), _range(group, "adopted_tokens")]
        for service, group in by_service.items()
    ]
    runs = soak.get("baseline", soak.get("quiet"))  # Older results have the old name.
    baseline = " and ".join(f"{entry['ms_per_step']:.2f}" for entry in runs)
    return [
        *("## Endurance", ""),
        wrapped(
            f"{soak['minutes']:.0f} minutes of the whole mesh under mixed random load with cancelled requests "
            f"(`{soak['command']}`, commit {soak['commit']}): {requests['begun']:,} requests, {requests['tokens']:,} "
            f"tokens, {soak['lost']} lost, {len(soak['problems'])} problems, {len(soak['logs']['errors'])} errors in "
            f"the logs. Steps of 256 rows took {baseline} ms before and after; after a flush all "
            f"{soak['at_rest']['free_pages_after_flush']:,} pages were free."
        ),
        "",
        *table(["killed (-9)", "times", "healthy after s", "longest pause of a stream s", "tokens adopted"], rows),
    ]


def _range(kills: Sequence[Mapping[str, Any]], key: str) -> str:
    values = [kill[key] for kill in kills]
    shown = [f"{value:,}" if isinstance(value, int) else f"{value:.1f}" for value in (min(values), max(values))]
    return shown[0] if len(values) == 1 else f"{shown[0]} to {shown[1]}"


def _notes(dense: Mapping[str, Any]) -> list[str]:
    lines = ["## Notes of the files", "", 'In the words of their time ("products" are GEMMs):', ""]
    for name in ("h200-dense.json", "h200-products90.json", "h200-decode-attention.json", "h200-verify.json"):
        lines += [wrapped(f"- {name}: {note}", "  ") for note in read(name)["notes"]]
    return lines


def main(argv: Sequence[str]) -> int:
    text = page()
    if "--check" in argv:
        is_current = PAGE.exists() and PAGE.read_text(encoding="utf-8") == text
        print("current" if is_current else f"{PAGE.relative_to(ROOT)} is out of date: run bench/results_page.py")
        return 0 if is_current else 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
