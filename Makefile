# make finetune   set up and train the embedded sample
# make test       set up and run the tests (2 CPU cores are enough)
# make test-slow  the tests that make test leaves out: more cases of what it proves, and whole runs
# make test-plain  run what depends on arithmetic as on a CPU without bf16 instructions
# make sweep      verify every architecture that transformers knows (slow; goes on where it stopped)
# make same_bits  what the scripts write, now and at COMMIT, to the bit: for changes that must change nothing
# make kill_points  kill a rank at everything it does on disk while it saves, and resume (slow)
# make bench      measure the training loops beside others that do the same work (15 minutes; ARGS: other sections)
# make bench-ladder  measure what each dial of the scenario scripts buys and costs
# make lint       check the style

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONFIG ?= accelerate_configs/default.yaml

.PHONY: finetune test test-slow test-plain sweep same_bits kill_points bench bench-ladder lint clean

finetune: $(VENV)/recipes.done
	@# one process per GPU, or two; fp32 where the CPU only emulates bf16, and says so
	flags=$$($(BIN)/python recipes/sample/launch_flags.py) && \
		$(BIN)/accelerate launch --config_file $(CONFIG) $$flags recipes/finetune.py $(ARGS)

# three test files at a time: much of a launch is one process importing libraries, or ranks that wait
AT_ONCE := -n 3 --dist loadfile --no-loadscope-reorder

test: $(VENV)/tests.done
	$(BIN)/python -m pytest tests -m "not slow" $(AT_ONCE) $(ARGS)

test-slow: $(VENV)/tests.done
	$(BIN)/python -m pytest tests -m slow $(AT_ONCE) $(ARGS)

test-plain: $(VENV)/tests.done
	PYTHONPATH=$(CURDIR)/tests/plain_arithmetic ATEN_CPU_CAPABILITY=avx2 \
		$(BIN)/python -m pytest tests -m "arithmetic and not slow" $(AT_ONCE) $(ARGS)

sweep: $(VENV)/tests.done
	$(BIN)/python tests/sweep.py $(ARGS)

same_bits: $(VENV)/tests.done
	$(BIN)/python tests/same_bits.py $(COMMIT)

kill_points: $(VENV)/tests.done
	$(BIN)/python tests/kill_points.py $(ARGS)

bench: $(VENV)/tests.done
	$(BIN)/python tests/bench/bench.py $(ARGS)

bench-ladder: $(VENV)/tests.done
	$(BIN)/python tests/bench/bench.py ladder $(ARGS)

lint: $(VENV)/tests.done
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

$(VENV)/recipes.done: requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

$(VENV)/tests.done: tests/requirements.txt $(VENV)/recipes.done
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r tests/requirements.txt
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache
