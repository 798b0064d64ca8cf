"""How samples are divided into units, and who writes each."""

from collections import Counter
from math import ceil

import pytest

from stages.artifacts.layouts import cut
from stages.generating.units import ELASTIC_UNITS, dealt, divided, divided_for_workers

IDS = [f"{number:04d}" for number in range(1152)]


def loads(units: list[list[str]], tile: int, groups: int, peers: int = 1) -> list[int]:
    """Forward batches of each rank."""
    tiles = [ceil(len(unit) / tile) for unit in units]
    owners = dealt(tiles, groups, peers)
    found = Counter[int]()
    for owner, count in zip(owners, tiles, strict=True):
        found[owner] += count
    return [found[rank] for rank in range(groups * peers)]


def test_one_rank_gets_units_of_the_planned_size():
    assert divided(IDS[:70], 32, 8, 1) == cut(IDS[:70], 32)
    assert dealt([4, 4, 1], 1, 1) == [0, 0, 0]


def test_the_rollout_of_sd3_is_divided_evenly_among_eight_ranks():
    units = divided(IDS, 32, 8, 8)
    assert units[:32] == cut(IDS, 32)[:32]
    assert [len(unit) for unit in units[32:]] == [16] * 8
    assert loads(units, 8, 8) == [18] * 8


@pytest.mark.parametrize("groups", range(1, 10))
@pytest.mark.parametrize(("size", "tile"), [(32, 8), (32, 32), (10, 4), (5, 3), (1, 1), (8, 16)])
@pytest.mark.parametrize("count", [1, 7, 31, 96, 333])
def test_ranks_differ_by_at_most_one_tile_and_no_tile_depends_on_them(groups: int, size: int, tile: int, count: int):
    ids, most = IDS[:count], min(size, tile)
    units = divided(ids, size, tile, groups)
    assert all(0 < len(unit) <= size for unit in units)
    assert [part for unit in units for part in cut(unit, most)] == cut(ids, most)
    found = loads(units, most, groups)
    assert sum(found) == ceil(count / most)
    assert max(found) - min(found) <= 1


@pytest.mark.parametrize(("size", "tile"), [(32, 8), (32, 32), (10, 4), (5, 3), (1, 1), (8, 16)])
@pytest.mark.parametrize("count", [1, 7, 96, 333, 1152])
def test_workers_get_many_units_with_the_tiles_of_ranks(size: int, tile: int, count: int):
    ids, most = IDS[:count], min(size, tile)
    units = divided_for_workers(ids, size, tile)
    assert all(0 < len(unit) <= size for unit in units)
    assert len(units) >= min(ELASTIC_UNITS, ceil(count / most)) / 2
    tiles = [part for unit in units for part in cut(unit, most)]
    assert tiles == cut(ids, most) == [part for unit in divided(ids, size, tile, 2) for part in cut(unit, most)]


def test_peers_decode_in_turns_and_groups_differ_by_at_most_one_tile():
    """36 videos, one a unit, for two groups of four peers; then 6 units of two videos."""
    units = divided(IDS[:36], 1, 1, 2, 4)
    assert loads(units, 1, 2, 4) == [5, 5, 4, 4, 5, 5, 4, 4]
    units = divided(IDS[:12], 2, 1, 1, 4)
    assert [len(unit) for unit in units] == [2, 2, 2, 2, 1, 1, 1, 1]
    assert loads(units, 1, 1, 4) == [3, 3, 3, 3]
