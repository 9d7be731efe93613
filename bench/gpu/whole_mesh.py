"""All five daemons with a worker on a GPU and 256 streaming text clients over gRPC: throughput, TTFT, ITL.

    python bench/gpu/whole_mesh.py --streams 256 --prompt 128 --out 512

One router, one detokenizer, one tokenizer. Clients are processes of their own that read and take apart every message.
The weights are random; the tokenizer is made up: bytes and as many made-up words as the vocabulary has room for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from gpu.shapes import SHAPES, write_shape
from hop_ladder.processes import Processes, cpu_s

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.arrays import pack_ints
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.router.v1 import router_pb2

GENERATE = "/radixmesh.router.v1.RouterService/Generate"
_PROCESSES = 8
# Until then all clients have imported what they need.
_IMPORTS_S = 6.0


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level vocabulary of exactly that size."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    symbols = [chr(byte) for byte in printable] + [chr(256 + index) for index in range(len(others))]
    words = [f"\u0120w{number}" for number in range(vocab_size - len(symbols))]
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: index for index, token in enumerate([*symbols, *words])},
        "merges": [],
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": model,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


async def read_streams(
    address: str, first: int, count: int, prompt: int, out: int, start_at: float
) -> dict[str, object]:
    """Results of `count` clients, who begin at `start_at`; times on the monotonic clock, which processes share."""
    firsts: list[float] = []
    gaps: list[float] = []
    totals = {"tokens": 0, "messages": 0, "text_bytes": 0}

    async def one(number: int) -> None:
        ids = np.random.default_rng(number).integers(300, 100_000, prompt)
        request = router_pb2.GenerateRequest(
            prompt_ids=pack_ints(ids.tolist()),
            sampling=common_pb2.SamplingParams(temperature=0.0),
            stop=common_pb2.StopParams(max_tokens=out, ignore_eos=True),
        ).SerializeToString()
        start = last = time.monotonic()
        async for data in channels[number % 4].unary_stream(GENERATE)(request):
            message = router_pb2.GenerateResponse.FromString(data)
            num = sum(len(delta.ids) for delta in message.deltas) // 4
            if not num:
                continue
            now = time.monotonic()
            if last == start:
                firsts.append(now - start)
            else:
                gaps.append(now - last)
            last = now
            totals["tokens"] += num
            totals["messages"] += 1
            totals["text_bytes"] += sum(len(delta.text) for delta in message.deltas)

    channels = [open_channel(address) for _ in range(4)]
    await asyncio.sleep(start_at - time.monotonic())
    begun = time.monotonic()
    await asyncio.gather(*(one(first + i) for i in range(count)))
    return {"begun": begun, "ended": time.monotonic(), "ttft": firsts, "gaps": gaps, **totals}


async def measure(args: argparse.Namespace) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        async with Processes(Path(folder), "unix", start_s=240.0) as processes:
            model = write_shape(args.shape, Path(folder))
            vocab_size = SHAPES[args.shape]["vocab_size"]
            assert isinstance(vocab_size, int)
            write_tokenizer(model, vocab_size)
            worker = {
                "backend": "cuda",
                "model": model,
                "load_format": "dummy",
                "num_slots": args.streams,
                "max_tokens_per_step": 8192,
                "max_total_len": 8192,
            }
            await processes.start("worker", "worker", worker)
            scheduler = {"workers": processes.address("worker"), "chunk_tokens": 8192}
            await processes.start("scheduler", "scheduler", scheduler)
            await processes.start("tokenizer", "tokenizer", {"model": model})
            await processes.start("detokenizer", "detokenizer", {"model": model})
            peers = {f"{name}s": processes.address(name) for name in ("tokenizer", "detokenizer", "scheduler")}
            await processes.start("router", "router", {**peers, "client_stall_s": 120})
            runs = [await _run(processes, args) for _ in range(args.runs)]
    best = max(runs, key=lambda run: float(str(run["out_tok_s"])))
    return {
        "command": " ".join(["python", *sys.argv]),
        "streams": args.streams,
        **best,
        "runs": [r["out_tok_s"] for r in runs],
    }


async def _run(processes: Processes, args: argparse.Namespace) -> dict[str, object]:
    names = ("worker", "scheduler", "router", "detokenizer")
    cpu = {name: cpu_s(processes.pid(name)) for name in names}
    share = args.streams // _PROCESSES
    numbers = ["--prompt", str(args.prompt), "--out", str(args.out), "--count", str(share)]
    numbers += ["--start-at", str(time.monotonic() + _IMPORTS_S)]
    clients = [
        await asyncio.create_subprocess_exec(
            sys.executable,
            __file__,
            "--clients",
            processes.address("router"),
            "--first",
            str(index * share + int(time.time()) % 10_000 * 1000),
            *numbers,
            stdout=asyncio.subprocess.PIPE,
            # Each run's line holds every gap: more than the default of a line.
            limit=1 << 26,
        )
        for index in range(_PROCESSES)
    ]
    seen = [json.loads((await client.communicate())[0]) for client in clients]
    wall = max(s["ended"] for s in seen) - min(s["begun"] for s in seen)
    tokens, messages = sum(s["tokens"] for s in seen), sum(s["messages"] for s in seen)
    assert tokens == args.out * share * _PROCESSES, tokens
    ttft = np.concatenate([s["ttft"] for s in seen]) * 1e3
    gaps = np.concatenate([s["gaps"] for s in seen]) * 1e3
    return {
        "out_tok_s": round(tokens / wall, 1),
        "seconds": round(wall, 3),
        "ttft_ms": {f"p{p}": round(float(np.percentile(ttft, p)), 1) for p in (50, 99)},
        "itl_ms": {f"p{p}": round(float(np.percentile(gaps, p)), 2) for p in (50, 99)},
        "coalescing": round(tokens / messages, 2),
        "cores": {name: round((cpu_s(processes.pid(name)) - cpu[name]) / wall, 2) for name in names},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.2-3b")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--out", type=int, default=512)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--clients", metavar="ADDRESS", help="be some of the clients")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--start-at", type=float, default=0.0)
    args = parser.parse_args()
    if args.clients:
        print(
            json.dumps(
                asyncio.run(read_streams(args.clients, args.first, args.count, args.prompt, args.out, args.start_at))
            )
        )
        return
    print(json.dumps(asyncio.run(measure(args)), indent=1))


if __name__ == "__main__":
    main()
