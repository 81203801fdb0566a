"""The picture is well-formed, holds one curve per policy, and can be read on light and dark pages."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from carpool.sim.money.picture import DEADLINE_TICKS, INKS, Curve, CurvePoint, cost_curves, deadline_label, spread

SVG = "{http://www.w3.org/2000/svg}"
DEADLINES = (60.0, 600.0, 3600.0, 86400.0)


def curve(name: str, ratio: float = 0.8, missed: float = 0.0, width: float = 0.0) -> Curve:
    return Curve(name, [CurvePoint(one, ratio, ratio - width, ratio + width, missed) for one in DEADLINES])


def drawn(*curves: Curve) -> ET.Element:
    return ET.fromstring(cost_curves("Title <of> a & b", 'About "it"', curves))


def texts(picture: ET.Element) -> list[str]:
    return ["".join(one.itertext()) for one in picture.iter(f"{SVG}text")]


def test_a_curve_and_a_name_per_policy() -> None:
    names = [*INKS, "of my own"]
    picture = drawn(*(curve(name, 0.5 + number / 5) for number, name in enumerate(names)))
    lines = list(picture.iter(f"{SVG}polyline"))
    assert len(lines) == len(names)
    assert all(len(str(line.get("points")).split()) == len(DEADLINES) for line in lines)
    assert all(any(text.startswith(name) for text in texts(picture)) for name in names)


def test_policies_with_a_number_are_drawn_like_their_kind() -> None:
    pings = INKS["now+5m+pings"].light
    assert f".c0{{color:{pings}}}" in cost_curves("a", "b", [curve("now+5m+pings(3)")])


def test_titles_are_escaped_and_told_to_screen_readers() -> None:
    picture = drawn(curve("carpool"))
    assert "Title <of> a & b" in texts(picture)
    assert picture.get("aria-label") == 'Title <of> a & b. About "it"'
    assert picture.get("role") == "img"


def test_deadlines_are_labelled_in_their_units() -> None:
    assert [deadline_label(tick) for tick in DEADLINE_TICKS][:3] == ["1 min", "2 min", "5 min"]
    said = texts(drawn(curve("carpool")))
    assert {"1 min", "10 min", "1 h", "24 h", "deadline of each call"} <= set(said)


def test_points_that_miss_deadlines_are_hollow() -> None:
    marks = list(drawn(curve("carpool"), curve("llmfleet", missed=0.02)).iter(f"{SVG}circle"))
    assert sum(mark.get("class") == "hollow" for mark in marks) == len(DEADLINES)
    assert len(marks) == 2 * len(DEADLINES)


def test_intervals_are_shaded_where_they_can_be_seen() -> None:
    assert not list(drawn(curve("carpool", width=0.0001)).iter(f"{SVG}polygon"))
    assert len(list(drawn(curve("carpool", width=0.2)).iter(f"{SVG}polygon"))) == 1


def test_curves_that_coincide_are_shaded_once() -> None:
    same = [curve(name, width=0.2) for name in ("batch", "window", "llmfleet")]
    assert len(list(drawn(*same).iter(f"{SVG}polygon"))) == 1


def test_the_line_of_today_is_always_there() -> None:
    """Also when every curve lies far from it."""
    assert "1" in texts(drawn(curve("carpool", 0.1)))
    assert "1" in texts(drawn(curve("carpool", 9.0)))


def test_everything_is_inside_the_picture() -> None:
    picture = drawn(*(curve(name, 1.0) for name in INKS), curve("far", 40.0), curve("near", 0.02))
    _, _, width, height = map(float, str(picture.get("viewBox")).split())
    at = [(float(one.get("x") or 0), float(one.get("y") or 0)) for one in picture.iter(f"{SVG}text")]
    at += [(float(one.get("cx") or 0), float(one.get("cy") or 0)) for one in picture.iter(f"{SVG}circle")]
    assert all(0 <= x <= width and 0 <= y <= height for x, y in at)


@pytest.mark.parametrize("deadlines", [(), (600.0,)])
def test_one_deadline_or_none_is_drawn(deadlines: tuple[float, ...]) -> None:
    picture = drawn(Curve("carpool", [CurvePoint(one, 0.9, 0.9, 0.9) for one in deadlines]))
    assert len(list(picture.iter(f"{SVG}circle"))) == len(deadlines)


# ---------------------------------------------------------------- names beside their curves


def test_names_keep_their_place_if_they_can() -> None:
    assert spread([100, 50, 200], 15, 0, 300) == [100, 50, 200]


def test_names_do_not_overlap_and_keep_their_order() -> None:
    wanted = [100.0, 101.0, 99.0, 100.5, 20.0, 299.0, 298.0]
    placed = spread(wanted, 15, 0, 300)
    ordered = sorted(placed)
    assert all(after - before >= 15 - 0.11 for before, after in pairwise(ordered))
    assert sorted(range(7), key=wanted.__getitem__) == sorted(range(7), key=placed.__getitem__)
    assert min(placed) >= 0
    assert max(placed) <= 300


# ---------------------------------------------------------------- light and dark


def luminance(colour: str) -> float:
    """Of sRGB, as WCAG defines it."""
    values = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in values]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("name", INKS)
def test_names_can_be_read_on_both_pages(name: str) -> None:
    """4.5 : 1 is what WCAG asks of text."""
    assert contrast(INKS[name].light, "#ffffff") >= 4.5
    assert contrast(INKS[name].dark, "#0d1117") >= 4.5


def test_dark_pages_have_colours_of_their_own() -> None:
    text = cost_curves("a", "b", [curve("carpool")])
    light, _, dark = text.partition("@media(prefers-color-scheme:dark)")
    assert f".c0{{color:{INKS['carpool'].light}}}" in light
    assert f".c0{{color:{INKS['carpool'].dark}}}" in dark
    assert re.search(r"\.page[^}]*#0d1117", dark)
