"""Draws the way of the data through the packages into docs/architecture.md, from the source itself.

    python tools/draw_data_flow.py           writes the picture
    python tools/draw_data_flow.py --check   exits with 1 where the picture is not that of the source

Each box is a record of `grupo/types.py`, in the order in which the data pass through them, with the modules that make
such records and the packages that read them.
"""

from __future__ import annotations

import ast
import functools
import itertools
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "grupo"
PAGE = ROOT / "docs" / "architecture.md"
START, END = "<!-- drawn by tools/draw_data_flow.py -->\n", "<!-- end of the drawing -->\n"


WAY = ("Prompt", "Completion", "Rollout", "Group", "TrainingSample", "MicroBatch")


@functools.cache
def modules() -> dict[str, ast.Module]:
    """Name below grupo, as in `rollout/collector`, -> syntax tree, without the files at the top."""
    return {
        path.relative_to(SOURCE).with_suffix("").as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(SOURCE.rglob("*.py"))
        if path.parent != SOURCE
    }


def makers(record: str) -> list[str]:
    """Modules that make a record of this class."""

    def makes(tree: ast.Module) -> bool:
        calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
        return any(isinstance(function, ast.Name) and function.id == record for function in calls)

    return [name for name, tree in modules().items() if makes(tree)]


def readers(record: str) -> list[str]:
    """Packages that import the class."""

    def reads(tree: ast.Module) -> bool:
        imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "grupo.types")
        return any(alias.name == record for node in imports for alias in node.names)

    return sorted({name.split("/")[0] for name, tree in modules().items() if reads(tree)})


def picture() -> str:
    boxes = [
        f'    {record}["<b>{record}</b><br/>made in {"<br/>".join(makers(record))}<br/>'
        f'<i>read by {", ".join(readers(record))}</i>"]'
        for record in WAY
    ]
    arrows = [f"    {first} --> {second}" for first, second in itertools.pairwise(WAY)]
    return "\n".join(["```mermaid", "flowchart TD", *boxes, *arrows, "```", ""])


def main() -> int:
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    wanted = before + START + picture() + END + after
    if "--check" in sys.argv:
        if text != wanted:
            print("docs/architecture.md: the drawing is not that of the source; run python tools/draw_data_flow.py")
        return int(text != wanted)
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
