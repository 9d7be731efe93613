"""The trace of one request through all daemons: recorded by OTLP, drawn as a waterfall. CPU only.

    python bench/trace.py [--picture docs/trace.svg] [--json FILE] [--compose compose/local.yml] [--tokens 12]

Starts the compose file as local processes with `--otlp-endpoint` at a receiver of this script, warms up, sends one text
and waits for the spans of its trace. Prints them as a tree, and fails unless every daemon is in it.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from observability.otlp_receiver import OtlpReceiver
from observability.spans import Placed, Span, as_tree
from observability.waterfall import waterfall

from radixmesh.client import AsyncClient
from radixmesh.daemons.cluster.local_cluster import LocalCluster

ROOT = Path(__file__).resolve().parents[1]
DAEMONS = ("router", "tokenizer", "detokenizer", "scheduler", "worker")
_PROMPT = "I met a traveller from an antique land"
_SPANS_S = 20.0


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    spans = asyncio.run(_trace(args.compose, args.tokens))
    rows = as_tree(spans)
    for row in rows:
        print(f"{row.span.duration_ms:9.2f} ms  {'  ' * row.depth}{row.span.name}  ({row.span.service})")
    if args.picture is not None:
        args.picture.write_text(waterfall(rows, _title(rows[0], args.tokens)), encoding="utf-8")
    if args.json is not None:
        args.json.write_text(json.dumps([dataclasses.asdict(row.span) for row in rows], indent=1) + "\n")
    return 0


async def _trace(compose: Path, num_tokens: int) -> list[Span]:
    """The spans of one request's trace. Raises TimeoutError if not every daemon has sent its own in time."""
    async with OtlpReceiver() as receiver:
        # Batches leave five times a second, so that nobody waits for them here.
        settings = {"RADIXMESH_OTLP_ENDPOINT": receiver.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "200"}
        cluster = LocalCluster(compose, environment=dict.fromkeys(DAEMONS, settings), publish=False)
        async with cluster:
            await cluster.wait_healthy(90)
            async with AsyncClient([cluster.address("router")]) as client:
                # Other prompts first: channels, estimates of step times, code that runs for the first time.
                for number in range(3):
                    await client.complete(f"{number} times before", max_tokens=num_tokens, temperature=0.0)
                answer = await client.complete(_PROMPT, max_tokens=num_tokens, temperature=0.0)
            return await _spans_of(receiver, answer.request_id)


async def _spans_of(receiver: OtlpReceiver, request_id: str) -> list[Span]:
    def of_trace(spans: list[Span]) -> list[Span]:
        root = next((s for s in spans if s.attributes.get("radixmesh.request_id") == request_id), None)
        return [] if root is None else [span for span in spans if span.trace_id == root.trace_id]

    def is_whole(spans: list[Span]) -> bool:
        trace = of_trace(spans)
        known = {span.span_id for span in trace}
        daemons = {span.service.rpartition("-")[2] for span in trace}
        return set(DAEMONS) <= daemons and all(not span.parent_id or span.parent_id in known for span in trace)

    try:
        return of_trace(await receiver.wait_for(is_whole, _SPANS_S))
    except TimeoutError:
        got = sorted({f"{span.service}: {span.name}" for span in of_trace(receiver.spans)})
        raise TimeoutError(
            f"the trace is not whole after {_SPANS_S:g} s; it has {', '.join(got) or 'nothing'}"
        ) from None


def _title(root: Placed, num_tokens: int) -> str:
    return f"One request through five daemons: text in, {num_tokens} tokens out, {root.span.duration_ms:.1f} ms"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw the waterfall there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the spans there")
    parser.add_argument("--compose", type=Path, default=ROOT / "compose" / "local.yml", help="what to start")
    parser.add_argument("--tokens", type=int, default=12, help="length of the answer (12)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
