"""The results as Markdown: the machine, the targets, and a table for each case."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from benchmarks.cases import CASES
from benchmarks.figures import Figure, figures
from benchmarks.peers import PEERS

if TYPE_CHECKING:
    from benchmarks.cases import Case
    from benchmarks.runner import Results

_SAVE_LOAD = {
    "save_wall_s": "save, s",
    "save_cpu_s_per_gib": "CPU s/GiB",
    "save_peak_mib": "extra MiB",
    "load_wall_s": "load, s",
    "load_cpu_s_per_gib": "CPU s/GiB",
    "load_peak_mib": "extra MiB",
}
_ASYNC = {
    "first_blocked_s": "async_save blocks, first, s",
    "later_blocked_s": "later, s",
    "later_commit_s": "to commit, s",
    "copy_s": "copy_, s",
    "default_stager_s": "DefaultStager, s",
}
_STEPS = {
    "base_ms": "undisturbed, ms",
    "mean_slowdown": "mean, x",
    "p99_slowdown": "p99, x",
    "p99_ms": "p99, ms",
    "blocked_s": "blocked, s",
    "commit_s": "to commit, s",
}
_COLUMNS: dict[str, dict[str, str]] = {
    "plane": {
        "put_wall_s": "upload, s",
        "put_cpu_s_per_gib": "CPU s/GiB",
        "get_wall_s": "download, s",
        "get_cpu_s_per_gib": "CPU s/GiB",
    },
    "dense": _SAVE_LOAD | _ASYNC,
    "small": _SAVE_LOAD,
    "dtensor": _SAVE_LOAD,
    "staging": _ASYNC,
    "latency": {"save_wall_s": "save, s"} | _ASYNC,
    "commit": {"round_trips": "round trips", "last_part_to_visible_s": "s", "requests": "requests in all"},
    "records": {
        "finish_4_s": "finish, a quarter, s",
        "finish_2_s": "half, s",
        "finish_1_s": "all, s",
        "read_4_s": "read_metadata, a quarter, s",
        "read_2_s": "half, s",
        "read_1_s": "all, s",
    },
}


def markdown(results: Results) -> str:
    """The whole report."""
    parts = [_heading(results), _targets(figures(results))]
    parts += [table for case in CASES if (table := _table(case, results))]
    measured = {run["subject"] for run in results.runs}
    settings = [f"* `{name}`: {PEERS[name].settings}" for name in PEERS if name in measured and PEERS[name].settings]
    if settings:
        parts.append("### Settings\n\n" + "\n".join(settings))
    failed = [f"* {run['case']}, `{run['subject']}`: {run['error']}" for run in results.errors()]
    if failed:
        parts.append("### What failed\n\n" + "\n".join(dict.fromkeys(failed)))
    return "\n\n".join(parts) + "\n"


def _heading(results: Results) -> str:
    about = results.environment
    if not about:
        return "Nothing has been measured."
    packages = ", ".join(f"{name} {version}" for name, version in about["packages"].items())
    return (
        f"Measured on {about['date']}: {about['cpu']}, {about['cores']} cores, {about['memory_gib']:g} GiB, {about['kernel']}, "
        f"Python {about['python']}, dcp_s3 {about['dcp_s3']}, {packages}. Endpoint: {results.settings['endpoint']}. State dict: "
        f"{results.settings['gib']:g} GiB (other counts are those at 2 GiB). All subjects in turn, each in a fresh process after "
        "a warm-up; medians, and minimum and maximum in brackets. CPU is that of the client and its children; extra memory is the "
        "peak of the resident set over its size before."
    )


def _targets(found: list[Figure]) -> str:
    if not found:
        return "No target has been measured."
    lines = ["| | target | measured | behind it | rounds | met |", "|---|---|---|---|---:|---|"]
    for figure in found:
        sign = ">=" if figure.at_least else "<="
        measured = f"{_number(figure.value)} {figure.unit} ({_number(figure.low)}-{_number(figure.high)})"
        lines.append(
            f"| {figure.name} | {sign} {figure.limit:g} {figure.unit} | {measured} | {figure.detail} | {figure.rounds} | "
            f"{'yes' if figure.met else '**no**'} |"
        )
    met = sum(figure.met for figure in found)
    return f"### Targets: {met} of {len(found)} met\n\n" + "\n".join(lines)


def _table(case: Case, results: Results) -> str:
    measured = {name: values for name in case.subjects if (values := results.values(case.name, name))}
    columns = _COLUMNS.get(case.name, _STEPS)
    shown = {key: title for key, title in columns.items() if any(key in v for vs in measured.values() for v in vs)}
    if not shown:
        return ""
    lines = [f"| | {' | '.join(shown.values())} |", "|---|" + "---:|" * len(shown)]
    lines += [
        f"| {name} | {' | '.join(_cell([v[key] for v in values if key in v]) for key in shown)} |"
        for name, values in measured.items()
    ]
    return f"### {case.title}\n\n" + "\n".join(lines)


def _cell(values: list[float]) -> str:
    if not values:
        return ""
    middle = _number(statistics.median(values))
    return middle if len(values) == 1 else f"{middle} ({_number(min(values))}-{_number(max(values))})"


def _number(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.3f}"
