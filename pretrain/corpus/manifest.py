"""The manifest of a prepared corpus: its settings, sources, shards and files, and the fingerprint of its samples."""

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

VOCABULARY_BYTES = 1 << 30  # maximum bytes of text to train a vocabulary; documents are sampled by hash
_MODEL_FILES = ("config.json", "*.safetensors", "pytorch_model*.bin")
_SOURCE = re.compile(r"corpus\.sources\.(\d+)\.(.+)")


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
    """Make the manifest of the files in `folder`, without the card.

    `hashes` has {name: SHA-256} of the shards' files, `further_files` the names of other files. If sources were added
    to a corpus, `old_files` has the entries of its files, which are not read again.
    """
    old_files = {name: entry for name, entry in old_files.items() if name not in CARD_FILES}
    written = [name for name in [*hashes, *TOKENIZER_FILES, *further_files] if name not in old_files]
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
        "files": {**old_files, **{name: _file_entry(folder / name, hashes.get(name, "")) for name in written}},
    }
    manifest["fingerprint"] = fingerprint(manifest)
    for number, source in enumerate(sources):
        source["fingerprint"] = source_fingerprint(manifest, number)
    return manifest


def _file_entry(path: Path, digest: str = "") -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": digest or sha256_file(path)}


def without_card(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest without the files of the card, which can then be replaced while the corpus is in use."""
    files = {name: entry for name, entry in manifest["files"].items() if name not in CARD_FILES}
    return {**manifest, "files": files}


def with_card(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """Add the files of the card, which are written last, to the manifest."""
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


def fingerprint_settings(
    corpus: CorpusConfig,
    inputs: list[list[Input]],
    tokenizer: Tokenizer | None,
    states: Mapping[int, str] | None = None,
) -> dict[str, Any]:
    """Return the settings that affect the tokens, under their full names in the config.

    `tokenizer` is None if one is to be trained; `states` has the digest of the files of each source without inputs.
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
        settings["corpus.vocabulary.training_bytes"] = VOCABULARY_BYTES
    if vocabulary.added_words:
        settings["corpus.vocabulary.added_words"] = vocabulary.added_words
        settings["corpus.vocabulary.training_bytes"] = VOCABULARY_BYTES
    for key, value in filter_settings(corpus.filters).items():
        settings[f"corpus.filters.{key}"] = value
    for number, (source, source_inputs) in enumerate(zip(corpus.sources, inputs, strict=True)):
        state = (states or {}).get(number) or _files_digest(source_inputs)
        settings |= prefix_settings(number, _source_settings(source, state))
    return settings


def _source_settings(source: SourceConfig, state: str) -> dict[str, Any]:
    """Return the settings of a source that affect its tokens, with `state`, the digest of its files, as path."""
    settings = {key: getattr(source, key) for key in ("kind", "subset", "split", "revision", "text_column")}
    if is_custom(source.kind):
        settings["module"] = module_hashes().get(source.kind)
    if source.held_out:
        settings["held_out"] = True
    if source.quoting != "auto":
        settings["quoting"] = source.quoting
    return {**settings, "path": state}


def prefix_settings(number: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the source with index `number` under their full names in the config."""
    return {f"corpus.sources.{number}.{key}": value for key, value in settings.items()}


def split_by_source(
    settings: dict[str, Any], *, vocabulary: bool = True
) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """Split settings into (general settings, {source index: settings}); without the vocabulary's if it is False."""
    general, of_sources = {}, {}
    for key, value in settings.items():
        if match := _SOURCE.fullmatch(key):
            of_sources.setdefault(int(match[1]), {})[match[2]] = value
        elif vocabulary or not key.startswith("corpus.vocabulary."):
            general[key] = value
    return general, of_sources


def match_sources(
    folder: Path,
    manifest: dict[str, Any],
    sources: Sequence[SourceConfig],
    inputs: list[list[Input]],
    requested: dict[str, Any],
    *,
    vocabulary: bool,
) -> list[int]:
    """Return the index in the corpus of each source in the config; new sources get the next indices.

    A source is identified by its settings and the digest of its files (names, sizes, times), or else by their content
    (then the manifest gets the new digest), or else by its name. If `vocabulary` is False, the settings of the
    vocabulary may differ.

    Raises `InputError` if settings of the corpus, or the content of one of its sources, have changed.
    """
    general, by_source = split_by_source(requested, vocabulary=vocabulary)
    old_general, old_by_source = split_by_source(manifest["settings"], vocabulary=vocabulary)
    numbers = _match_to_manifest(manifest, sources, inputs, by_source, old_by_source)
    for index, number in numbers.items():
        old_general |= prefix_settings(index, old_by_source[number])
    for index, settings in by_source.items():
        if index in numbers:
            general |= prefix_settings(index, settings)
    refuse_changes(folder, old_general, general)
    names, count = [entry["name"] for entry in manifest["sources"]], len(manifest["sources"])
    for index, source in enumerate(sources):
        if index not in numbers:
            name = source_name(source)
            if name in names:
                raise InputError(
                    f"corpus.sources.{index}: {folder} has another source with the name {name}. Give it another "
                    "name (name: ...) to add it."
                )
            names.append(name)
            numbers[index] = count
            count += 1
    return [numbers[index] for index in range(len(sources))]


def _match_to_manifest(
    manifest: dict[str, Any],
    sources: Sequence[SourceConfig],
    inputs: list[list[Input]],
    requested: dict[int, dict[str, Any]],
    old: dict[int, dict[str, Any]],
) -> dict[int, int]:
    """Return {index in the config: index in the manifest} of sources; if files were copied, `old` gets their digest."""
    entries, matched = manifest["sources"], {}
    names = [source_name(source) for source in sources]

    def match(fits: Callable[[int, int], bool]) -> None:
        for index in range(len(sources)):
            free = (n for n in range(len(entries)) if n not in matched.values() and n in old)
            number = None if index in matched else next((n for n in free if fits(index, n)), None)
            if number is not None:
                matched[index] = number

    def has_same_name(index: int, number: int) -> bool:
        return names[index] == entries[number]["name"]

    def is_copy(index: int, number: int) -> bool:
        digest = {"path": requested[index]["path"]}
        is_same = {**old[number], **digest} == requested[index] and _has_content(inputs[index], entries[number])
        if is_same and "path" in old[number]:
            old[number] |= digest
            manifest["settings"] |= prefix_settings(number, digest)
        return is_same

    match(lambda index, number: requested[index] == old[number] and has_same_name(index, number))
    match(lambda index, number: requested[index] == old[number])
    match(lambda index, number: has_same_name(index, number) and is_copy(index, number))
    match(is_copy)
    match(has_same_name)
    return matched


def _has_content(inputs: list[Input], entry: dict[str, Any]) -> bool:
    """Return whether the files have the content of a source in the manifest."""
    if sum(item.bytes for item in inputs) != entry.get("input_bytes"):
        return False
    paths = [path for item in inputs if not item.is_remote for path in item.paths]
    return bool(paths) and content_digest({path: sha256_file(Path(path)) for path in paths}) == entry["content"]


def try_read_manifest(folder: Path) -> dict[str, Any] | None:
    """Read the manifest of a corpus that may be damaged; None if it cannot be read."""
    try:
        manifest = read_manifest(folder)
    except InputError:
        return None
    return manifest if isinstance(manifest.get("settings"), dict) and "sources" in manifest else None


def refuse_other_content(folder: Path) -> None:
    """Raise `InputError` if `folder` contains something other than a corpus, or a corpus of another version."""
    other = next((path for pattern in _MODEL_FILES for path in sorted(folder.glob(pattern))), None)
    manifest = None
    with contextlib.suppress(InputError):  # a damaged corpus is prepared again
        manifest = read_manifest(folder) if (folder / MANIFEST).exists() else None
    if manifest and "shards" not in manifest:
        other = folder / MANIFEST
    elif manifest:
        check_version(manifest, folder)
    if other is not None:
        raise InputError(f"{folder}: is not a corpus folder ({other.name}). Choose another corpus.dir.")


def refuse_changed_settings(
    folder: Path, manifest: dict[str, Any], sources: Sequence[SourceConfig], wanted: dict[str, Any], *, vocabulary: bool
) -> list[int]:
    """Like `match_sources`, but only by name, without reading files; return the indices of new sources."""
    general, by_source = split_by_source(wanted, vocabulary=vocabulary)
    old_general, old_by_source = split_by_source(manifest["settings"], vocabulary=vocabulary)
    numbers = {entry["name"]: number for number, entry in enumerate(manifest["sources"])}
    for index, source in enumerate(sources):
        if (number := numbers.get(source_name(source))) is not None:
            old_general |= prefix_settings(index, {**old_by_source[number], "path": None})
            general |= prefix_settings(index, {**by_source[index], "path": None})
    refuse_changes(folder, old_general, general)
    return [index for index, source in enumerate(sources) if source_name(source) not in numbers]


def refuse_changes(folder: Path, before: dict[str, Any], requested: dict[str, Any]) -> None:
    """Raise `InputError` if the settings of the corpus in `folder` differ from the requested ones."""
    changed = [key for key in {**before, **requested} if before.get(key) != requested.get(key)]
    if not changed:
        return
    key = changed[0]
    if key.endswith(".path"):
        change = f"{key}: its files have changed"
    else:
        change = f"{key}: was {before.get(key)!r}, is {requested.get(key)!r}"
    rest = f" (and {len(changed) - 1} more)" if changed[1:] else ""
    rename = "give the changed source another name to add it, " if _SOURCE.fullmatch(key) else ""
    raise InputError(
        f"{folder}: prepared with other settings. {change}{rest}. Restore them, {rename}or choose another corpus.dir."
    )


def check_same_tokenizer(folder: Path, tokenizer: Tokenizer, *, extended: bool = False, of: str = "start_from") -> None:
    """Raise `InputError` unless the corpus in `folder` was prepared with `tokenizer`, which is from a checkpoint.

    `extended`: the corpus may have more entries after the checkpoint's. `of`: the setting that names the checkpoint.
    """
    prepared_with = Tokenizer.from_file(str(folder / "tokenizer.json"))
    size, entries = vocabulary_size(tokenizer), prepared_with.get_vocab()
    additional = vocabulary_size(prepared_with) - size
    if additional < 0 or (additional and not extended):
        reason = f"its vocabulary has {size + additional} entries, the checkpoint's {size}"
    elif wrong := [entry for entry, number in tokenizer.get_vocab().items() if entries.get(entry) != number]:
        first = min(wrong, key=tokenizer.get_vocab().__getitem__)
        reason = f"the id of {first!r} is {entries.get(first)}, and {tokenizer.token_to_id(first)} in the checkpoint"
    elif _steps_before_model(prepared_with) != _steps_before_model(tokenizer):
        reason = "it normalizes text differently, such as case or accents"
    else:
        return
    advice = "the same start_from" if of == "start_from" else "corpus.vocabulary.path: its tokenizer.json"
    raise InputError(
        f"{folder}: prepared with a different tokenizer than in {of}: {reason}. Prepare the text into another "
        f"corpus.dir with {advice}."
    )


def _steps_before_model(tokenizer: Tokenizer) -> list[Any]:
    """Return a tokenizer's steps before the model, except joining lines, which is a setting of the corpus."""
    described = json.loads(tokenizer.to_str())
    normalizer = None if described["normalizer"] == LINE_JOINER else described["normalizer"]
    added = [token for token in described["added_tokens"] if not token["special"]]
    return [normalizer, described["pre_tokenizer"], added]


def source_facts(source: SourceConfig) -> dict[str, Any]:
    """Return the fields of a source in the manifest and card that the config may change later."""
    return {"name": source_name(source), "kind": source.kind, "weight": source.weight, "license": source.license}


def source_name(source: SourceConfig) -> str:
    """Return the name of a source; by default, its kind and the stem of its path."""
    stem = Path(source.path or source.dataset).name.split(".")[0].strip("*")
    return source.name or "-".join(filter(None, (source.kind, stem)))


def content_digest(hashes: dict[str, str]) -> str:
    """Return a digest of the contents of a source's files, in order."""
    return hashlib.sha256("\n".join(hashes.values()).encode()).hexdigest()


def _files_digest(inputs: list[Input]) -> str:
    """Return a digest of the names, sizes and times of the files. Their folder may be moved."""
    digest = hashlib.sha256()
    for item in inputs:
        for path in item.paths:
            facts: list[Any] = [path]
            if not item.is_remote:
                stat = Path(path).stat()
                facts = [Path(path).name, stat.st_size, stat.st_mtime_ns]
            digest.update(json.dumps(facts).encode())
    return digest.hexdigest()
