"""A line chart as SVG text, readable on a light and on a dark page."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from itertools import pairwise

WIDTH, HEIGHT = 840, 460
LEFT, RIGHT, TOP, BOTTOM = 64, 150, 72, 56  # margins around the plot; the right one holds the lines' labels
MAX_POINTS = 800  # a line has no more; the picture has hardly more pixels
LABEL_GAP = 32  # between the labels of two lines, so that they do not overlap

# Colours that stay apart for colour-blind readers, on white and on the dark background.
LIGHT = ("#1f6fd0", "#d1580f", "#1b8a5a", "#9a3fb5", "#a8780a", "#b3304f")
DARK = ("#6cb0ff", "#ff9a52", "#57d39b", "#d58cf0", "#e3bb4a", "#ff7d97")


@dataclass(frozen=True)
class Series:
    """One line: its label, the value to write beside its end, its points in order of x, and over how many of them its
    smoothed line averages (1: there is none)."""

    label: str
    value: float
    x: list[float]
    y: list[float]
    window: int = 1


def line_chart(series: list[Series], title: str, subtitle: str, x_label: str, y_label: str) -> str:
    """Draw ``series``: each as measured, pale, and smoothed above it, with its label and value beside its end.

    The horizontal axis starts at zero. The vertical range is that of the smoothed lines; a single spike leaves the
    picture instead of flattening the rest.

    Raises:
        ValueError: a series has no point, or there is no series.
    """
    if not series or not all(line.x for line in series):
        raise ValueError("a chart needs at least one point in every series")
    smooth = [smoothed(line.y, line.window) for line in series]
    x_axis = Axis.around([0.0, *(x for line in series for x in line.x)], LEFT, WIDTH - RIGHT, padding=0.0)
    y_axis = Axis.around([y for line in smooth for y in line], HEIGHT - BOTTOM, TOP, padding=0.06)
    parts = [_style(len(series)), _frame(title, subtitle, x_label, y_label), _grid(x_axis, y_axis)]
    for index, (line, values) in enumerate(zip(series, smooth, strict=True)):
        parts.append(_line(line, values, index, x_axis, y_axis))
    parts.append(_labels(series, smooth, y_axis))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="{escape(title)}">\n' + "\n".join(parts) + "\n</svg>\n"
    )


@dataclass(frozen=True)
class Axis:
    """Maps values from ``low`` to ``high`` to pixels from ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def around(cls, values: list[float], start: float, end: float, padding: float) -> Axis:
        """The axis that holds ``values`` with a share of ``padding`` left free on both sides."""
        low, high = min(values), max(values)
        room = (high - low) * padding or (0.0 if high > low else max(abs(high) * 0.05, 0.5))
        return cls(low - room, high + room, start, end)

    def pixel(self, value: float) -> float:
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 2)

    def ticks(self, count: int) -> list[float]:
        """About ``count`` round values (1, 2 or 5 times a power of ten apart) within the axis."""
        raw = (self.high - self.low) / count
        power = 10 ** math.floor(math.log10(raw))
        step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]


def smoothed(values: list[float], window: int) -> list[float]:
    """Centred moving mean over ``window`` values.

    At the start the window shrinks evenly on both sides, so that the first steps, where the loss falls fast, are not
    averaged with later ones; at the end only its later half is missing.
    """
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    result = []
    for index in range(len(values)):
        half = min(window // 2, index)
        first, last = index - half, min(index + half, len(values) - 1)
        result.append((sums[last + 1] - sums[first]) / (last + 1 - first))
    return result


def number(value: float) -> str:
    """``0.5``, ``12``, ``1.5K``, ``2M``, ``3.1B``: short enough for a tick."""
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= limit:
            return f"{value / limit:.4g}{suffix}"
    return f"{value:.4g}"


def _style(num_series: int) -> str:
    def rules(colors: tuple[str, ...], paper: str, ink: str, faint: str, rule: str) -> str:
        lines = [f".s{index}{{--c:{colors[index % len(colors)]}}}" for index in range(num_series)]
        page = f".paper{{fill:{paper}}}.ink{{fill:{ink}}}.faint{{fill:{faint}}}.rule{{stroke:{rule}}}"
        return page + "".join(
            line.replace("{--c:", "{stroke:") + line.replace(".s", ".t").replace("{--c:", "{fill:") for line in lines
        )

    return (
        "<style>text{font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;font-size:13px}"
        ".title{font-size:19px;font-weight:600}.value{font-size:14px;font-weight:600}"
        ".raw{fill:none;clip-path:url(#plot);stroke-width:1;opacity:.32}.smooth{fill:none;stroke-width:2.4;stroke-linejoin:round;"
        "stroke-linecap:round}"
        + rules(LIGHT, "#ffffff", "#1c2128", "#656d76", "#e3e6ea")
        + "@media (prefers-color-scheme:dark){"
        + rules(DARK, "#0d1117", "#e6edf3", "#9198a1", "#2b3139")
        + "}</style>"
    )


def _frame(title: str, subtitle: str, x_label: str, y_label: str) -> str:
    middle_x, middle_y = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
    return "\n".join(
        (
            f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}" rx="8"/>',
            f'<clipPath id="plot"><rect x="{LEFT}" y="{TOP}" width="{WIDTH - RIGHT - LEFT}" '
            f'height="{HEIGHT - BOTTOM - TOP}"/></clipPath>',
            f'<text class="ink title" x="24" y="34">{escape(title)}</text>',
            f'<text class="faint" x="24" y="55">{escape(subtitle)}</text>',
            f'<text class="faint" x="{middle_x}" y="{HEIGHT - 14}" text-anchor="middle">{escape(x_label)}</text>',
            f'<text class="faint" x="20" y="{middle_y}" text-anchor="middle" '
            f'transform="rotate(-90 20 {middle_y})">{escape(y_label)}</text>',
        )
    )


def _grid(x_axis: Axis, y_axis: Axis) -> str:
    parts = []
    for tick in y_axis.ticks(6):
        y = y_axis.pixel(tick)
        parts.append(f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="faint" x="{LEFT - 9}" y="{y + 4.5}" text-anchor="end">{number(tick)}</text>')
    for tick in x_axis.ticks(7):
        x, y = x_axis.pixel(tick), HEIGHT - BOTTOM
        parts.append(f'<line class="rule" x1="{x}" x2="{x}" y1="{y}" y2="{y + 5}"/>')
        parts.append(f'<text class="faint" x="{x}" y="{y + 20}" text-anchor="middle">{number(tick)}</text>')
    return "\n".join(parts)


def _line(line: Series, smooth: list[float], index: int, x_axis: Axis, y_axis: Axis) -> str:
    paths = [("smooth", smooth)] if line.window <= 1 else [("raw", line.y), ("smooth", smooth)]
    return "\n".join(
        f'<polyline class="{kind} s{index}" points="{_points(line.x, values, x_axis, y_axis)}"/>'
        for kind, values in paths
    )


def _points(x: list[float], y: list[float], x_axis: Axis, y_axis: Axis) -> str:
    points = [f"{x_axis.pixel(x[index])},{y_axis.pixel(y[index])}" for index in _thinned(y)]
    return " ".join(points if len(points) > 1 else points * 2)  # with the round caps a single point is a dot


def _thinned(y: list[float]) -> list[int]:
    """Indices of at most ``MAX_POINTS`` points: the lowest and the highest of each stretch, so that spikes stay."""
    if len(y) <= MAX_POINTS:
        return list(range(len(y)))
    num_stretches = MAX_POINTS // 2 - 1
    bounds = [round(index * len(y) / num_stretches) for index in range(num_stretches + 1)]
    kept = {0, len(y) - 1}
    for first, last in pairwise(bounds):
        kept |= {min(range(first, last), key=y.__getitem__), max(range(first, last), key=y.__getitem__)}
    return sorted(kept)


def _labels(series: list[Series], smooth: list[list[float]], y_axis: Axis) -> str:
    """Each line's value and label beside its end, moved apart where they would overlap."""
    x = WIDTH - RIGHT + 10
    parts, lowest_free = [], TOP
    wanted = sorted(range(len(series)), key=lambda index: y_axis.pixel(smooth[index][-1]))
    top_of_last = HEIGHT - BOTTOM - 12
    for position, index in enumerate(wanted):
        limit = top_of_last - LABEL_GAP * (len(wanted) - 1 - position)
        y = max(min(y_axis.pixel(smooth[index][-1]), limit), lowest_free)
        lowest_free = y + LABEL_GAP
        parts.append(f'<text class="value t{index}" x="{x}" y="{y}">{series[index].value:.3f}</text>')
        parts.append(f'<text class="faint" x="{x}" y="{y + 15}">{escape(_shorten(series[index].label))}</text>')
    return "\n".join(parts)


def _shorten(label: str, length: int = 17) -> str:
    return label if len(label) <= length else label[: length - 1] + "…"
