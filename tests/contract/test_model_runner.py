"""What every ModelRunner promises, whatever it computes with."""

from pathlib import Path

import numpy as np
import pytest

from radixmesh.daemons.runtime.arrays import as_ints
from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.runtime.steps.step import Task
from radixmesh.daemons.worker.runner import SampleInput, Segment
from radixmesh.daemons.worker.simulated.clock import VirtualClock
from radixmesh.daemons.worker.simulated.latency import LatencyModel
from radixmesh.daemons.worker.simulated.runner import SimulatedRunner
from radixmesh.daemons.worker.simulated.token_source import Alphabet

MODEL = Path(__file__).parents[2] / "compose" / "models" / "tiny-llama"
PROMPT = as_ints([0, 40, 77, 492, 295, 274, 12, 603, 329, 609])
PAGE_SIZE = 4
GREEDY = Sampling(temperature=0.0)


def _simulated():
    return SimulatedRunner(
        page_size=PAGE_SIZE,
        num_pages=64,
        vocab_size=768,
        max_total_len=128,
        alphabet=Alphabet.of(768),
        latency=LatencyModel(),
        clock=VirtualClock(),
    )


def _cpu():
    from radixmesh.daemons.worker.cpu import load_cpu_runner

    return load_cpu_runner(MODEL, page_size=PAGE_SIZE, num_pages=64, threads=1, max_total_len=128)


@pytest.fixture(params=[_simulated, _cpu], ids=["simulated", "cpu"])
def runner(request):
    return request.param()


def _segment(tokens, start, length, pages, *, slot=0, sampling=None, suppressed=(), wanted=None, num_top=0):
    sample = None
    if sampling is not None:
        sample = SampleInput(
            sampling=sampling,
            prompt_ids=PROMPT,
            output_ids=as_ints(tokens[len(PROMPT) :]),
            position=start + length,
            suppressed_ids=as_ints(list(suppressed)),
        )
    return Segment(
        slot=slot,
        ids=as_ints(tokens[start : start + length]),
        start=start,
        pages=as_ints(list(pages)[: -(-(start + length) // PAGE_SIZE)]),
        sample=sample,
        prompt_logprobs=wanted,
        prompt_ids=PROMPT,
        prompt_num_top=num_top,
        is_last_chunk=sampling is not None,
    )


def _generate(runner, pages, num_tokens, *, chunk=64, sampling=GREEDY, tokens=None, computed=0):
    tokens = PROMPT.tolist() if tokens is None else list(tokens)
    for _ in range(num_tokens):
        while computed < len(tokens):
            length = min(chunk, len(tokens) - computed)
            is_last = computed + length == len(tokens)
            segment = _segment(tokens, computed, length, pages, sampling=sampling if is_last else None)
            (output,) = runner.forward([segment])
            assert (output.token is not None) is is_last
            computed += length
        tokens.append(output.token)
    return tokens[len(PROMPT) :]


def test_it_says_what_it_is(runner):
    assert (runner.page_size, runner.num_pages, runner.vocab_size) == (PAGE_SIZE, 64, 768)
    assert runner.max_total_len == 128
    assert Task.GENERATE in runner.tasks
    assert runner.forward([]) == []


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.8, seed=2**64 - 1)])
def test_neither_chunks_nor_pages_change_tokens(runner, sampling):
    expected = _generate(runner, range(16), 12, sampling=sampling)
    assert _generate(runner, range(20, 40), 12, chunk=1, sampling=sampling) == expected
    assert _generate(runner, range(59, 40, -1), 12, chunk=3, sampling=sampling) == expected


def test_rows_of_one_forward_do_not_touch_each_other(runner):
    expected = _generate(runner, range(16), 2)
    tokens, noise = PROMPT.tolist(), [5] * 30
    segments = [
        _segment(noise, 0, 30, range(30, 50), slot=1),
        _segment(tokens, 0, len(tokens), range(50, 60), sampling=GREEDY),
    ]
    first = runner.forward(segments)[1].token
    decode = _segment([*tokens, first], len(tokens), 1, range(50, 60), sampling=GREEDY)
    noisy = _segment(noise, 0, 7, range(20, 30), slot=2, sampling=Sampling(temperature=1.0, seed=3))
    assert [first, runner.forward([noisy, decode])[1].token] == expected


def test_a_copied_page_goes_on_like_its_source(runner):
    expected = _generate(runner, range(16), 6)
    tokens = PROMPT.tolist()
    # Ten tokens are computed: two full pages to share, and two tokens of the third one to copy.
    runner.copy_page(2, 33, 1)
    assert _generate(runner, [0, 1, 33, 34, 35, 36], 6, tokens=tokens, computed=9) == expected


def test_suppressed_ids_are_never_drawn(runner):
    tokens = PROMPT.tolist()
    drawn = []
    for _ in range(4):
        segment = _segment(tokens, 0, len(tokens), range(16), sampling=GREEDY, suppressed=drawn)
        drawn.append(runner.forward([segment])[0].token)
    assert len(set(drawn)) == 4


def test_logprobs_come_in_the_shape_that_was_asked_for(runner):
    sampling = Sampling(temperature=0.0, num_top_logprobs=3, prompt_logprobs=True)
    tokens = PROMPT.tolist()
    wanted = range(3, len(tokens))
    segment = _segment(tokens, 0, len(tokens), range(16), sampling=sampling, wanted=wanted, num_top=3)
    (output,) = runner.forward([segment])
    for logprobs, size in ((output.logprobs, 1), (output.prompt_logprobs, len(wanted))):
        assert logprobs.own.shape == (size,)
        assert logprobs.top_ids.shape == logprobs.top.shape == (size, 3)
        assert (np.diff(logprobs.top, axis=1) <= 0).all()
        assert (logprobs.own <= 0).all()
    # Greedy draws the most likely id.
    assert output.logprobs.top_ids[0, 0] == output.token
    assert output.logprobs.own[0] == output.logprobs.top[0, 0]
    plain = _segment(tokens, 0, len(tokens), range(16), sampling=GREEDY)
    assert runner.forward([plain])[0].logprobs is None


def test_cleared_kv_can_be_computed_anew(runner):
    expected = _generate(runner, range(16), 3)
    runner.clear()
    assert _generate(runner, range(16), 3) == expected
