"""The Python API: what `longtake` exports, and what the command line's verbs call. `docs/python.md` shows its use.

Names are provisional until a GPU run and an outside user have tried them; changes are in CHANGELOG.md.
"""
