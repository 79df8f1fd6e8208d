"""Parallelism: the processes of a run, the mesh, sharding, sequence and tensor parallelism, recomputation."""
