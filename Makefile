# Each target makes what it needs from nothing but Python 3.11+ with pip, and reuses it afterwards.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: demo test cover check docs format clean

$(VENV)/.base: pyproject.toml hatch_build.py $(wildcard native/*.*)
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
	sed -n 3p examples/lighthouse.txt | $(BIN)/logprobe score - --logprobs 3
	$(BIN)/logprobe generate "The capital of France is" --max-tokens 12 --temperature 0 --logprobs 5

# Three processes, each with whole files (some 12 GB in all): a test's Python has one core, and waits for its child
# processes and clocks as often as it computes, which would leave a part of two cores idle to two. A test that hangs
# shows its threads after 20 minutes, and fails by its name; the slowest are told.
SIDE_BY_SIDE := -n 3 --dist loadfile --max-worker-restart 0 --durations 40 -o faulthandler_timeout=1200 -o faulthandler_exit_on_timeout=true

# Some 80 processes of the suite import the same modules: each would compile them anew where a shell forbids to keep them.
quick test test-all cover: export PYTHONDONTWRITEBYTECODE :=

.PHONY: quick test-all
quick: $(VENV)/.test  ## what a contributor runs: the quicker tests, no downloads
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not real_model and not slow and not exhaustive and not fuzz"

MARKS := not exhaustive
test: $(VENV)/.test  ## the suite with a sample of the largest tables of cases; the default model is fetched once
	$(BIN)/python -m pytest -q $(SIDE_BY_SIDE) -m "$(MARKS)"

.PHONY: test-core
CORE := .venv-core/bin/python
CORE_TESTS := $(wildcard tests/test_*.py) $(addprefix tests/,engine kernels models next_token processors records sampling server text transport)
test-core: $(VENV)/.test  ## the package without extras, in an environment of its own: tests of the library and the server, without torch
	$(BIN)/python tests/core_models.py .venv-core/models
	test -x $(CORE) || $(PYTHON) -m venv .venv-core
	$(CORE) -m pip install --quiet --disable-pip-version-check -e '.[test-core]'
	TINY_MODELS=$(CURDIR)/.venv-core/models $(CORE) -m pytest -q -n 2 --dist loadfile -m "not slow and not exhaustive and not fuzz" $(CORE_TESTS)

test-all: $(VENV)/.test  ## the suite with every case
	$(BIN)/python -m pytest -q $(SIDE_BY_SIDE)

cover: $(VENV)/.test  ## `make test` but for test-ray, with branch coverage; fails under the floor in pyproject.toml
	$(BIN)/python -m pytest -q $(SIDE_BY_SIDE) -m "not ray and not exhaustive" --cov --cov-report=term:skip-covered

PYTHONS ?= 3.12 3.13 3.14
.PHONY: test-pythons
test-pythons:  ## what needs no real weights, on other Pythons that are on the path, each in an environment of its own
	@for version in $(PYTHONS); do \
	python$$version --version >/dev/null 2>&1 || { echo "python$$version is not here"; continue; }; \
	echo "Python $$version:"; \
	test -x .venv-$$version/bin/python || python$$version -m venv .venv-$$version; \
	.venv-$$version/bin/python -m pip install --quiet --disable-pip-version-check -e '.[test]' && \
	.venv-$$version/bin/python -m pytest -q -m "not real_model and not exhaustive" --ignore=tests/benchmarks || exit 1; \
	done

.PHONY: test-lowest
LOWEST := .venv-lowest/bin/python
test-lowest:  ## the lowest versions that pyproject.toml allows, but for torch, in an environment of their own
	test -x $(LOWEST) || python3 -m venv .venv-lowest
	$(LOWEST) docs/dependencies.py --lowest > .venv-lowest/constraints.txt
	$(LOWEST) -m pip install --quiet --disable-pip-version-check -e '.[test]' -c .venv-lowest/constraints.txt
	$(LOWEST) -m pytest -q -o filterwarnings=default -m "not real_model" tests/test_llm.py tests/records tests/models/gguf tests/server/test_completions.py tests/server/test_chat.py tests/next_token

.PHONY: test-sanitize
test-sanitize: $(VENV)/.test  ## the kernels' tests on native libraries built with GCC's address, undefined and thread sanitizers
	$(BIN)/python native/tests/sanitize.py

# A machine with a card is often lent for minutes and has a Python with torch: nothing is installed there. Four processes
# compile the kernels side by side. docs/dev/gpu.md says which packages that Python needs.
GPU_PYTHON ?= python3
GPU_RESULTS := benchmarks/results/gpu.json
GPU_TESTS := tests/gpu tests/kernels tests/transport/test_copy.py
GPU_KERNEL_TESTS := tests/kernels/triton tests/engine/forward/cuda
.PHONY: gpu
gpu: export PYTHONPATH := src:$(PYTHONPATH)
gpu:  ## on an NVIDIA GPU: its tests, then benchmarks/bench_gpu.py, in six minutes; GPU_PYTHON=python3, no installation
	$(GPU_PYTHON) -c "import torch; assert torch.cuda.is_available(), 'there is no NVIDIA GPU here'"
	@failed=; timeout --signal INT --kill-after 10 100 \
	$(GPU_PYTHON) -m pytest -q -m gpu -n 8 --dist loadgroup -p no:cacheprovider -o filterwarnings=default $(GPU_TESTS) || failed=" tests"; \
	timeout --signal INT --kill-after 10 50 \
	$(GPU_PYTHON) -m pytest -q -n 8 -p no:cacheprovider -o filterwarnings=default $(GPU_KERNEL_TESTS) || failed="$$failed kernels"; \
	$(GPU_PYTHON) benchmarks/bench_gpu.py --out $(GPU_RESULTS) $(OPTIONS) || failed="$$failed benchmarks"; \
	test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

check: $(VENV)/.check  ## linter, format, types, import layers; the files of deploy/ and .github/
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hadolint deploy/Dockerfile
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec deploy/compose.yaml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/zizmor --quiet --offline --min-severity medium .github

EXAMPLES ?= 20000
.PHONY: fuzz
fuzz: $(VENV)/.test  ## hostile input of every kind, EXAMPLES of each; what it finds becomes a named test
	FUZZ_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest -q -m fuzz --hypothesis-show-statistics

.PHONY: test-web
test-web: $(VENV)/.test  ## pages of a real Chromium against the server; installs Debian's where root may
	@command -v chromium >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && \
	apt-get update -q && apt-get install -y -q --no-install-recommends chromium; } || \
	{ echo "test-web needs chromium on the path; as root: apt-get install -y chromium" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[web]'
	REQUIRE_CHROMIUM=1 $(BIN)/python -m pytest -q tests/web

.PHONY: screenshots
screenshots: $(VENV)/.base  ## docs/pictures: the page at three widths; needs chromium, as test-web does
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[web]'
	$(BIN)/python docs/screenshots.py

.PHONY: rivals bench bench-real
rivals: $(VENV)/.base  ## build the environments that the benchmarks compare with; one that fails stops no other
	$(BIN)/python benchmarks/rivals/install.py

.PHONY: test-genlm
test-genlm: $(VENV)/.base  ## genlm-backend and genlm-control, unchanged, with their own tests, on this library
	$(BIN)/python benchmarks/rivals/install.py genlm
	.rivals/genlm/bin/python -m pytest -q -o filterwarnings=default tests/integrations/genlm

.PHONY: test-lm-eval
test-lm-eval: $(VENV)/.test  ## lm-evaluation-harness, unchanged, over HTTP and in process; the harness in an environment of its own
	$(BIN)/python benchmarks/rivals/install.py lm_eval
	$(BIN)/python -m pytest -q tests/server/test_lm_eval.py tests/integrations/test_lm_eval.py

.PHONY: test-clients
test-clients: $(VENV)/.test  ## client libraries of the server, unchanged, each in an environment that has no part of this project
	$(BIN)/python benchmarks/rivals/install.py clients clients_2 structured_logprobs
	$(BIN)/python -m pytest -q -rP tests/clients

.PHONY: test-trainers
test-trainers: $(VENV)/.test  ## TRL's trainers, unchanged, against the server on a tiny model, and Tinker's interface; each in an environment of its own
	$(BIN)/python benchmarks/rivals/install.py trl tinker
	$(BIN)/python -m pytest -q -rP tests/trainers
	PYTHONPATH=src .rivals/tinker/bin/python -m pytest -q tests/integrations/test_tinker.py

.PHONY: test-evaluators
test-evaluators: $(VENV)/.test  ## Inspect, lighteval and lm-evaluation-harness, unchanged: our model in process and over HTTP beside their own on transformers
	$(BIN)/python benchmarks/rivals/install.py evaluators
	$(BIN)/python -m pytest -q -rP tests/evaluators

# genlm-control by itself: its import sets how vLLM starts.
ON_VLLM := tests/engine/backends tests/integrations/vllm tests/next_token tests/docs/test_next_token_page.py
.PHONY: test-vllm
test-vllm: $(VENV)/.base  ## the vLLM engine on this CPU: the suite of every engine and what is vLLM's own, in vLLM's environment
	$(BIN)/python benchmarks/rivals/install.py vllm
	PYTHONPATH=src .rivals/vllm/bin/python -m pytest -q -n 2 --dist loadfile --durations 40 -o filterwarnings=default -m vllm $(ON_VLLM)
	PYTHONPATH=src .rivals/vllm/bin/python -m pytest -q -o filterwarnings=default -m vllm tests/integrations/genlm/test_genlm.py

.PHONY: test-uncertainty
test-uncertainty: $(VENV)/.test  ## figures of answers against the code of lm-polygraph, uqlm and DeepConf, of which nothing else is installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/uncertainty lm-polygraph==0.7.0 uqlm==0.6.7 deepconf==0.1.0
	PYTHONPATH=$(VENV)/uncertainty $(BIN)/python -m pytest -q tests/sources/test_uncertainty.py

.PHONY: torture
MINUTES ?= 15
torture: $(VENV)/.test  ## mixed requests for MINUTES=15 in every layout, with faults, and drawn numbers against scored ones
	PYTHONPATH=tests:tests/torture:benchmarks:benchmarks/rivals $(BIN)/python benchmarks/torture.py --minutes $(MINUTES)

.PHONY: simulate
SECONDS ?= 60
simulate: $(VENV)/.test  ## simulate the engine for SECONDS=60 from fresh seeds, or from SEED=...; a failure is printed as a test
	PYTHONPATH=tests $(BIN)/python -m simulation --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(OPTIONS)

.PHONY: mutations
mutations: $(VENV)/.test  ## put faults into a copy of the engine, one at a time; the simulation must find each within 30 s
	PYTHONPATH=tests $(BIN)/python tests/simulation/mutations.py $(OPTIONS)

.PHONY: test-ray
test-ray: $(VENV)/.test  ## data sets on a real local Ray, an actor killed half way; installs the extra `ray`
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[ray]'
	$(BIN)/python -m pytest -q -m ray

.PHONY: notebook
notebook: $(VENV)/.test  ## run examples/surprisal.ipynb anew and keep what it shows
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[notebook,frames,plot]'
	$(BIN)/python docs/run_notebook.py

bench: $(VENV)/.test  ## every benchmark but bench-real and gpu beside the rivals that are there, then the page of their figures; OPTIONS="--rounds 3" for fewer
	@failed=; for script in $(filter-out benchmarks/bench_real.py benchmarks/bench_gpu.py,$(wildcard benchmarks/bench_*.py)); do $(BIN)/python $$script $(OPTIONS) || failed="$$failed $$script"; done; \
	$(BIN)/python benchmarks/report.py; test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

bench-real: $(VENV)/.test  ## a model of 1.2 billion random weights beside the rivals that are there; OPTIONS="--model FOLDER" for another
	$(BIN)/python benchmarks/bench_real.py $(OPTIONS) && $(BIN)/python benchmarks/report.py

# Not with --quiet: MkDocs would not count the warnings that --strict turns into errors.
docs: $(VENV)/.base  ## the site, in site/; the hook docs/site_hook.py fills in the generated parts of its pages
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The wheel from the source archive, both as published, in an environment of their own with what they declare.
.PHONY: test-wheel
test-wheel: $(VENV)/.test  ## build wheel and source archive, install the wheel outside this folder, and try it; deploy/
	@command -v promtool >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && \
	apt-get update -q && apt-get install -y -q --no-install-recommends prometheus; } || \
	echo "there is no promtool: the rules of deploy/ are not checked; as root: apt-get install -y prometheus" >&2
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[release]'
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
	$(BIN)/python -m build --outdir "$$folder/dist" . >"$$folder/build.log" || { cat "$$folder/build.log"; exit 1; } && \
	$(PYTHON) -m venv "$$folder/venv" && \
	"$$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check "$$folder"/dist/*.whl && \
	RELEASE_FOLDER="$$folder" $(BIN)/python -m pytest -q tests/release

.PHONY: test-aarch64
test-aarch64: $(VENV)/.test  ## the kernels for 64-bit Arm under qemu beside those for x86-64; installs Debian's where root may
	@{ command -v qemu-aarch64-static && command -v aarch64-linux-gnu-g++; } >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && \
	apt-get update -q && apt-get install -y -q --no-install-recommends qemu-user-static g++-aarch64-linux-gnu libstdc++-12-dev-arm64-cross libc6-dev-arm64-cross; } || \
	{ echo "test-aarch64 needs qemu-aarch64-static and aarch64-linux-gnu-g++; as root: apt-get install -y qemu-user-static g++-aarch64-linux-gnu" >&2; exit 1; }
	$(BIN)/python -m pytest -q -rs tests/kernels/test_aarch64.py

# Wheels for every platform from the source archive, by zig; the one for this machine is installed and tried.
.PHONY: wheels
WHEELS := manylinux_2_28_x86_64 manylinux_2_28_aarch64 macosx_11_0_arm64 win_amd64
wheels: $(VENV)/.test  ## wheels for Linux (x86-64, Arm), macOS (Arm) and Windows in dist/, by cross compilation; this machine's is tried
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[release]'
	rm -rf dist
	$(BIN)/python -m build --no-isolation --sdist --outdir dist .
	for target in $(WHEELS); do LOGPROBE_TARGET=$$target $(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps -w dist dist/*.tar.gz || exit 1; done
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && mkdir "$$folder/dist" && \
	cp dist/*.tar.gz dist/*manylinux_2_28_$$(uname -m).whl "$$folder/dist" && \
	$(PYTHON) -m venv "$$folder/venv" && \
	"$$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check "$$folder"/dist/*.whl && \
	RELEASE_FOLDER="$$folder" $(BIN)/python -m pytest -q tests/release/test_archives.py

RELEASE_TESTS ?= tests
.PHONY: release-check
release-check:  ## archives, licences, SBOM, and the quick tests on the installed wheel; DIST=dist for those of `make wheels`, RELEASE_PYTHONS="python3.11 python3.14"
	$(PYTHON) release/check.py $(if $(DIST),--dist $(DIST)) --pythons $(or $(RELEASE_PYTHONS),$(PYTHON)) --tests $(RELEASE_TESTS)

format: $(VENV)/.check
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .venv-* .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis
