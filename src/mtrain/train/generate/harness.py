"""Tasks of lm-evaluation-harness in any layout: all ranks make the same requests in order."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, make_table

from mtrain import strict_json
from mtrain.config.schema.run import RunConfig
from mtrain.data.chats.template import ChatFormat
from mtrain.data.text.tokenizer import Tokenizer
from mtrain.errors import ConfigError, Problem, say_page
from mtrain.train.generate.request import Questions, Request, Sampling
from mtrain.train.generate.sampler import Sampler
from mtrain.train.generate.score import score
from mtrain.train.generate.texts import continued
from mtrain.train.generate.write import restored
from mtrain.world.init import joined

MOST_TOKENS = 256
"""Tokens of an answer if a task sets no limit."""


def answer(
    run: RunConfig, checkpoint: Path, tokenizer: Path, questions: Questions, as_json: bool
) -> None:
    """Print the results of tasks.

    Raises:
        ConfigError: a task is not known, or its data cannot be had.
    """
    with joined(run) as world:
        if not world.is_rank0:
            logging.getLogger("lm_eval").setLevel(logging.ERROR)
        sampler = Sampler(run, world, restored(run, world, checkpoint))
        report = results(Model(sampler, Tokenizer(tokenizer), questions.rows), questions)
        if world.is_rank0:
            kept = {
                key: report[key]
                for key in ("results", "n-shot", "n-samples", "versions")
                if key in report
            }
            say_page(
                strict_json.dumps(kept, indent=2, default=str) if as_json else make_table(report)
            )


def results(model: Model, questions: Questions) -> dict[str, Any]:
    """Return lm-evaluation-harness's results; a task ending in .yaml is a file without code."""
    try:
        tasks = [
            yaml.safe_load(Path(name).read_text()) if name.endswith((".yaml", ".yml")) else name
            for name in questions.tasks
        ]
        report = simple_evaluate(
            model,
            tasks=tasks,
            limit=questions.limit,
            num_fewshot=questions.shots,
            log_samples=False,
        )
    except (KeyError, ValueError, OSError, yaml.YAMLError) as error:
        rule = f"lm-evaluation-harness ends with {type(error).__name__}: {error}"
        fix = (
            "a task that `lm_eval ls tasks` lists, or a .yaml of your own; its data must be here or"
            " to be had"
        )
        raise ConfigError(
            [Problem("MT511", "tasks", list(questions.tasks), rule, fix, "command line")]
        ) from error
    return dict(report or {})  # one of the processes of a machine gets them


class Model(TemplateLM):
    """lm-evaluation-harness' model: our log probabilities and our texts for its requests."""

    def __init__(self, sampler: Sampler, tokenizer: Tokenizer, rows: int) -> None:
        super().__init__()
        self._sampler = sampler
        self._tokenizer = tokenizer
        self._rows = rows
        # Every rank makes the same requests; one bar is enough.
        self._silent = not sampler.world.is_rank0

    @property
    def eot_token_id(self) -> int:
        """Return the end of a document, which stands in front of a text without context."""
        return self._tokenizer.eod or 0

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Return ids of a text, without special tokens."""
        return self._tokenizer.encode(string)

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
        """Return the log probability of each continuation, and whether greedy sampling gives it."""
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm or self._silent)

    def _loglikelihood_tokens(self, requests: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        pairs = [(list(before), list(after)) for _, before, after in requests]
        # Texts longer than the context lose their beginning, never their scored end.
        whole = [(before + after)[-(self._sampler.context + 1) :] for before, after in pairs]
        scored = score(self._sampler, whole, self._rows)
        out = []
        for (_, after), one in zip(pairs, scored, strict=True):
            begin = max(0, len(one.likeliest) - len(after))
            out.append((sum(one.log_probabilities[begin:]), all(one.likeliest[begin:])))
        return out

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Return the log probability of each text, in windows of the context."""
        windows: list[tuple[None, list[int], list[int]]] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            rolling = get_rolling_token_windows(
                ids, self.eot_token_id, self._sampler.context, context_len=1
            )
            for before, after in map(make_disjoint_window, rolling):
                windows.append((None, before, after))
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, (value, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += value
        return totals

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Return an answer to each request, up to one of its texts `until`."""
        out = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            # Requests with the same options are sampled together.
            groups.setdefault(strict_json.dumps(request.args[1], sort_keys=True), []).append(number)
        for numbers in groups.values():
            options = dict(requests[numbers[0]].args[1])
            prompts = tuple(requests[number].args[0] for number in numbers)
            written = continued(
                self._sampler, self._tokenizer, _request(prompts, options, self._rows)
            )
            for number, one in zip(numbers, written, strict=True):
                out[number] = one.text
        return out

    def apply_chat_template(
        self, chat_history: Sequence[Any], add_generation_prompt: bool = True
    ) -> str:
        """Return a chat as the tokenizer's template writes it."""
        return ChatFormat(self._tokenizer.path.parent).render(chat_history)


def _request(prompts: tuple[str, ...], options: dict[str, Any], rows: int) -> Request:
    until = options.get("until") or []
    # lm-evaluation-harness is greedy unless a task samples, whatever its temperature.
    draws = options.get("do_sample", False)
    sampling = Sampling(
        tokens=int(options.get("max_gen_toks", MOST_TOKENS)),
        temperature=float(options.get("temperature", 1.0)) if draws else 0.0,
        top_k=int(options.get("top_k", 0)),
        top_p=float(options.get("top_p", 1.0)),
        min_p=float(options.get("min_p", 0.0)),
    )
    return Request(prompts, sampling, (until,) if isinstance(until, str) else tuple(until), rows)
