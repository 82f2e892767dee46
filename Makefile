# Needs Python 3.10 or newer and make; every target makes the environment that it uses.

PYTHON ?= python3

# The torch to install. pyproject.toml names only a lower bound: recording takes the torch that is there.
TORCH ?= torch==2.13.0

# The newest one, while the unit tests have the oldest. torchvision has to match it to the release.
TORCH_INTEGRATIONS ?= torch==2.14.1 torchvision==0.29.1

# The tools that the zoo compares with, as the committed table has them.
PEERS ?= transformers==5.24.0 torchlens==2.36.1 mindstudio-probe==26.2.0

# More words for pytest: make test PYTEST_ARGS="-k verdict"
PYTEST_ARGS ?=

DEMO_RUN := demo.parquet
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check

.PHONY: demo test soak test-lowest lint docs test-integrations chromium peers clean

demo: .venv/.installed
	.venv/bin/gradtrace record --force -o $(DEMO_RUN) examples/char_transformer.py --steps 30
	.venv/bin/gradtrace first-nan $(DEMO_RUN)

test: lint
	OMP_NUM_THREADS=1 .venv-test/bin/python -m pytest -n auto tests --ignore=tests/integrations $(PYTEST_ARGS)

# The long ones, one at a time since they measure; what they measure goes to tests/soak/results, and from there to docs/soak.md.
soak: .venv-test/.installed
	OMP_NUM_THREADS=1 .venv-test/bin/python -m pytest --timeout 3600 -p no:xdist tests/soak $(PYTEST_ARGS)
	.venv-test/bin/python docs/generate.py

# The oldest versions that pyproject.toml claims, with all that Arrow, DuckDB, click and TensorBoard have a part in.
LOWEST := $(addprefix tests/trace/test_, writer.py readers.py shelf.py) tests/analysis \
	$(filter-out %_recheck.py %_hostile_names.py, $(wildcard tests/cli/test_*.py)) tests/test_packaging.py tests/test_settings.py

test-lowest: .venv-lowest/.installed
	OMP_NUM_THREADS=1 .venv-lowest/bin/python -m pytest -n auto $(LOWEST) $(PYTEST_ARGS)

lint: .venv-test/.installed
	.venv-test/bin/ruff check .
	.venv-test/bin/ruff format --check .
	.venv-test/bin/mypy
	.venv-test/bin/lint-imports

docs: .venv-test/.installed
	.venv-test/bin/python docs/generate.py

# A file at a time, since its tests share recordings that take long to make.
test-integrations: .venv-integrations/.installed chromium
	OMP_NUM_THREADS=1 .venv-integrations/bin/python -m pytest -n auto --dist loadfile tests/integrations $(PYTEST_ARGS)

# The browser that the tests of the report drive; Debian's, as others have to be downloaded from elsewhere.
chromium:
	@command -v chromium > /dev/null || { \
		if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
			export DEBIAN_FRONTEND=noninteractive; \
			apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core; \
		else \
			echo 'The tests of the report need chromium on PATH: apt-get install chromium' >&2; exit 1; \
		fi; }

peers: .venv-peers/.installed
	.venv-peers/bin/python -m benchmarks.zoo --peers

clean:
	rm -rf .venv .venv-test .venv-lowest .venv-integrations .venv-peers build dist *.egg-info
	rm -rf .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	rm -rf $(DEMO_RUN) $(DEMO_RUN).parts $(DEMO_RUN:.parquet=.capsule.pt)
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps are the environments' age: changed dependencies install again, nothing else does.
# torch warns where there is no numpy. pip reads dependency groups from 25.1 on, and a new environment may come with an older one.
.venv/.installed: pyproject.toml Makefile
	$(PYTHON) -m venv .venv
	.venv/bin/python $(PIP_INSTALL) $(TORCH) numpy --editable .
	touch $@

.venv-test/.installed: pyproject.toml Makefile
	$(PYTHON) -m venv .venv-test
	.venv-test/bin/python $(PIP_INSTALL) --upgrade 'pip>=25.1'
	.venv-test/bin/python $(PIP_INSTALL) $(TORCH) --editable . --group dev
	touch $@

# uv knows which versions are the oldest; pip installs them, since it finds the torch that the others have. pandas 3 warns of
# what the oldest Arrow does.
.venv-lowest/.installed: pyproject.toml Makefile
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python $(PIP_INSTALL) --upgrade 'pip>=25.1' uv
	.venv-lowest/bin/uv pip compile --quiet --no-deps --no-header --no-annotate --resolution lowest-direct --all-extras \
		--output-file .venv-lowest/lowest.txt pyproject.toml
	.venv-lowest/bin/python $(PIP_INSTALL) --constraint .venv-lowest/lowest.txt \
		--editable '.[torch,report,tensorboard]' --group test 'pandas<3'
	touch $@

.venv-integrations/.installed: pyproject.toml Makefile
	$(PYTHON) -m venv .venv-integrations
	.venv-integrations/bin/python $(PIP_INSTALL) --upgrade 'pip>=25.1'
	.venv-integrations/bin/python $(PIP_INSTALL) $(TORCH_INTEGRATIONS) --editable . --group integrations
	touch $@

.venv-peers/.installed: Makefile
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python $(PIP_INSTALL) $(TORCH) numpy $(PEERS)
	touch $@
