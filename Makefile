# Every target makes the environment that it needs (.dev_scripts/setup_env.sh); remove .venv to rebuild it.
.PHONY: help demo demo-det demo-spiking test test-fast test-openmmlab test-onedl lint benchmark clean

PYTEST = -m pytest --numprocesses auto --durations 25

help:  ## show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo:  ## train a small KANet on scikit-learn's digits (no compiler needed)
	.dev_scripts/setup_env.sh demo
	OMP_NUM_THREADS=1 .venv/bin/python tools/demo.py configs/kanet/kanet-kv_digits.py

demo-det:  ## train a small Mask R-CNN with lambda layers on scenes of Fashion-MNIST's garments, or of digits
	.dev_scripts/setup_env.sh test
	test -f data/fashion_scenes/annotations/classes.txt || \
	    .venv/bin/python tools/dataset_converters/fashion_scenes.py data/fashion_scenes
	OMP_NUM_THREADS=1 .venv/bin/python tools/demo.py \
	    configs/lambda_resnet/mask-rcnn_lambda-r17-w16_fpn_1xb8-6e_scenes-128x128.py --cfg-options \
	    train_dataloader.dataset.metainfo.classes=data/fashion_scenes/annotations/classes.txt \
	    val_dataloader.dataset.metainfo.classes=data/fashion_scenes/annotations/classes.txt

demo-spiking:  ## train a small spiking QKFormer on digits, then show its firing rates and energy (no compiler needed)
	.dev_scripts/setup_env.sh demo
	OMP_NUM_THREADS=1 .venv/bin/python tools/demo.py configs/qkformer/qkformer_digits.py
	OMP_NUM_THREADS=1 .venv/bin/python tools/analysis_tools/energy.py configs/qkformer/qkformer_digits.py \
	    "$$(ls -t work_dirs/qkformer_digits/best_accuracy_top1_epoch_*.pth | head -n 1)" --out work_dirs/qkformer_digits/energy

test:  ## run all tests in the full environment (the first run builds it and compiles mmcv)
	.dev_scripts/setup_env.sh test
	OMP_NUM_THREADS=1 .venv/bin/python $(PYTEST) tests

test-fast:  ## run the tests of operators, layers and models
	.dev_scripts/setup_env.sh test
	OMP_NUM_THREADS=1 .venv/bin/python $(PYTEST) tests/test_ops tests/test_layers tests/test_models

test-openmmlab: test  ## the same: .venv has the original OpenMMLab packages

test-onedl:  ## run all tests on the OneDL packages, in a separate environment
	.dev_scripts/setup_env.sh onedl
	OMP_NUM_THREADS=1 .venv-onedl/bin/python $(PYTEST) tests

lint:  ## check style and format with ruff
	.dev_scripts/setup_env.sh lint
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

benchmark:  ## compare operators, layers and neurons with public peers
	.dev_scripts/setup_env.sh test
	.venv/bin/python benchmarks/kronecker.py
	.venv/bin/python benchmarks/attention_blocks.py
	.venv/bin/python benchmarks/lambda_forms.py
	.venv/bin/python benchmarks/lambdas.py
	.venv/bin/python benchmarks/lif.py

clean:  ## remove what builds and runs leave behind (keeps the environments, data and work_dirs)
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
