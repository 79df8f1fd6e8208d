# `make demo`: install what the demo imports, and run it. `make test`: install the test tools too, lint, test.
.PHONY: demo test slow weekly oldest cluster clean

PY := .venv/bin/python
unexport PYTHONDONTWRITEBYTECODE  # or every interpreter that a test starts compiles all sources anew

demo: .venv/.demo
	$(PY) -m longtake demo

test: .venv/.dev
	bash tools/install_test_tools.sh
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2 --dist loadfile

slow: .venv/.dev
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -m slow -n 2 --dist loadfile --timeout 2400

weekly: .venv/.dev
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -m weekly --timeout 2400

# The oldest PyTorch that is allowed and its Triton, which GPU machines may have: several GB, and a quarter of an hour on
# two cores. The release between it and the newest: `make oldest OLD=2.12 OLD_TRITON=3.7`.
OLD ?= 2.11
OLD_TRITON ?= 3.6
oldest:
	VENV=.venv-oldest/$(OLD) TORCH='torch==$(OLD).*' bash tools/install.sh dev
	.venv-oldest/$(OLD)/bin/python -m pip install --quiet 'triton==$(OLD_TRITON).*' 'numpy<2.4'  # its interpreter needs this
	OMP_NUM_THREADS=1 .venv-oldest/$(OLD)/bin/python -m pytest -q -n 2 --dist loadfile --timeout 600 \
		tests/models tests/parallel tests/plan tests/system tests/train tests/generate tests/families tests/weights
	OMP_NUM_THREADS=1 .venv-oldest/$(OLD)/bin/python -m pytest -q -n 2 --dist loadfile --timeout 600 -m slow \
		tests/parallel/test_compile.py tests/parallel/test_float8.py tests/parallel/test_recompute.py \
		tests/parallel/test_recompute_of_peers.py tests/train/test_compiled_resume.py

# Root, for Slurm's packages and daemons, promtool and namespaces; what was found goes into benchmarks/results/cluster.json.
cluster: .venv/.dev
	bash tools/install_test_tools.sh
	bash tools/install_slurm.sh
	OMP_NUM_THREADS=1 LONGTAKE_CLUSTER_JSON=benchmarks/results/cluster.json \
		$(PY) -m pytest -q -m cluster --timeout 2400 tests/cluster
	$(PY) -m pytest -q tests/cluster/test_health.py

.venv/.demo: pyproject.toml tools/install.sh
	bash tools/install.sh
	touch $@

.venv/.dev: pyproject.toml tools/install.sh
	bash tools/install.sh dev
	touch .venv/.demo $@

clean:
	rm -rf .venv build dist *.egg-info
