"""The samples of each split: of one corpus or a blend, of shares of them or corpora of its own, in
either order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from mtrain.config.compose.paths import user_path
from mtrain.config.schema.data import DataConfig
from mtrain.data import megatron_order
from mtrain.data.blend import Blend, Plan, by_sizes, read_once, used_up
from mtrain.data.document_fit import Fit
from mtrain.data.indexed import IndexedDataset
from mtrain.data.megatron_cache import Theirs
from mtrain.data.samples import SHARES, Samples, split_documents
from mtrain.data.tokenize import Corpus
from mtrain.data.whole_documents import BlendOfDocuments, WholeDocuments
from mtrain.errors import ConfigError, Problem

Opened = Samples | Blend


def opened(
    data: DataConfig,
    vocab_size: int,
    seed: int,
    corpus: Corpus,
    need: Sequence[str],
    asked: Sequence[int] | None,
    problems: list[Problem],
) -> dict[str, Opened | None]:
    """Return each split by its name; `problems` gets what is wrong with those that are needed.

    `asked` is how many samples a run takes of each split, which Megatron's order depends on; None:
    one epoch.
    """
    opener = _Opener(data, vocab_size, seed, corpus, asked)
    out: dict[str, Opened | None] = {}
    for name in SHARES:
        try:
            out[name] = opener.split(name)
        except ConfigError as error:
            out[name] = None
            if name in need or name == "train":
                problems.extend(error.problems)
    return out


class _Opener:
    def __init__(
        self,
        data: DataConfig,
        vocab_size: int,
        seed: int,
        corpus: Corpus,
        asked: Sequence[int] | None,
    ) -> None:
        self.data = data
        self.vocab_size = vocab_size
        self.seed = seed
        self.asked = asked
        self.megatron = data.order == "megatron"
        self.blend = BlendOfDocuments if data.whole_documents else Blend
        self.own = {"validation": data.validation_blend, "test": data.test_blend}
        self.apart = any(self.own.values())
        """Whether splits have corpora of their own."""
        assert corpus.prefix is not None
        prefixes = {"train": (corpus.prefix, *corpus.others), **corpus.of_splits}
        self.datasets = {name: list(map(corpus.opened, each)) for name, each in prefixes.items()}

    def split(self, name: str) -> Opened:
        """Return the samples of a split. Raises ConfigError where there are none."""
        source = name if self.own.get(name) else "train"
        if self.apart and source == "train" != name:
            raise ConfigError([_no_corpus(name)])
        datasets = self.datasets[source]
        if self.megatron:
            found = self._by_megatron(name, datasets, whole=self.apart)
        else:
            found = self._keyed(name, datasets)
        most = getattr(found, "total", None)
        if most is not None and name == "train" and self.asked and self.asked[0] > most:
            caps = self.data.blend_max_epochs
            if caps is None:
                few = read_once(name, self.asked[0], most)
            else:
                few = used_up(name, self.asked[0], most, caps)
            raise ConfigError([few])
        return found

    def _keyed(self, name: str, datasets: list[IndexedDataset]) -> Opened:
        """Return the split in the order that is computed sample by sample."""
        data = self.data
        # Evaluations look at the first few samples: shuffled, they stand for the whole split, and
        # with a seed of their own they are the same samples in every run.
        order = self.seed if name == "train" else 0
        cuts = [
            range(d.num_documents)
            if self.apart
            else split_documents(d, data.split)[SHARES.index(name)]
            for d in datasets
        ]
        parts = [
            self._part(dataset, cut, order, name)
            for dataset, cut in zip(datasets, cuts, strict=True)
        ]
        if self._alone(name):
            return parts[0]
        sizes = [dataset.num_tokens for dataset in datasets]
        if name == "train":
            caps = data.blend_max_epochs
            if caps is None:
                most = None
            else:
                most = [int(cap * len(p)) for cap, p in zip(caps, parts, strict=True)]
            return self.blend(parts, self._plan(name) or sizes, order, name, most)
        shares = (self._weights(name) if self.own.get(name) else self._plan(name)) or sizes
        # what is evaluated is read once
        return self.blend(parts, shares, order, name, [len(part) for part in parts])

    def _part(self, dataset: IndexedDataset, documents: range, seed: int, name: str) -> Samples:
        """Return the samples of a range of documents of one corpus."""
        data = self.data
        if not data.whole_documents:
            return Samples(dataset, documents, data.length, seed, True, self.vocab_size, name)
        cache = user_path(data.cache_dir)
        return WholeDocuments(dataset, documents, Fit.of(data), seed, self.vocab_size, name, cache)

    def _plan(self, name: str) -> Sequence[float] | Plan | None:
        """Return the shares of the corpora, or how they change over the samples of training."""
        data = self.data
        if data.blend_curriculum is not None:
            return data.blend_curriculum if name == "train" else data.blend_curriculum[-1][1]
        if data.blend_sizes is not None:
            if name == "train":
                return by_sizes(data.blend_sizes)
            return [float(size) for size in data.blend_sizes]
        return data.blend_weights

    def _by_megatron(self, name: str, datasets: list[IndexedDataset], *, whole: bool) -> Opened:
        """Return the split in Megatron-LM's order."""
        data = self.data
        asked = None if self.asked is None else self.asked[SHARES.index(name)]
        cache = user_path(data.cache_dir)
        folder = None if data.megatron_cache is None else user_path(data.megatron_cache)

        def part(dataset: IndexedDataset, count: int | None) -> megatron_order.MegatronSamples:
            sequences, shares = megatron_order.cut(len(dataset), data.split)[SHARES.index(name)]
            if whole:
                sequences = range(len(dataset))
            if folder is None:
                theirs = None
            else:
                theirs = Theirs(folder, None if whole else shares)
            return megatron_order.MegatronSamples(
                dataset,
                sequences,
                data.length,
                self.seed,
                self.vocab_size,
                name,
                count,
                cache,
                theirs,
            )

        if self._alone(name):
            return part(datasets[0], asked)
        parts = [functools.partial(part, dataset) for dataset in datasets]
        return megatron_order.blended(parts, self._weights(name), asked, name)

    def _alone(self, name: str) -> bool:
        """Return whether the split is of one corpus, without a blend; in Megatron's order where
        megatron-core has none.
        """
        own = self.own.get(name)
        blend = self.data.blend
        if own or blend is None:
            return not own or len(own) == 1
        return self.megatron and len(blend) == 1 and (self.apart or self.data.blend_weights is None)

    def _weights(self, name: str) -> Sequence[float] | None:
        if self.own.get(name):
            return self.data.validation_weights if name == "validation" else self.data.test_weights
        return self.data.blend_weights


def _no_corpus(name: str) -> Problem:
    rule = f"splits have corpora of their own, and {name} has none"
    return Problem("MT605", f"data.{name}_blend", None, rule, f"data.{name}_blend=[PREFIX]")
