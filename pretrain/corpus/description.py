"""Describes what `prepare` would do for a config: sources, files and bytes to read, number of processes."""

import os
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pretrain.common.addresses import is_remote
from pretrain.common.errors import InputError
from pretrain.common.kinds import unknown_name_message
from pretrain.config import CorpusConfig, PretrainConfig
from pretrain.corpus import sources
from pretrain.corpus.formats import kind_warnings
from pretrain.corpus.inputs import first_faults
from pretrain.corpus.manifest import (
    check_is_corpus_folder,
    check_same_tokenizer,
    find_new_sources,
    match_sources,
    settings_affecting_tokens,
    source_name,
)
from pretrain.corpus.released import keeps_lines
from pretrain.corpus.special_tokens import declared_settings
from pretrain.corpus.stored import prepared_manifest
from pretrain.corpus.tokenizer_files import load_vocabulary

WORK = ".work"  # subfolder of the corpus with the state of an unfinished preparation


def configured_tokenizer(corpus: CorpusConfig) -> Tokenizer | None:
    """Load the tokenizer that corpus.vocabulary names; None if the vocabulary is to be trained."""
    settings = corpus.vocabulary
    if not settings.path:
        if settings.kind == "released":
            raise InputError("corpus.vocabulary.path: empty, but kind: released needs a tokenizer.json.")
        return None
    return load_vocabulary(
        Path(settings.path), lowercase=settings.lowercase, kind=settings.kind, strip_accents=settings.strip_accents
    )


def check_line_breaks(corpus: CorpusConfig, tokenizer: Tokenizer | None) -> None:
    """Raise `InputError` if line breaks are kept, but `tokenizer` (None: to be trained) has no tokens for them."""
    if corpus.line_breaks != "keep":
        return
    if not (keeps_lines(tokenizer) if tokenizer else corpus.vocabulary.kind == "byte_bpe"):
        raise InputError(
            "corpus.line_breaks: keep, but the vocabulary has no tokens for line breaks and indentation. Set auto, or "
            "choose a vocabulary that has them: kind: byte_bpe, or the tokenizer of ModernBERT, RoBERTa or mmBERT."
        )


def read_tokenizer_config(corpus: CorpusConfig) -> dict[str, Any]:
    """Read the tokenizer_config.json next to the configured vocabulary."""
    path = Path(corpus.vocabulary.path).expanduser()
    return declared_settings(path if path.is_dir() else path.parent)


def process_count(config: PretrainConfig) -> int:
    """Return corpus.processes; by default, the number of this machine's cores or, for a cluster, 0 (all its cores)."""
    default = 0 if config.scheduling.address else len(os.sched_getaffinity(0))
    return config.corpus.processes or default


def check_weights(config: PretrainConfig) -> None:
    """Raise `InputError` if a phase has a weight for a source that the corpus will not have."""
    source_names = {source_name(source): None for source in config.corpus.sources}  # an ordered set
    weighted = [(index, name) for index, phase in enumerate(config.phases) for name in phase.weights]
    if any(name not in source_names for _, name in weighted):
        prepared = prepared_manifest(config.corpus) or {"sources": []}
        source_names |= dict.fromkeys(source["name"] for source in prepared["sources"])
    for index, name in weighted:
        if name not in source_names:
            raise InputError(f"phases.{index}.weights: {unknown_name_message(name, list(source_names))}")


def describe(config: PretrainConfig, tokenizer: Tokenizer | None = None) -> dict[str, Any]:
    """Describe what `prepare` would do, for --dry-run, given the `tokenizer` of the checkpoint to start from, if any.

    Raises `InputError` like `prepare`, such as for a finished corpus that was prepared with other settings.
    """
    check_weights(config)
    corpus, folder = config.corpus, config.corpus.folder
    check_is_corpus_folder(folder)
    manifest = prepared_manifest(corpus)
    state = "finished" if manifest else "started" if (folder / WORK).exists() else "new"
    new_indices = list(range(len(corpus.sources)))  # indices of the sources that `prepare` would read
    inputs_by_source = [sources.list_inputs(source, f"corpus.sources.{n}") for n, source in enumerate(corpus.sources)]
    if state != "finished":
        check_line_breaks(corpus, tokenizer or configured_tokenizer(corpus))
    all_local = not any(is_remote(source.path) for source in corpus.sources)  # a dry run downloads no remote sources
    if manifest and inputs_by_source:
        inputs = inputs_by_source if all_local else [[] for _ in inputs_by_source]
        settings = settings_affecting_tokens(corpus, inputs, tokenizer or configured_tokenizer(corpus))
        if all_local:
            required_tokenizer = None if corpus.vocabulary.added_words else tokenizer
            if required_tokenizer is not None:
                check_same_tokenizer(folder, required_tokenizer)
            requested = corpus.sources, inputs_by_source, settings
            corpus_indices = match_sources(folder, manifest, *requested, compare_vocabulary=required_tokenizer is None)
            # New sources get the indices after the manifest's sources.
            new_indices = [n for n, index in enumerate(corpus_indices) if index >= len(manifest["sources"])]
        else:
            new_indices = find_new_sources(
                folder, manifest, corpus.sources, settings, compare_vocabulary=tokenizer is None
            )
        if new_indices:
            state = f"grows by {' and '.join(source_name(corpus.sources[index]) for index in new_indices)}"
    rows = [
        {
            "name": source_name(source),
            "kind": source.kind,
            "files": sum(len(item.paths) for item in inputs),
            "bytes": sum(item.bytes for item in inputs),
            "weight": source.weight,
        }
        for source, inputs in zip(corpus.sources, inputs_by_source, strict=True)
    ]
    problems = [problem for inputs in inputs_by_source for item in inputs for problem in item.problems]
    new_sources = {index: corpus.sources[index] for index in new_indices}
    warnings, _ = kind_warnings(new_sources, dict(enumerate(inputs_by_source)), corpus.validation_fraction)
    return {
        "dir": str(folder),
        "state": state,
        "sources_compared": all_local,
        "processes": process_count(config),
        "address": config.scheduling.address,
        "bytes": sum(rows[index]["bytes"] for index in new_indices),
        "sources": rows,
        "notes": [*(first_faults([problem]) for problem in problems), *warnings],
    }
