"""Manifests of prepared corpora: settings, sources, shards, files, and a fingerprint of all that affects samples."""

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pretrain.common.errors import InputError
from pretrain.common.extensions import is_custom, module_hashes
from pretrain.common.files import MANIFEST, read_manifest, sha256_file
from pretrain.config import CorpusConfig, SourceConfig
from pretrain.corpus.byte_level import LINE_JOINER
from pretrain.corpus.card import CARD_FILES
from pretrain.corpus.filters import filter_settings
from pretrain.corpus.inputs import Input
from pretrain.corpus.shards import FOLDED, FORMAT, check_version, source_fingerprint, token_dtype
from pretrain.corpus.special_tokens import special_ids
from pretrain.corpus.vocabulary import TOKENIZER_FILES, tokens_digest, vocabulary_size

VOCABULARY_TRAINING_BYTES = 1 << 30  # maximum text to train a vocabulary; documents are sampled by hash
_MODEL_FILES = ("config.json", "*.safetensors", "pytorch_model*.bin")  # present in folders of models, not of corpora
_SOURCE_SETTING = re.compile(r"corpus\.sources\.(\d+)\.(.+)")


def make_manifest(
    folder: Path,
    tokenizer: Tokenizer,
    *,
    sources: list[dict[str, Any]],
    shards: list[dict[str, Any]],
    settings: dict[str, Any],
    hashes: dict[str, str],
    tokenizer_config: dict[str, Any],
    further_files: Sequence[str],
    old_files: Mapping[str, Any],
) -> dict[str, Any]:
    """Make the manifest of the corpus in `folder`, still without entries for its card.

    `hashes` is {name: SHA-256} of the shards' files, `further_files` the names of other files. If sources are added to
    a corpus, `old_files` has the manifest entries of the files it already had, which are not read again.
    """
    old_files = {name: entry for name, entry in old_files.items() if name not in CARD_FILES}
    new_names = [name for name in [*hashes, *TOKENIZER_FILES, *further_files] if name not in old_files]
    size = vocabulary_size(tokenizer)
    manifest = {
        "format": FORMAT,
        FOLDED: True,
        "fingerprint": "",
        "vocabulary_size": size,
        "dtype": token_dtype(size).name,
        "special_ids": special_ids(tokenizer, tokenizer_config),
        "sources": sources,
        "shards": shards,
        "settings": settings,
        "files": {**old_files, **{name: _file_entry(folder / name, hashes.get(name, "")) for name in new_names}},
    }
    manifest["fingerprint"] = fingerprint(manifest)
    for index, source in enumerate(sources):
        source["fingerprint"] = source_fingerprint(manifest, index)
    return manifest


def _file_entry(path: Path, digest: str = "") -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": digest or sha256_file(path)}


def without_card(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest without the entries of the card, whose files may then change while the corpus is in use."""
    files = {name: entry for name, entry in manifest["files"].items() if name not in CARD_FILES}
    return {**manifest, "files": files}


def add_card(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """Add entries for the card, whose files are written last, to the manifest."""
    for name in CARD_FILES:
        manifest["files"][name] = _file_entry(folder / name)
    return manifest


def fingerprint(manifest: dict[str, Any]) -> str:
    """Return a digest of all that affects samples: vocabulary, shards, weights (invariant 1 in docs/invariants.md)."""
    arrays = {name: entry["sha256"] for name, entry in manifest["files"].items() if name.endswith(".npy")}
    contents = [
        FORMAT,
        manifest["special_ids"],
        manifest["files"]["vocab.txt"]["sha256"],
        manifest["shards"],
        sorted(arrays.items()),
        [source["weight"] for source in manifest["sources"]],
    ]
    return hashlib.sha256(json.dumps(contents).encode()).hexdigest()


def settings_affecting_tokens(
    corpus: CorpusConfig,
    inputs: list[list[Input]],
    tokenizer: Tokenizer | None,
    known_digests: Mapping[int, str] | None = None,
) -> dict[str, Any]:
    """Return the settings that affect the tokens, under their full names in the config.

    `tokenizer` is None if one will be trained. `known_digests` has the files' digest of each source without `inputs`.
    """
    vocabulary = corpus.vocabulary
    settings: dict[str, Any] = {"version": FORMAT}
    for key in ("language", "min_document_words", "validation_fraction", "shard_tokens"):
        settings[f"corpus.{key}"] = getattr(corpus, key)
    if vocabulary.kind != "wordpiece":
        settings["corpus.vocabulary.kind"] = vocabulary.kind
    if corpus.line_breaks == "keep":
        settings["corpus.line_breaks"] = "keep"
    settings["corpus.vocabulary.lowercase"] = vocabulary.lowercase
    if vocabulary.strip_accents not in (None, vocabulary.lowercase):
        settings["corpus.vocabulary.strip_accents"] = vocabulary.strip_accents
    if tokenizer is not None:
        settings["corpus.vocabulary.path"] = tokens_digest(tokenizer)
    else:
        for key in ("size", "min_frequency"):
            settings[f"corpus.vocabulary.{key}"] = getattr(vocabulary, key)
        settings["corpus.vocabulary.training_bytes"] = VOCABULARY_TRAINING_BYTES
    if vocabulary.added_words:
        settings["corpus.vocabulary.added_words"] = vocabulary.added_words
        settings["corpus.vocabulary.training_bytes"] = VOCABULARY_TRAINING_BYTES
    for key, value in filter_settings(corpus.filters).items():
        settings[f"corpus.filters.{key}"] = value
    for index, (source, source_inputs) in enumerate(zip(corpus.sources, inputs, strict=True)):
        files_digest = (known_digests or {}).get(index) or _files_digest(source_inputs)
        settings |= prefix_settings(index, _source_settings(source, files_digest))
    return settings


def _source_settings(source: SourceConfig, files_digest: str) -> dict[str, Any]:
    """Return the settings of a source that affect its tokens; the digest of its files replaces its path."""
    settings = {key: getattr(source, key) for key in ("kind", "subset", "split", "revision", "text_column")}
    if is_custom(source.kind):
        settings["module"] = module_hashes().get(source.kind)
    if source.held_out:
        settings["held_out"] = True
    if source.quoting != "auto":
        settings["quoting"] = source.quoting
    return {**settings, "path": files_digest}


def prefix_settings(index: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the source with this index under their full names in the config."""
    return {f"corpus.sources.{index}.{key}": value for key, value in settings.items()}


def split_by_source(
    settings: dict[str, Any], *, include_vocabulary: bool = True
) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """Split settings into (general ones, {index of a source: its settings}), with or without the vocabulary's."""
    general, by_source = {}, {}
    for key, value in settings.items():
        if match := _SOURCE_SETTING.fullmatch(key):
            by_source.setdefault(int(match[1]), {})[match[2]] = value
        elif include_vocabulary or not key.startswith("corpus.vocabulary."):
            general[key] = value
    return general, by_source


def match_sources(
    folder: Path,
    manifest: dict[str, Any],
    sources: Sequence[SourceConfig],
    inputs: list[list[Input]],
    requested: dict[str, Any],
    *,
    compare_vocabulary: bool,
) -> list[int]:
    """Return the index in the corpus of each source in the config; new sources get the next indices.

    A source in the config matches the source in the corpus that has equal settings and whose files have equal names,
    sizes and times or, failing that, equal content (copied files, whose digest is then put into the manifest). Failing
    that, it matches the source with its name. Settings of the vocabulary are only compared if `compare_vocabulary`.

    Raises `InputError` if settings of the corpus, or the content of one of its sources, have changed.
    """
    general, by_source = split_by_source(requested, include_vocabulary=compare_vocabulary)
    old_general, old_by_source = split_by_source(manifest["settings"], include_vocabulary=compare_vocabulary)
    corpus_indices = _match_to_manifest(manifest, sources, inputs, by_source, old_by_source)
    for index, corpus_index in corpus_indices.items():
        old_general |= prefix_settings(index, old_by_source[corpus_index])
    for index, settings in by_source.items():
        if index in corpus_indices:
            general |= prefix_settings(index, settings)
    check_unchanged(folder, old_general, general)
    names = [entry["name"] for entry in manifest["sources"]]
    for index, source in enumerate(sources):
        if index not in corpus_indices:
            name = source_name(source)
            if name in names:
                raise InputError(
                    f"corpus.sources.{index}: the corpus in {folder} already has a source named {name}. To add this "
                    "one, give it a different name (name: ...)."
                )
            corpus_indices[index] = len(names)
            names.append(name)
    return [corpus_indices[index] for index in sorted(corpus_indices)]


def _match_to_manifest(
    manifest: dict[str, Any],
    sources: Sequence[SourceConfig],
    inputs: list[list[Input]],
    requested: dict[int, dict[str, Any]],
    old: dict[int, dict[str, Any]],
) -> dict[int, int]:
    """Return {index in the config: index in the corpus}; for copied files, put digests into `old` and `manifest`.

    `requested` has the settings of each source in the config, `old` the settings of each source in the corpus.
    """
    entries, matched = manifest["sources"], {}
    names = [source_name(source) for source in sources]

    def match(is_match: Callable[[int, int], bool], *, copied: bool = False) -> None:
        for index in sorted(requested.keys() - matched):
            unmatched = (n for n in range(len(entries)) if n not in matched.values() and n in old)
            corpus_index = next((n for n in unmatched if is_match(index, n)), None)
            if corpus_index is not None:
                matched[index] = corpus_index
                if copied and "path" in old[corpus_index]:
                    old[corpus_index]["path"] = requested[index]["path"]
                    manifest["settings"] |= prefix_settings(corpus_index, {"path": requested[index]["path"]})

    def has_same_name(index: int, corpus_index: int) -> bool:
        return names[index] == entries[corpus_index]["name"]

    def is_copy(index: int, corpus_index: int) -> bool:
        has_equal_settings = {**old[corpus_index], "path": requested[index]["path"]} == requested[index]
        return has_equal_settings and _content_matches(inputs[index], entries[corpus_index])

    match(lambda index, corpus_index: requested[index] == old[corpus_index] and has_same_name(index, corpus_index))
    match(lambda index, corpus_index: requested[index] == old[corpus_index])
    match(lambda index, corpus_index: has_same_name(index, corpus_index) and is_copy(index, corpus_index), copied=True)
    match(is_copy, copied=True)
    match(has_same_name)
    return matched


def _content_matches(inputs: list[Input], entry: dict[str, Any]) -> bool:
    """Return whether the files have the content that a source's entry in the manifest states."""
    if sum(item.bytes for item in inputs) != entry.get("input_bytes"):
        return False
    paths = [path for item in inputs if not item.is_on_hub for path in item.paths]
    return bool(paths) and content_digest({path: sha256_file(Path(path)) for path in paths}) == entry["content"]


def try_read_manifest(folder: Path) -> dict[str, Any] | None:
    """Read the manifest of a corpus that may be damaged; None if it cannot be read."""
    try:
        manifest = read_manifest(folder)
    except InputError:
        return None
    return manifest if isinstance(manifest.get("settings"), dict) and "sources" in manifest else None


def check_is_corpus_folder(folder: Path) -> None:
    """Raise `InputError` if `folder` contains something other than a corpus, or a corpus of another version."""
    foreign_file = next((path for pattern in _MODEL_FILES for path in sorted(folder.glob(pattern))), None)
    manifest = None
    with contextlib.suppress(InputError):  # a damaged corpus is prepared again
        manifest = read_manifest(folder) if (folder / MANIFEST).exists() else None
    if manifest and "shards" not in manifest:
        foreign_file = folder / MANIFEST
    elif manifest:
        check_version(manifest, folder)
    if foreign_file is not None:
        raise InputError(f"{folder}: is not a corpus folder (it has {foreign_file.name}). Choose another corpus.dir.")


def find_new_sources(
    folder: Path,
    manifest: dict[str, Any],
    sources: Sequence[SourceConfig],
    requested: dict[str, Any],
    *,
    compare_vocabulary: bool,
) -> list[int]:
    """Return the indices of new sources like `match_sources`, but compare them only by name, without reading files."""
    general, by_source = split_by_source(requested, include_vocabulary=compare_vocabulary)
    old_general, old_by_source = split_by_source(manifest["settings"], include_vocabulary=compare_vocabulary)
    corpus_indices = {entry["name"]: index for index, entry in enumerate(manifest["sources"])}
    for index, source in enumerate(sources):
        if (corpus_index := corpus_indices.get(source_name(source))) is not None:
            old_general |= prefix_settings(index, {**old_by_source[corpus_index], "path": None})
            general |= prefix_settings(index, {**by_source[index], "path": None})
    check_unchanged(folder, old_general, general)
    return [index for index, source in enumerate(sources) if source_name(source) not in corpus_indices]


def check_unchanged(folder: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Raise `InputError` if the settings of the corpus in `folder`, `old`, differ from the requested ones, `new`."""
    changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    if not changed:
        return
    key = changed[0]
    change = "its files have changed" if key.endswith(".path") else f"was {old.get(key)!r}, is {new.get(key)!r}"
    rest = f" (and {len(changed) - 1} more)" if changed[1:] else ""
    rename = "give the changed source another name to add it, " if _SOURCE_SETTING.fullmatch(key) else ""
    raise InputError(
        f"{folder}: prepared with other settings. {key}: {change}{rest}. Restore them, {rename}or choose another "
        "corpus.dir."
    )


def check_same_tokenizer(
    folder: Path, tokenizer: Tokenizer, *, extended: bool = False, setting: str = "start_from"
) -> None:
    """Raise `InputError` unless the corpus in `folder` was prepared with `tokenizer`, the tokenizer of a checkpoint.

    `extended`: the corpus's vocabulary may have further entries at its end. `setting` names the checkpoint.
    """
    corpus_tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    size, entries = vocabulary_size(tokenizer), corpus_tokenizer.get_vocab()
    extra = vocabulary_size(corpus_tokenizer) - size
    if extra < 0 or (extra and not extended):
        reason = f"the corpus's vocabulary has {size + extra} entries, the checkpoint's {size}"
    elif different := [entry for entry, token_id in tokenizer.get_vocab().items() if entries.get(entry) != token_id]:
        first = min(different, key=tokenizer.get_vocab().__getitem__)
        reason = f"the id of {first!r} is {entries.get(first)}, and {tokenizer.token_to_id(first)} in the checkpoint"
    elif _preprocessing(corpus_tokenizer) != _preprocessing(tokenizer):
        reason = "the corpus's tokenizer normalizes text differently, such as case or accents"
    else:
        return
    advice = "the same start_from" if setting == "start_from" else "that tokenizer.json as corpus.vocabulary.path"
    raise InputError(
        f"{folder}: prepared with a different tokenizer than in {setting}: {reason}. Prepare the text into another "
        f"corpus.dir with {advice}."
    )


def _preprocessing(tokenizer: Tokenizer) -> list[Any]:
    """Return the normalizer (None if it only joins lines), the pre-tokenizer, and added tokens that are not special."""
    spec = json.loads(tokenizer.to_str())
    normalizer = None if spec["normalizer"] == LINE_JOINER else spec["normalizer"]
    added = [token for token in spec["added_tokens"] if not token["special"]]
    return [normalizer, spec["pre_tokenizer"], added]


def changeable_source_fields(source: SourceConfig) -> dict[str, Any]:
    """Return the manifest and card fields of a source that may change in the config of an existing corpus."""
    return {"name": source_name(source), "kind": source.kind, "weight": source.weight, "license": source.license}


def source_name(source: SourceConfig) -> str:
    """Return the name of a source in the corpus; by default, its kind and the first part of its file name."""
    stem = Path(source.path or source.dataset).name.split(".")[0].strip("*")
    return source.name or "-".join(filter(None, (source.kind, stem)))


def content_digest(hashes: dict[str, str]) -> str:
    """Return a digest of a source's files, in order, from their hashes by path."""
    return hashlib.sha256("\n".join(hashes.values()).encode()).hexdigest()


def _files_digest(inputs: list[Input]) -> str:
    """Return a digest of the names, sizes and times of files, regardless of their folder."""
    digest = hashlib.sha256()
    for item in inputs:
        for path in item.paths:
            identity: list[Any] = [path]
            if not item.is_on_hub:
                stat = Path(path).stat()
                identity = [Path(path).name, stat.st_size, stat.st_mtime_ns]
            digest.update(json.dumps(identity).encode())
    return digest.hexdigest()
