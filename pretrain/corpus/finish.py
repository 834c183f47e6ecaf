"""The last stage of `prepare`: write tokenizer files, deduplication signatures, card, and finally the manifest."""

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
from pretrain.corpus.growth import ExistingCorpus, merged_evaluation_sets, merged_filters, write_signatures
from pretrain.corpus.inputs import Input, Problems
from pretrain.corpus.manifest import add_card, changeable_source_fields, content_digest, make_manifest, source_name
from pretrain.corpus.released import kind_of
from pretrain.corpus.samples import check_tokens, read_tokens
from pretrain.corpus.shards import TokenShards, shards_of, source_fingerprints
from pretrain.corpus.vocabulary import save_tokenizer, vocabulary_size

_EXTENSION_KEYS = ("added", "saved_share", "first_added")  # keys of the card about words added to the vocabulary

ReadingCounter = Callable[[TokenShards], tuple[list[dict[str, Any]], list[str]]]
"""Function that returns two lists for the card: how often an epoch reads each token, and the sources of each phase."""


@dataclass(frozen=True)
class PreparedCorpus:
    """The results of all earlier stages. `sources` and `inputs` are keyed by the index of the source in the corpus.

    Attributes:
        settings: settings of the whole corpus, for the manifest.
        existing: the corpus to which the sources are added; None for a new corpus.
        tokenizer_config: tokenizer_config.json of a released tokenizer, as in `save_tokenizer`.
        extension: entries of the card about words added to the vocabulary.
        results: result of `stages.write_shard` for each shard of the plan.
        hashes: {path: SHA-256} of the files of each source, in order.
        evaluation_sizes: number of examples in each evaluation set, and of examples too short to search for.
    """

    corpus: CorpusConfig
    work_dir: Path
    sources: dict[int, SourceConfig]
    inputs: dict[int, list[Input]]
    settings: dict[str, Any]
    existing: ExistingCorpus | None
    tokenizer: Tokenizer
    tokenizer_config: dict[str, Any]
    extension: dict[str, Any]
    documents: Documents
    plan: list[ShardPlan]
    results: list[dict[str, Any]]
    hashes: list[dict[str, str]]
    problems: Problems
    evaluation_sizes: Sequence[dict[str, int]]

    def write(self, count_readings: ReadingCounter | None) -> None:
        """Write the remaining files. `count_readings` as in `prepare`."""
        existing, folder = self.existing, self.corpus.folder
        old_manifest: dict[str, Any] = existing.manifest if existing else {"sources": [], "shards": [], "files": {}}
        if not existing:
            save_tokenizer(folder, self.tokenizer, self.tokenizer_config)
        self._check_samples(self.tokenizer if existing else Tokenizer.from_file(str(folder / "tokenizer.json")))
        new_shards = [{"name": p.name, "split": p.split, "source": p.source, **p.totals} for p in self.plan]
        with_sketches = self.corpus.filters.near_duplicates.enabled
        signature_files = [
            write_signatures(folder, self.work_dir, self.documents, source, with_sketches=with_sketches)
            for source in self.sources
        ]
        manifest = make_manifest(
            folder,
            self.tokenizer,
            sources=[*old_manifest["sources"], *self._source_entries()],
            shards=[*old_manifest["shards"], *new_shards],
            settings=self.settings,
            hashes={name: digest for result in self.results for name, digest in result["hashes"].items()},
            tokenizer_config=self.tokenizer_config,
            further_files=[name for names in signature_files for name in names],
            old_files=old_manifest["files"],
        )
        if existing:
            manifest["grown"] = 1 + existing.manifest.get("grown", 0)
            existing.detach_card()
        self._write_card(manifest, self._readings(manifest, count_readings))
        put_manifest(folder, add_card(folder, manifest))

    def _check_samples(self, tokenizer: Tokenizer) -> None:
        """Raise `InputError` if the tokenizer gives sampled documents other tokens than the shards contain."""
        origins = {n: f"{self.corpus.folder}: source {source_name(config)}" for n, config in self.sources.items()}
        shards = zip(self.plan, self.results, strict=True)
        sampled = [(shard, result["samples"]) for shard, result in shards if result.get("samples")]
        stored = ((shard.source, read_tokens(self.corpus.folder, shard.name, samples)) for shard, samples in sampled)
        check_tokens(tokenizer, ((origins[source], document) for source, documents in stored for document in documents))

    def _write_card(self, manifest: dict[str, Any], readings: tuple[list[dict[str, Any]], list[str]]) -> None:
        old_card = self.existing.card(self.work_dir) if self.existing else {}
        count = len(manifest["sources"])
        extension = {key: value for key, value in old_card.get("vocabulary", {}).items() if key in _EXTENSION_KEYS}
        names = set_names(self.corpus.filters.contamination)
        evaluation = self.documents.evaluation_entries(self.evaluation_sizes, names)
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
            filtered=merged_filters(old_card.get("filters", []), self.documents.filter_entries(count), count),
            evaluation=merged_evaluation_sets(old_card.get("evaluation_sets", []), evaluation),
            old_card=old_card,
        )

    def _readings(
        self, manifest: dict[str, Any], count_readings: ReadingCounter | None
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """Return the result of `count_readings`, empty if it is None or there is too little text.

        If the shards of an existing corpus are not on this machine, the readings are taken from the old card.
        `count_readings` is called in any case, since it also stores the number of samples of each block.
        """
        folder, entries = self.corpus.folder, manifest["shards"]
        local_entries = [entry for entry in entries if (folder / f"{entry['name']}.tokens.npy").is_file()]
        shards = shards_of(folder, {**manifest, "shards": local_entries}, "train")
        shards = dataclasses.replace(shards, fingerprints=source_fingerprints(manifest))
        readings: tuple[list[dict[str, Any]], list[str]] = [], []
        with contextlib.suppress(InputError):
            readings = count_readings(shards) if count_readings and shards.shards else readings
        if self.existing and len(local_entries) < len(entries):
            return self.existing.card(self.work_dir).get("readings", []), []
        return readings

    def _source_entries(self) -> list[dict[str, Any]]:
        """Return the entries of the new sources in the manifest and the card."""
        statistics = self.documents.statistics(1 + max(self.sources, default=-1))
        entries = []
        for (index, source), hashes in zip(self.sources.items(), self.hashes, strict=True):
            results = [result for shard, result in zip(self.plan, self.results, strict=True) if shard.source == index]
            skipped = self.documents.skipped_paragraphs(index)
            held_out_copies = statistics[index].pop("lost_to_held_out")  # training documents that equal held-out text
            entries.append(
                {
                    **changeable_source_fields(source),
                    "revision": source.revision,
                    "content": content_digest(hashes),
                    "input_bytes": sum(item.bytes for item in self.inputs[index]),
                    **statistics[index],
                    **({"left_out": skipped} if skipped else {}),
                    **({"lost_to_held_out": held_out_copies} if held_out_copies else {}),
                    **({"held_out": True} if source.held_out else {}),
                    **card.shard_statistics(results),
                }
            )
        return entries
