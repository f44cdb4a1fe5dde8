import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from flame.metrics.chart import HEIGHT, MAX_POINTS, TOP, Axis, Series, line_chart, number, smoothed

SVG = "{http://www.w3.org/2000/svg}"


def draw(*series):
    return ET.fromstring(line_chart(list(series), "Loss <1>", "a & b", "step", "loss"))


def points_of(polyline):
    return [tuple(map(float, point.split(","))) for point in polyline.get("points").split()]


def texts_of(svg):
    return ["".join(text.itertext()) for text in svg.iter(f"{SVG}text")]


def test_smoothing_averages_but_keeps_the_first_value():
    assert smoothed([8.0, 5.0, 2.0, 2.0, 2.0], 3) == [8.0, 5.0, 3.0, 2.0, 2.0]
    assert smoothed([3.0, 1.0], 1) == [3.0, 1.0]


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0, 400, [0, 100, 200, 300, 400]), (4.1, 9.0, [5, 6, 7, 8, 9]), (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1])],
)
def test_ticks_are_round(low, high, ticks):
    assert Axis(low, high, 0, 100).ticks(5) == pytest.approx(ticks)


@pytest.mark.parametrize(("value", "text"), [(0.5, "0.5"), (400, "400"), (1500, "1.5K"), (2e6, "2M"), (3.1e9, "3.1B")])
def test_numbers_are_short(value, text):
    assert number(value) == text


def test_chart_is_well_formed_with_titles_labels_and_values():
    svg = draw(Series("run <a>", 4.3, [1, 2, 3], [9.0, 5.0, 4.0], window=2), Series("b", 4.2, [1, 3], [8.0, 4.1]))
    texts = texts_of(svg)
    assert {"Loss <1>", "a & b", "step", "loss", "run <a>", "4.300", "b", "4.200"} <= set(texts)
    kinds = [line.get("class") for line in svg.iter(f"{SVG}polyline")]
    assert kinds == ["raw s0", "smooth s0", "smooth s1"]


def test_chart_has_colors_for_light_and_dark_pages():
    style = line_chart([Series("a", 1.0, [1], [1.0])], "t", "", "x", "y")
    assert "prefers-color-scheme:dark" in style
    assert len(re.findall(r"\.s0\{stroke:#", style)) == 2


def test_spike_does_not_flatten_the_rest():
    y = [5.0] * 500
    y[250] = 1000.0
    svg = draw(Series("a", 5.0, list(range(500)), y, window=50))
    smooth = [line for line in svg.iter(f"{SVG}polyline") if line.get("class").startswith("smooth")]
    assert all(TOP <= pixel <= HEIGHT for _, pixel in points_of(smooth[0]))
    assert max(float(tick) for tick in texts_of(svg) if re.fullmatch(r"[\d.]+", tick)) < 500 + 1


def test_long_runs_are_thinned_and_keep_their_extremes():
    y = [float(index % 7) for index in range(20_000)]
    y[12_345] = 9.0
    (line,) = draw(Series("a", 1.0, list(range(20_000)), y)).iter(f"{SVG}polyline")
    points = points_of(line)
    assert len(points) <= MAX_POINTS
    assert points == sorted(points, key=lambda point: point[0])
    assert min(pixel for _, pixel in points) < sorted(pixel for _, pixel in points)[1]


def test_labels_of_lines_that_end_together_do_not_overlap():
    svg = draw(*(Series(name, 2.0, [1, 2], [3.0, 2.0]) for name in "abcd"))
    heights = sorted(float(text.get("y")) for text in svg.iter(f"{SVG}text") if text.text == "2.000")
    assert len(heights) == 4
    assert all(later - earlier >= 30 for earlier, later in pairwise(heights))
    assert heights[-1] < HEIGHT


@pytest.mark.parametrize("y", [[2.0], [2.0, 2.0], [0.0, 0.0]])
def test_flat_and_single_points_are_drawn(y):
    (line,) = draw(Series("a", y[0], list(range(1, len(y) + 1)), y)).iter(f"{SVG}polyline")
    assert len(points_of(line)) == 2


def test_empty_chart_is_refused():
    with pytest.raises(ValueError):
        line_chart([Series("a", 0.0, [], [])], "t", "", "x", "y")
