"""The command line: one file for each verb or group of verbs, nothing but parsing and printing."""

from longtake.cli.app import main

__all__ = ["main"]
