"""Clean layouts drawn at random: `prove` must say of none of them that it computes
something else.
"""

from __future__ import annotations

import random

from mtrain.api import load
from mtrain.errors import MtrainError
from mtrain.launching import prove
from tests.museum.exhibit import judged

MODELS = {
    "": ("tp", "pp", "dp", "cp"),
    "model=gemma_tiny": ("tp", "pp", "dp", "cp"),
    "model=pythia_tiny": ("tp", "pp", "dp", "cp"),
    "model=phi3_tiny": ("tp", "pp", "dp", "cp"),
    "model=mixtral_tiny": ("tp", "pp", "dp", "cp", "ep"),
    "model=deepseek_tiny": ("tp", "pp", "dp", "ep"),
    "model=gpt_oss_tiny": ("tp", "pp", "dp", "ep"),
    "model=glm45_tiny": ("tp", "pp", "dp", "ep"),
}
"""Shipped models, and the axes that they are drawn over."""
MORE = (
    "",
    "",
    "parallel.distributed_optimizer=true",
    (
        "parallel.distributed_optimizer=true parallel.overlap_grad_reduce=true"
        " parallel.overlap_param_gather=true"
    ),
    "data.packed=true",
    "precision=bf16",
    "parallel.recompute.granularity=full parallel.recompute.method=block",
    "model.tie_word_embeddings=true",
    "trainer.micro_batch_size=2",
    "parallel.fsdp=fsdp2",
    "model.hidden_dropout=0.1",
    "optim.weight_decay=0.1",
)
MOST_RANKS = 4
COMMUNICATIONS = ("p2p", "a2a", "all_gather")


def drawn(count: int, seed: int) -> list[str]:
    """Return `count` command lines whose layouts break no rule, the same for the same seed."""
    draw = random.Random(seed)
    found = []
    while len(found) < count:
        words = _one(draw)
        argv = words.split()
        try:
            prove.comparable(load(argv).run, argv, prove.STEPS, "fp32")
        except MtrainError:  # a rule forbids it
            continue
        found.append(words)
    return found


def _one(draw: random.Random) -> str:
    model = draw.choice(list(MODELS))
    degrees: dict[str, int] = {}
    ranks = 1
    for axis in draw.sample(MODELS[model], draw.choice((1, 2))):
        size = draw.choice((2, 2, 2, 4))
        needs = ranks * (1 if axis == "ep" and "tp" in degrees else size)
        if needs <= MOST_RANKS:
            degrees[axis] = size
            ranks = needs
    layout = "".join(f"{axis}{size}" for axis, size in degrees.items())
    if degrees.get("tp") and ("ep" in degrees or draw.random() < 0.5):
        layout += "sp"
    if degrees.get("pp") == 2 and draw.random() < 0.3:
        layout += "vpp2"
    words = [model, f"parallel={layout}" if layout else "", draw.choice(MORE)]
    if "cp" in degrees:
        words.append(f"parallel.cp_comm_type={draw.choice(COMMUNICATIONS)}")
    return " ".join(word for word in words if word)


def prove_drawn(count: int, seed: int) -> int:
    """Prove so many layouts and print a line of each; returns how many alarms there were."""
    alarms = 0
    for number, words in enumerate(drawn(count, seed), 1):
        alarm, _, said = judged(words)
        alarms += alarm
        print(f"{number:3d} {words}: {'ALARM: ' + said if alarm else 'proven'}", flush=True)
    print(f"{count} clean layouts: {alarms} alarms")
    return alarms
