"""The Python API that `longtake` exports; `longtake config show` and `longtake plan` call it too. `docs/python.md`
shows its use.

Names are provisional until a GPU run and an outside user have tried them; changes are in CHANGELOG.md.
"""
