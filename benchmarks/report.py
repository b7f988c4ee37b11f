"""From `benchmarks/results.json` to the tables and plots of `docs/benchmarks.md`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from suite.jobs import SECTIONS, points_of

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- results: written by benchmarks/report.py -->\n", "<!-- end of results -->\n"

TITLES = {
    "recipes": "Whole steps",
    "parts": "Parts of a step",
    "sweeps": "What scoring costs, and what that grows with",
    "learning": "Learning",
}
AXIS_LABELS = {
    "group_size": "completions of a prompt",
    "prompt_tokens": "prompt tokens",
    "completion_tokens": "completion tokens",
    "vocabulary_size": "vocabulary",
}
SIDE_LABELS = {
    "shared": "prompt computed once",
    "plain": "plain, log-probs in chunks",
    "full_logits": "plain, full logits",
}


def results_text(results: Mapping[str, Any]) -> str:
    """What the page says between its two marks."""
    parts = []
    for section in SECTIONS:
        if section in results["sections"]:
            parts += [f"## {TITLES[section]}\n", _measured(results["sections"][section]), _body(section, results)]
    return "\n".join(parts)


def _measured(about: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    return f"Measured {about['date']}: {about['machine']}; Python {about['python']}, {versions}.\n"


def _body(section: str, results: Mapping[str, Any]) -> str:
    rows = [row for row in results["rows"] if row["section"] == section]
    if section == "recipes":
        return _table(
            ("", "grupo", "TRL, its defaults", "TRL, no checkpointing", "ratio"),
            [
                (
                    row["name"],
                    _quantity(row["ours"], row["unit"]),
                    _quantity(row["peer_checkpointing"]["with"], row["unit"]),
                    _quantity(row["peer_checkpointing"]["without"], row["unit"]),
                    _ratio(row),
                )
                for row in rows
            ],
        )
    if section == "sweeps":
        return "".join(f"![{AXIS_LABELS[axis]}](benchmarks/{axis}.svg)\n" for axis in AXIS_LABELS)
    table = _table(
        ("", "grupo", "peer", "ratio"),
        [
            (row["name"], _quantity(row["ours"], row["unit"]), _quantity(row["peer"], row["unit"]), _ratio(row))
            for row in rows
        ],
    )
    return table + ("\n![held-out accuracy](benchmarks/learning.svg)\n" if section == "learning" else "")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] + ["---:"] * (len(heads) - 1), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _quantity(value: float | None, unit: str) -> str:
    return "" if value is None else f"{_short(value)} {unit}"


def _ratio(row: Mapping[str, Any]) -> str:
    if row["ratio"] is None:
        return ""
    if row["ratio_is"] == "floor / ours":
        return f"{row['ratio']:.0%} of the floor"
    return f"{row['ratio']:.2f}" + (" ×" if row["ratio_is"] == "peer / ours" else " of it")


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def with_results(page: str, results: Mapping[str, Any]) -> str:
    """The page with what is between its marks replaced."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{results_text(results)}\n{END}{after}"


# ---- plots -----------------------------------------------------------------------------------------------------------


def draw(results: Mapping[str, Any], folder: Path) -> None:
    """One file for each sweep, and one for learning."""
    import matplotlib

    matplotlib.use("svg")
    # The same results give the same file.
    matplotlib.rcParams["svg.hashsalt"] = "grupo"
    folder.mkdir(exist_ok=True)
    sections = results["sections"]
    if "sweeps" in sections:
        for axis, label in AXIS_LABELS.items():
            _draw_sweep(label, points_of(axis, sections["sweeps"]["found"]), folder / f"{axis}.svg")
    if "learning" in sections:
        _draw_learning(sections["learning"]["found"], folder / "learning.svg")


def _draw_sweep(axis_label: str, points: Mapping[int, Any], path: Path) -> None:
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for panel, quantity, label in zip(panels, ("seconds", "peak_mib"), ("seconds", "MiB above the model"), strict=True):
        for side, name in SIDE_LABELS.items():
            panel.plot(list(points), [point[side][quantity] for point in points.values()], marker="o", label=name)
        panel.set_xscale("log", base=2)
        panel.set_xticks(list(points), [str(value) for value in points])
        panel.set_ylim(bottom=0)
        panel.set_xlabel(axis_label)
        panel.set_ylabel(label)
    panels[0].legend(frameon=False)
    _save(figure, path)


def _draw_learning(found: Mapping[str, Any], path: Path) -> None:
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(6, 3.2), layout="constrained")
    for job, name in (("learning, ours", "grupo"), ("learning, trl", "TRL")):
        curve = found[job]["curve"]
        panel.plot([p["seconds"] for p in curve], [100 * p["accuracy"] for p in curve], marker="o", label=name)
    panel.set_ylim(0, 100)
    panel.set_xlabel("seconds of training, evaluations left out")
    panel.set_ylabel("held-out accuracy, %")
    panel.legend(frameon=False)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    results = json.loads((HERE / "results.json").read_text())
    PAGE.write_text(with_results(PAGE.read_text(), results))
    draw(results, PAGE.parent / "benchmarks")


if __name__ == "__main__":
    main()
