# Every target sets up what it needs: a virtual environment in .venv with pinned versions. `make` alone lists them.
PYTHON ?= python3
CONFIG ?= recipe/configs/shakespeare.yaml
ACCELERATE ?= accelerate_configs/single.yaml
MODEL ?=
RUN ?=
OUT ?= model
LIMIT ?=
PROMPT ?= The king
TEXT ?=
ROWS ?=
TASKS ?= hellaswag
FRESH ?=
PROCESSES ?=
ARGS ?=
# Of the tests: processes that run them, of pytest-xdist, one a core up to four.
WORKERS ?= logical

# Seconds that torchrun leaves a run to save itself when it is to stop; its own 30 are too few for a large model.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT ?= 300

BIN := .venv/bin
INSTALL := -m pip install --quiet --disable-pip-version-check
# --quiet: after an error of the script, the script's message is the last line and not the launcher's traceback.
# The trainer handles Ctrl-C itself (a checkpoint first); the launcher, told to ignore it below, waits for that.
LAUNCH := $(BIN)/accelerate launch --quiet --config_file $(ACCELERATE) $(if $(PROCESSES),--num_processes $(PROCESSES))
XDIST := -n $(WORKERS) --maxprocesses 4 --dist worksteal
MODEL_ARG := $(if $(MODEL),--model $(MODEL))
# Measurements choose by the device, unless CONFIG or OUT is given.
BENCH_ARGS = $(if $(filter-out file,$(origin CONFIG)),--config $(CONFIG)) $(if $(filter-out file,$(origin OUT)),--out $(OUT)) $(ARGS)

ifneq (,$(findstring tpu,$(ACCELERATE)))
$(error a TPU wants an environment of its own: pip install -e '.[tpu]', then accelerate launch --config_file $(ACCELERATE) recipe/train.py)
endif

.DEFAULT_GOAL := help
.PHONY: help train data sample chat eval-val eval-wikitext eval-lambada eval-hellaswag eval-lm report export test test-faults lint format clean test-xla bench-data scoreboard bench-peers bench-eval bench-gpu

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' | awk -F'|' '{printf "  make %-16s %s\n", $$1, $$2}'
	@echo
	@echo "  variables: CONFIG ACCELERATE PROCESSES ARGS FRESH | MODEL LIMIT PROMPT | RUN OUT | TEXT ROWS TASKS   e.g. make train CONFIG=recipe/configs/gpt2.yaml ARGS='--dry_run'"

train: .venv/installed $(if $(findstring zero,$(ACCELERATE)),.venv/installed-deepspeed) ## train (CONFIG, ARGS, FRESH=1; the default takes about three minutes on two CPU cores), then sample
	@echo "$(LAUNCH) recipe/train.py --config $(CONFIG) $(if $(FRESH),--fresh) $(ARGS)"
	@trap '' INT; $(LAUNCH) recipe/train.py --config $(CONFIG) $(if $(FRESH),--fresh) $(ARGS)
	$(if $(findstring --dry_run,$(ARGS)),,@$(BIN)/python eval/sample.py --model "$$($(BIN)/python -m recipe.config --config $(CONFIG) $(ARGS))" --prompt "$(PROMPT)")

data: .venv/installed ## prepare the shards that CONFIG names
	$(BIN)/python -m recipe.data.prepare --config $(CONFIG) $(ARGS)

bench-data: .venv/installed ## how fast the data are, beside datasets.map (TEXT=file of documents)
	$(BIN)/python -m recipe.data.bench $(if $(TEXT),--text $(TEXT)) $(ARGS)

scoreboard: .venv/installed ## what each optimisation brings here: a table, scoreboard.json and .png (ARGS=--quick: a minute)
	$(BIN)/python -m recipe.bench scoreboard $(BENCH_ARGS)

bench-peers: .venv/installed ## transformers' Trainer, and others, beside recipe/train.py: ratios (CONFIG, ARGS)
	$(BIN)/python -m recipe.bench peers $(BENCH_ARGS)

bench-eval: .venv/installed-eval ## HellaSwag's speed beside lm-evaluation-harness (MODEL; ARGS="--rows 200 --rounds 3")
	$(BIN)/python eval/bench.py $(MODEL_ARG) $(ARGS)

bench-gpu: .venv/installed ## all measurements of a GPU in less than nine minutes, under OUT
	$(BIN)/python -m recipe.bench all --minutes 8 --rounds 1 --seconds 1.5 $(BENCH_ARGS)

sample: .venv/installed ## continue PROMPT with MODEL (a directory or Hub id; default: the newest run)
	$(BIN)/python eval/sample.py $(MODEL_ARG) --prompt "$(PROMPT)" $(ARGS)

chat: .venv/installed ## continue with MODEL what you type, line by line (Ctrl-D ends)
	@$(BIN)/python eval/sample.py $(MODEL_ARG) --interactive $(ARGS)

eval-val: .venv/installed ## validation loss, perplexity and bits per byte of MODEL
	$(BIN)/python eval/perplexity.py $(MODEL_ARG) $(ARGS)

eval-wikitext: .venv/installed ## perplexity of MODEL on WikiText-2, sliding window (TEXT=joined rows; default: from the Hub; LIMIT=windows)
	$(BIN)/python eval/wikitext.py $(MODEL_ARG) $(if $(TEXT),--text $(TEXT)) $(if $(LIMIT),--limit_windows $(LIMIT)) $(ARGS)

eval-lambada: .venv/installed ## LAMBADA's last words of MODEL (ROWS=rows.jsonl; default: from the Hub; LIMIT=500)
	$(BIN)/python eval/lambada.py $(MODEL_ARG) $(if $(ROWS),--rows $(ROWS)) $(if $(LIMIT),--limit $(LIMIT)) $(ARGS)

eval-hellaswag: .venv/installed ## HellaSwag of MODEL, both published ways (LIMIT=500 for a quick look)
	$(BIN)/python eval/hellaswag.py $(MODEL_ARG) $(if $(LIMIT),--limit $(LIMIT)) $(ARGS)

eval-lm: .venv/installed-eval ## lm-evaluation-harness on MODEL (TASKS=hellaswag,lambada_openai ROWS=rows.jsonl LIMIT=100)
	$(BIN)/python eval/harness.py $(MODEL_ARG) --tasks $(TASKS) $(if $(ROWS),--rows $(ROWS)) $(if $(LIMIT),--limit $(LIMIT)) $(ARGS)

report: .venv/installed ## pictures of RUN ("runs/a runs/b" for several; default: the newest) and whether its loss looks right
	$(BIN)/python eval/report.py $(RUN) $(if $(filter-out file,$(origin OUT)),--out $(OUT)) $(ARGS)

export: .venv/installed ## the latest checkpoint of RUN as a model directory with its card, OUT (ARGS="--best")
	$(BIN)/python -m recipe.export $(if $(RUN),--run $(RUN)) --out $(OUT) $(ARGS)

test: .venv/installed-dev ## all tests (ARGS="-k name" for some, WORKERS=1 for one after the other)
	$(BIN)/python -m pytest $(XDIST) $(ARGS)

test-faults: .venv/installed-dev ## every fault and bad input of the table, on tiny runs (ARGS="--group kill")
	$(BIN)/python -m tests.faults $(ARGS)

test-xla: .venv-xla/installed ## the TPU engine's tests, on XLA's CPU client, in an environment of their own
	PJRT_DEVICE=CPU .venv-xla/bin/python -m pytest tests/xla $(XDIST) $(ARGS)

lint: .venv/installed-dev ## check style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: .venv/installed-dev ## apply style and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## delete the environment, the shards and caches; runs/ stays
	rm -rf .venv .venv-xla data .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	@echo "runs/ is kept; delete it by hand"

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "error: $(PYTHON) is too old, Python 3.10 or later is needed (make PYTHON=...)"; exit 1; }
	$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing pinned dependencies into .venv (some minutes the first time)"
	$(BIN)/python $(INSTALL) -c constraints.txt -e .
	@touch $@

.venv/installed-deepspeed: .venv/installed
	@echo "installing DeepSpeed into .venv"
	$(BIN)/python $(INSTALL) -c constraints.txt -e '.[deepspeed]'
	@touch $@

.venv/installed-eval: .venv/installed
	@echo "installing lm-evaluation-harness into .venv"
	$(BIN)/python $(INSTALL) -c constraints.txt -e '.[eval]'
	@touch $@

# All at once: each call of pip works out anew what goes with what.
.venv/installed-dev: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing pinned dependencies and what the tests need into .venv (some minutes the first time)"
	$(BIN)/python $(INSTALL) -c constraints.txt -e '.[dev,deepspeed]'
	@touch .venv/installed .venv/installed-deepspeed .venv/installed-eval $@

# Where torch_xla is installed it is used, and it wants a torch of its own version: hence a second environment. The tpu
# extra would add libtpu, which only a TPU needs.
.venv-xla/installed: pyproject.toml constraints.txt
	@echo "installing torch_xla into .venv-xla (some minutes the first time)"
	$(PYTHON) -m venv .venv-xla
	grep -v '^torch==' constraints.txt > .venv-xla/constraints.txt
	.venv-xla/bin/python $(INSTALL) -c .venv-xla/constraints.txt -e '.[deepspeed]' pytest pytest-xdist 'torch==2.9.*' 'torch_xla==2.9.*'
	@touch $@
