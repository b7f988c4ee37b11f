"""The benchmarks run, on a tiny model, and the page says what the results say."""

from __future__ import annotations

import json

import pytest
import torch

import bench
import report
from suite.jobs import AXES, SECTIONS, Job, _row, points_of
from suite.measure import MIB, MemoryAbove
from suite.models import save_tiny_model
from suite.parts import geometric_lengths


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Of all sections, in tiny; the numbers mean nothing."""
    folder = tmp_path_factory.mktemp("bench")
    save_tiny_model(folder / "model")
    output = folder / "results.json"
    bench.measure(list(SECTIONS), folder=str(folder / "model"), tiny=True, run=bench.run_here, output=output)
    return json.loads(output.read_text())


def test_every_measurement_gives_its_rows(results):
    rows = results["rows"]
    assert {row["section"] for row in rows} == {"recipes", "parts", "learning"}
    assert all({"name", "ours", "peer", "ratio", "unit"} <= row.keys() for row in rows)
    assert all(row["ours"] > 0 for row in rows if row["unit"] != "MiB")
    assert len({row["name"] for row in rows}) == len(rows) == 6 + 11 + 2
    sweeps = results["sections"]["sweeps"]["found"]
    assert all(list(points_of(axis, sweeps)) == [8, 16] for axis in AXES)


def test_a_later_run_of_one_section_keeps_the_others(results, tmp_path):
    output = tmp_path / "results.json"
    output.write_text(json.dumps(results))
    found = results["sections"]["parts"]["found"]
    bench.measure(["parts"], folder="", tiny=True, run=lambda job: {**found[job.name], "ours": 123.0}, output=output)
    again = json.loads(output.read_text())
    assert [row["name"] for row in again["rows"]] == [row["name"] for row in results["rows"]]
    changed = {row["section"] for row, old in zip(again["rows"], results["rows"], strict=True) if row != old}
    assert changed == {"parts"}


def test_ratios_are_what_they_say():
    assert _row("", 2.0, 5.0, "s", "peer / ours")["ratio"] == 2.5
    assert _row("", 2.0, 1.0, "s", "floor / ours")["ratio"] == 0.5
    assert _row("", 2.0, 8.0, "MiB", "ours / peer")["ratio"] == 0.25
    assert _row("", 2.0, None, "s", "")["ratio"] is None


def test_a_measurement_runs_in_a_process_of_its_own():
    job = Job("log-probs", "suite.parts:measure_logprob_memory", {"tokens": 8, "vocabulary_size": 16, "hidden_size": 4})
    assert bench.run_alone(job)["full_logits_mib"] == 8 * 16 * 4 / MIB
    with pytest.raises(RuntimeError, match=r"'lost' failed:(.|\n)*ModuleNotFoundError"):
        bench.run_alone(Job("lost", "suite.nowhere:measure"))


def test_memory_is_the_peak_above_the_start():
    held = torch.ones(32, MIB // 4)
    memory = MemoryAbove()
    passing = torch.ones(64, MIB // 4)
    del passing
    assert 60 * MIB < memory.bytes() < 80 * MIB
    assert MemoryAbove().bytes() < 16 * MIB
    del held


def test_lengths_are_geometric_and_fixed():
    lengths = geometric_lengths(2000, mean=60, cap=256)
    assert lengths[:64] == geometric_lengths(64, mean=60, cap=256)
    # The mean of a geometric distribution of mean 60 cut at 256: 60 (1 - (59/60)^256) = 59.2; its error is 1.2.
    assert abs(sum(lengths) / 2000 - 59.2) < 4 and max(lengths) == 256 and min(lengths) == 1


def test_the_page_and_the_plots_are_made_from_results(results, tmp_path):
    page = report.with_results(f"# Head\n{report.BEGIN}old\n{report.END}tail\n", results)
    assert page.startswith("# Head\n") and page.endswith("tail\n") and "old" not in page
    assert all(f"| {row['name']} |" in page for row in results["rows"])
    assert report.with_results(page, results) == page
    pytest.importorskip("matplotlib")
    report.draw(results, tmp_path)
    for name in (*report.AXIS_LABELS, "learning"):
        assert f"benchmarks/{name}.svg" in page and (tmp_path / f"{name}.svg").stat().st_size > 1000


def test_the_page_says_what_the_results_say():
    results = json.loads(bench.RESULTS.read_text())
    page = report.PAGE.read_text(encoding="utf-8")
    assert report.with_results(page, results) == page
