"""The version, for everything that says it. Must stay free of imports: the build reads it."""

__version__ = "0.1.0"
