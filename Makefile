# make demo: set up, train a small model with 4 local ranks, prove its layout.
# make test-fast: the tests for an edit, 90 seconds. make test: before a push and in CI; 15
# minutes on two cores are the aim. make full: every test, in pieces; those that have not run for longest come first.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/installed
PEERS := .venv-peers
BESIDE := $(PEERS)/peers
# Tests start hundreds of processes: each would compile isograd anew, and pytest its tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: chromium demo full fuzz test test-fast test-peers lint format bench bench-quick docs sbom clean
.DEFAULT_GOAL := demo

$(STAMP): pyproject.toml verify/pyproject.toml constraints.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check torch==$$(sed -n 's/^torch==//p' constraints.txt)
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable verify --editable '.[hf,plot,dev]'
	touch $(STAMP)

# Libraries that no resolver installs beside our pins, verl and DeepSpeed among them: an environment that sees all of $(VENV),
# and has what stands below "# Peers" in constraints.txt, as it stands there. tests/conftest.py knows it by the file that ends it.
$(BESIDE): $(STAMP)
	rm -rf $(PEERS)
	$(RUN) -m venv --without-pip $(PEERS)
	$(RUN) -c "import sysconfig as s; print('import site; site.addsitedir(%r)' % s.get_path('purelib'))" >$(PEERS)/venv.pth
	mv $(PEERS)/venv.pth $(PEERS)/lib/python*/site-packages
	sed '1,/^# Peers/d' constraints.txt >$(PEERS)/peers.txt
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --requirement $(PEERS)/peers.txt
	touch $(BESIDE)

demo: $(STAMP)
	rm -rf runs/demo runs/here.yaml
	mkdir -p runs
	@echo "what this computer sustains:"
	$(VENV)/bin/isograd machine measure runs/here.yaml
	$(VENV)/bin/isograd plan recipes/quickstart.yaml --machine runs/here.yaml --layout "dp2 tp2 sp zero1"
	$(VENV)/bin/isograd train recipes/quickstart.yaml --run runs/demo
	$(VENV)/bin/isograd verify recipes/quickstart.yaml

# The tests open the verifier's page in a browser, as a person would.
chromium:
	@command -v chromium >/dev/null || { \
	  command -v apt-get >/dev/null || { echo "install chromium: the tests open a page in it"; exit 1; }; \
	  SUDO=$$(test "$$(id -u)" = 0 || echo sudo); \
	  $$SUDO apt-get update -qq && $$SUDO apt-get install -y -qq --no-install-recommends chromium >/dev/null; }

# Two workers: each has worlds of its own; a file's tests stay together, with what they share. WORKERS=0: this process alone.
WORKERS ?= 2
test-fast: $(STAMP)
	$(RUN) -m pytest -n $(WORKERS) --dist loadfile -m "not slow and not medium"

test: $(STAMP) chromium
	$(RUN) -m pytest -n $(WORKERS) --dist loadfile -m "not slow"

# Half a minute of mutations for each reader of files, in CI after `make test`, which has a second for each.
fuzz: $(STAMP)
	ISOGRAD_FUZZ_SECONDS=30 $(RUN) -m pytest -n $(WORKERS) -k mutations tests/test_outside.py

# Tests of verl's own workers, DeepSpeed's own schedules, ...: what `make test` cannot import. Here nothing is skipped.
test-peers: $(BESIDE)
	$(PEERS)/bin/python -m pytest -n $(WORKERS) --dist loadfile -m "peers and not slow" $$(grep -rl --include='test_*.py' 'mark\.peers' tests)

full: $(STAMP) $(BESIDE) chromium
	WORKERS=$(WORKERS) $(RUN) scripts/full.py

lint: $(STAMP)
	$(VENV)/bin/ruff check src tests examples benchmarks verify scripts
	$(VENV)/bin/mypy
	$(RUN) scripts/house.py
	$(RUN) scripts/full.py --stale
	$(RUN) scripts/expected.py --check
	$(RUN) scripts/loops.py --check

format: $(STAMP)
	$(VENV)/bin/ruff format src tests examples benchmarks verify scripts

# All races beside the peers, under an hour on a quiet machine; bench-quick: five minutes, wider ranges.
bench: $(STAMP)
	$(RUN) -m benchmarks.all

bench-quick: $(STAMP)
	$(RUN) -m benchmarks.all --quick

# The documentation as a site, in site/. Building it needs no network.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet

# What is installed, as a CycloneDX file, with the hashes of the wheel.
sbom: $(STAMP)
	$(RUN) -m pip wheel --quiet --no-deps --wheel-dir dist . ./verify
	$(RUN) scripts/sbom.py dist/sbom.json dist/isograd-*.whl dist/isograd_verify-*.whl

clean:
	rm -rf $(VENV) $(PEERS) benchmarks/out site
