.PHONY: affected check docs format full random test wheel

WORKERS ?= auto

check:  ## What CI holds the code to
	ruff check .
	ruff format --check .
	mypy
	lint-imports

format:  ## Mend what can be mended by machine
	ruff check --fix .
	ruff format .

test:  ## The quick tier: what CI runs first
	pytest -q -m "not slow" -n $(WORKERS) --dist worksteal

affected:  ## All tests of what the change touches, nearest first (ARGS="--minutes 10 --since main")
	python -m tests.affected $(ARGS)

full:  ## Every test, or one part of it (SHARD=3/8)
	pytest -q -n $(WORKERS) --dist loadfile $(if $(SHARD),--shard $(SHARD)) $(ARGS)

random:  ## The quick tier in a random order of its own (SEED=1)
	pytest -q -m "not slow" -n $(WORKERS) --dist worksteal --random-order-bucket=module \
		$(if $(SEED),--random-order-seed=$(SEED))

wheel:  ## dist/tunekit-*.whl, with recipes, example data and pico
	python -m build --wheel

docs:  ## The documentation in site/, without a network
	NO_MKDOCS_2_WARNING=1 mkdocs build --quiet
