"""What is public, what is shipped, and what importing costs; `lint-imports` checks the layers."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import grupo

PACKAGE = Path(grupo.__file__).parent


def modules() -> Iterator[tuple[str, ast.Module]]:
    """(dotted name below grupo, syntax tree) of every module but `grupo/__init__.py`."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:
            yield name, ast.parse(path.read_text(encoding="utf-8"))


def imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names of what is imported at run time, also inside functions; not for type checkers only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        yield from imports(node)


MODULES = dict(modules())


HEAVY = {"torch", "transformers", "accelerate", "datasets", "peft"}
LIGHT = [
    *("cli.main", "cli.check_rewards", "config.batch_plan", "config.field_support"),
    *(
        "data",
        "errors",
        "metrics",
        "recipes.schema",
        "rewards",
        "sampling",
        "tasks",
        "types",
        "utils.files",
        "utils.hub",
        "utils.messages",
    ),
]


@pytest.mark.parametrize("part", LIGHT)
def test_parts_that_never_import_torch_at_the_top(part: str) -> None:
    for name, tree in MODULES.items():
        if name == part or name.startswith(f"{part}."):
            top = ast.Module([node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))], [])
            heavy = {other for other in imports(top) if other.partition(".")[0] in HEAVY}
            assert not heavy, name


def test_trl_is_never_imported() -> None:
    """An oracle of the tests, never a dependency."""
    for name, tree in MODULES.items():
        assert not [other for other in imports(tree) if other.partition(".")[0] == "trl"], name


def test_public_names_are_sorted_complete_and_real() -> None:
    assert list(grupo.__all__) == sorted(grupo.__all__)
    assert set(grupo.__all__) == {*grupo._HOMES, "__version__"} == set(dir(grupo))
    for name, home in grupo._HOMES.items():
        value = getattr(grupo, name)
        assert value is getattr(importlib.import_module(home), name)
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    typed = {f"{node.module}.{alias.asname}" for node in block.body for alias in node.names}  # type: ignore[attr-defined]
    assert typed == {f"{home}.{name}" for name, home in grupo._HOMES.items()}, "type checkers see the same names"
    with pytest.raises(AttributeError, match="has no attribute 'GRPOConfg'"):
        grupo.GRPOConfg  # noqa: B018


def test_typing_marker_and_recipes_are_shipped() -> None:
    assert (PACKAGE / "py.typed").is_file()
    assert list((PACKAGE / "recipes").glob("*.yaml"))


def test_import_has_no_effects() -> None:
    """Nothing is patched, configured or set by importing all of it."""
    program = """
import os, logging, warnings, signal
before = dict(os.environ), list(logging.getLogger().handlers), list(warnings.filters), signal.getsignal(signal.SIGINT)
import torch, transformers, datasets, peft, accelerate, rich, pandas, ruamel.yaml
environment, filters = dict(os.environ), list(warnings.filters)
import grupo.cli, grupo.cli.train, grupo.trainer
assert dict(os.environ) == environment, "environment"
assert list(logging.getLogger().handlers) == before[1] and not logging.getLogger("grupo").handlers, "logging"
assert logging.getLogger("grupo").level == logging.NOTSET, "logging level"
assert list(warnings.filters) == filters, "warning filters"
assert signal.getsignal(signal.SIGINT) is before[3], "signals"
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=PACKAGE.parent, timeout=120
    )
    assert result.returncode == 0, result.stderr[-1000:]
