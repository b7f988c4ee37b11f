"""The version of grupo, on its own so that nothing has to import the package to read it."""

__version__ = "0.1.0"
