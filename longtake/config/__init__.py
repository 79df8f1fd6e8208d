"""How a run is written down: files read as data, inheritance with late binding, flags, checked schemas, clear faults.

`Section` is the base of every schema. `load_config` turns a file, its bases and the command line's flags into a checked
value; `resolve` does so without a file; `dump_config` writes a file that reads back equal; `describe` lists every value
with where it comes from; `key_names` tells one kind of file from another. A mistake of the user is a `ConfigError` that
carries all its `Fault`s.
"""
