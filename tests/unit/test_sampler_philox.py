"""The noise: known answers of the generator, exactness of u, independence of which ids are asked for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixmesh.daemons.worker.sampling.philox import NoiseKey, gumbel_noise, philox4x32, random_bits

# counter, key, result of Philox4x32-10: the known-answer vectors published with Random123.
_KNOWN_ANSWERS = [
    ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF, 0xFFFFFFFF), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), _KNOWN_ANSWERS)
def test_known_answers_of_random123(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = (np.array([word], np.uint64) for word in counter)
    assert tuple(int(word[0]) for word in philox4x32((c0, c1, c2, c3), _key(*key))) == expected


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**31 - 1))
def test_an_id_is_a_lane_of_its_quads_counter(seed: int, position: int, token: int) -> None:
    counter = [np.array([word], np.uint64) for word in (token >> 2, position, 0, 0)]
    lanes = philox4x32((counter[0], counter[1], counter[2], counter[3]), _key(seed & 0xFFFFFFFF, seed >> 32))
    assert random_bits([NoiseKey(seed, position, np.array([token]))])[0][0] == lanes[token & 3][0]


@given(st.integers(0, 2**64 - 2), st.lists(st.integers(0, 999), min_size=1, max_size=20))
def test_noise_of_an_id_does_not_depend_on_other_ids_and_draws(seed: int, ids: list[int]) -> None:
    everything, others = gumbel_noise([NoiseKey(seed, 17, np.arange(1000)), NoiseKey(seed + 1, 17, np.arange(7))])
    (some,) = gumbel_noise([NoiseKey(seed, 17, np.array(ids))])
    assert np.array_equal(some, everything[ids])
    assert not np.array_equal(others, everything[:7])


def test_noise_differs_between_seeds_and_positions() -> None:
    ids = np.arange(64)
    rows = [
        gumbel_noise([NoiseKey(seed, position, ids)])[0] for seed in (0, 1, 2**32, 2**63) for position in (0, 1, 1000)
    ]
    assert len({row.tobytes() for row in rows}) == len(rows)


def test_noise_is_standard_gumbel() -> None:
    (noise,) = gumbel_noise([NoiseKey(7, 3, np.arange(400_000))])
    assert np.isfinite(noise).all()
    # Mean is Euler's constant, variance pi^2 / 6; tolerances are five standard errors.
    assert noise.mean() == pytest.approx(0.5772157, abs=5 * 1.2825 / 400_000**0.5)
    assert noise.var() == pytest.approx(np.pi**2 / 6, rel=5 * (4.4 / 400_000) ** 0.5)  # Kurtosis 5.4


def _key(low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
    return np.array([low], np.uint64), np.array([high], np.uint64)
