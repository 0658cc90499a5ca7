# Each target makes what it needs from nothing but Python 3.11+ with pip, and reuses it afterwards.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: demo test cover check docs format clean

$(VENV)/.base: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/.test: $(VENV)/.base
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	touch $@

$(VENV)/.check: $(VENV)/.base
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[check]'
	touch $@

demo: $(VENV)/.base  ## score the first lines of a text and generate from a prompt, on real weights
	$(BIN)/logprobe models pull smollm2
	sed -n 3p examples/lighthouse.txt | $(BIN)/logprobe score - --top 3
	$(BIN)/logprobe generate "The capital of France is" --max-tokens 12 --temperature 0 --logprobs 5

test: $(VENV)/.test  ## the whole suite; the default model is fetched once
	$(BIN)/python -m pytest -q

cover: $(VENV)/.test  ## the whole suite with branch coverage; fails under the floor in pyproject.toml
	$(BIN)/python -m coverage erase
	$(BIN)/python -m coverage run -m pytest -q
	$(BIN)/python -m coverage report --skip-covered --skip-empty --sort=cover

PYTHONS ?= 3.12 3.13
.PHONY: test-pythons
test-pythons:  ## what needs no real weights, on other Pythons that are on the path, each in an environment of its own
	@for version in $(PYTHONS); do \
	python$$version --version >/dev/null 2>&1 || { echo "python$$version is not here"; continue; }; \
	echo "Python $$version:"; \
	test -x .venv-$$version/bin/python || python$$version -m venv .venv-$$version; \
	.venv-$$version/bin/python -m pip install --quiet --disable-pip-version-check -e '.[test]' && \
	.venv-$$version/bin/python -m pytest -q -m "not real_model" --ignore=tests/benchmarks || exit 1; \
	done

check: $(VENV)/.check  ## linter, format, types, import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: rivals bench
rivals: $(VENV)/.base  ## build the environments that the benchmarks compare with; one that fails stops no other
	$(BIN)/python benchmarks/rivals/install.py

.PHONY: test-genlm
test-genlm: $(VENV)/.base  ## genlm-control, unchanged, on this library, in an environment of its own
	$(BIN)/python benchmarks/rivals/install.py genlm
	.rivals/genlm/bin/python -m pytest -q -o filterwarnings=default tests/integrations/test_genlm.py

.PHONY: test-lm-eval
test-lm-eval: $(VENV)/.test  ## lm-evaluation-harness, unchanged, over HTTP and in process; the harness in an environment of its own
	$(BIN)/python benchmarks/rivals/install.py lm_eval
	$(BIN)/python -m pytest -q tests/server/test_lm_eval.py tests/integrations/test_lm_eval.py

bench: $(VENV)/.base  ## every benchmark beside the rivals that are there, then docs/performance.md; OPTIONS="--rounds 3" for fewer
	@failed=; for script in benchmarks/bench_*.py; do $(BIN)/python $$script $(OPTIONS) || failed="$$failed $$script"; done; \
	$(BIN)/python benchmarks/report.py; test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

docs: $(VENV)/.base  ## docs/cli.md from the commands' own help, docs/models.md from the tests' table of families
	$(BIN)/python docs/cli_help.py > docs/cli.md
	$(BIN)/python docs/models_page.py > docs/models.md

format: $(VENV)/.check
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .venv-* .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis
