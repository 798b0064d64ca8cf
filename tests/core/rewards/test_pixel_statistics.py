"""Statistics of pixels against their closed forms."""

import math
from typing import Any

import numpy as np
import pytest

from cosmos_rl_core.rewards import pixel_statistics
from cosmos_rl_core.rewards._base import Sample

SIDE = 64


def grey(level: int | np.ndarray, *shape: int) -> np.ndarray:
    """Pictures ``[n, height, width, 3]`` of one level and a shape, or of given levels ``[..., height, width]``."""
    levels = np.broadcast_to(np.asarray(level, np.uint8), shape or np.shape(level))
    return np.repeat(levels[..., None], 3, axis=-1).reshape(-1, *levels.shape[-2:], 3)


def checkerboard(period: int, side: int = SIDE) -> np.ndarray:
    y, x = np.indices((side, side)) // (period // 2)
    return grey((y + x) % 2 * 255)


def statistics(pixels: np.ndarray, **settings: Any) -> dict[str, float]:
    (found,) = score([Sample("s", "p", "", pixels)], **settings)
    assert isinstance(found, dict)
    return found


def score(samples: list[Sample], **settings: Any) -> list[dict[str, float] | Exception]:
    return pixel_statistics.Reward(pixel_statistics.Options(name="pixel_statistics", **settings)).score(samples)


def test_a_flat_grey_picture_has_its_luma_and_nothing_else():
    found = statistics(grey(51, SIDE, SIDE))
    assert found == {
        "luma": 0.2, "contrast": 0.0, "edge_density": 0.0, "colour_entropy": 0.0, "fine_energy": 0.0,
        "grid_energy": 0.0, "block_deviation": 0.0, "border_deviation": 0.0, "block_contrast": 0.0,
        "pixel_statistics": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize(("channel", "weight"), [(0, 0.299), (1, 0.587), (2, 0.114)])
def test_luma_weighs_the_channels(channel: int, weight: float):
    pixels = np.zeros((1, 8, 8, 3), np.uint8)
    pixels[..., channel] = 255
    assert statistics(pixels)["luma"] == weight


def test_a_checkerboard_of_single_pixels_is_all_fine_energy_and_all_grid():
    found = statistics(checkerboard(2))
    assert found["contrast"] == 0.5
    assert found["fine_energy"] == found["grid_energy"] == 0.25
    assert found["edge_density"] == found["colour_entropy"] == 1.0


@pytest.mark.parametrize(("period", "grid"), [(4, 0.25), (8, 0.25), (16, 0.0)])
def test_coarser_checkerboards_are_grid_up_to_the_cell_and_never_fine(period: int, grid: float):
    found = statistics(checkerboard(period))
    assert (found["fine_energy"], found["grid_energy"]) == (0.0, grid)


def test_a_step_edge_is_one_column_of_neighbours():
    levels = np.zeros((SIDE, SIDE), np.uint8)
    levels[:, SIDE // 2 :] = 255
    found = statistics(grey(levels))
    assert found["edge_density"] == SIDE / (2 * SIDE * (SIDE - 1))
    assert (found["contrast"], found["grid_energy"], found["colour_entropy"]) == (0.5, 0.0, 1.0)


def test_an_edge_is_a_step_of_more_than_a_tenth():
    for step, share in ((25, 0.0), (26, 1.0)):
        levels = np.tile(np.array([[0, step]], np.uint8), (1, 4))
        assert statistics(grey(levels))["edge_density"] == share


def test_noise_has_three_quarters_of_its_variance_in_blocks_and_almost_none_in_the_grid():
    noise = np.random.default_rng(0).integers(0, 256, (256, 256), np.uint8)
    found = statistics(grey(noise))
    variance = (256**2 - 1) / 12 / 255**2
    assert found["contrast"] ** 2 == pytest.approx(variance, rel=0.01)
    assert found["fine_energy"] == pytest.approx(0.75 * variance, rel=0.01)
    # The mean of 1024 cells at each of 64 places.
    assert found["grid_energy"] == pytest.approx(variance / 1024, rel=0.5)


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_equally_many_pixels_of_each_colour_have_the_logarithm_of_their_number_in_bits(count: int):
    pixels = np.zeros((1, 8, 8, 3), np.uint8)
    pixels[0, ..., 1] = np.arange(8)[None] * count // 8 * 32
    assert statistics(pixels)["colour_entropy"] == math.log2(count)


def test_only_pixels_that_change_back_flicker():
    alternating = grey(np.stack([np.full((8, 8), 255 * (t % 2)) for t in range(5)]))
    fade = grey(np.stack([np.full((8, 8), 10 * t) for t in range(5)]))
    half = alternating.copy()
    half[:, :, :4] = 0
    assert statistics(alternating)["flicker"] == 1.0
    assert statistics(half)["flicker"] == 0.5
    assert statistics(fade)["flicker"] == statistics(alternating[::2])["flicker"] == 0.0


LOCAL = ("block_deviation", "border_deviation", "block_contrast")


def local(pixels: np.ndarray) -> list[float]:
    found = statistics(pixels)
    return [found[name] for name in LOCAL]


@pytest.mark.parametrize(("corner", "at_border"), [((0, 0), True), ((56, 24), True), ((24, 32), False)])
def test_one_block_of_another_level_differs_by_its_distance_from_the_others(corner: tuple[int, int], at_border: bool):
    pixels, (top, left) = grey(51, SIDE, SIDE).copy(), corner
    pixels[0, top : top + 8, left : left + 8] = 153
    assert local(pixels) == [0.4, 0.4 * at_border, 0.0]
    # The farthest channel counts, whatever its weight in the luma.
    pixels[0, top : top + 8, left : left + 8] = (51, 51, 204)
    assert local(pixels) == [0.6, 0.6 * at_border, 0.0]


def test_a_patch_of_half_a_block_moves_its_mean_by_half_and_spreads_it():
    pixels = grey(51, SIDE, SIDE).copy()
    pixels[0, :8, :4] = 153
    assert local(pixels) == [pytest.approx(0.2), pytest.approx(0.2), pytest.approx(0.2)]


def test_a_patch_of_noise_that_leaves_the_mean_is_found_by_the_contrast_of_its_block():
    pixels = grey(51, SIDE, SIDE).copy()
    pixels[0, :8, :8] = checkerboard(2, 8)[0] // 255 * 102
    assert local(pixels) == [0.0, 0.0, pytest.approx(0.2)]


def test_blocks_of_other_sizes_tile_the_picture():
    pixels = grey(51, 12, 20).copy()
    # The second row of blocks has one row of pixels, the second column three columns.
    pixels[0, 1:3, 2:5] = 153
    assert local(pixels)[:2] == [0.4, 0.0]


@pytest.mark.parametrize("frame", [0, 3, 4])
def test_a_patch_in_one_frame_of_a_video_is_not_diluted(frame: int):
    video = grey(51, 5, SIDE, SIDE).copy()
    video[frame, :8, :8] = 153
    assert local(video) == [0.4, 0.4, 0.0]


def test_statistics_that_are_not_defined_are_absent():
    assert not {*LOCAL} & {*statistics(grey(0, 64, 7))}
    assert "flicker" not in statistics(grey(0, 2, 8, 8))
    assert "flicker" in statistics(grey(0, 3, 8, 8))
    assert "grid_energy" not in statistics(grey(0, 7, 64))
    assert "group_diversity" not in statistics(grey(0, 8, 8))
    assert statistics(grey(9, 1, 1))["edge_density"] == 0.0


def test_diversity_is_the_mean_distance_from_the_other_samples_of_the_prompt():
    levels = {"a0": 0, "a1": 51, "a2": 255, "b0": 10, "b1": 10, "c0": 99}
    samples = [Sample(name, name[0], "", grey(level, 64, 48)) for name, level in levels.items()]
    found = {s.sample_id: entry for s, entry in zip(samples, score(samples), strict=True) if isinstance(entry, dict)}
    assert {name: entry.get("group_diversity") for name, entry in found.items()} == {
        "a0": 0.6, "a1": 0.5, "a2": 0.9, "b0": 0.0, "b1": 0.0, "c0": None,
    }  # fmt: skip


def test_a_video_has_the_means_of_its_frames_and_of_blocks_the_largest():
    pictures = [checkerboard(2), grey(51, SIDE, SIDE)]
    each, video = [statistics(picture) for picture in pictures], statistics(np.concatenate(pictures))
    assert video == {
        name: max(each[0][name], each[1][name]) if name in LOCAL else (each[0][name] + each[1][name]) / 2
        for name in each[0]
    }


def test_large_white_pictures_do_not_overflow():
    found = statistics(grey(255, 2048, 4096))
    assert (found["luma"], found["contrast"], found["fine_energy"], found["grid_energy"]) == (1.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("name", ["luma", "contrast", "edge_density", "colour_entropy", "fine_energy"])
def test_the_score_is_the_statistic_that_is_named(name: str):
    pixels = np.random.default_rng(0).integers(0, 256, (1, 16, 16, 3), np.uint8)
    found = statistics(pixels, score=name)
    assert found["pixel_statistics"] == found[name] > 0


def test_a_sample_that_is_no_picture_fails_alone():
    good, bad = Sample("g", "p", "", grey(51, 8, 8)), Sample("b", "p", "", np.zeros((8, 8, 3), np.uint8))
    found, failed = score([good, bad])
    assert isinstance(found, dict)
    assert found["luma"] == 0.2
    assert str(failed) == "expected uint8 pixels [frames, height, width, 3], got uint8 [8, 8, 3]"
