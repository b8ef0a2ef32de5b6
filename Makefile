# `make train` and `make test` are all the set-up there is: each creates .venv first if it is missing or out of date.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Tests start hundreds of processes, and each would compile every module again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-all full engines lint docs oracle fuzz clean install
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
# PART=K/N: one of N parts of all that
test-all: full
	$(MAKE) -j 2 oracle fuzz

full: install .triton-3.6 .launch-test .moto-5.2 .gcs-2026.7 .sinks
	$(PYTEST) -m 'full or engine' --part=$(or $(PART),1/1)

# The oldest Triton that is admitted, beside the installed one: kernels/tests/test_aot.py compiles with both
.triton-3.6: | $(STAMP)
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $@ 'triton==3.6.*'

# Schemas of Kubernetes, JobSet, Kubeflow and SkyPilot, which tests/e2e/test_rendered_jobs.py holds jobs against, and Ray.
# They lie in a folder of their own (430 MB): whole, SkyPilot brings sixty packages and another release of click.
LAUNCH_TEST := kubernetes-validate==1.37.0 kubeflow-trainer-api==2.3.0 kubeflow-training==1.9.4 skypilot==0.14.1 \
  kubernetes==35.0.0 importlib_resources==7.1.0 oauthlib==4.0.1 requests-oauthlib==2.0.0 websocket-client==1.9.2 \
  durationpy==0.11 retrying==1.4.2 six==1.17.0 ray==2.60.0 msgpack==1.2.4 protobuf==7.36.2
.launch-test: | $(STAMP)
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $@ $(LAUNCH_TEST)

# A server and a client of S3, whose botocore is another than that of the tests: tests/unit/test_checkpoint_s3.py
.moto-5.2: | $(STAMP)
	$(BIN)/python -m pip install -q --upgrade --target $@ 'moto[server]==5.2.5' s3fs==2026.9.0 'botocore>=1.43.115,<1.43.118' 'boto3>=1.43.115,<1.43.118'

# Google Cloud Storage on loopback (80 MB): tests/unit/test_checkpoint_gcs.py
.gcs-2026.7: | $(STAMP)
	$(BIN)/python -m pip install -q --upgrade --target $@ gcp-storage-emulator==2026.7.19 gcsfs

# The libraries of sinks (1 GB with their own dependencies), behind the installed packages: tests/unit/test_sink_libraries.py
.sinks: | $(STAMP)
	$(BIN)/python -m pip install -q --upgrade --target $@ tensorboard==2.21.0 wandb==0.31.0 mlflow==3.17.2 \
	  swanlab==0.10.3 trackio==0.43.0 \
	  prometheus-client==0.26.0 opentelemetry-sdk==1.45.2 opentelemetry-exporter-otlp-proto-http==1.45.2

# megatron-core's newest release that is supported lies in a folder of its own, in front of the installed one
ENGINE := $(VENV)/megatron-core-0.19.2
$(ENGINE): $(STAMP)
	$(BIN)/python -m pip install -q --no-deps --ignore-requires-python --target $@ megatron-core==0.19.2

ENGINE_SAMPLE := $(addprefix tests/distributed/test_,$(addsuffix .py,engines engine_fields core_fields \
  adapter_patches later_releases builders hybrid_patterns convert_boxes layouts families resume \
  batch_ramp generation mup device_keys captured_layers captured_parts captured_steps padding further_tokens)) \
  tests/distributed/test_fully_sharded.py::test_fully_sharded_layout_is_proven tests/unit/test_adapter_hook.py \
  tests/distributed/test_op_overrides.py::test_op_override_chunked_loss_trains_as_megatron \
  tests/distributed/test_auxiliary_outputs.py::test_auxiliary_outputs_layout_equals_all_logits \
  tests/distributed/test_sparse_experts.py::test_sparse_experts_kernels_follow_maps_as_megatron \
  tests/distributed/test_fully_sharded.py::test_fully_sharded_rank_never_holds_whole_weights \
  tests/distributed/test_megatron_checkpoints.py::test_megatron_checkpoint_foreign_model_writes_nothing \
  tests/distributed/test_any_rank.py::test_any_rank_plan_names_every_weight_of_a_stage \
  tests/distributed/test_sparse_attention.py::test_sparse_attention_all_keys_equal_plain_mla \
  tests/distributed/test_soap.py::test_soap_every_layout_has_equal_bits \
  tests/distributed/test_padded_exchange.py::test_padded_exchange_equals_exact_exchange_bitwise \
  tests/distributed/test_packing.py::test_packing_any_split_has_one_loss_and_gradient

# A sample on that release: fields, patches, layouts, resume, and runs of either release that go on in the other
engines: $(ENGINE)
	PYTHONPATH=$(CURDIR)/$(ENGINE) MTRAIN_TWO_ENGINES=1 $(PYTEST) -m 'not full' $(ENGINE_SAMPLE)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation site, in build/docs. A warning fails, and a link that leads nowhere is a warning.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[docs]'
	touch $@

# 500 random configurations: `check` says yes exactly where the model builds and makes a step. CASES= and SEED=
oracle: install
	$(BIN)/python -m tests.support.oracle --cases $(or $(CASES),500) --seed $(or $(SEED),1) --part $(or $(PART),1/1)

# 10,000 mutated recipes and 500 hostile inputs: no traceback, nothing slow, nothing done
fuzz: install
	$(BIN)/python -m tests.support.fuzz --seed $(or $(SEED),1) --part $(or $(PART),1/1)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
