"""The flags of `radixmesh bench serve`."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from radixmesh.cli.access import add_access_flags
from radixmesh.cli.bench.workloads import WORKLOADS

_EPILOG = """
examples:
  radixmesh bench serve --dataset shared-prefix --concurrency 64
  radixmesh bench serve --target grpc://127.0.0.1:50050 --dataset multi-turn --json out.json --plot out.svg
  radixmesh bench serve --target http://127.0.0.1:8000/v1 --input-len 512 --output-len 128 --request-rate 8
  radixmesh bench serve --target https://api.example.com/v1 --plain --dataset sharegpt --file chats.json --chat
"""


def serve_parser() -> argparse.ArgumentParser:
    """All flags; what they mean together is checked where they are used."""
    parser = argparse.ArgumentParser(
        prog="radixmesh bench serve",
        description="Send a workload to a running mesh, or to any OpenAI server, and measure what its clients see. "
        "Workloads of ids whose longest request exceeds the served context are scaled down to it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_target(parser.add_argument_group("target"))
    _add_dataset(parser.add_argument_group("workload"))
    _add_pace(parser.add_argument_group("pace"))
    out = parser.add_argument_group("results")
    out.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    out.add_argument("--details", action="store_true", help="with --json: every request too")
    out.add_argument(
        "--output-file", type=Path, metavar="FILE", help="add a line of JSON there, under sglang.bench_serving's names"
    )
    out.add_argument("--output-details", action="store_true", help="with --output-file: every request's figures too")
    out.add_argument("--plot", type=_svg, metavar="FILE.svg", help="write diagrams there (needs matplotlib)")
    out.add_argument("--oracle", action="store_true", help="show the hit rate of an infinite cache beside")
    out.add_argument("--no-progress", action="store_true", help="show nothing while it runs")
    return parser


def _add_target(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--target",
        metavar="ADDRESS",
        help="grpc://host:port[,...] or http://host:port/v1; default: RADIXMESH_ROUTER, or the cluster that runs here",
    )
    group.add_argument("-p", "--project", help="which cluster, if several run here")
    group.add_argument("--model", default="", help="default: the first that is served")
    group.add_argument("--api-key", default="", help="default: RADIXMESH_API_KEY for meshes, OPENAI_API_KEY for HTTP")
    add_access_flags(group)
    group.add_argument("--plain", action="store_true", help="HTTP: send nothing that OpenAI's own API does not know")
    group.add_argument("--timeout", type=_positive, default=600.0, metavar="SECONDS", help="of a request (600)")


def _add_dataset(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--dataset", default="random", choices=[*WORKLOADS, "sharegpt"], help="default: random")
    group.add_argument("--file", type=Path, help="sharegpt: JSON file of chats")
    group.add_argument(
        "--chat", action="store_true", help="sharegpt: whole chats, each turn after the answer before it"
    )
    group.add_argument("--num-requests", type=count, metavar="N", help="default: as many as the workload has")
    group.add_argument("--seed", type=int, help="default: the workload's own")
    group.add_argument("--input-len", type=count, metavar="N", help="random: prompts of 1 to N tokens (4096)")
    group.add_argument(
        "--output-len", type=count, metavar="N", help="random: 1 to N (2048); shared-prefix, sharegpt: N"
    )
    group.add_argument("--prefix-len", type=count, metavar="N", help="shared-prefix: tokens in common (2048)")
    group.add_argument("--question-len", type=count, metavar="N", help="shared-prefix: tokens of one's own (128)")
    group.add_argument("--per-group", type=count, metavar="N", help="shared-prefix: requests with one prefix (16)")
    group.add_argument("--vocab-size", type=count, metavar="N", help="fold ids into so many; default: the mesh's own")
    group.add_argument("--temperature", type=float, default=0.0, help="default: 0")
    group.add_argument("--respect-eos", action="store_true", help="let the model end before the asked length")
    group.add_argument("--ids-only", action="store_true", help="gRPC: no text is made")


def _add_pace(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--request-rate",
        type=_positive,
        metavar="R",
        help="first turns arrive at random, R a second (inf: all at once); default: as the workload says",
    )
    group.add_argument(
        "--concurrency", type=count, metavar="N", help="at most N requests at a time, sent when there is room"
    )
    group.add_argument("--time-scale", type=_not_negative, default=1.0, metavar="F", help="all delays times F (1)")
    group.add_argument("--warmup", type=_whole, default=2, metavar="N", help="uncounted requests before (2)")


def count(text: str) -> int:
    """A whole number from 1 on. Raises ArgumentTypeError."""
    number = _whole(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _positive(text: str) -> float:
    value = _not_negative(text)
    if value == 0:
        raise argparse.ArgumentTypeError("more than 0")
    return value


def _not_negative(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if math.isnan(value) or value < 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 on")
    return value


def _svg(text: str) -> Path:
    if not text.endswith(".svg"):
        raise argparse.ArgumentTypeError(f"plots are SVG: name it {Path(text).stem}.svg")
    return Path(text)
