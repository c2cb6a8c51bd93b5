# All set-up is done by the commands themselves: see tools/with_env.sh.
ENV := tools/with_env.sh

.PHONY: help demo test bench results lint format docs build compat sanitize clean

help:  ## list the commands
	@sed -n 's/^\([a-z]*\):  *## */\1\t/p' $(MAKEFILE_LIST) | expand -t 12

demo:  ## train a small language model, exact and sparse; writes demo/ (DEMO_ARGS="--steps 50" and the like)
	@$(ENV) bash -c 'tools/build.sh && python -m examples.train_lm $(DEMO_ARGS)'

test:  ## run every test: C++, Python, style, types, layering, docs
	@$(ENV) tools/test.sh

bench:  ## measure the CPU backend against torch's attention; writes build/bench/
	@$(ENV) bash -c 'tools/build.sh && python benchmarks/cpu.py $(BENCH_ARGS)'

results:  ## write docs/results.md and its figures from the JSON in docs/results/
	@$(ENV) python -m benchmarks.results

lint:  ## check style, types, layering and docs, without building
	@$(ENV) tools/lint.sh

format:  ## apply the style to Python and C++
	@$(ENV) bash -c 'ruff format . && ruff check --fix . && python tools/repo_files.py .h .cpp .cu .cuh | xargs -r clang-format -i'

docs:  ## check that what the documentation names exists
	@$(ENV) python tools/check_docs.py

build:  ## build the Python package and install it into the environment
	@$(ENV) tools/build.sh

compat:  ## try torch 2.2, 2.3, 2.4 and the newest (VERSIONS="2.4" for some); downloads each
	@$(ENV) tools/compat.sh $(VERSIONS)

sanitize:  ## run the C++ tests under the address, undefined-behaviour and thread sanitizers
	@$(ENV) tools/sanitize.sh

clean:  ## remove what the commands built (.venv stays)
	rm -rf build dist demo .mypy_cache .pytest_cache .ruff_cache .hypothesis
