"""Drafts of the tiny models' networks, chains and trees: on texts that they were trained on, and on one that is new.

    python bench/drafts_on_text.py [--prompts 8] [--tokens 64] > bench/results/drafts-on-text.json

known: beginnings of the texts that the target memorised and the network learned to follow. new: pieces of the reference
that every Python brings along (pydoc_data.topics), of which neither has seen any. The target goes on with them as it
can, greedy or sampled at temperature 1, on the CPU worker, alone, drafts in every step. per_step: tokens of a row in a
step that verifies, 1 without drafts. by_position: share of steps in which so many drafts were accepted at least, of
those that drafted so many. verified: tokens that a step computed of a row, the last one included. tokens_per_s: of all
rows beside each other, by the CPU time of the steps on one thread, drafting included; speed_up: of that without drafts.
Outputs are checked to be those without drafts.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.drafting import draft_folder, target_folder
from support.planner_world import World

from radixmesh.daemons.runtime.sampling import Sampling, Stop
from radixmesh.daemons.worker.cpu import load_cpu_runner
from radixmesh.daemons.worker.cpu.load_drafter import load_model_drafter
from radixmesh.daemons.worker.cpu.runner import CpuRunner
from radixmesh.daemons.worker.speculation.drafter import Drafter
from radixmesh.daemons.worker.speculation.ngram import NgramDrafter
from radixmesh.daemons.worker.speculation.settings import Speculation, SpeculativeAlgorithm

MODELS = Path(__file__).parents[1] / "compose" / "models"
NETWORKS = (("eagle3", "tiny-llama"), ("standalone", "tiny-llama"), ("mtp", "tiny-deepseek"), ("ngram", "tiny-llama"))
PROMPT_TOKENS = 48


class Shape(NamedTuple):
    """As --speculative-eagle-topk, --speculative-num-steps and --speculative-num-draft-tokens."""

    topk: int
    num_steps: int
    num_tokens: int


SHAPES = (Shape(1, 4, 5), Shape(1, 7, 8), Shape(4, 4, 8))


def prompts_of(model: str, text: str, number: int) -> list[list[int]]:
    """Beginnings of known texts, or of pieces of the new one that lie apart."""
    if text == "known":
        items = json.loads((MODELS / model / "recitations.json").read_text())
        long = [item["prompt_ids"] + item["expected_ids"] for item in items if len(item["expected_ids"]) > 100]
        return [ids[:PROMPT_TOKENS] for ids in long[:number]]
    tokenizer = Tokenizer.from_file(str(MODELS / model / "tokenizer.json"))
    pieces = [topics[name] for name in sorted(topics) if len(topics[name]) > 1000][:number]
    return [tokenizer.encode(piece).ids[:PROMPT_TOKENS] for piece in pieces]


def drafting_runner(algorithm: str, model: str, shape: Shape | None) -> CpuRunner:
    runner = load_cpu_runner(target_folder(algorithm, model), page_size=16, num_pages=256, threads=1, max_total_len=512)
    assert isinstance(runner, CpuRunner)
    if shape is not None:
        runner.verify(drafter_of(algorithm, model, shape, runner), max_drafts=shape.num_tokens - 1)
    return runner


def drafter_of(algorithm: str, model: str, shape: Shape, runner: CpuRunner) -> Drafter:
    if algorithm == "ngram":
        return NgramDrafter()
    speculation = Speculation(
        algorithm=SpeculativeAlgorithm(algorithm),
        max_drafts=shape.num_tokens - 1,
        draft_model=draft_folder(algorithm, model),
        topk=shape.topk,
        levels=shape.num_steps,
    )
    return load_model_drafter(speculation, runner, MODELS / model, "float32")


class Outcome(NamedTuple):
    """drafted, accepted: of each row of a step that verified drafts. tokens_per_s: of all rows, by CPU time."""

    outputs: list[list[int]]
    drafted: list[int]
    accepted: list[int]
    tokens_per_s: float


def run(runner: CpuRunner, prompts: list[list[int]], num_tokens: int, temperature: float) -> Outcome:
    world = World(runner=runner, num_slots=4, chunk_tokens=64, max_tokens_per_step=256)
    drafted: list[int] = []
    accepted: list[int] = []
    for number, prompt in enumerate(prompts):
        sampling = Sampling(temperature=temperature, seed=number)
        world.submit(prompt, sampling=sampling, stop=Stop(max_tokens=num_tokens, ignore_eos=True))
    seconds = 0.0
    while world.plan() or world.results or world.plans:
        began = time.process_time()
        world.execute()
        seconds += time.process_time() - began
        if world.results and len(world.results[-1].drafted):
            drafted += world.results[-1].drafted.tolist()
            accepted += world.results[-1].accepted.tolist()
        world.process()
    records = [world.records[key] for key in sorted(world.records)]
    return Outcome([record.tokens for record in records], drafted, accepted, num_tokens * len(prompts) / seconds)


def row_of(got: Outcome, num_steps: int, plain: Outcome) -> dict[str, object]:
    drafted, accepted = np.array(got.drafted), np.array(got.accepted)
    drafted, accepted = drafted[drafted > 0], accepted[drafted > 0]
    if not len(drafted):
        return {"steps": 0}
    by_position = [float((accepted >= n).sum() / max(1, (drafted >= n).sum())) for n in range(1, num_steps + 1)]
    return {
        "steps": len(drafted),
        "verified": round(float(1 + drafted.mean()), 2),
        "per_step": round(float(1 + accepted.mean()), 3),
        "by_position": [round(share, 3) for share in by_position],
        "tokens_per_s": round(got.tokens_per_s, 1),
        "speed_up": round(got.tokens_per_s / plain.tokens_per_s, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    rows: list[dict[str, object]] = []
    plain: dict[tuple[str, str, float], Outcome] = {}
    for algorithm, model in NETWORKS:
        for text in ("known", "new"):
            prompts = prompts_of(model, text, args.prompts)
            for temperature in (0.0, 1.0):
                key = (model, text, temperature)
                if key not in plain:
                    plain[key] = run(drafting_runner("ngram", model, None), prompts, args.tokens, temperature)
                for shape in SHAPES if algorithm != "ngram" else SHAPES[:1]:
                    got = run(drafting_runner(algorithm, model, shape), prompts, args.tokens, temperature)
                    assert got.outputs == plain[key].outputs, (algorithm, text, shape)
                    about = {"algorithm": algorithm, "model": model, "text": text, "temperature": temperature}
                    rows.append(about | shape._asdict() | row_of(got, shape.num_steps, plain[key]))
                    print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    command = " ".join(["python", *sys.argv])
    print(json.dumps({"command": command, "machine": platform.machine(), "versions": versions, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
