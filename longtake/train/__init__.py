"""A training run: read, prepared, run step by step, saved, resumed, and the stages of a curriculum in a row.

What updates the weights belongs into `optimizer`, what watches over a run into `health`; what a run trains on comes
from `data` and `encode`, what it trains from `system`.
"""
