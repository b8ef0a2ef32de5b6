"""The engine that `rollout.engine` names, and the weights that it gets."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from mtrain.config.compose.paths import user_path
from mtrain.config.schema.run import RunConfig
from mtrain.data.text.tokenizer import Tokenizer
from mtrain.train.generate.texts import endings, ends_of
from mtrain.train.loop.context import TrainContext
from mtrain.train.rollouts import hf_server
from mtrain.train.rollouts.client import Client
from mtrain.train.rollouts.engine import Engine
from mtrain.train.rollouts.hf_weights import hf_weights
from mtrain.train.rollouts.local import LocalEngine
from mtrain.train.rollouts.reported import Expected
from mtrain.train.rollouts.server import ServerEngine

PROBE = "A text of 2 lines,\nwhich both sides encode."


def engine_of(context: TrainContext, tokenizer: Tokenizer) -> Engine:
    """Return the engine of a run."""
    run = context.run
    r = run.rollout
    stop = partial(getattr, context, "stop_requested")
    if r.engine == "local":
        ending = endings(tokenizer, ())
        chunks = context.state.chunks
        return LocalEngine(run, context.world, chunks, r.rows, ending, stop, context.routes)
    own = None
    url = r.url
    if r.engine == "transformers":
        # Ranks other than the first one send no request.
        own, url = hf_server.begun() if context.world.is_rank0 else (None, "http://127.0.0.1")
    assert url is not None
    client = Client(
        url,
        run.model.vocab_size,
        run.data.length,
        ends_of(tokenizer),
        r.engine,
        hf_server.MODEL if own else r.server_model or "",
        r.rows,
        r.request_seconds,
        stop=stop,
        expected=Expected.of(run),
    )
    folder = None if r.weights_folder is None else user_path(r.weights_folder)
    probe = None if r.engine == "transformers" else (PROBE, tokenizer.encode(PROBE))
    return ServerEngine(run, context.world, client, folder, base_of(run), probe, stop, own=own)


def base_of(run: RunConfig) -> Path | None:
    """Return the Hugging Face folder that a run starts from; None: it starts from another one."""
    source = run.checkpoint.init_from
    folder = None if source is None else user_path(source)
    return folder if folder is not None and (folder / "config.json").is_file() else None


def push(context: TrainContext, engine: Engine) -> None:
    """Give a server the weights as they are; an engine that has them gets nothing."""
    run = context.run
    base = base_of(run)
    if run.rollout.engine == "local" or run.rollout.weights_folder is None or base is None:
        return
    kind = json.loads((base / "config.json").read_text(encoding="utf-8"))["model_type"]
    if isinstance(engine, ServerEngine):
        # An evaluation pushes while the answers of the next step are under way.
        now = context.state.sampled
        engine.kept = [*context.state.sampled_saved, *([] if now is None else [now])]
    weights = hf_weights(run, context.world, context.state.chunks, kind)
    engine.push(weights, context.state.step)
