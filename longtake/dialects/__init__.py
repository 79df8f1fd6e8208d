"""The command lines and run files of other systems, with their own keys, as runs of Longtake."""
