from __future__ import annotations

import numpy as np
import pytest

from longtake.buckets.aspect import aspect_table, closest_ratio, frame_size, num_pixels
from longtake.contracts import UserError
from tests.buckets.tables import golden

TABLES = golden("aspect_tables.json")["tables"]


def _listed(table: dict) -> list[tuple[str, tuple[int, int]]]:
    return [(ratio, tuple(shape)) for ratio, shape in table.items()]


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES.keys())
def test_the_tables_equal_the_reference_in_values_and_order(table: dict) -> None:
    name, divisor = table["resolution"], table["ae_spatial_compression"]
    assert num_pixels(name) == table["num_pixels"]
    assert _listed(aspect_table(name, divisor)) == _listed(table["training"])
    assert _listed(aspect_table(name, divisor, training=False)) == _listed(table["inference"])
    assert _listed(aspect_table(f"{name}_max", divisor)) == _listed(table["max"])
    for ratio, shape in table["sampling"].items():
        assert frame_size(name, ratio, divisor) == tuple(shape)


def test_one_ratio_can_be_kept_even_where_the_table_leaves_it_out() -> None:
    assert aspect_table("256px_ar1:1", 16) == {"1:1": (256, 256)}
    assert aspect_table("256px_ar16:9", 16) == {"16:9": (192, 336)}
    assert "1.85:1" not in aspect_table("256px", 16)
    assert aspect_table("256px_ar1.85:1", 16) == {"1.85:1": (192, 336)}
    height, width = aspect_table("256px_ar7:3", 16)["7:3"]
    assert aspect_table("256px_ar3:7", 16) == {"3:7": (width, height)}


def test_a_ratio_of_width_to_height_is_the_nearest_of_a_table_of_keys() -> None:
    sizes = {"16:9": (384, 672), "9:16": (672, 384), "1:1": (512, 512), "2.39:1": (320, 768)}
    assert {ratio: frame_size("512px", ratio, 16, law="cogvideox_fun") for ratio in sizes} == sizes
    with pytest.raises(UserError, match="choose one of"):
        frame_size("512px", "0.58", 16, law="cogvideox_fun")


@pytest.mark.parametrize(("law", "ratio"), [(None, "720:480"), ("opensora_v2", "720:480"), ("cogvideox_fun", "0.67")])
def test_a_size_is_itself_under_every_law(law: str | None, ratio: str) -> None:
    assert aspect_table("480x720", 16, law=law) == {ratio: (480, 720)}
    assert num_pixels("480x720", law) == 480 * 720
    assert frame_size("480x720", "16:9", 16, law=law) == (480, 720), "whatever ratio is said beside it"
    assert closest_ratio([100, 900], [900, 100], aspect_table("480x720", 16, law=law), law).tolist() == [0, 0]
    with pytest.raises(UserError, match="'481x720': height and width are multiples of 16, up to 16384; write 480x720"):
        aspect_table("481x720", 16, law=law)


@pytest.mark.parametrize("divisor", [1, 4, 8, 16, 20, 32, 64])
@pytest.mark.parametrize("name", ["256px", "720p", "480p_max"])
def test_every_side_is_a_multiple_of_the_divisor(name: str, divisor: int) -> None:
    sides = np.array(list(aspect_table(name, divisor).values()))
    assert (sides % divisor == 0).all()
    assert (sides > 0).all()


@pytest.mark.parametrize("case", golden("closest_ratio.json")["cases"], ids=lambda case: case["resolution"])
def test_the_nearest_ratio_equals_the_reference_under_compat(case: dict) -> None:
    table = aspect_table(case["resolution"], case["ae_spatial_compression"])
    height, width = np.array([row[:2] for row in case["rows"]]).T
    found = closest_ratio(height, width, table, law="opensora_v2")
    assert [list(table)[index] for index in found] == [row[2] for row in case["rows"]]


def test_the_default_nearest_ratio_loses_the_least_of_the_picture() -> None:
    rng = np.random.default_rng(0)
    height, width = rng.integers(50, 4000, (2, 2000))
    for name in ("256px", "768px", "64px"):
        table = aspect_table(name, 16)
        shapes = np.array(list(table.values()))
        ratio, target = (width / height)[:, None], (shapes[:, 1] / shapes[:, 0])[None]
        kept = np.minimum(ratio / target, target / ratio)  # share of the picture that survives cover and crop
        chosen = kept[np.arange(2000), closest_ratio(height, width, table)]
        np.testing.assert_allclose(chosen, kept.max(axis=1), rtol=1e-12)


def test_portrait_clips_choose_the_twin_of_what_landscape_clips_choose() -> None:
    table = aspect_table("768px", 16)
    rng = np.random.default_rng(1)
    height, width = rng.integers(50, 4000, (2, 2000))
    shapes = np.array(list(table.values()))
    np.testing.assert_array_equal(
        shapes[closest_ratio(height, width, table)], shapes[closest_ratio(width, height, table)][:, ::-1]
    )


@pytest.mark.parametrize(
    "name", ["256", "px256", "0px", "256px_", "256px_ar", "256px_ar16-9", "256px_ar0:1", "256 px", ""]
)
def test_a_wrong_resolution_name_is_answered_with_a_sentence(name: str) -> None:
    with pytest.raises(UserError, match="expected"):
        aspect_table(name, 16)


def test_a_resolution_too_small_for_the_divisor_is_refused() -> None:
    with pytest.raises(UserError, match="thinner than the size divisor 64"):
        aspect_table("64px", 64)
    assert aspect_table("64px_ar1:1", 64) == {"1:1": (64, 64)}
