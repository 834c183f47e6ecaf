"""The last stage of `prepare`: tokenizer files, signatures, card, and finally the manifest."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pretrain.common.errors import InputError
from pretrain.common.files import put_manifest
from pretrain.config import CorpusConfig, SourceConfig
from pretrain.corpus import card
from pretrain.corpus.documents import Documents, ShardPlan
from pretrain.corpus.filters.evaluation_sets import set_names
from pretrain.corpus.growth import Growth, merged_filters, merged_sets, write_signatures
from pretrain.corpus.inputs import Input, Problems
from pretrain.corpus.manifest import content_digest, make_manifest, source_facts, source_name, with_card
from pretrain.corpus.released import kind_of
from pretrain.corpus.samples import compare, read_tokens
from pretrain.corpus.shards import TokenShards, shards_of, source_fingerprints
from pretrain.corpus.vocabulary import save_tokenizer, vocabulary_size

_EXTENSION_FACTS = ("added", "saved_share", "first_added")

CountReadings = Callable[[TokenShards], tuple[list[dict[str, Any]], list[str]]]
"""Returns, for the card, how often an epoch reads a token, and lines on how much of each source a phase reads."""


@dataclass(frozen=True)
class Prepared:
    """The results of the other stages. Sources are identified by their numbers in the corpus.

    Attributes:
        settings: settings of the whole corpus, for the manifest.
        growth: the corpus to which the sources are added; None for a new corpus.
        declared: see `save_tokenizer`.
        extension: facts about an extended vocabulary, for the card.
        results: result of writing each shard of the plan.
        hashes: {path: SHA-256} of the files of each source, in order.
        evaluation_sizes: sizes of each evaluation set.
    """

    corpus: CorpusConfig
    work: Path
    sources: dict[int, SourceConfig]
    inputs: dict[int, list[Input]]
    settings: dict[str, Any]
    growth: Growth | None
    tokenizer: Tokenizer
    declared: dict[str, Any]
    extension: dict[str, Any]
    documents: Documents
    plan: list[ShardPlan]
    results: list[dict[str, Any]]
    hashes: list[dict[str, str]]
    problems: Problems
    evaluation_sizes: Sequence[dict[str, int]]

    def write(self, count_readings: CountReadings | None) -> None:
        """Write the remaining files. `count_readings` as in `prepare`."""
        growth, folder = self.growth, self.corpus.folder
        before: dict[str, Any] = growth.manifest if growth else {"sources": [], "shards": [], "files": {}}
        if not growth:
            save_tokenizer(folder, self.tokenizer, self.declared)
        self._compare_samples(self.tokenizer if growth else Tokenizer.from_file(str(folder / "tokenizer.json")))
        new = [{"name": p.name, "split": p.split, "source": p.source, **p.totals} for p in self.plan]
        signatures = [
            write_signatures(folder, self.work, self.documents, number, with_sketches=self._finds_near)
            for number in self.sources
        ]
        manifest = make_manifest(
            folder,
            self.tokenizer,
            sources=[*before["sources"], *self._source_entries()],
            shards=[*before["shards"], *new],
            settings=self.settings,
            hashes={name: digest for result in self.results for name, digest in result["hashes"].items()},
            declared=self.declared,
            further_files=[name for names in signatures for name in names],
            before=before["files"],
        )
        if growth:
            manifest["grown"] = 1 + growth.manifest.get("grown", 0)
            growth.detach_card()
        self._write_card(manifest, self._readings(manifest, count_readings))
        put_manifest(folder, with_card(folder, manifest))

    def _compare_samples(self, tokenizer: Tokenizer) -> None:
        """Raise `InputError` if the corpus's tokenizer gives sampled documents other tokens than the shards have."""
        names = {n: f"{self.corpus.folder}: source {source_name(config)}" for n, config in self.sources.items()}
        shards = zip(self.plan, self.results, strict=True)
        sampled = [(shard, result["samples"]) for shard, result in shards if result.get("samples")]
        read = ((shard.source, read_tokens(self.corpus.folder, shard.name, samples)) for shard, samples in sampled)
        compare(tokenizer, ((names[source], document) for source, documents in read for document in documents))

    @property
    def _finds_near(self) -> bool:
        return self.corpus.filters.near_duplicates.enabled

    def _write_card(self, manifest: dict[str, Any], readings: tuple[list[dict[str, Any]], list[str]]) -> None:
        before = self.growth.card(self.work) if self.growth else {}
        count = len(manifest["sources"])
        extension = {key: value for key, value in before.get("vocabulary", {}).items() if key in _EXTENSION_FACTS}
        evaluation = self.documents.evaluation(self.evaluation_sizes, set_names(self.corpus.filters.contamination))
        card.write_card(
            self.corpus.folder,
            manifest["sources"],
            self.hashes,
            self.problems.entries(),
            vocabulary_size=vocabulary_size(self.tokenizer),
            kind=kind_of(self.tokenizer),
            lowercase=self.corpus.vocabulary.lowercase,
            strip_accents=getattr(self.tokenizer.normalizer, "strip_accents", None),
            language=self.corpus.language,
            shards=manifest["shards"],
            readings=readings,
            extension=extension or self.extension,
            filtered=merged_filters(before.get("filters", []), self.documents.filtered(count), count),
            evaluation=merged_sets(before.get("evaluation_sets", []), evaluation),
            before=before,
        )

    def _readings(
        self, manifest: dict[str, Any], count: CountReadings | None
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """Return the result of `count`, if it is given and there is enough text.

        Old shards of a growing corpus may not be on this machine; the old card then provides the readings. `count` is
        called in any case, since it also stores the number of samples of each block.
        """
        folder, entries = self.corpus.folder, manifest["shards"]
        local = [entry for entry in entries if (folder / f"{entry['name']}.tokens.npy").is_file()]
        train = shards_of(folder, {**manifest, "shards": local}, "train")
        train = dataclasses.replace(train, fingerprints=source_fingerprints(manifest))
        readings: tuple[list[dict[str, Any]], list[str]] = [], []
        with contextlib.suppress(InputError):
            readings = count(train) if count and train.shards else readings
        if self.growth and len(local) < len(entries):
            return self.growth.card(self.work).get("readings", []), []
        return readings

    def _source_entries(self) -> list[dict[str, Any]]:
        """Return the entries of the new sources in the manifest and the card."""
        figures = self.documents.figures(1 + max(self.sources, default=-1))
        entries = []
        for (number, source), hashes in zip(self.sources.items(), self.hashes, strict=True):
            results = [result for shard, result in zip(self.plan, self.results, strict=True) if shard.source == number]
            left_out, lost = self.documents.left_out(number), figures[number].pop("lost_to_held_out")
            entries.append(
                {
                    **source_facts(source),
                    "revision": source.revision,
                    "content": content_digest(hashes),
                    "input_bytes": sum(item.bytes for item in self.inputs[number]),
                    **figures[number],
                    **({"left_out": left_out} if left_out else {}),
                    **({"lost_to_held_out": lost} if lost else {}),
                    **({"held_out": True} if source.held_out else {}),
                    **card.shard_figures(results),
                }
            )
        return entries
