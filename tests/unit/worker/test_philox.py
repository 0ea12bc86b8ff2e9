"""Philox4x32-10 against the known answers of its authors (Random123, kat_vectors)."""

import numpy as np
import pytest

from aioengine.worker.philox import philox4x32, uniforms

KNOWN_ANSWERS = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    words = philox4x32(np.array([counter], np.uint32), np.array([key], np.uint32))
    assert words[0].tolist() == expected


def test_rows_do_not_depend_on_each_other() -> None:
    seeds = np.array([5, 2**63 - 1, 5], np.uint64)
    positions, choices = np.array([0, 17, 4000]), np.array([0, 1, 2])
    together = uniforms(seeds, positions, choices)
    for row in range(3):
        alone = uniforms(seeds[row : row + 1], positions[row : row + 1], choices[row : row + 1])
        assert alone[0] == together[row]


def test_seed_position_choice_and_draw_all_count() -> None:
    def one(seed: int, position: int, choice: int, draw: int) -> float:
        return float(
            uniforms(np.array([seed], np.uint64), np.array([position]), np.array([choice]), draw)[0]
        )

    places = [
        (0, 0, 0, 0),
        (1, 0, 0, 0),
        (2**32, 0, 0, 0),
        (0, 1, 0, 0),
        (0, 0, 1, 0),
        (0, 0, 0, 1),
    ]
    assert len({one(*place) for place in places}) == len(places)


def test_uniform() -> None:
    values = uniforms(np.full(20000, 3, np.uint64), np.arange(20000), np.zeros(20000, np.int64))
    assert values.min() >= 0
    assert values.max() < 1
    counts = np.histogram(values, bins=20, range=(0, 1))[0]
    chi_square = ((counts - 1000) ** 2 / 1000).sum()
    assert chi_square < 43.8  # 99.9 % quantile, 19 degrees of freedom
