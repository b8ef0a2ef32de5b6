# `make train` and `make test` are all the set-up there is: each creates .venv first if it is missing or out of date.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Tests start hundreds of processes, and each would compile every module again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-all full engines lint oracle fuzz clean install
install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "mtrain needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $(STAMP)

train: install
	$(BIN)/python launch.py

# Files in the order of their names: those that start ranks come first, and the two processes end together.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test: install
	$(PYTEST)

# What `make test` leaves out: whole products, all sizes of the interpreted kernels, the oracle and the fuzz.
# PART=K/N: one of N parts of these cases
test-all: full
	$(MAKE) -j 2 oracle fuzz

full: install .triton-3.6
	$(PYTEST) -m full --part=$(or $(PART),1/1)

# The oldest Triton that is admitted, beside the installed one: kernels/tests/test_aot.py compiles with both
.triton-3.6: | $(STAMP)
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $@ 'triton==3.6.*'

# megatron-core's newest release that is supported lies in a folder of its own, in front of the installed one
ENGINE := $(VENV)/megatron-core-0.19.2
$(ENGINE): $(STAMP)
	$(BIN)/python -m pip install -q --no-deps --ignore-requires-python --target $@ megatron-core==0.19.2

ENGINE_SAMPLE := $(addprefix tests/distributed/test_,$(addsuffix .py,engines fields_are_accounted_for core_fields \
  adapter_patches later_releases builders hybrid_patterns convert_boxes layouts_match families_match resume \
  batch_ramp generation mup keys_of_devices captured_layers padding further_tokens)) \
  tests/distributed/test_fully_sharded.py::test_a_layout_is_proven tests/unit/test_adapter_hook.py \
  tests/distributed/test_op_overrides.py::test_the_loss_in_parts_trains_as_megatrons_from_all_logits \
  tests/distributed/test_auxiliary_outputs.py::test_a_layout_logs_what_all_logits_say \
  tests/distributed/test_sparse_experts.py::test_maps_are_followed_by_kernels_as_by_megatron_core \
  tests/distributed/test_fully_sharded.py::test_a_rank_keeps_its_part_of_the_weights_and_never_had_more \
  tests/distributed/test_megatron_checkpoints.py::test_weights_of_another_model_are_named_and_nothing_is_written \
  tests/distributed/test_any_rank.py::test_the_plan_names_every_weight_of_a_stage_as_it_is_built \
  tests/distributed/test_sparse_attention.py::test_with_as_many_keys_as_there_are_it_is_plain_mla \
  tests/distributed/test_soap.py::test_the_same_gradients_make_the_same_bits_in_every_layout \
  tests/distributed/test_padded_exchange.py::test_steps_have_the_bits_of_exact_exchanges \
  tests/distributed/test_packing_is_proven.py::test_one_global_batch_has_one_loss_and_one_gradient_in_any_split

# A sample on that release: fields, patches, layouts, resume, and runs of either release that go on in the other
engines: $(ENGINE)
	PYTHONPATH=$(CURDIR)/$(ENGINE) MTRAIN_TWO_ENGINES=1 $(PYTEST) $(ENGINE_SAMPLE)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# 500 random configurations: `check` says yes exactly where the model builds and makes a step. CASES= and SEED=
oracle: install
	$(BIN)/python -m tests.support.oracle --cases $(or $(CASES),500) --seed $(or $(SEED),1)

# 10,000 mutated recipes and 500 hostile inputs: no traceback, nothing slow, nothing done
fuzz: install
	$(BIN)/python -m tests.support.fuzz --seed $(or $(SEED),1)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
