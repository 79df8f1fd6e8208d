"""Wheels for a GPU machine without a package index, and what its image is taken to hold (gpu_packages.json).

python tools/gpu_packages.py            fill .wheels, and record the sizes
python tools/gpu_packages.py --hide     variables with which a Python process sees only these packages
"""

import json
import re
import subprocess
import sys
import zipfile
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

ROOT, RECORD = Path(__file__).parents[1], Path(__file__).with_suffix(".json")
WANTED = ["av<19", "diffusers", "pydantic", "annotated_types", "typing_inspection"]
WANTED += ["ftfy", "wcwidth", "beautifulsoup4", "soupsieve"]  # captions of Open-Sora 1.2
PLATFORM = ["--no-deps", "--only-binary=:all:", "--python-version=3.12", "--implementation=cp"]
PLATFORM += [f"--platform={name}_x86_64" for name in ("manylinux_2_28", "manylinux_2_17", "manylinux2014")]


def fill(folder):
    """Download the wheels into `folder` and record their sizes."""
    for file in folder.glob("*.whl"):
        file.unlink()
    download = [sys.executable, "-m", "pip", "download", "-q", "-d", str(folder), *PLATFORM]
    subprocess.run([*download, *WANTED], check=True)
    with zipfile.ZipFile(next(folder.glob("pydantic-*.whl"))) as wheel:
        metadata = next(name for name in wheel.namelist() if name.endswith("METADATA"))
        core = re.search(r"Requires-Dist: (pydantic-core==[\d.]+)", wheel.read(metadata).decode())[1]
    subprocess.run([*download, core], check=True)
    sizes = {file.name: file.stat().st_size for file in sorted(folder.glob("*.whl"))}
    record = json.loads(RECORD.read_text()) | {"wheels": sizes}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{sum(sizes.values()) / 2**20:.1f} MiB in {folder}")


def hiding():
    """Environment variables that hide installed modules that neither the wheels nor the image hold."""
    record, needed = json.loads(RECORD.read_text()), set()
    waiting = list(record["image"])
    while waiting:
        if (name := _normal(waiting.pop())) not in needed:
            needed.add(name)
            with suppress(PackageNotFoundError):
                waiting += [re.match(r"[\w.-]+", line)[0] for line in requires(name) or () if "extra ==" not in line]
    allowed = needed | {_normal(name.split("-")[0]) for name in record["wheels"]} | {"longtake"}
    modules = packages_distributions().items()
    hidden = ",".join(module for module, names in modules if not allowed & set(map(_normal, names)))
    return {"HIDDEN_PACKAGES": hidden, "PYTHONPATH": f"{ROOT / 'tools/hide'}:{ROOT}:{ROOT / 'benchmarks'}"}


def _normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    if "--hide" in sys.argv:
        print(json.dumps(hiding()))
    else:
        fill(ROOT / ".wheels")
