"""Makes a folder of images with captions: coloured shapes.

`python -m tests.support.shapes FOLDER [COUNT]`.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 180, 60),
    "blue": (40, 60, 220),
    "yellow": (230, 210, 40),
}
SHAPES = ("square", "circle", "bar")


def folder_of_shapes(
    folder: Path, count: int = 64, seed: int = 0, *, conversations: bool = False
) -> Path:
    """Write `count` images of 32 to 48 pixels and `shapes.jsonl`, both a function of the seed;
    return the folder.
    """
    from PIL import Image, ImageDraw

    draw = random.Random(seed)
    lines = []
    (folder / "images").mkdir(parents=True)
    for number in range(count):
        colour = draw.choice(sorted(COLOURS))
        shape = draw.choice(SHAPES)
        size = (draw.randint(32, 48), draw.randint(32, 48))
        image = Image.new("RGB", size, (245, 245, 245))
        pen = ImageDraw.Draw(image)
        w, h = size
        box = [w // 4, h // 4, 3 * w // 4, (h // 3 if shape == "bar" else 3 * h // 4)]
        (pen.ellipse if shape == "circle" else pen.rectangle)(box, fill=COLOURS[colour])
        name = f"images/{number:04d}.png"
        image.save(folder / name)
        said = f"a {colour} {shape}"
        if conversations:
            turns = [
                {"from": "human", "value": "<image>\nWhat is it?"},
                {"from": "gpt", "value": said},
            ]
            lines.append({"image": name, "conversations": turns})
        else:
            lines.append({"image": name, "text": f"This is {said}."})
    (folder / "shapes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


if __name__ == "__main__":
    folder_of_shapes(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 64)
