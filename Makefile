# On a fresh machine with python3 and nothing else: `make demo` sets up .venv and trains the embedded model; `make test` sets
# up .venv, then runs lint, types and the quick tests. Neither needs a C compiler.
PYTHON ?= python3
BIN := .venv/bin
export OMP_WAIT_POLICY ?= passive

.PHONY: demo test test-all test-package test-verl test-vllm test-gpu docs lint types unit format benchmark clean
.DELETE_ON_ERROR:

demo: .venv/train
	@if [ -e runs/demo ]; then old=runs/demo-$$(date +%Y%m%d-%H%M%S); mv runs/demo $$old; echo "the earlier demo is now $$old"; fi
	@trap : INT; $(BIN)/poise train demo; code=$$?; \
	echo 'to have the command poise: . .venv/bin/activate'; exit $$code # also after Ctrl-C

test: lint types unit

# With the tests of browsers, docs and studies and the slow ones: continuous integration runs it.
test-all: lint types .venv/rg
	$(BIN)/pytest tests experiments -m ""

# Reinstalls only when what is to be installed has changed.
install = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e

.venv/train: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "poise needs Python 3.11 or newer: make PYTHON=python3.12")'
	@echo 'installing poise and what it needs into .venv: 2 to 6 GB, some minutes; pip says nothing until it is done'
	$(PYTHON) -m venv .venv
	$(install) '.[train]'
	@touch $@

.venv/installed: .venv/train
	$(install) '.[dev]'
	@touch $@

# reasoning-gym needs pycosat, which has to be compiled. Without it its tests are skipped.
.venv/rg: .venv/installed
	@if command -v "$${CC:-cc}" >/dev/null; then $(install) '.[rg]' && touch $@; \
	else echo 'no C compiler, so no reasoning-gym: its tests are skipped'; fi

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed
	$(BIN)/mypy

unit: .venv/installed
	$(BIN)/pytest

# verl has an environment of its own, on top of .venv: verl 0.9.1 wants transformers < 5.11. Ray's warnings are not ours
# to fix. vLLM has one too, for a CPU: it brings sixty packages and numpy < 2.4. There every package is listed, since some
# of those that it would bring along do harm.
layer = $(PYTHON) -m venv $(1) && echo "import site; site.addsitedir('$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')')" \
  > $$($(1)/bin/python -c 'import site; print(site.getsitepackages()[0])')/base.pth

.venv-verl/installed: .venv/installed constraints-verl.txt
	$(call layer,.venv-verl)
	@# Where TRL is found, verl looks for a class in it that TRL no longer has.
	@echo "import sys; sys.modules['trl'] = None" > $$(.venv-verl/bin/python -c 'import site; print(site.getsitepackages()[0])')/no_trl.pth
	.venv-verl/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-verl.txt -e '.[verl]'
	@touch $@

test-verl: .venv-verl/installed
	.venv-verl/bin/python -m pytest tests/with_verl -n 1 -p no:warnings -o filterwarnings=

.venv-vllm/installed: .venv/installed constraints-vllm.txt
	$(call layer,.venv-vllm)
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r constraints-vllm.txt
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

test-vllm: .venv-vllm/installed
	.venv-vllm/bin/python -m pytest tests/with_vllm -n 0 -p no:warnings -o filterwarnings=

# The package as a user gets it: sdist and wheel are built, and the wheel is used in an environment without this clone. A
# plain line in a .pth file lends it the packages of .venv, but not the link to this clone that `pip install -e` left there.
test-package: .venv/installed
	rm -rf .venv-package && $(PYTHON) -m venv .venv-package
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' \
	  > $$(.venv-package/bin/python -c 'import site; print(site.getsitepackages()[0])')/base.pth
	.venv-package/bin/python -m pip install --quiet --disable-pip-version-check build
	.venv-package/bin/python -m build --outdir .venv-package/dist . > .venv-package/build.log || { cat .venv-package/build.log; exit 1; }
	.venv-package/bin/python -m pip install --quiet --disable-pip-version-check --no-deps .venv-package/dist/*.whl
	.venv-package/bin/python -m pytest tests/with_package -n 0

# The site, in site/. A dead link, a link to no heading and a public name without a docstring are errors.
.venv-docs/installed: .venv/installed
	$(call layer,.venv-docs)
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt mkdocs-material 'mkdocstrings[python]'
	@touch $@

docs: .venv-docs/installed
	.venv-docs/bin/python -m mkdocs build

# On a machine with a CUDA device. With a python that has all it needs already: make test-gpu GPU_PYTHON=python3
# Several processes share the device, since most of the time goes to imports and compilers. vLLM measures the device's free
# memory when it starts, so its tests run alone.
GPU_PYTHON ?= $(BIN)/python
GPU_JOBS ?= 4
test-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),.venv/installed)
	@$(GPU_PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available() and "make test-gpu: torch sees no CUDA device here")'
	@failed=0; \
	$(GPU_PYTHON) -m pytest tests/gpu -n $(GPU_JOBS) --ignore tests/gpu/test_vllm_cuda.py || failed=1; \
	$(GPU_PYTHON) -m pytest tests/gpu/test_vllm_cuda.py -n 0 || failed=1; \
	exit $$failed

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

benchmark: .venv/installed
	$(BIN)/python benchmarks/regulators.py

clean:
	rm -rf .venv .venv-docs .venv-package .venv-verl .venv-vllm site .mypy_cache .pytest_cache .ruff_cache .hypothesis build src/*.egg-info
