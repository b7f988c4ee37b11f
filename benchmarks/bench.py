"""Measures TRL's trainer and ours side by side, and the parts of a step beside their peers and floors.

Every measurement runs alone in a process of its own, one after the other. Results go to `benchmarks/results.json`;
`benchmarks/report.py` makes the table and the plots of `docs/benchmarks.md` from it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from suite.jobs import SECTIONS, Job, rows_of
from suite.measure import OtherProcesses, machine

BUSY_CORES = 0.1
RESULTS = Path(__file__).with_name("results.json")


def run_here(job: Job) -> dict[str, Any]:
    """Runs a measurement in this process, in a folder of its own."""
    module, _, name = job.function.partition(":")
    function = getattr(importlib.import_module(module), name)
    started, before = time.perf_counter(), Path.cwd()
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        try:
            result = function(**job.arguments)
        finally:
            os.chdir(before)
    return {"wall_s": time.perf_counter() - started, **result}


def run_alone(job: Job) -> dict[str, Any]:
    """Runs a measurement in a process of its own, which prints its result as the last line."""
    task = json.dumps([job.name, job.function, job.arguments])
    command = [sys.executable, str(Path(__file__).resolve()), "--child", task]
    others = OtherProcesses()
    started = time.perf_counter()
    finished = subprocess.run(command, capture_output=True, text=True)
    seconds = time.perf_counter() - started
    if finished.returncode != 0:
        raise RuntimeError(f"The measurement {job.name!r} failed:\n{finished.stderr[-4000:]}")
    return {**json.loads(finished.stdout.splitlines()[-1]), "wall_s": seconds, "others_cores": others.cores(seconds)}


def measure(
    sections: Sequence[str], *, folder: str, tiny: bool, run: Callable[[Job], dict[str, Any]], output: Path
) -> dict[str, Any]:
    """Measures sections, and puts them in place of those of an earlier run; the others are kept."""
    results: dict[str, Any] = json.loads(output.read_text()) if output.is_file() else {"rows": [], "sections": {}}
    for section in sections:
        found = {}
        for job in SECTIONS[section](folder, tiny):
            found[job.name] = run(job)
            print(f"{found[job.name]['wall_s']:6.1f} s  {job.name}", flush=True)
            if (cores := found[job.name].get("others_cores") or 0.0) > BUSY_CORES:
                print(f"          measure again: other processes kept {cores:.2f} cores busy meanwhile", flush=True)
        results["sections"][section] = {**machine(), "found": found}
        kept = [row for row in results["rows"] if row["section"] != section]
        order = list(SECTIONS)
        rows = [*kept, *({"section": section, **row} for row in rows_of(section, found))]
        results["rows"] = sorted(rows, key=lambda row: order.index(row["section"]))
        output.write_text(json.dumps(results, indent=1) + "\n")
        for row in rows_of(section, found):
            print(json.dumps(row), flush=True)
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", help=f"any of {', '.join(SECTIONS)}; by default all but learning")
    parser.add_argument("--tiny", action="store_true", help="a tiny random model, all in this process: to try the code")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        print("\n" + json.dumps(run_here(Job(*json.loads(options.child)))))
        return
    for section in options.sections:
        if section not in SECTIONS:
            parser.error(f"{section!r} is none of {', '.join(SECTIONS)}")
    sections = options.sections or [section for section in SECTIONS if section != "learning"]
    with tempfile.TemporaryDirectory() as scratch:
        if options.tiny:
            from suite.models import save_tiny_model

            folder = scratch
            save_tiny_model(Path(folder))
        else:
            from grupo.models.default_model import default_model_path

            folder = default_model_path()
        output = options.output.resolve()
        measure(sections, folder=folder, tiny=options.tiny, run=run_here if options.tiny else run_alone, output=output)


if __name__ == "__main__":
    main()
