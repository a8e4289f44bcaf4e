.PHONY: check format test wheel

check:  ## What CI holds the code to
	ruff check .
	ruff format --check .
	mypy
	lint-imports

format:  ## Mend what can be mended by machine
	ruff check --fix .
	ruff format .

test:  ## The whole suite, one process a core
	pytest -q -n auto --dist loadfile

wheel:  ## dist/tunekit-*.whl, with recipes, example data and pico
	python -m build --wheel
