# Everything a developer types. Each target sets up what it needs on a bare machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROTO_FILES := $(wildcard protos/atoll/v1/*.proto)
USUAL := not soak and not gpu
# More than cores, where there are few: some of the time goes to waiting for disks, sockets and processes.
WORKERS = $(shell $(PYTHON) -c "import os; cores = os.cpu_count() or 1; print(max(cores, min(2 * cores, 8)))")
SERVICES := admin enrolment membership

PEERS := $(patsubst benchmarks/peers/%.txt,.make/peers/%/ready,$(wildcard benchmarks/peers/*.txt))

# Mutants: fast modules with direct tests, for CI; all that are pure otherwise.
MUTANTS_IN_CI := quorum promises earlier_attempts snapshot_ledger

.PHONY: demo test test-stalled check wheel reference site protos protos-check lock bench peers soak mutants mutants-in-ci format clean

demo: $(VENV)/ready  ## a whole swarm on this machine, in about three minutes
	$(BIN)/atoll demo

test: $(VENV)/ready  ## everything but soaks and GPUs; what measures links has the cores to itself
	$(BIN)/pytest -m "$(USUAL) and not swarm and not wan" -n $(WORKERS) --dist worksteal
	$(BIN)/pytest -m "$(USUAL) and swarm and not wan" -n logical --dist worksteal --durations=12
	$(BIN)/pytest -m "$(USUAL) and wan" --durations=12

check: $(VENV)/ready protos-check  ## style, types, layers, dependencies
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/deptry core protos node coordinator lab

wheel: $(VENV)/ready .make/wheel/ready  ## sdist and wheel in dist/, checked and tried without this checkout
	rm -rf dist
	.make/wheel/bin/python -m build --no-isolation --outdir dist .
	.make/wheel/bin/twine check --strict dist/*
	PYTHONPATH=tests:. $(BIN)/python -m support.wheel_check dist

.make/wheel/ready: pyproject.toml
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet "build>=1.2" "hatchling>=1.25" "twine>=6"
	touch $@

reference: $(VENV)/ready  ## docs/reference/atoll.md and atollctl-options.md, from the programs' help
	PYTHONPATH=tests:. $(BIN)/python -m support.command_reference

site: .make/site/ready  ## the documentation as a site, in site/; a link that leads nowhere fails
	.make/site/bin/mkdocs build --quiet

.make/site/ready: Makefile
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet "mkdocs>=1.6,<2"
	touch $@

format: $(VENV)/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test-stalled: $(VENV)/ready  ## the swarm tests on busy cores, with processes that stand still now and then; hours
	PYTHONPATH=tests:. $(BIN)/python -m support.stalled $(BIN)/pytest -m "$(USUAL) and swarm and not wan" -n logical \
		--dist worksteal

soak: $(VENV)/ready  ## long tests
	$(BIN)/pytest -m soak

mutants: $(VENV)/ready  ## mutation tests of the modules that decide rounds; MODULES="opener follower" for others
	PYTHONPATH=tests:. $(BIN)/python -m mutants $(MODULES) $(if $(MODULES),,--write)

mutants-in-ci: $(VENV)/ready  ## a part of them, in about a minute
	PYTHONPATH=tests:. $(BIN)/python -m mutants --quick $(MUTANTS_IN_CI)

bench: $(VENV)/ready  ## every benchmark, then the acceptance rows that fall short
	$(BIN)/python -m benchmarks

peers: $(PEERS)  ## the environments of those whom benchmarks measure beside Atoll

.make/peers/%/ready: benchmarks/peers/%.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet -r $<
	touch $@

protos: $(VENV)/ready  ## regenerate the committed protobuf code
	cd protos && ../$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. \
		$(PROTO_FILES:protos/%=%)
	cd protos && ../$(BIN)/python -m grpc_tools.protoc -I. --grpc_python_out=. \
		--plugin=protoc-gen-mypy_grpc=../$(BIN)/protoc-gen-mypy_grpc --mypy_grpc_out=quiet:. \
		$(SERVICES:%=atoll/v1/%.proto)

protos-check: protos  ## fails when the committed code is not what the .proto files say
	git diff --exit-code --stat -- protos

lock:  ## resolve all extras but eval afresh into constraints.txt (a library of eval needs the older dateutil)
	rm -rf .make/lock && $(PYTHON) -m venv .make/lock
	.make/lock/bin/pip install --quiet "torch==2.13.0" "python-dateutil<3" -e ".[node,coordinator,postgres,hf,dev]"
	{ echo "# The full lock of all extras but eval; \`make lock\` renews it."; \
	  .make/lock/bin/pip freeze --exclude-editable | sed 's/+cpu$$//'; } > constraints.txt

$(VENV)/ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -c constraints.txt -e ".[node,coordinator,postgres,hf,dev]"
	touch $@

clean:
	rm -rf $(VENV) .make dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
