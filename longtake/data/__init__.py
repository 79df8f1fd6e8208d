"""From files to batches: clip table, probing, decoding, transforms, captions, and the samples of a slot.

A row of `ClipTable` is a clip; `probe_table` makes one from a list of files. `SlotDataset` turns a slot of the order
into a `Batch`, with its pixels, captions and random numbers, and `SlotLoader` does so in worker processes. `caption`
and `write_video` serve training and generation alike.
"""
