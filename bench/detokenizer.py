"""Cost of detokenisation: the decode table alone, and the daemon over gRPC.

    python bench/detokenizer.py [--model FOLDER] [--entries 256] [--tokens 200] [--json FILE]

One token per entry and frame, as a decode step gives them; stop strings: none, four, 64. Over gRPC the client keeps a
few frames on their way, and the daemon runs in a process of its own: its CPU seconds are what a token costs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.arrays import pack_ints
from radixmesh.daemons.runtime.detokenize.decoder_table import DecoderTable, EntryBudget, Limits
from radixmesh.daemons.runtime.detokenize.messages import OpenEntry, TokenBatch
from radixmesh.daemons.runtime.detokenize.text_decoder import family_of
from radixmesh.daemons.runtime.model_folder.vocabulary import Vocabulary
from radixmesh.daemons.runtime.rpc.channel import check_health, open_channel
from radixmesh.daemons.runtime.rpc.hello import make_hello
from radixmesh.detokenizer.v1 import detokenizer_pb2 as pb
from radixmesh.detokenizer.v1 import detokenizer_pb2_grpc

TINY = Path(__file__).parents[1] / "compose" / "models" / "tiny-llama"
TEXT = "It was the best of times, it was the worst of times; naïve café, 日本語, and 😀 emoji.\n"
# Some start like the text does, so that text is held back and searched.
STOPS = {"none": [], "four": ["\nUser:", "###", "the end", "<stop>"], "64": [f"the {n} best" for n in range(64)]}
# Frames that the client has on their way: enough to keep the daemon busy, as a scheduler one step ahead does.
NUM_IN_FLIGHT = 4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=TINY)
    parser.add_argument("--entries", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400, help="per entry")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    vocabulary = Vocabulary.load(args.model)
    ids = vocabulary.tokenizer.encode(TEXT, add_special_tokens=False).ids
    outputs = [[ids[(entry + position) % len(ids)] for position in range(args.tokens)] for entry in range(args.entries)]
    results: dict[str, object] = {
        "command": " ".join(sys.argv),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "entries": args.entries,
        "tokens_per_entry": args.tokens,
    }
    for name, stops in STOPS.items():
        results[f"domain, {name} stop strings"] = bench_domain(vocabulary, outputs, stops)
    with tempfile.TemporaryDirectory() as folder:
        results |= asyncio.run(bench_daemon(args.model, outputs, Path(folder)))
    text = json.dumps(results, indent=2)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n")
    return 0


def bench_domain(vocabulary: Vocabulary, outputs: list[list[int]], stops: list[str]) -> dict[str, float]:
    limits = Limits(max_stop_bytes=1024)
    table = DecoderTable(family_of(vocabulary), vocabulary.vocab_size, limits, EntryBudget(len(outputs)))
    for handle in range(len(outputs)):
        table.open(OpenEntry(handle=handle, stops=stops))
    num_tokens = len(outputs[0])
    batches = [
        TokenBatch(
            handles=list(range(len(outputs))),
            first_indexes=[position] * len(outputs),
            counts=[1] * len(outputs),
            finals=bytes(len(outputs)),
            ids=[output[position] for output in outputs],
            min_id=0,
            max_id=vocabulary.vocab_size - 1,
        )
        for position in range(num_tokens)
    ]
    start = time.process_time()
    for batch in batches:
        deltas, failures = table.push(batch)
        assert len(deltas) == len(outputs) and not failures
    took_s = time.process_time() - start
    return {"tokens_per_cpu_s": round(num_tokens * len(outputs) / took_s)}


async def bench_daemon(model: Path, outputs: list[list[int]], folder: Path) -> dict[str, object]:
    """Over TCP and over a unix socket, each with a daemon of its own."""
    results: dict[str, object] = {}
    for name, listen in (("tcp", "127.0.0.1:0"), ("unix", f"unix:{folder}/socket")):
        address_file = folder / f"{name}.address"
        argv = ["--model", str(model), "--listen", listen, "--address-file", str(address_file), "--log-level", "error"]
        start = time.monotonic()
        daemon = await asyncio.create_subprocess_exec(sys.executable, "-m", "radixmesh.daemons.detokenizer", *argv)
        try:
            while not address_file.exists():
                assert daemon.returncode is None, "the daemon left"
                await asyncio.sleep(0.01)
            address = address_file.read_text().split()[0]
            while await check_health(address) != "SERVING":  # noqa: ASYNC110 - another process.
                await asyncio.sleep(0.01)
            results[f"{name}: start to serving, s"] = round(time.monotonic() - start, 2)
            for stops_name, stops in STOPS.items():
                results[f"{name}, {stops_name} stop strings"] = await stream_all(address, outputs, stops, daemon.pid)
        finally:
            daemon.terminate()
            await asyncio.wait_for(daemon.wait(), 20)
    return results


async def stream_all(address: str, outputs: list[list[int]], stops: list[str], pid: int) -> dict[str, float]:
    async with open_channel(address) as channel:
        call = detokenizer_pb2_grpc.DetokenizerServiceStub(channel).Detokenize()
        handles = range(len(outputs))
        stop = common_pb2.StopParams(stop=stops)
        opens = [pb.Open(handle=handle, stop=stop) for handle in handles]
        await call.write(pb.DetokenizeRequest(hello=make_hello("bench", "router"), opens=opens))
        await call.read()
        await call.read()
        num_tokens = len(outputs[0])
        packed = pack_ints(list(handles))
        ones = pack_ints([1] * len(outputs))
        frames = [
            pb.DetokenizeRequest(
                tokens=pb.TokenRows(
                    handles=packed,
                    first_output_indexes=pack_ints([position] * len(outputs)),
                    counts=ones,
                    ids=pack_ints([output[position] for output in outputs]),
                )
            )
            for position in range(num_tokens)
        ]
        room = asyncio.Semaphore(NUM_IN_FLIGHT)

        async def write() -> None:
            for frame in frames:
                await room.acquire()
                await call.write(frame)

        cpu_s, start = cpu_seconds(pid), time.monotonic()
        writing = asyncio.create_task(write())
        num_seen = num_released = 0
        while num_seen < num_tokens:
            response = await call.read()
            assert not response.failures
            num_seen = min(row.num_tokens for row in response.rows) if response.rows else num_seen
            for _ in range(num_seen - num_released):
                room.release()
            num_released = num_seen
        await writing
        took_s, cpu_s = time.monotonic() - start, cpu_seconds(pid) - cpu_s
        await call.done_writing()
        total = num_tokens * len(outputs)
        return {"tokens_per_s": round(total / took_s), "tokens_per_daemon_cpu_s": round(total / max(cpu_s, 0.01))}


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
