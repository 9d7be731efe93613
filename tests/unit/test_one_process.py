"""The engine composed in one process: tokens by the oracle, text by the tokenizer, every way that an output ends."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from support.bench_modules import bench_imports

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.detokenize.decoder_table import DecoderTable, EntryBudget, Limits
from radixmesh.daemons.runtime.detokenize.text_decoder import family_of
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.finish_reason import FinishReason
from radixmesh.daemons.runtime.model_folder.vocabulary import Vocabulary
from radixmesh.daemons.runtime.sampling import Sampling, Stop
from radixmesh.daemons.runtime.tokenize.chat_template import ChatTemplate
from radixmesh.daemons.runtime.tokenize.text_codec import Limits as CodecLimits
from radixmesh.daemons.runtime.tokenize.text_codec import TextCodec
from radixmesh.daemons.scheduler.planning.settings import PlannerSettings
from radixmesh.daemons.worker.plans.executor import StepExecutor
from radixmesh.daemons.worker.simulated.clock import VirtualClock
from radixmesh.daemons.worker.simulated.latency import LatencyModel
from radixmesh.daemons.worker.simulated.runner import SimulatedRunner
from radixmesh.daemons.worker.simulated.token_source import Alphabet, simulated_continuation

ROOT = Path(__file__).parents[2]
with bench_imports():
    from hop_ladder.one_process import OneProcess
    from hop_ladder.step_link import ThreadLink

MODEL = ROOT / "compose" / "models" / "tiny-llama"
VOCABULARY = Vocabulary.load(MODEL)
ALPHABET = Alphabet.of(VOCABULARY.vocab_size, special_ids=VOCABULARY.special_ids)
GREEDY = Sampling(temperature=0.0)
MAX_TOTAL_LEN = 300


class Breakable(SimulatedRunner):
    """Dies at the next step once it is told to."""

    is_broken = False

    def step(self, *args: object) -> object:  # type: ignore[override]
        if self.is_broken:
            raise RuntimeError("the device is gone")
        return super().step(*args)  # type: ignore[arg-type]


@asynccontextmanager
async def engine() -> AsyncIterator[tuple[OneProcess, Breakable]]:
    runner = Breakable(
        page_size=1,
        num_pages=4096,
        vocab_size=VOCABULARY.vocab_size,
        max_total_len=MAX_TOTAL_LEN,
        alphabet=ALPHABET,
        latency=LatencyModel(),
        clock=VirtualClock(),
    )
    link = ThreadLink(StepExecutor(runner, num_slots=16, max_tokens_per_step=256))
    codec = TextCodec(VOCABULARY, ChatTemplate.load(MODEL), CodecLimits())
    table = DecoderTable(family_of(VOCABULARY), VOCABULARY.vocab_size, Limits(), EntryBudget(64))
    async with OneProcess(link, codec, table, PlannerSettings(check_invariants=True)) as composed:
        yield composed, runner


async def complete(composed: OneProcess, prompt: str | list[int], stop: Stop) -> tuple[list[int], str, object]:
    ids: list[int] = []
    text, finished = "", None
    async for delta in composed.generate(prompt, GREEDY, stop):
        assert finished is None
        ids += delta.ids
        text += delta.text
        finished = delta.finished
    assert finished is not None
    return ids, text, finished


def expected(prompt: str, num_tokens: int) -> list[int]:
    ids = VOCABULARY.tokenizer.encode(prompt).ids
    return simulated_continuation(ids, num_tokens, alphabet=ALPHABET, temperature=0.0, seed=0)


async def test_many_at_once_give_what_oracle_and_tokenizer_give() -> None:
    async with engine() as (composed, _):
        prompts = [f"{number} men sat in a boat" for number in range(24)]  # More than there are slots.
        stop = Stop(max_tokens=40, ignore_eos=True)
        answers = await asyncio.gather(*(complete(composed, prompt, stop) for prompt in prompts))
    for prompt, (ids, text, finished) in zip(prompts, answers, strict=True):
        assert ids == expected(prompt, 40)
        assert text == VOCABULARY.tokenizer.decode(ids, skip_special_tokens=True)
        assert finished.reason is FinishReason.LENGTH and finished.num_output == 40  # type: ignore[attr-defined]


async def test_a_stop_string_ends_the_output_before_it() -> None:
    whole = VOCABULARY.tokenizer.decode(expected("Call me", 120), skip_special_tokens=True)
    stop_string = next(whole[i : i + 3] for i in range(40, len(whole)) if whole[i : i + 3].isascii())
    async with engine() as (composed, _):
        stop = Stop(max_tokens=120, ignore_eos=True, stop=(stop_string,))
        _, text, finished = await complete(composed, "Call me", stop)
    assert text == whole[: whole.index(stop_string)]
    assert finished.reason is FinishReason.STOP and finished.num_output < 120  # type: ignore[attr-defined]


async def test_who_leaves_early_leaves_room() -> None:
    async with engine() as (composed, _):
        for _ in range(40):
            stream = composed.generate("Once more", GREEDY, Stop(max_tokens=200, ignore_eos=True))
            await anext(stream)
            await stream.aclose()
        ids, _, _ = await complete(composed, "unto the breach", Stop(max_tokens=5, ignore_eos=True))
        assert ids == expected("unto the breach", 5)
        assert composed.num_live == 0


async def test_what_cannot_run_is_refused_and_the_rest_goes_on() -> None:
    async with engine() as (composed, _):
        with pytest.raises(MeshError) as refusal:
            await complete(composed, np.ones(MAX_TOTAL_LEN + 1, np.int32).tolist(), Stop(max_tokens=5))
        assert refusal.value.reason == ErrorReason.ERROR_REASON_PROMPT_TOO_LONG
        ids, _, _ = await complete(composed, "still here", Stop(max_tokens=5, ignore_eos=True))
        assert ids == expected("still here", 5)


async def test_a_dead_worker_ends_every_output_and_every_later_one() -> None:
    async with engine() as (composed, runner):
        streams = [composed.generate(f"{n}", GREEDY, Stop(max_tokens=250, ignore_eos=True)) for n in range(3)]
        for stream in streams:
            await anext(stream)
        runner.is_broken = True
        for stream in streams:
            with pytest.raises(RuntimeError, match="the device is gone"):
                async for _ in stream:
                    pass
        with pytest.raises(RuntimeError, match="the device is gone"):
            await asyncio.wait_for(complete(composed, "too late", Stop(max_tokens=5)), 60)
