# Every target sets up what it needs: a virtual environment in .venv with pinned versions. `make help` lists the targets.
PYTHON ?= python3
CONFIG ?= recipe/configs/shakespeare.yaml
ACCELERATE ?= accelerate_configs/single.yaml
MODEL ?=
RUN ?=
REPO ?=
OUT ?= model
LIMIT ?=
PROMPT ?= The king
TEXT ?=
NANOGPT ?=
PROOF_OUT ?= bench/proof
BUNDLE ?= gpu-proof.tar.gz
WITH ?= openai-community/gpt2
TASKS ?= hellaswag
FRESH ?=
PROCESSES ?=
DEVICE ?=
ARGS ?=
HOURS ?=
DOLLARS ?=
PRICE ?=
# Number of pytest-xdist processes that run the tests: by default one per core, at most four.
WORKERS ?= logical

# Seconds that torchrun gives a run to save a checkpoint before killing it; the default of 30 is too short for a large model.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT ?= 300

# A variable of the command line that is not listed above is a mistake, as HOUR=2 is, unless it is one of the programs'
# that make starts. Tests set BIN and LAUNCH.
VARIABLES := $(shell sed -En 's/^(export )?([A-Z_]+) \?=.*/\2/p' $(lastword $(MAKEFILE_LIST)))
FOREIGN := BIN LAUNCH SHELL MAKE% ACCELERATE_% CUDA_% HF_% NCCL_% OMP_% PYTORCH_% TORCH_% TPU_% WANDB_%
UNKNOWN := $(strip $(foreach name,$(filter-out $(VARIABLES) $(FOREIGN),$(.VARIABLES)),$(if $(findstring command line,$(origin $(name))),$(name))))
$(if $(UNKNOWN),$(error unknown variable $(UNKNOWN); the variables are $(VARIABLES); an environment variable goes in front: NAME=value make))
# So is one that the targets' rules do not use, as HOURS=2 for `make train`.
RULES := $(shell awk -v goals=" $(or $(MAKECMDGOALS),start) " '/^[a-z.][^ :]*:/ {on = index(goals, " " substr($$0, 1, index($$0, ":") - 1) " ")} on' $(lastword $(MAKEFILE_LIST)))
OPEN := (
CLOSE := )
COMMA := ,
names_in = $(subst $(OPEN), ,$(subst $(CLOSE), ,$(subst $(COMMA), ,$(1))))
USED = $(call names_in,$(RULES) $(foreach name,TRAIN BEST WHICH BENCH_ARGS LAUNCH XDIST,$(if $(filter $(name),$(call names_in,$(RULES))),$(value $(name)))))
GIVEN = $(foreach name,$(filter-out PYTHON ACCELERATE $(FOREIGN),$(VARIABLES)),$(if $(findstring command line,$(origin $(name))),$(name)))
UNUSED = $(strip $(filter-out $(USED),$(GIVEN)))
$(if $(filter 2,$(words $(filter RUN MODEL,$(GIVEN)))),$(error RUN and MODEL mean the same; give one of them))

# Quote a text, or a variable's value, as one shell word, whatever it contains.
quoted = '$(subst ','\'',$(1))'
as_word = $(call quoted,$(value $(1)))
# A variable's value, if it has one, as a path, in which the shell would not expand ~.
path_word = $(if $(value $(1)),$(call quoted,$(subst :::,,$(subst :::~/,$(HOME)/,:::$(value $(1))))))

# TorchTPU has its own environment, because it changes torch.compile wherever it is installed.
VENV := $(if $(findstring tpu,$(notdir $(ACCELERATE))),.venv-tpu,.venv)
BIN := $(VENV)/bin
# --quiet: after the process fails, the last line is its error message, not the launcher's traceback. With several
# processes torchrun's traceback follows the message all the same.
LAUNCH = $(BIN)/accelerate launch --quiet --config_file $(ACCELERATE) $(if $(PROCESSES),--num_processes $(PROCESSES))
# On Ctrl-C the trainer saves a checkpoint, and the launcher, which as a command in the background ignores Ctrl-C, waits
# for it; one that has not started the trainer yet is ended (a slim container has no ps). make then ends too, without
# calling it an error. `kill` of make ends the launcher, by whose death the trainer stops. torchrun prints a traceback
# after a stop and after an error.
launched = stopped=; $(LAUNCH) $(1) & pid=$$!; \
	trap 'stopped=1; parents=$$(ps -A -o ppid= 2>/dev/null || cat /proc/[0-9]*/stat 2>/dev/null | cut -d" " -f4); \
		echo "$$parents" | grep -qw $$pid || kill $$pid' INT; \
	trap 'kill 0' QUIT; trap 'stopped=1; kill $$pid' TERM; \
	until wait $$pid; do kill -0 $$pid 2>/dev/null || { $(if $(filter-out single tpu%,$(basename $(notdir $(ACCELERATE)))),echo "the traceback is the launcher's; the run's own last lines are above it" >&2;) [ $$stopped ]; exit; }; done
# What must be installed for a training run.
TRAINING := $(VENV)/installed $(if $(findstring zero,$(ACCELERATE)),.venv/installed-deepspeed) $(if $(findstring --report_to,$(ARGS)),$(VENV)/installed-trackers)
# A run or a model, by either name; one of the command line counts more than one of the environment.
WHICH = $(call path_word,$(if $(filter RUN,$(GIVEN)),RUN,$(if $(filter MODEL,$(GIVEN)),MODEL,$(if $(RUN),RUN,MODEL))))
TRAIN = recipe/train.py --config $(call as_word,CONFIG) $(if $(filter-out 0 no false,$(FRESH)),--fresh) $(ARGS)
BEST = recipe/best.py $(if $(TEXT),--text=$(call as_word,TEXT)) $(if $(HOURS),--hours $(HOURS)) $(if $(DOLLARS),--dollars $(DOLLARS)) $(if $(PRICE),--price_per_hour $(PRICE)) $(if $(DEVICE),--device $(call as_word,DEVICE)) $(if $(filter-out 0 no false,$(FRESH)),--fresh) $(ARGS)
XDIST = -n $(WORKERS) --maxprocesses 4 --dist worksteal
# Benchmarks choose their own recipe and output for the device, unless CONFIG or OUT is given.
BENCH_ARGS = $(if $(filter-out file,$(origin CONFIG)),--config $(call as_word,CONFIG)) $(if $(filter-out file,$(origin OUT)),--out $(call path_word,OUT)) $(ARGS)

# The tests that show in a minute whether a change has broken the core.
FAST := tests/model/test_gpt2.py tests/data/test_dataset.py $(addprefix tests/test_train.py::,\
	test_golden_loss_curve test_a_run_learns_and_reports test_stop_and_resume_equals_never_stopping_bit_for_bit)
# Prints the targets below under their headings, each with its description (the text after ##).
LIST = awk '/^\#\#@ / {printf "\n%s\n", substr($$0, 5)} /^[a-z-]+:.*\#\# / {split($$0, part, /:.*\#\# /); printf "  make %-14s %s\n", part[1], part[2]}' $(firstword $(MAKEFILE_LIST))
# Installs into the environment of a target; the constraints file and pip's arguments follow.
INSTALL = bash .ci/install $(@D)

$(if $(and $(strip $(RULES)),$(UNUSED)),$(error make $(or $(MAKECMDGOALS),start) does not use $(UNUSED); see make help))

.DEFAULT_GOAL := start
.DELETE_ON_ERROR:
.PHONY: start help train best plan preflight overfit data checkpoints sample chat eval-val eval-hellaswag eval-lm compare report audit export push test test-fast test-all test-faults lint format clean test-tpu test-xla scoreboard bench-peers gpu-proof gpu-bundle

start:
	@echo "Pre-train GPT-2. Targets set up what they need in .venv; begin with make train."
	@echo
	@$(LIST) | grep -E '^  make (train|best|plan|sample|report) '
	@echo "  make help           all targets and their variables"

help:
	@echo "Pre-train GPT-2. Targets set up what they need in .venv; begin with make train."
	@$(LIST)
	@echo
	@echo "  CONFIG is a recipe (recipe/configs), ACCELERATE the hardware (accelerate_configs),"
	@echo "  PROCESSES the number of processes, ARGS any other flags:"
	@echo "    make train CONFIG=recipe/configs/gpt2.yaml PROCESSES=2 \\"
	@echo "      ACCELERATE=accelerate_configs/ddp.yaml"
	@echo "    make train ARGS='--dataset_name my.txt --run_name mine'"

##@ Train

train: $(TRAINING) ## train CONFIG, then sample; resumes from the last checkpoint
	@printf '%s\n' $(call quoted,$(LAUNCH) $(TRAIN))
	@$(call launched,$(TRAIN))
	$(if $(filter -h --help --dry_run%,$(ARGS)),,@$(BIN)/python -m eval.sample "$$($(BIN)/python -m recipe.config --config $(call as_word,CONFIG) $(ARGS))" --prompt $(call as_word,PROMPT))

best: $(TRAINING) ## the best model for TEXT in HOURS, or for DOLLARS at PRICE (with DEVICE=8xh100 only a plan)
	@printf '%s\n' $(call quoted,$(LAUNCH) $(BEST))
	@$(call launched,$(BEST))
	$(if $(DEVICE)$(filter -h --help --dry_run%,$(ARGS)),,@$(BIN)/python -m eval.sample "$$($(BIN)/python $(BEST) --print_run)" --prompt $(call as_word,PROMPT))

plan: $(TRAINING) ## batch, memory, disk, time of a run (on DEVICE=8xh100, at PRICE=28 dollars an hour)
	@$(LAUNCH) $(if $(DEVICE),--num_processes 1 --num_machines 1) recipe/train.py --config $(call as_word,CONFIG) --dry_run $(if $(DEVICE),$(call as_word,DEVICE)) $(if $(PRICE),--price_per_hour $(PRICE)) $(ARGS)

preflight: $(TRAINING) ## check a machine in two minutes: kernels, links, disk, resume, speed
	@$(LAUNCH) recipe/preflight.py --config $(call as_word,CONFIG) $(ARGS)

# Validation takes all of the text but 288 tokens: 4 sequences of 64 and the end of the last one.
overfit: $(TRAINING) ## overfit one batch with CONFIG: the loss falls from 10.8 to below 0.1
	@$(LAUNCH) --num_processes 1 --num_machines 1 recipe/train.py --config $(call as_word,CONFIG) --run_name overfit --fresh \
		--dataset_name data/one-batch --train_text recipe/data/tiny_shakespeare.txt --streaming false --val_fraction 0.99915 \
		--sequence_length 64 --n_positions 64 --total_batch_tokens 256 --micro_batch_size 4 --max_steps 40 --warmup_steps 5 \
		--logging_steps 5 --eval_steps end --eval_tokens 256 --save_steps end --hellaswag_steps 0 --sample_steps 0 \
		--output_dir runs/overfit --milestone_steps 0 --report_to none --push_to_hub false --init_from '' --tokenizer gpt2 \
		--val_data '' --train_hours 0 --num_train_epochs 0 $(ARGS)

data: $(VENV)/installed ## tokenize CONFIG's data before training
	$(BIN)/python -m recipe.data.prepare --config $(call as_word,CONFIG) $(ARGS)

checkpoints: $(VENV)/installed ## list RUN's checkpoints and verify each
	$(BIN)/python -m recipe.checkpoint $(WHICH) $(ARGS)

##@ Inspect and evaluate

sample: $(VENV)/installed ## continue PROMPT with MODEL (default: the newest run)
	$(BIN)/python -m eval.sample $(WHICH) --prompt $(call as_word,PROMPT) $(ARGS)

chat: $(VENV)/installed ## continue what you type, line by line (Ctrl-D ends)
	@$(BIN)/python -m eval.sample $(WHICH) --interactive $(ARGS)

report: $(VENV)/installed ## curves of RUN as a web page; does its loss look right?
	$(BIN)/python -m eval.report $(WHICH) $(if $(filter-out file,$(origin OUT)),--out $(call path_word,OUT)) $(ARGS)

audit: $(VENV)/installed ## replay the last steps of RUN or REPO and compare
	$(BIN)/python -m recipe.audit $(if $(REPO),--repo $(REPO),$(WHICH)) $(ARGS)

eval-val: $(VENV)/installed ## validation loss, perplexity and bits per byte of MODEL
	$(BIN)/python -m eval.perplexity $(WHICH) $(ARGS)

eval-hellaswag: $(VENV)/installed ## HellaSwag, both published ways (LIMIT=500: a quick look)
	$(BIN)/python -m eval.hellaswag $(WHICH) $(if $(LIMIT),--limit $(LIMIT)) $(ARGS)

eval-lm: .venv/installed-eval ## lm-evaluation-harness (TASKS=lambada_openai,wikitext)
	.venv/bin/python -m eval.harness $(WHICH) --tasks $(TASKS) $(if $(LIMIT),--limit $(LIMIT)) $(ARGS)

compare: $(VENV)/installed ## MODEL vs. WITH (default: GPT-2): loss, HellaSwag, a sample
	$(BIN)/python -m eval.compare $(WHICH) --other $(call path_word,WITH) $(if $(LIMIT),--limit $(LIMIT)) $(ARGS)

##@ Share

export: $(VENV)/installed ## the newest checkpoint of RUN, with its model card, into OUT
	$(BIN)/python -m recipe.hub.export $(WHICH) --out $(call path_word,OUT) $(ARGS)

push: $(VENV)/installed ## upload RUN's milestones and newest checkpoint to REPO
	$(BIN)/python -m recipe.hub.export push $(WHICH) --repo "$(REPO)" $(ARGS)

##@ Measure speed

scoreboard: $(VENV)/installed ## speed here by optimization, number of processes and model size
	$(BIN)/python -m benchmarks scoreboard $(BENCH_ARGS)

bench-peers: $(VENV)/installed ## speed of CONFIG vs. transformers and others
	$(BIN)/python -m benchmarks peers $(BENCH_ARGS)

# Installs nothing, since the GPU may have no network: runs .venv's Python if it exists, else PYTHON.
gpu-proof: ## measure a GPU in ten minutes, into PROOF_OUT (NANOGPT, TEXT)
	$(firstword $(wildcard .venv/bin/python) $(PYTHON)) -m benchmarks proof --out $(PROOF_OUT) $(if $(NANOGPT),--nanogpt $(NANOGPT)) $(if $(TEXT),--text $(call as_word,TEXT)) $(ARGS)

gpu-bundle: ## pack what gpu-proof needs without a network into BUNDLE
	@tar czf $(BUNDLE) --exclude-vcs --exclude __pycache__ $(filter-out runs data bench $(BUNDLE),$(wildcard *)) \
		$(if $(TEXT),-C "$$(dirname $(call as_word,TEXT))" "$$(basename $(call as_word,TEXT))") $(if $(NANOGPT),-C $(abspath $(NANOGPT)) model.py)
	@test $$(wc -c < $(BUNDLE)) -lt 60000000 || { echo "error: $(BUNDLE) is larger than 60 MB; choose a smaller TEXT"; exit 1; }
	@echo "$(BUNDLE): unpack it on the other machine, in a directory of its own, then run"
	@echo "  make gpu-proof$(if $(NANOGPT), NANOGPT=.)$(if $(TEXT), TEXT='$$(basename $(call as_word,TEXT))')"

##@ Develop

test: .venv/installed-dev ## test every promise, 7 minutes on two cores (ARGS="-k name": some)
	.venv/bin/python -m pytest $(XDIST) $(ARGS)

test-fast: .venv/installed-dev ## test the model, the data order, a run and its resume: a minute
	.venv/bin/python -m pytest $(XDIST) $(FAST) $(ARGS)

test-all: .venv/installed-dev ## run all tests, including slow ones (WORKERS=1: one by one)
	.venv/bin/python -m pytest -m '' $(XDIST) $(ARGS)

test-tpu: .venv-tpu/installed-dev ## test TorchTPU on XLA's CPU plugin, in .venv-tpu
	.venv-tpu/bin/python -m pytest tests/tpu $(XDIST) $(ARGS)

test-xla: .venv-xla/installed ## test torch_xla on XLA's CPU client, in .venv-xla
	PJRT_DEVICE=CPU .venv-xla/bin/python -m pytest tests/xla $(XDIST) $(ARGS)

test-faults: .venv/installed-dev ## inject faults (kills, full disks, power cuts, NaN, ...) into tiny runs
	.venv/bin/python -m pytest -m '' $(XDIST) tests/faults tests/hub/test_upload.py tests/test_secrets.py tests/test_bad_inputs.py $(ARGS)

lint: .venv/installed-dev ## check style, format, import layers, links, spelling
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/lint-imports --no-logo --no-cache
	.venv/bin/ty check --python .venv recipe eval benchmarks
	git ls-files -z | xargs -0 .venv/bin/codespell
	.venv/bin/python -m pytest -p no:cacheprovider tests/test_links.py

format: .venv/installed-dev ## fix style and format
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

clean: ## delete environments and caches; data/ and runs/ stay
	rm -rf .venv .venv-tpu .venv-xla .pytest_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	@echo "kept data/ and runs/; delete them by hand"

# --seed installs pip, for those who use it. Without uv, upgrade pip: Python 3.11's takes a minute longer to resolve versions.
.venv/bin/python .venv-tpu/bin/python .venv-xla/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 16))' || { echo "error: $(PYTHON) is not Python 3.10 to 3.15, for which PyTorch is built: choose another (make PYTHON=python3.13)"; exit 1; }
	@echo "creating the environment $(@D:/bin=)"
	@if command -v uv >/dev/null; then uv venv --quiet --seed --python $(PYTHON) $(@D:/bin=); \
	elif $(PYTHON) -c 'import ensurepip' 2>/dev/null; then $(PYTHON) -m venv --upgrade-deps $(@D:/bin=); \
	elif $(PYTHON) -c 'import virtualenv' 2>/dev/null; then $(PYTHON) -m virtualenv --quiet $(@D:/bin=); \
	else echo "error: $(PYTHON) has neither venv nor virtualenv: apt install python3-venv, or pip install virtualenv or uv"; exit 1; fi

.venv/installed: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing pinned dependencies into .venv (some minutes the first time)"
	@$(INSTALL) constraints.txt -e . && touch $@

.venv/installed-deepspeed: .venv/installed
	@echo "installing DeepSpeed into .venv"
	@$(INSTALL) constraints.txt -e '.[deepspeed]' && touch $@

.venv/installed-trackers .venv-tpu/installed-trackers: %/installed-trackers: %/installed
	@echo "installing the trackers into $(@D)"
	@$(INSTALL) constraints.txt -e '.[trackers]' && touch $@

.venv/installed-eval: .venv/installed
	@echo "installing lm-evaluation-harness into .venv"
	@$(INSTALL) constraints.txt -e '.[eval]' && touch $@

# One call, because each call of pip resolves all versions again.
.venv/installed-dev: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing pinned dependencies and test tools into .venv (some minutes the first time)"
	@$(INSTALL) constraints.txt -e '.[dev,deepspeed,trackers]'
	@touch .venv/installed-dev .venv/installed .venv/installed-deepspeed .venv/installed-trackers .venv/installed-eval

.venv-tpu/installed: pyproject.toml constraints.txt | .venv-tpu/bin/python
	@echo "installing pinned dependencies and TorchTPU into .venv-tpu (some minutes the first time)"
	@$(INSTALL) constraints.txt -e '.[tpu]' && touch $@

# The second call installs XLA's CPU plugin, on which TorchTPU computes real values without a TPU.
.venv-tpu/installed-dev: .venv-tpu/installed
	@echo "installing test tools into .venv-tpu"
	@$(INSTALL) constraints.txt pytest pytest-xdist
	@$(INSTALL) constraints.txt --no-deps lammps-jax-pjrt-cpu==0.11.2 && touch $@

# The pinned versions except torch's: torch_xla needs its own.
.venv-xla/constraints.txt: constraints.txt | .venv-xla/bin/python
	@grep -v '^torch==' constraints.txt > $@

# Not the extra `xla`, which also installs libtpu: only a TPU needs that.
.venv-xla/installed: pyproject.toml .venv-xla/constraints.txt
	@echo "installing torch_xla into .venv-xla (some minutes the first time)"
	@$(INSTALL) .venv-xla/constraints.txt -e . pytest pytest-xdist 'torch==2.9.*' 'torch_xla==2.9.*' && touch $@
