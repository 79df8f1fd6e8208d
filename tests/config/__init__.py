"""Tests of longtake.config."""
