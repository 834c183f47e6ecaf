"""Describe what `prepare` would do for a config: vocabulary, number of processes, files to read."""

import os
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pretrain.common.addresses import is_remote
from pretrain.common.errors import InputError
from pretrain.common.kinds import not_one_of
from pretrain.config import CorpusConfig, PretrainConfig
from pretrain.corpus import sources
from pretrain.corpus.formats import kind_warnings
from pretrain.corpus.inputs import first_faults
from pretrain.corpus.manifest import (
    check_same_tokenizer,
    find_new_sources,
    match_sources,
    refuse_other_content,
    settings_affecting_tokens,
    source_name,
)
from pretrain.corpus.released import keeps_lines
from pretrain.corpus.special_tokens import declared_settings
from pretrain.corpus.stored import prepared_manifest
from pretrain.corpus.tokenizer_files import load_vocabulary

WORK = ".work"  # subfolder of the corpus with the state of an unfinished preparation


def configured_tokenizer(corpus: CorpusConfig) -> Tokenizer | None:
    """Load the vocabulary that the config names; None if one is to be trained."""
    settings = corpus.vocabulary
    if not settings.path:
        if settings.kind == "released":
            raise InputError("corpus.vocabulary.path: empty, but kind: released needs a tokenizer.json.")
        return None
    return load_vocabulary(
        Path(settings.path), lowercase=settings.lowercase, kind=settings.kind, strip_accents=settings.strip_accents
    )


def check_line_breaks(corpus: CorpusConfig, tokenizer: Tokenizer | None) -> None:
    """Raise `InputError` if line breaks are kept but are not tokens. `tokenizer` is None if one is to be trained."""
    if corpus.line_breaks != "keep":
        return
    if not (keeps_lines(tokenizer) if tokenizer else corpus.vocabulary.kind == "byte_bpe"):
        raise InputError(
            "corpus.line_breaks: keep, but the vocabulary has no tokens for line breaks and indentation. Remove it, or "
            "choose a vocabulary that has them: kind: byte_bpe, or the tokenizer of ModernBERT, RoBERTa or mmBERT."
        )


def tokenizer_config_of(corpus: CorpusConfig) -> dict[str, Any]:
    """Read the tokenizer_config.json next to the configured vocabulary."""
    path = Path(corpus.vocabulary.path).expanduser()
    return declared_settings(path if path.is_dir() else path.parent)


def process_count(config: PretrainConfig) -> int:
    """Return the configured number of processes; the default is all cores: of this machine, or of the cluster (0)."""
    default = 0 if config.scheduling.address else len(os.sched_getaffinity(0))
    return config.corpus.processes or default


def check_weights(config: PretrainConfig) -> None:
    """Raise `InputError` if a phase has a weight for a source that the corpus will not have."""
    known = {source_name(source): None for source in config.corpus.sources}
    weighted = [(index, name) for index, phase in enumerate(config.phases) for name in phase.weights]
    if any(name not in known for _, name in weighted):
        prepared = prepared_manifest(config.corpus) or {"sources": []}
        known |= dict.fromkeys(source["name"] for source in prepared["sources"])
    for index, name in weighted:
        if name not in known:
            raise InputError(f"phases.{index}.weights: {not_one_of(name, list(known))}")


def describe(config: PretrainConfig, tokenizer: Tokenizer | None = None) -> dict[str, Any]:
    """Describe what `prepare` would do, for --dry-run; `tokenizer` as in `prepare`.

    Raises `InputError` like `prepare`, such as for a finished corpus that was prepared with other settings.
    """
    check_weights(config)
    corpus, folder = config.corpus, config.corpus.folder
    refuse_other_content(folder)
    manifest = prepared_manifest(corpus)
    state = "finished" if manifest else "started" if (folder / WORK).exists() else "new"
    new = list(range(len(corpus.sources)))  # indices of the sources that will be read
    inputs_by_source = [sources.list_inputs(source, f"corpus.sources.{n}") for n, source in enumerate(corpus.sources)]
    if state != "finished":
        check_line_breaks(corpus, tokenizer or configured_tokenizer(corpus))
    are_local = not any(is_remote(source.path) for source in corpus.sources)  # sources at addresses are not fetched
    if manifest and inputs_by_source:
        inputs = inputs_by_source if are_local else [[] for _ in inputs_by_source]
        settings = settings_affecting_tokens(corpus, inputs, tokenizer or configured_tokenizer(corpus))
        if are_local:
            same_tokenizer = None if corpus.vocabulary.added_words else tokenizer
            if same_tokenizer is not None:
                check_same_tokenizer(folder, same_tokenizer)
            requested = corpus.sources, inputs_by_source, settings
            matches = match_sources(folder, manifest, *requested, compare_vocabulary=same_tokenizer is None)
            new = [index for index, match in enumerate(matches) if match >= len(manifest["sources"])]
        else:
            new = find_new_sources(folder, manifest, corpus.sources, settings, compare_vocabulary=tokenizer is None)
        state = f"grows by {' and '.join(source_name(corpus.sources[index]) for index in new)}" if new else state
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
    left_out = [problem for inputs in inputs_by_source for item in inputs for problem in item.problems]
    kinds = {index: corpus.sources[index] for index in new}
    notes, _ = kind_warnings(kinds, dict(enumerate(inputs_by_source)), corpus.validation_fraction)
    return {
        "dir": str(folder),
        "state": state,
        "sources_compared": are_local,
        "processes": process_count(config),
        "address": config.scheduling.address,
        "bytes": sum(rows[index]["bytes"] for index in new),
        "sources": rows,
        "notes": [*map(first_faults, ([problem] for problem in left_out)), *notes],
    }
