"""A drafter for tests, which proposes how outputs went on before, with mistakes; and runs to compare with it."""

from __future__ import annotations

import atexit
import json
import random
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.worker.checkpoint.tensor_index import read_header
from radixmesh.daemons.worker.cpu.load_drafter import load_model_drafter
from radixmesh.daemons.worker.cpu.runner import CpuRunner
from radixmesh.daemons.worker.runner import ModelRunner, SampleInput
from radixmesh.daemons.worker.speculation.drafter import Drafter, EachRow
from radixmesh.daemons.worker.speculation.ngram import NgramDrafter
from radixmesh.daemons.worker.speculation.settings import Speculation, SpeculativeAlgorithm
from support.plan_driver import OPTIONS, PROMPTS, PlanDriver

MODELS = Path(__file__).parents[2] / "compose" / "models"

Outputs = Mapping[tuple[tuple[int, ...], Sampling], Sequence[int]]
"""Output ids by prompt and sampling."""


def drafter_of(outputs: Outputs, *, seed: int, share: float) -> Drafter:
    """Proposes the continuations in `outputs`, each token right with probability `share`. It knows what came behind
    any position, so that it can draft ahead of what it was told."""
    rng = random.Random(seed)

    def draft(sample: SampleInput, most: int) -> Sequence[int]:
        output = outputs[tuple(sample.prompt_ids.tolist()), sample.sampling]
        following = output[len(sample.output_ids) :][: rng.randrange(most // 2, most + 1)]
        return [token if rng.random() < share else rng.randrange(2, 200) for token in following]

    return EachRow(draft)


def cpu_drafter(algorithm: str, runner: CpuRunner, model: str, max_drafts: int = 4, topk: int = 1) -> Drafter:
    """The drafter of that name for a tiny model, which `runner` computes. topk > 1: it drafts trees."""
    if algorithm == "ngram":
        return NgramDrafter()
    return load_model_drafter(speculation_of(algorithm, model, max_drafts, topk), runner, MODELS / model, "float32")


def speculation_of(algorithm: str, model: str, max_drafts: int, topk: int = 1) -> Speculation:
    """A network that drafts for a tiny model; with topk > 1 trees."""
    levels = 0 if topk == 1 else min(4, max(1, max_drafts // 2))
    return Speculation(
        algorithm=SpeculativeAlgorithm(algorithm),
        max_drafts=max_drafts,
        draft_model=draft_folder(algorithm, model),
        topk=topk,
        levels=levels,
    )


def draft_folder(algorithm: str, model: str) -> Path | None:
    """Folder of the network that drafts for a tiny model. Both tiny models know the same texts by the same tokens."""
    if algorithm == "standalone":
        return MODELS / ("tiny-deepseek" if model == "tiny-llama" else "tiny-llama")
    if algorithm == "eagle3":
        assert model == "tiny-llama", "the head of the other one is not trained"
        return MODELS / "drafters" / "tiny-llama-eagle3"
    return None


@cache
def target_folder(algorithm: str, model: str) -> Path:
    """Folder of a tiny model; for mtp one whose checkpoint holds the layer that drafts too, as a second shard."""
    if algorithm != "mtp":
        return MODELS / model
    assert model == "tiny-deepseek", "the other one has no such layer"
    folder = Path(tempfile.mkdtemp(prefix="tiny-mtp-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for file in (MODELS / model).iterdir():
        (folder / file.name).symlink_to(file)
    shard = "mtp.safetensors"
    (folder / shard).symlink_to(MODELS / "drafters" / "tiny-deepseek-mtp.safetensors")
    shards = ("model.safetensors", shard)
    weight_map = {name: file for file in shards for name in read_header(folder / file)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    return folder


def sample_of(prompt_ids: Sequence[int], output_ids: Sequence[int], guide: object = None) -> SampleInput:
    """A greedy request's next token."""
    prompt, output = np.asarray(prompt_ids, np.int32), np.asarray(output_ids, np.int32)
    return SampleInput(
        sampling=Sampling(temperature=0.0),
        prompt_ids=prompt,
        output_ids=output,
        position=len(prompt) + len(output),
        guide=guide,  # type: ignore[arg-type]
    )


def outputs_of(driver: PlanDriver, options: Sequence[Sampling] = OPTIONS) -> Outputs:
    """Outputs of a driver that ran `options`."""
    prompts = [tuple(PROMPTS[slot % len(PROMPTS)]) for slot in range(len(options))]
    keys = zip(prompts, options, strict=True)
    return {key: driver.tokens[slot] for slot, key in enumerate(keys)}


def drive_long(
    runner: ModelRunner,
    *,
    chunk_len: int,
    lag: int,
    num_steps: int,
    num_out: int,
    options: Sequence[Sampling] = OPTIONS,
) -> PlanDriver:
    """All of `options`, one slot each, each for `num_out` tokens if so many steps suffice."""
    driver = PlanDriver(runner, lag=lag)
    for slot, sampling in enumerate(options):
        driver.add(slot, PROMPTS[slot % len(PROMPTS)], sampling, chunk_len=chunk_len, num_out=num_out)
    driver.finish(num_steps)
    return driver


def check_same_outputs(got: PlanDriver, want: PlanDriver, *, num_out: int, atol: float) -> None:
    """The tokens of each request, and the logprobs of each of its positions."""
    for slot, tokens in want.tokens.items():
        assert len(tokens) == num_out, (slot, len(tokens))
        assert got.tokens[slot] == tokens, slot
    ours, theirs = (_logprobs(driver) for driver in (got, want))
    assert ours.keys() == theirs.keys() and theirs
    for key, (token, top) in theirs.items():
        assert abs(ours[key][0] - token) <= atol, key
        assert all(abs(a - b) <= atol for a, b in zip(ours[key][1], top, strict=True)), key


def _logprobs(driver: PlanDriver) -> dict[tuple[int, int], tuple[float, list[float]]]:
    """Logprobs of tokens and of alternatives, by slot and position."""
    found: dict[tuple[int, int], tuple[float, list[float]]] = {}
    for result in driver.results:
        for part in result.logprobs:
            for index, own in enumerate(part.logprobs.own.tolist()):
                key = part.slot, part.first_position + index
                assert key not in found
                found[key] = own, part.logprobs.top[index].tolist()
    return found
