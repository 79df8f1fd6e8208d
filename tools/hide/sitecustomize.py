"""Hide packages from every interpreter that starts with this folder in PYTHONPATH: names in HIDDEN_PACKAGES."""

import os
from importlib.machinery import PathFinder

_hidden, _find_spec = frozenset(os.environ.get("HIDDEN_PACKAGES", "").split(",")), PathFinder.find_spec
PathFinder.find_spec = classmethod(lambda cls, name, *place: None if name in _hidden else _find_spec(name, *place))
