"""Requests of an endurance run: random ones of every kind, reproducible from a seed."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum

import numpy as np

from radixmesh.client.options import Options

_NUM_PREFIXES = 16
_NUM_PROBES = 8
_MAX_TALKS = 64
# Ids below may be special ones.
_FIRST_ID = 300


class Ending(Enum):
    """Way in which a client leaves a request."""

    LENGTH = "length"
    """It reads all of it."""
    CANCEL = "cancel"
    """It cancels the call after some tokens."""
    HANG_UP = "hang_up"
    """It cancels the call after some time, which may be before the first token."""
    ABORT = "abort"
    """It calls Abort after some tokens, and reads what still comes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadMix:
    """Sizes in tokens. Shares are of all requests; the rest are prompts of their own."""

    vocab_size: int
    longest_prompt: int
    longest_out: int
    seed: int = 0
    abort_share: float = 0.1
    probe_share: float = 0.05
    prefix_share: float = 0.3
    talk_share: float = 0.25
    text_share: float = 0.1
    twin_share: float = 0.03
    """Asks for two outputs."""

    def fields(self) -> dict[str, int | float]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request. probe: its number, -1 = none. leave_after: tokens (CANCEL, ABORT) or seconds (HANG_UP)."""

    kind: str
    prompt: str | Sequence[int]
    options: Options
    num_outputs: int
    out_len: int
    ending: Ending = Ending.LENGTH
    leave_after: float = 0.0
    probe: int = -1


class RequestMaker:
    """Makes jobs. number: of this maker among those that share a mix; they share prefixes and probes."""

    def __init__(self, mix: LoadMix, number: int) -> None:
        self._mix = mix
        self._rng = random.Random(mix.seed * 1009 + number + 1)
        self._ids = np.random.default_rng([mix.seed, number + 1])
        common, ids = random.Random(mix.seed), np.random.default_rng([mix.seed, 0])
        self._prefixes = [
            self._random_ids(common.randint(mix.longest_prompt // 16, mix.longest_prompt // 2), ids)
            for _ in range(_NUM_PREFIXES)
        ]
        self._probes = [self._make_probe(number, common, ids) for number in range(_NUM_PROBES)]
        self._talks: deque[list[int]] = deque(maxlen=_MAX_TALKS)

    def next(self) -> Job:
        """The next request; every call gives another."""
        mix, rng = self._mix, self._rng
        if rng.random() < mix.probe_share:
            return rng.choice(self._probes)
        kind, prompt = self._prompt()
        out_len = rng.randint(1, mix.longest_out)
        num_outputs = 2 if rng.random() < mix.twin_share else 1
        options = Options(
            max_tokens=out_len,
            ignore_eos=True,
            n=num_outputs,
            ids_only=rng.random() < 0.2,
            tenant=rng.choice(("", "", "a", "b")),
            **_sampling(rng),
        )
        ending, leave_after = self._ending(out_len)
        return Job(
            kind=kind,
            prompt=prompt,
            options=options,
            num_outputs=num_outputs,
            out_len=out_len,
            ending=ending,
            leave_after=leave_after,
        )

    def answered(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """A conversation that may go on."""
        if len(prompt_ids) + len(output_ids) < self._mix.longest_prompt:
            self._talks.append([*prompt_ids, *output_ids])

    def _prompt(self) -> tuple[str, str | list[int]]:
        mix, rng = self._mix, self._rng
        share = rng.random()
        if share < mix.text_share:
            # A word may be some tokens; so few that no vocabulary makes too many of them.
            num_words = rng.randint(1, max(1, mix.longest_prompt // 8))
            return "text", " ".join(f"w{rng.randint(0, 999)}" for _ in range(num_words))
        share -= mix.text_share
        if share < mix.talk_share and self._talks:
            talk = self._talks.popleft()
            return "talk", talk + self._random_ids(rng.randint(1, mix.longest_prompt - len(talk)))
        share -= mix.talk_share
        if share < mix.prefix_share:
            prefix = rng.choice(self._prefixes)
            return "prefix", prefix + self._random_ids(rng.randint(1, mix.longest_prompt - len(prefix)))
        return "alone", self._random_ids(rng.randint(1, mix.longest_prompt))

    def _ending(self, out_len: int) -> tuple[Ending, float]:
        rng = self._rng
        if rng.random() >= self._mix.abort_share:
            return Ending.LENGTH, 0.0
        ending = rng.choice((Ending.CANCEL, Ending.CANCEL, Ending.HANG_UP, Ending.ABORT))
        if ending is Ending.HANG_UP:
            return ending, rng.expovariate(4.0)
        return ending, rng.randint(1, out_len)

    def _make_probe(self, number: int, rng: random.Random, ids: np.random.Generator) -> Job:
        """Half of them greedy, half sampled with a seed: both are functions of the request alone."""
        prompt = self._random_ids(rng.randint(1, self._mix.longest_prompt // 2), ids)
        out_len = rng.randint(1, max(1, self._mix.longest_out // 2))
        sampling = Options(temperature=0.0) if number % 2 else Options(temperature=1.0, seed=number)
        return Job(
            kind="probe",
            prompt=prompt,
            options=Options(max_tokens=out_len, ignore_eos=True, **sampling),
            num_outputs=1,
            out_len=out_len,
            probe=number,
        )

    def _random_ids(self, length: int, ids: np.random.Generator | None = None) -> list[int]:
        sampled: list[int] = (ids or self._ids).integers(_FIRST_ID, self._mix.vocab_size, length).tolist()
        return sampled


def _sampling(rng: random.Random) -> Options:
    if rng.random() < 0.4:
        return Options(temperature=0.0)
    options = Options(temperature=rng.uniform(0.3, 1.5), seed=rng.getrandbits(32))
    if rng.random() < 0.4:
        options["top_p"] = rng.uniform(0.5, 1.0)
    if rng.random() < 0.3:
        options["top_k"] = rng.randint(1, 100)
    if rng.random() < 0.2:
        options["frequency_penalty"] = rng.uniform(0.0, 1.0)
    return options
