"""Checkpoints: saved by all ranks, loaded at any number of them, checked, listed, retained and exported.

`folder` is the format and its checks, `state` what is kept beside tensors, `layout` deals tensors to ranks and files,
`save`, `background` (with `writer`) and `load` move them, `frozen` keeps those that are not trained, `runs` finds and
retains, `leases` keep what others read, `contents` looks inside, `export` takes the weights out.
"""
