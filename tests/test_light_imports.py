"""Modules that must import without heavy packages."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import longtake


def test_config_sections_need_no_tensors() -> None:
    """`config show`, the doors of every verb and tests of configs import them."""
    sections = [module.name for module in pkgutil.walk_packages(longtake.__path__, "longtake.")]
    imports = "\n".join(f"import {name}" for name in sections if name.endswith(".config") and ".cli" not in name)
    heavy = "import sys; print(*({'torch', 'pyarrow', 'duckdb', 'av', 'PIL', 'safetensors'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", f"{imports}\n{heavy}"], capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("\n", "")
