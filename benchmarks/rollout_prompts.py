"""Prompts of a task that a program judges, with a tokenizer of bytes: `python rollout_prompts.py
FOLDER` writes `prompts.jsonl`, `tokenizer.json` and `tokenizer_config.json`.

The answer to some letters is how many of them are an a.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

PROMPTS = 512
LETTERS = 5
END = "<|endoftext|>"
TEMPLATE = (
    "{%- for message in messages -%}{{ message.content }}"
    "{%- if message.role == 'assistant' -%}{{ eos_token }}{%- endif -%}{%- endfor -%}"
)


def main(folder: Path) -> int:
    """Write the files; return 0."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + 1,
        special_tokens=[END],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator([], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": END, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with (folder / "prompts.jsonl").open("w", encoding="utf-8") as file:
        for row in prompts(random.Random(1)):
            file.write(json.dumps(row) + "\n")
    return 0


def prompts(dice: random.Random) -> list[dict[str, str]]:
    """Return the lines of the file."""
    rows = []
    for _ in range(PROMPTS):
        count = dice.randrange(LETTERS + 1)
        letters = list("a" * count + "b" * (LETTERS - count))
        dice.shuffle(letters)
        rows.append({"prompt": f"How many a are in {''.join(letters)}? ", "answer": str(count)})
    return rows


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
