"""The results as a picture: every target as a share of its limit, and the peers' seconds beside ours."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import matplotlib as mpl  # type: ignore[import-not-found]  # installed by scripts/bench alone

mpl.use("Agg")

from matplotlib import pyplot as plt

from benchmarks.cases import CASES
from benchmarks.figures import OURS, Figure, figures

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.runner import Results

_MET, _MISSED, _OTHER = "#2a7f9e", "#c8553d", "#b9bfc4"
_INK = "#222222"
_SPREAD: dict[str, Any] = {"color": _INK, "linewidth": 1.2, "solid_capstyle": "butt"}
_SECONDS = (
    ("dense", "save_wall_s", "save, dense"),
    ("dense", "load_wall_s", "load, dense"),
    ("small", "save_wall_s", "save, small"),
    ("small", "load_wall_s", "load, small"),
    ("dtensor", "save_wall_s", "save, 2 ranks"),
    ("dtensor", "load_wall_s", "load, 2 ranks"),
)


def draw(results: Results, path: Path) -> None:
    """Draw the picture.

    Args:
        results: The measurements.
        path: Its name ends in ``.svg`` or ``.png``.
    """
    found = figures(results)
    walls = [panel for panel in _SECONDS if any(results.values(panel[0], name) for name in _subjects(panel[0]))]
    rows = -(-len(walls) // 2)
    height = 0.9 + 0.32 * max(1, len(found))
    plt.rcParams.update(
        {"font.size": 9, "svg.hashsalt": "dcp_s3", "axes.spines.top": False, "axes.spines.right": False}
    )
    figure = plt.figure(figsize=(11, height + 1.9 * rows), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=(height, max(0.01, 1.9 * rows)))
    upper.suptitle(
        "Targets as shares of their limits: shorter is better, lines span the rounds", fontsize=10, weight="bold"
    )
    _targets(upper.subplots(), found)
    if walls:
        lower.suptitle("Seconds, medians and span of the rounds", fontsize=10, weight="bold")
        axes = lower.subplots(rows, 2, squeeze=False).flat
        for axis, (case, key, title) in zip(axes, walls, strict=False):
            _seconds(axis, results, case, key, title)
        for axis in list(axes)[len(walls) :]:
            axis.set_visible(False)
    about = results.environment
    if about:
        where = f"{about['cpu']}, {about['cores']} cores, {results.settings['endpoint']}, {about['date']}"
        figure.suptitle(f"dcp_s3 {about['dcp_s3']} and its peers, {results.settings['gib']:g} GiB. {where}", fontsize=9)
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(path, dpi=130, metadata=metadata)
    plt.close(figure)


def _subjects(case: str) -> tuple[str, ...]:
    return next(found.subjects for found in CASES if found.name == case)


def _targets(axis: Any, found: list[Figure]) -> None:  # noqa: ANN401 -- matplotlib's Axes
    """One bar a target; the line at 1 is the limit, on a logarithmic scale."""
    smallest, largest = 0.02, 10.0

    def shown(item: Figure, value: float) -> float:
        return min(largest, max(smallest, item.share(max(value, 1e-9))))

    for row, item in enumerate(reversed(found)):
        colour = _MET if item.met else _MISSED
        axis.barh(row, shown(item, item.value) - smallest, left=smallest, height=0.62, color=colour, alpha=0.85)
        axis.plot(sorted(shown(item, value) for value in (item.low, item.high)), (row, row), **_SPREAD)
        sign = ">=" if item.at_least else "<="
        text = f"{item.value:.3g} {item.unit}  ({sign} {item.limit:g})"
        axis.text(1.01, row, text, transform=axis.get_yaxis_transform(), va="center", fontsize=8, color=colour)
    axis.axvline(1, color=_INK, linewidth=1)
    axis.set_xscale("log")
    axis.set_xlim(smallest, largest)
    axis.set_ylim(-0.6, len(found) - 0.4)
    axis.set_yticks(range(len(found)), [item.name for item in reversed(found)])
    axis.set_xticks((0.05, 0.1, 0.2, 0.5, 1, 2, 5), ("1/20", "1/10", "1/5", "1/2", "limit", "2 x", "5 x"))
    axis.minorticks_off()


def _seconds(axis: Any, results: Results, case: str, key: str, title: str) -> None:  # noqa: ANN401
    measured = {
        name: [values[key] for values in found]
        for name in _subjects(case)
        if (found := results.values(case, name)) and key in found[0]
    }
    names = list(reversed(measured))
    for row, name in enumerate(names):
        values = measured[name]
        middle = statistics.median(values)
        axis.barh(row, middle, height=0.62, color=_MET if name == OURS else _OTHER)
        axis.plot((min(values), max(values)), (row, row), **_SPREAD)
        axis.annotate(
            f"{middle:.2f}", (max(values), row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8
        )
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_title(f"{title}", loc="left", fontsize=9)
    axis.margins(x=0.12)
