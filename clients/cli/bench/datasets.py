"""The workload that the flags of `radixmesh bench serve` describe."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from radixmesh.cli.bench.load_turn import LoadTurn, first_of, load_turns, paced, time_scaled
from radixmesh.cli.bench.sharegpt import read_sharegpt
from radixmesh.cli.bench.workloads import PER_GROUP, WORKLOADS, Turn, make_workload, random_lengths, shared_prefix

_PACE_SEED = 1_000_003
# Flags that shape only some workloads, and what the workload calls them.
_SHAPES: Mapping[str, Mapping[str, str]] = {
    "random": {"input_len": "prompt", "output_len": "out"},
    "shared-prefix": {
        "output_len": "out",
        "prefix_len": "prefix",
        "question_len": "question",
        "per_group": "per_group",
    },
    "sharegpt": {"output_len": "out_len", "file": "file", "chat": "chat"},
}


def make_turns(options: argparse.Namespace, vocab_size: int | None) -> list[LoadTurn]:
    """The turns as they are to be sent.

    Raises ValueError for flags that do not fit together or a bad file, OSError for one that cannot be read.
    """
    shape = _shape_of(options)
    turns = _read(options) if options.dataset == "sharegpt" else load_turns(_made(options, shape), vocab_size)
    if options.num_requests is not None:
        turns = first_of(turns, options.num_requests)
    if options.request_rate is not None or options.concurrency is not None:
        rate = float("inf") if options.request_rate is None else options.request_rate
        turns = paced(turns, rate, _PACE_SEED if options.seed is None else options.seed)
    return time_scaled(turns, options.time_scale)


def plain_turns(options: argparse.Namespace) -> list[Turn]:
    """The turns of ids as every system gets them. Raises ValueError where there are none (sharegpt)."""
    if options.dataset == "sharegpt":
        raise ValueError("--oracle needs a workload of ids: sharegpt has texts")
    turns = _made(options, _shape_of(options))
    return turns if options.num_requests is None else turns[: options.num_requests]


def why_fewer(options: argparse.Namespace) -> str:
    """The reason why a workload has fewer turns than --num-requests asks for."""
    if options.dataset == "shared-prefix":
        return f"requests come in whole groups of {options.per_group or PER_GROUP} with one prefix (--per-group)"
    if options.dataset == "sharegpt":
        return "the file holds no more"
    return f"{options.dataset} is made of whole conversations, and its parts are rounded"


def _shape_of(options: argparse.Namespace) -> dict[str, int]:
    allowed = _SHAPES.get(options.dataset, {})
    every = sorted({flag for flags in _SHAPES.values() for flag in flags})
    given = [flag for flag in every if getattr(options, flag) not in (None, False)]
    for flag in given:
        if flag not in allowed:
            owners = ", ".join(name for name, flags in _SHAPES.items() if flag in flags)
            raise ValueError(f"--{flag.replace('_', '-')} is of {owners}, not of {options.dataset}")
    return {allowed[flag]: getattr(options, flag) for flag in given}


def _made(options: argparse.Namespace, shape: Mapping[str, int]) -> list[Turn]:
    seed = WORKLOADS[options.dataset][1] if options.seed is None else options.seed
    if options.dataset == "random":
        return random_lengths(seed, options.num_requests, **shape)
    if options.dataset == "shared-prefix":
        return shared_prefix(seed, options.num_requests, **shape)
    return make_workload(options.dataset, seed, options.num_requests)


def _read(options: argparse.Namespace) -> list[LoadTurn]:
    if options.file is None:
        raise ValueError("--dataset sharegpt needs --file")
    return read_sharegpt(
        options.file,
        seed=options.seed or 0,
        num_requests=options.num_requests,
        as_chat=options.chat,
        out_len=options.output_len,
    )
