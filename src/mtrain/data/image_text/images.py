"""Images as a vision tower reads them, decoded within limits by Pillow from the extra `images`.

The steps are those of CLIP: the shorter side is resized to the size of the model (bicubic), the
middle is cut out, and each channel is normalised. Source: Radford et al. 2021, and the published
preprocessor_config.json of LLaVA-1.5.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from mtrain.errors import BadEnvironment, CorruptData
from mtrain.units import bytes_

MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
"""Mean and deviation of the red, green and blue of CLIP's training images."""
MAX_BYTES = 64 << 20
MAX_PIXELS = 64_000_000
"""A file of a few bytes may decompress to more than any memory; no real image has so many pixels.
"""
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "PPM")
"""The formats that are opened; decoding them starts no other program."""


def require_pillow() -> Any:
    """Return the module PIL.Image.

    Raises:
        BadEnvironment: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise BadEnvironment(
            "data.kind=image_text decodes images with Pillow, which is not installed",
            "  fix: pip install 'mtrain[images]'",
        ) from error
    return Image


def inside(folder: Path, name: str) -> Path:
    """Return the path of an image that a record names.

    Raises:
        CorruptData: the path leads out of the folder, also by a link, or cannot exist.
    """
    path = folder / name
    parts = Path(name).parts
    if not name or Path(name).is_absolute() or ".." in parts or "\0" in name:
        raise CorruptData(f"{name[:200]!r}: an image has a path inside its folder")
    try:
        real = path.resolve()
    except (OSError, RuntimeError) as error:
        # pathlib raises RuntimeError for a link that leads back to itself
        raise CorruptData(f"{name[:200]!r} cannot be resolved: {error}") from None
    if not real.is_relative_to(folder.resolve()):
        raise CorruptData(f"{name[:200]!r} is a link that leads out of the folder")
    return path


def load(path: Path, size: int) -> np.ndarray:
    """Return an image as float32 [3, size, size], normalised.

    Raises:
        CorruptData: the file is not an image of a known format, is damaged or too large.
        BadEnvironment: Pillow is not installed.
    """
    module = require_pillow()
    try:
        held = path.stat().st_size
        if held > MAX_BYTES:
            raise CorruptData(f"{bytes_(held)}; an image may have {bytes_(MAX_BYTES)}")
        with warnings.catch_warnings():
            # warnings are about odd metadata; Pillow's own limit of pixels is above ours
            warnings.simplefilter("ignore")
            with module.open(path, formats=FORMATS) as image:
                width, height = image.size
                if width * height > MAX_PIXELS or min(width, height) < 1:
                    raise CorruptData(
                        f"{width} x {height} pixels; an image may have {MAX_PIXELS} of them"
                    )
                return _normalised(_cropped(image.convert("RGB"), size, module.Resampling.BICUBIC))
    except CorruptData as found:
        raise CorruptData(f"{path}: {found}") from None
    except Exception as error:  # Pillow raises errors of every type for damaged files
        raise CorruptData(f"{path}: not a readable image: {str(error)[:200]}") from error


def _cropped(image: Any, size: int, resample: Any) -> np.ndarray:
    """Resize the shorter side of an image and return its middle: uint8 [size, size, 3]."""
    width, height = image.size
    short = min(width, height)
    if max(width, height) * size // short * size > MAX_PIXELS:
        raise CorruptData(f"{width} x {height} pixels are too long and narrow to be resized")
    wide, high = (size if side == short else int(size * side / short) for side in (width, height))
    if (wide, high) != (width, height):
        image = image.resize((wide, high), resample=resample, reducing_gap=None)
    left = (wide - size) // 2
    top = (high - size) // 2
    return np.asarray(image.crop((left, top, left + size, top + size)))


def _normalised(pixels: np.ndarray) -> np.ndarray:
    scaled = (
        pixels.astype(np.float32) * np.float32(1 / 255) - np.array(MEAN, np.float32)
    ) / np.array(STD, np.float32)
    return np.ascontiguousarray(scaled.transpose(2, 0, 1))
