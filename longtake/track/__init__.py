"""Watching a run from inside: trackers (JSONL, TensorBoard, Weights & Biases), meters of speed and memory, progress.

`trackers` writes numbers down, `meters` makes them, `progress` shows them on the terminal, `devices` knows what a GPU
can do at most.
"""
