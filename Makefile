# Every target makes the environment that it needs (.dev_scripts/setup_env.sh); remove .venv to start anew.
.PHONY: help demo test test-onedl lint benchmark clean

help:  ## show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo:  ## train a small KANet on scikit-learn's digits (no compiler needed)
	.dev_scripts/setup_env.sh demo
	OMP_NUM_THREADS=1 .venv/bin/python tools/demo.py configs/kanet/kanet-kv_digits.py

test:  ## run all tests in the full environment (its first making compiles mmcv)
	.dev_scripts/setup_env.sh test
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest tests

test-onedl:  ## run all tests on the OneDL packages, in an environment of their own
	.dev_scripts/setup_env.sh onedl
	OMP_NUM_THREADS=1 .venv-onedl/bin/python -m pytest tests

lint:  ## check style and format with ruff
	.dev_scripts/setup_env.sh lint
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

benchmark:  ## compare the operators and attention blocks with public peers
	.dev_scripts/setup_env.sh test
	.venv/bin/python benchmarks/kronecker.py
	.venv/bin/python benchmarks/attention_blocks.py

clean:  ## remove what builds and runs leave (keeps the environments, data and work_dirs)
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
