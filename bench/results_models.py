"""Parts of docs/gpu-results.md: models with routed experts, FP8 pages, small models, starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from results_files import read, table, wrapped

# tokens/s of vLLM 0.22.1 on the same kind of GPU, sampled at temperature 1; of two figures the larger.
_VLLM = {
    "deepseek-v2-lite": {"single-stream": 277, "decode-256": 27_500, "shared-prefix": 12_200},
    "qwen3-30b-a3b": {"single-stream": 228, "decode-256": 10_700, "shared-prefix": 7_900},
}


def routed_experts(_: Mapping[str, Any]) -> list[str]:
    got = read("h200-moe.json")
    rows = []
    for shape, runs in got["shapes"].items():
        for name, run in runs["workloads"].items():
            peer = _VLLM[shape][name]
            idle = f"{1 - run['device_busy']:.1%}"
            figures = [f"{run['out_tok_s']:,.0f}", f"{peer:,}", f"{run['out_tok_s'] / peer:.2f}"]
            rows.append([shape, name, *figures, f"{run['roofline_share']:.0%}", idle])
    parts = [
        [shape, workload, *(f"{run['us_per_step'].get(part, 0):,.0f}" for part in _PARTS)]
        for shape, runs in got["shapes"].items()
        for entry in runs["where"]
        for workload, run in entry.items()
    ]
    starts = [
        [shape, f"{runs['start_s']:.0f} s", *(f"{runs['memory'][field] / 2**30:.1f} GiB" for field in _MEMORY)]
        for shape, runs in got["shapes"].items()
        if "memory" in runs
    ]
    return [
        *("## Latent attention and routed experts", ""),
        wrapped(f"Random weights in bf16, sampled at temperature 1, the best of three runs (`{got['command']}`)."),
        "",
        *table(["shape", "workload", "tokens/s", "vLLM 0.22.1", "ratio", "of the roofline", "idle"], rows),
        "",
        *([wrapped(_since(got["since"])), ""] if "since" in got else []),
        *(["Microseconds of a step, by part, under the profiler:", ""] if parts else []),
        *(table(["shape", "workload", *_PARTS], parts) if parts else []),
        *(["", "Until the worker serves:", ""] if starts else []),
        *(table(["shape", "start", "weights", "in use before KV pages and graphs"], starts) if starts else []),
    ]


def _since(got: Mapping[str, Any]) -> str:
    before, since = got["kernels_us"]["before"], got["kernels_us"]["since"]
    runs, others = got["workloads"], got["qwen3-30b-a3b"]
    return (
        f"Since these runs DeepSeek-V2-Lite gives {runs['decode-256']['out_tok_s']:,.0f} tokens/s in decode-256 and "
        f"{runs['shared-prefix']['out_tok_s']:,.0f} in shared-prefix, Qwen3-30B-A3B "
        f"{others['decode-256']['out_tok_s']:,.0f} and {others['shared-prefix']['out_tok_s']:,.0f} "
        f"(`{got['command']}`, commit {got['commit']}). Since commit d33eaaba (17,434 in shared-prefix, 12,513 and "
        "12,254) weights of experts come by TMA, which gives 2% for 256 rows and 5% for prompts, and attention over "
        "shared prefixes has tasks for warp groups (below). Of 256 rows, router logits "
        f"take {since['router_logits pdl=True']} us instead of {before['router_logits pdl=True']}, attention at 384 "
        f"tokens {since['mla_decode 384 scattered']} instead of {before['mla_decode 384']}, a sampled token "
        f"{since['sample 1.0']:.0f} where the search for noise alone took 270 (`bench/gpu/moe_step.py --rows 256`), "
        "and shared experts are computed beside the routed ones."
    )


_MEMORY = ("weights_bytes", "used_bytes")
_PARTS = ("experts", "gemm", "attention of decodes", "expansions of latents", "routing of rows to experts", "idle")


def fp8_pages(_: Mapping[str, Any]) -> list[str]:
    got = read("h200-kv-fp8.json")
    before = {entry["pages"]: entry for entry in got["before"]["models"]}
    rows = []
    for entry in got["models"]:
        for step, earlier in zip(entry["steps"], before[entry["pages"]]["steps"], strict=True):
            size = [f"{step['rows']}", f"{step['context']:,}", f"{step['ms']:.2f}", f"{earlier['ms']:.2f}"]
            fits = "" if step["fits"] else "more than there are"
            rows.append([entry["pages"], *size, f"{step['tok_s']:,}", f"{entry['tokens_of_kv']:,}", fits])
    kernels = {entry["pages"]: entry for entry in got["attention"] if entry["config"] is None}
    best = min((e for e in got["attention"] if e["pages"].startswith("float8")), key=lambda entry: entry["us"])
    bf16 = kernels["bfloat16"]
    return [
        *("## Keys and values in FP8", ""),
        wrapped(
            f"{got['shape']} (`{got['command']}`). A layer's decode attention at 256 rows of context 4,096 takes "
            f"{bf16['us']:.0f} us over bf16 ({bf16['tb_s']:.2f} TB/s) and {best['us']:.0f} us over FP8 "
            f"({best['tb_s']:.2f} TB/s); relative error {bf16['relative_error']:.1%} and {best['relative_error']:.1%}. "
            f'"Earlier": before numbers were converted two at a time ({got["before"]["why_slower"]}).'
        ),
        "",
        *table(["pages", "rows", "context", "ms a step", "earlier", "tokens/s", "tokens of KV", ""], rows),
    ]


def small_models(_: Mapping[str, Any]) -> list[str]:
    got = read("h200-small.json")
    rows = []
    for name, run in got["workloads"].items():
        before = got["before"]["workloads"][name]
        figures = [
            [f"{one['out_tok_s']:,.0f}", f"{one['ms_per_step']:.2f}", f"{1 - one['device_busy']:.1%}"]
            for one in (before, run)
        ]
        rows.append([name, *figures[0], *figures[1]])
    steps = [
        [
            str(host["rows"]),
            f"{host['step_us']:,.0f}",
            f"{max(0.0, 1 - host['device_us'] / host['step_us']):.1%}",
            *(f"{host['cpu_us_per_step'][side]['all']:,.0f}" for side in ("worker", "scheduler")),
        ]
        for host in got["host"]
    ]
    return [
        *("## A small model", ""),
        wrapped(
            f"{got['shape']}, the better of two runs (`{got['command']}`), and {got['before']['what']}. The whole run, "
            "with its prompt: while that is read no step is behind it."
        ),
        "",
        *table(
            ["workload", "tokens/s before", "ms a step", "no step runs", "tokens/s", "ms a step", "no step runs"], rows
        ),
        "",
        "Decode steps alone, and the CPU that the host spends on one, in microseconds:",
        "",
        *table(["rows", "us a step", "no step runs", "CPU of the worker", "CPU of the scheduler"], steps),
        "",
        wrapped(
            "Before that, the worker spent 942 us of CPU on a step of one row, 712 of them on the launching thread; "
            "a trace had the device wait 86 us a step at the borders of batches: the interpreter was full. Now the "
            "thread takes 258. The trace of this run has two pauses of milliseconds; the device's clock, untraced, has "
            "none."
        ),
    ]


def shapes(_: Mapping[str, Any]) -> list[str]:
    """Before and after, by shape; a shape that was not measured since has no figures of now."""
    got = read("h200-shapes.json")
    rows = []
    for shape, workloads in got["before"]["shapes"].items():
        for name, before in workloads.items():
            run = got["shapes"].get(shape, {}).get("workloads", {}).get(name)
            figures = [f"{before['out_tok_s']:,.0f}", f"{1 - before['device_busy']:.1%}"]
            if run is not None:
                runs = "; ".join(f"{rate:,.0f}" for rate in run["runs"])
                figures += [runs, f"{run['ms_per_step']:.2f}", f"{1 - run['device_busy']:.1%}"]
                figures += [f"{run['roofline_share']:.0%}"]
            rows.append([shape, name, *figures, *[""] * (6 - len(figures))])
    return [
        *("## Dense shapes from 1B to 8B", ""),
        wrapped(
            f"Random weights in bf16, runs in order (`{got['command']}`), beside what was measured before "
            f"({got['before']['what']}). Idle is the share of the time in which no step ran; of the roofline is of the "
            "best run."
        ),
        "",
        *table(["shape", "workload", "before", "idle", "tokens/s", "ms a step", "idle", "of the roofline"], rows),
    ]


def starts(_: Mapping[str, Any]) -> list[str]:
    got = read("h200-start.json")
    names = list(got["starts"])
    parts = next(iter(got["starts"].values()))["phases_s"]
    rows = [[part, *(f"{got['starts'][name]['phases_s'][part]:.1f}" for name in names)] for part in parts]
    rows.append(["to serving", *(f"**{got['starts'][name]['start_s']:.1f}**" for name in names)])
    return [
        *("## Start of a worker by phase", ""),
        wrapped(
            f"{got['shape']}, random weights, seconds (`{got['command']}`). GEMMs of our own compile while cuBLASLt's "
            "are measured. Before: Triton's kernels were compiled side by side, but the C function that launches each "
            "of them at its first launch, one after the other."
        ),
        "",
        *table(["phase", *names], rows),
        "",
        wrapped(_daemon_start(got["daemons"])),
    ]


def _daemon_start(got: Mapping[str, Any]) -> str:
    (cold, warm), before = (got["starts"][name] for name in ("cold 1", "warm 1")), got["before"]
    phases = ", ".join(f"{phase['event']} {phase['at_s']:.1f}" for phase in cold["phases"] if "seconds" in phase)
    return (
        f"The whole daemon, mask processes included, commit {got['commit']} (`{got['command']}`): it serves "
        f"{cold['serving_s']:.1f} s after an empty start and {warm['serving_s']:.1f} with warm caches, where commit "
        f"{before['commit']} took {before['serving_s']['cold 1']:.1f} and {before['serving_s']['warm 1']:.1f}. Ends of "
        f"phases of the empty one, by their events in the log: {phases}."
    )


def serving(_: Mapping[str, Any]) -> list[str]:
    got = read("h200-serve.json")
    rows = [
        [entry["family"], *(f"{entry['runs'][turn]['first_answer_s']:.1f}" for turn in (0, 1))]
        for entry in got["families"]
    ]
    return [
        *("## From `radixmesh serve` to the first answer", ""),
        wrapped(
            f"Folders made by transformers' `save_pretrained`, seconds (`{got['command']}`). The last family is run by "
            "transformers' own modules."
        ),
        "",
        *table(["family", "first start", "second"], rows),
    ]
