"""The command line."""

from grupo.cli.main import main

__all__ = ["main"]
