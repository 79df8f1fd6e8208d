"""The demo: the whole way from clips on disk to judged videos, on made-up shapes, with the product's own steps."""

from __future__ import annotations

from longtake.demo.run import DemoOutcome, run_demo

__all__ = ["DemoOutcome", "run_demo"]
