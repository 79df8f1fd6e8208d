"""Slots to batches, made ahead of time by worker processes and brought to the device."""
