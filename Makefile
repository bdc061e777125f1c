# make demo | make test | make engines MODEL=... DRAFT=... | make help
SHELL := /bin/bash
PYTHON ?= python3
PY := .venv/bin/python

MODEL ?=
DRAFT ?= none
OUT ?=
BENCH_OUT ?= build/results
BACKEND ?= onnxruntime
DTYPE ?= float32
WEIGHTS ?=
BITS ?=
DRAFT_WEIGHTS ?=
CACHE ?=
TEXT ?=
MAX_LEN ?=
MAX_GAMMA ?= 8
SLOTS ?= 1
MEASURE ?= 1
SM ?=
OPT_LEVEL ?=
FORCE ?= 0

PROMPT ?= def read_lines(path):
ENGINES ?= build/demo
PROMPTS ?=
GPU_OUT ?=
GPU_SECONDS ?=
CALL ?=
DRY ?=
TENSORRT_ROOT ?=
export PYTHONUNBUFFERED := 1
# What a user writes reaches the commands as it stands: recipes take it from the environment, so
# that neither make nor the shell looks for variables and commands in it.
GIVEN := MODEL DRAFT OUT BENCH_OUT BACKEND DTYPE WEIGHTS BITS DRAFT_WEIGHTS CACHE TEXT MAX_LEN \
         MAX_GAMMA SLOTS MEASURE SM OPT_LEVEL FORCE PROMPT ENGINES PROMPTS GPU_OUT GPU_SECONDS \
         CALL TENSORRT_ROOT
$(foreach name,$(GIVEN),$(eval override export $(name) := $$(value $(name))))
# Of what else is set on the command line a misspelt name would be dropped without a word.
KNOWN := QUICK DRY PYTHON PY CXX CUDA_HOME PIP_% OUTRIDER_%
$(foreach name,$(.VARIABLES),$(if $(findstring command line,$(origin $(name))),\
  $(if $(filter $(KNOWN),$(name)),,$(error error: option: there is no variable $(name). \
  Type make help for those there are))))
$(foreach name,QUICK DRY,$(if $(filter-out 0 1,$($(name))),\
  $(error error: option: $(name) is $($(name)). Use 0 or 1)))

.PHONY: kernel gpu-check help demo test test-slow test-serve check map bench report engines plugins plugin \
        cubins wheel clean distclean
.DEFAULT_GOAL := help

help:
	@echo 'make demo       set up, compile the bundled pair, generate, compare with plain decoding'
	@echo 'make engines MODEL=<target> DRAFT=<draft|self|ngram|none> [OUT=build/<name>] [BACKEND=onnxruntime]'
	@echo '             [DTYPE=float32|float16] [MAX_LEN=2048] [MAX_GAMMA=8] [SLOTS=1] [FORCE=0]'
	@echo '             [WEIGHTS=int8|int4|fp8] [DRAFT_WEIGHTS=int8|int4|fp8|full] fewer bytes, so faster; what'
	@echo '                they cost is measured on TEXT=<file>, or on what the model writes; DRAFT=self is'
	@echo '                the target itself with 4 bits: a draft for whoever has none'
	@echo '             [BITS=4.5 to 8.5] a weight, for WEIGHTS=int4: 8 where 4 cost the model the most'
	@echo '             [MEASURE=1]: find out what the bits of a text depend on'
	@echo '             [CACHE=int8] keys and values of 8 bits on the CPU: faster over long texts, and smaller'
	@echo '             BACKEND=tensorrt_rtx DTYPE=float16|bfloat16 [SM=80,89,120] builds for RTX GPUs, here'
	@echo '                or elsewhere; BACKEND=tensorrt [OPT_LEVEL=0..5] for the GPU of this machine'
	@echo '             BACKEND=aotinductor [DTYPE=...|bfloat16] for the GPU here, or with SM=cpu for the CPU'
	@echo '                MODEL and DRAFT are Hugging Face folders or names, or GGUF files'
	@echo 'make test       the proofs, minutes on two cores; make test-slow: the long ones'
	@echo 'make test-serve the servers of examples/, asked by OpenAI'"'"'s client, in an environment of its own'
	@echo 'make check      ruff, mypy and the rules of the house; make map draws the house'
	@echo 'make bench      ours and what else there is, side by side, then how costs grow; it takes long'
	@echo '                [QUICK=1: less of it] [BENCH_OUT=build/results]; more peers: pip install -e .[peers]'
	@echo 'make report     a page with a plot of what speculation gains [ENGINES=build/demo] [PROMPTS=<file>]'
	@echo 'make plugins    compile the sampling kernel, into build/lib (the others do so by themselves)'
	@echo 'make cubins     compile the CUDA kernels for all GPUs, into build/cuda (needs no GPU)'
	@echo 'make plugin TENSORRT_ROOT=<folder with include/>   the TensorRT plugin and engine, into build/lib'
	@echo 'make gpu-check  all that a GPU can tell about this project, in calls of 9 minutes: [CALL=1|2|3]'
	@echo '                [GPU_OUT=<folder>] [GPU_SECONDS=540]; DRY=1 prints what each would do'
	@echo 'make wheel      the installable runtime, into dist/'
	@echo 'make clean      remove what was built; make distclean: the environment too'
	@echo 'make itself ends with 2 whatever failed; the status of the command that did, which --help of'
	@echo '                runtime.generate lists, is in its last line: Error <status>'

# The stamp is newer than what decides the environment's contents.
.venv/stamp: constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: $(PYTHON) is older than Python 3.11. Set PYTHON=python3.11 or newer."; exit 1; }
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[cpu,dev,rtx]'
	@touch $@

# Without a compiler they say so and go on: NumPy then does the sampling.
kernel: .venv/stamp
	@$(PY) -m plugins.tools.build --optional

engines: kernel
	@test -n "$$MODEL" || { echo 'error: option: MODEL is not set.' \
	  'Type make engines MODEL=<folder or name> DRAFT=<folder or name, ngram, or none>.' >&2; exit 2; }
	@for name in FORCE MEASURE; do case "$${!name}" in 0|1) ;; *) \
	  echo "error: option: $$name is $${!name}. Use 0 or 1." >&2; exit 2;; esac; done
	@set -e; out=$${OUT:-build/$$(basename -- "$$(realpath -sm -- "$$MODEL")")}; force=$${FORCE#0}; \
	unmeasured=$${MEASURE#1}; \
	graphs=build/.cache/graphs/$$(realpath -m -- "$$out" | sha256sum | cut -c1-12); \
	bundle=(--out="$$out" --backend="$$BACKEND" --slots="$$SLOTS" --sm="$$SM" \
	  $${OPT_LEVEL:+--opt-level="$$OPT_LEVEL"}); \
	runs=$$($(PY) -m engines "$${bundle[@]}" --supports "$$DTYPE" "$${WEIGHTS:-full}" \
	  "$${DRAFT_WEIGHTS:-full}" $${CACHE:+--cache-type="$$CACHE"}); \
	case "$$BACKEND" in aotinductor) format=torch;; *) format=onnx;; esac; \
	$(PY) -m export --model="$$MODEL" --draft="$$DRAFT" --dtype="$$DTYPE" --format=$$format \
	  $${WEIGHTS:+--weights="$$WEIGHTS"} $${DRAFT_WEIGHTS:+--draft-weights="$$DRAFT_WEIGHTS"} \
	  $${BITS:+--bits="$$BITS"} $${CACHE:+--cache-type="$$CACHE"} \
	  $${TEXT:+--text="$$TEXT"} $${runs:+--backend-runs="$$runs"} \
	  --max-gamma="$$MAX_GAMMA" $${MAX_LEN:+--max-len="$$MAX_LEN"} --out="$$graphs" \
	  $${force:+--force}; \
	case "$$BACKEND" in tensorrt*) $(PY) -m plugins.tools.cubins > /dev/null;; esac; \
	$(PY) -m engines "$${bundle[@]}" --graphs="$$graphs" $${force:+--force} \
	  $${unmeasured:+--no-measure}

demo: kernel
	@$(MAKE) --no-print-directory engines MODEL=models/target DRAFT=models/draft OUT=build/demo
	@echo
	@$(PY) -m runtime.generate --engines build/demo --prompt="$$PROMPT" --max-new-tokens 160 \
	  --temperature 0.8 --seed 3 --gamma 2 --baseline $(if $(MAKE_TERMOUT),--color)
	@echo
	@echo 'The bundled target is tiny: a step of it costs little more than a step of its draft, so a'
	@echo 'draft model can gain little here. docs/performance.md measures a target worth drafting for.'
	@echo 'Where a text copies, looking it up drafts for nothing:'
	@echo
	@$(PY) -m runtime.generate --engines build/demo --prompt-file examples/copying.txt \
	  --max-new-tokens 160 --draft ngram --baseline $(if $(MAKE_TERMOUT),--color)

test: kernel
	$(PY) -m pytest -m "not slow" -n 2 --dist worksteal

test-slow: kernel
	$(PY) -m pytest -m slow

build/serve-env/stamp: constraints.txt pyproject.toml
	$(PYTHON) -m venv --clear build/serve-env
	build/serve-env/bin/python -m pip install --quiet --disable-pip-version-check \
	  -c constraints.txt -e '.[cpu,ray]' openai pytest
	@touch $@

test-serve: build/serve-env/stamp
	@test -d "$$ENGINES" || $(MAKE) --no-print-directory engines MODEL=models/target \
	  DRAFT=models/draft OUT="$$ENGINES"
	build/serve-env/bin/python -m pytest -m slow tests/serving

check: .venv/stamp
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	@$(PY) tests/house/house.py > /dev/null

map: .venv/stamp
	@$(PY) tests/house/house.py

bench: kernel
	$(PY) -m bench side $(if $(filter 1,$(QUICK)),--quick) --out="$$BENCH_OUT/side"
	$(PY) -m bench growth $(if $(filter 1,$(QUICK)),--quick) --out="$$BENCH_OUT/growth"

report: kernel
	@$(PY) -m bench report --engines="$$ENGINES" $${PROMPTS:+--prompts="$$PROMPTS"}

# Without network and .venv: bench/suites/gpu/suite.py says what a machine with a GPU must have.
gpu-check:
	@$(or $(wildcard $(PY)),$(PYTHON)) -m bench gpu $${GPU_OUT:+--out="$$GPU_OUT"} \
	  $${CALL:+--call="$$CALL"} $${GPU_SECONDS:+--seconds="$$GPU_SECONDS"} \
	  $(if $(filter 1,$(DRY)),--dry)

plugins: .venv/stamp
	@$(PY) -m plugins.tools.build

plugin: .venv/stamp
	@$(PY) -m plugins.tools.build_tensorrt

cubins: .venv/stamp
	@$(PY) -m plugins.tools.cubins

wheel: .venv/stamp
	@rm -rf build/wheel dist/outrider-*.whl # setuptools would pack modules that are gone
	@$(PY) -m plugins.tools.build --optional # what the quiet build would not say
	@$(PY) -m plugins.tools.cubins > /dev/null
	$(PY) -m build --quiet --wheel --outdir dist .

clean:
	rm -rf build dist *.egg-info

distclean: clean
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache
