"""What transformers computes of a folder, where it is installed: the judge of a conversion."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path


def installed() -> bool:
    """Whether there is a transformers to ask."""
    return find_spec("transformers") is not None


def save_logits(folder: Path, ids: list[int], out: Path, auto_class: str = "AutoModelForCausalLM") -> None:
    """Save transformers' logits after each of `ids`, fp32 [tokens, vocabulary], as plain numbers.

    `auto_class` names the class of transformers that loads the folder. Its configuration is read by transformers
    itself, and no code that it names is run.
    """
    import torch
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    loaded = getattr(transformers, auto_class).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True, trust_remote_code=False
    )
    given = {"input_ids": torch.tensor([ids])}
    if loaded.config.is_encoder_decoder:  # both read the same tokens, as ours do where the encoder is given none
        given["decoder_input_ids"] = given["input_ids"]
    with torch.no_grad():
        found = loaded.eval()(**given).logits
    found[0].float().numpy().tofile(out)
