"""Documentation that is made from the code says what the code says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_key_reference_is_what_the_schemas_say() -> None:
    check = [sys.executable, str(ROOT / "tools" / "config_keys.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
