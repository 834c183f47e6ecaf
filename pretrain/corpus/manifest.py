"""The manifest of a prepared corpus: its settings, sources, shards and files, and the fingerprint of its samples."""

import hashlib
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pretrain.common.errors import InputError
from pretrain.common.extensions import hashes, is_own
from pretrain.common.files import MANIFEST, read_manifest, sha256_file
from pretrain.config import CorpusConfig, SourceConfig
from pretrain.corpus.card import CARD_FILES
from pretrain.corpus.filters import filter_settings
from pretrain.corpus.inputs import Input
from pretrain.corpus.shards import FORMAT, token_dtype
from pretrain.corpus.special_tokens import special_ids
from pretrain.corpus.vocabulary import TOKENIZER_FILES, vocabulary_size

VOCABULARY_BYTES = 1 << 30  # of text, at most, on which a vocabulary is trained; sampled by document hash
_OTHER_FILES = ("config.json", "*.safetensors", "pytorch_model*.bin")  # of models


def make_manifest(
    folder: Path,
    tokenizer: Tokenizer,
    *,
    sources: list[dict[str, Any]],
    shards: list[dict[str, Any]],
    settings: dict[str, Any],
    hashes: dict[str, str],
    declared: dict[str, Any],
) -> dict[str, Any]:
    """The manifest of the files in `folder`, without the card.

    `hashes` has {name: SHA-256} of the shards' files, `declared` what `special_ids` takes.
    """
    size = vocabulary_size(tokenizer)
    manifest = {
        "format": FORMAT,
        "fingerprint": "",
        "vocabulary_size": size,
        "dtype": token_dtype(size).name,
        "special_ids": special_ids(tokenizer, declared),
        "sources": sources,
        "shards": shards,
        "settings": settings,
        "files": {
            name: {
                "bytes": (folder / name).stat().st_size,
                "sha256": hashes.get(name) or sha256_file(folder / name),
            }
            for name in [*hashes, *TOKENIZER_FILES]
        },
    }
    manifest["fingerprint"] = fingerprint(manifest)
    return manifest


def with_card(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest with the files of the card, which is written last."""
    for name in CARD_FILES:
        path = folder / name
        manifest["files"][name] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
    return manifest


def fingerprint(manifest: dict[str, Any]) -> str:
    """A digest of what decides the samples: vocabulary, token shards, and weights of the sources (invariant 1)."""
    arrays = {name: entry["sha256"] for name, entry in manifest["files"].items() if name.endswith(".npy")}
    decisive = [
        FORMAT,
        manifest["special_ids"],
        manifest["files"]["vocab.txt"]["sha256"],
        manifest["shards"],
        sorted(arrays.items()),
        [source["weight"] for source in manifest["sources"]],
    ]
    return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()


def fingerprint_settings(
    corpus: CorpusConfig, inputs: list[list[Input]], tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """The settings that decide the tokens, by their names in the config.

    `tokenizer` is None if one is to be trained.
    """
    vocabulary = corpus.vocabulary
    settings: dict[str, Any] = {"version": FORMAT}
    for key in ("language", "min_document_words", "validation_fraction", "shard_tokens"):
        settings[f"corpus.{key}"] = getattr(corpus, key)
    if vocabulary.kind != "wordpiece":  # corpora from before there were kinds stay as they are
        settings["corpus.vocabulary.kind"] = vocabulary.kind
    settings["corpus.vocabulary.lowercase"] = vocabulary.lowercase
    if vocabulary.strip_accents not in (None, vocabulary.lowercase):  # corpora from before it stay as they are
        settings["corpus.vocabulary.strip_accents"] = vocabulary.strip_accents
    if tokenizer is not None:
        settings["corpus.vocabulary.path"] = hashlib.sha256(tokenizer.to_str().encode()).hexdigest()
    else:
        for key in ("size", "min_frequency"):
            settings[f"corpus.vocabulary.{key}"] = getattr(vocabulary, key)
        settings["corpus.vocabulary.training_bytes"] = VOCABULARY_BYTES
    if vocabulary.added_words:
        settings["corpus.vocabulary.added_words"] = vocabulary.added_words
        settings["corpus.vocabulary.training_bytes"] = VOCABULARY_BYTES
    for key, value in filter_settings(corpus.filters).items():
        settings[f"corpus.filters.{key}"] = value
    for number, (source, its_inputs) in enumerate(zip(corpus.sources, inputs, strict=True)):
        for key in ("kind", "subset", "split", "revision", "text_column"):
            settings[f"corpus.sources.{number}.{key}"] = getattr(source, key)
        if is_own(source.kind):
            settings[f"corpus.sources.{number}.module"] = hashes().get(source.kind)
        if source.held_out:  # corpora from before there was this setting stay as they are
            settings[f"corpus.sources.{number}.held_out"] = True
        settings[f"corpus.sources.{number}.path"] = _files_state(its_inputs)
    return settings


def accepted_manifest(
    folder: Path, inputs: list[list[Input]], settings: dict[str, Any], same_tokenizer: Tokenizer | None = None
) -> dict[str, Any]:
    """The manifest of a finished corpus; `InputError` if its settings or the content of its sources were others.

    Args:
        same_tokenizer: the tokenizer that the corpus must have, however its vocabulary was made; otherwise the settings
            of the vocabulary must be the same.
    """
    manifest = read_manifest(folder)
    if same_tokenizer is not None:
        check_same_tokenizer(folder, same_tokenizer)
    refuse_other_settings(folder, manifest, inputs, settings, vocabulary=same_tokenizer is None)
    return manifest


def refuse_other_settings(
    folder: Path, manifest: dict[str, Any], inputs: list[list[Input]], now: dict[str, Any], *, vocabulary: bool
) -> None:
    """Raise `InputError` if the settings of a manifest, or the content of its sources, are others.

    Copies of the sources are the same, and the manifest takes their state. Without `vocabulary`, the settings that
    describe it may differ.
    """
    _accept_copies(manifest, inputs, now)
    before = manifest["settings"]
    if not vocabulary:
        before, now = _without_vocabulary(before), _without_vocabulary(now)
    refuse_changes(folder, before, now)


def readable_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a corpus, which may be damaged; None if it cannot be read."""
    try:
        manifest = read_manifest(folder)
    except InputError:
        return None
    return manifest if isinstance(manifest.get("settings"), dict) and "sources" in manifest else None


def refuse_other_content(folder: Path) -> None:
    """Raise `InputError` if `folder` holds something else than a corpus of this version, complete or not."""
    other = next((path for pattern in _OTHER_FILES for path in sorted(folder.glob(pattern))), None)
    if (folder / MANIFEST).exists():
        try:
            manifest = read_manifest(folder)
        except InputError:  # damaged: the corpus is prepared again
            manifest = {"format": FORMAT, "shards": []}
        if "shards" not in manifest:
            other = folder / MANIFEST
        elif manifest.get("format") != FORMAT:
            raise InputError(
                f"{folder / MANIFEST}: has format {manifest.get('format')}, this version reads {FORMAT}. Install the "
                "version that wrote it, or choose another corpus.dir."
            )
    if other is not None:
        raise InputError(f"{folder}: holds something else than a corpus ({other.name}). Choose another corpus.dir.")


def refuse_changed_settings(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """As `refuse_changes`, without a look at the files of the sources."""
    refuse_changes(folder, *({key: x for key, x in one.items() if not _is_files(key)} for one in (before, now)))


def _is_files(key: str) -> bool:
    return key.startswith("corpus.sources.") and key.endswith(".path")


def refuse_changes(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise `InputError` if the deciding settings of the corpus in `folder` differ from those requested now."""
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    if not changed:
        return
    key = changed[0]
    if key.endswith(".path"):
        what = f"{key}: its files have changed"
    else:
        what = f"{key}: was {before.get(key)!r}, is {now.get(key)!r}"
    others = f" (and {len(changed) - 1} more)" if changed[1:] else ""
    raise InputError(
        f"{folder}: prepared with other settings. {what}{others}. "
        "Restore them, choose another corpus.dir, or delete this folder to prepare it again."
    )


def check_same_tokenizer(folder: Path, tokenizer: Tokenizer, *, extended: bool = False, of: str = "start_from") -> None:
    """Raise `InputError` unless the corpus in `folder` was prepared with `tokenizer`, that of a checkpoint.

    `extended`: it may have further entries after those of the checkpoint. `of`: the setting that names the checkpoint.
    """
    own = Tokenizer.from_file(str(folder / "tokenizer.json"))
    size, entries = vocabulary_size(tokenizer), own.get_vocab()
    more = vocabulary_size(own) - size
    if more < 0 or (more and not extended):
        reason = f"its vocabulary has {size + more} entries, the checkpoint's {size}"
    elif wrong := [entry for entry, number in tokenizer.get_vocab().items() if entries.get(entry) != number]:
        first = min(wrong, key=tokenizer.get_vocab().__getitem__)
        reason = f"the id of {first!r} is {entries.get(first)}, and {tokenizer.token_to_id(first)} in the checkpoint"
    elif _steps_before_model(own) != _steps_before_model(tokenizer):
        reason = "it normalizes text in another way, such as case or accents"
    else:
        return
    advice = "the same start_from" if of == "start_from" else "corpus.vocabulary.path: its tokenizer.json"
    raise InputError(
        f"{folder}: prepared with another tokenizer than {of} has: {reason}. Prepare the text into another "
        f"corpus.dir with {advice}."
    )


def _steps_before_model(tokenizer: Tokenizer) -> list[Any]:
    """What a tokenizer does to text before its vocabulary is used."""
    described = json.loads(tokenizer.to_str())
    return [described["normalizer"], described["pre_tokenizer"]]


def source_facts(source: SourceConfig) -> dict[str, Any]:
    """The fields of a source in the manifest and the card that may change later."""
    return {
        "name": source_name(source),
        "kind": source.kind,
        "weight": source.weight,
        "license": source.license,
    }


def source_name(source: SourceConfig) -> str:
    """The source's name, or one made of its kind and its path's stem."""
    stem = Path(source.path or source.dataset).name.split(".")[0].strip("*")
    return source.name or "-".join(filter(None, (source.kind, stem)))


def content_state(hashes: dict[str, str]) -> str:
    """A digest of the contents of a source's files, in their order."""
    return hashlib.sha256("\n".join(hashes.values()).encode()).hexdigest()


def _files_state(inputs: list[Input]) -> str:
    """A digest of names, sizes and times of the files. Folders may move."""
    digest = hashlib.sha256()
    for item in inputs:
        for path in item.paths:
            facts: list[Any] = [path]
            if not item.is_remote:
                stat = Path(path).stat()
                facts = [Path(path).name, stat.st_size, stat.st_mtime_ns]
            digest.update(json.dumps(facts).encode())
    return digest.hexdigest()


def _without_vocabulary(settings: dict[str, Any]) -> dict[str, Any]:
    """The deciding settings besides those of the vocabulary."""
    return {key: value for key, value in settings.items() if not key.startswith("corpus.vocabulary.")}


def _accept_copies(manifest: dict[str, Any], inputs: list[list[Input]], now: dict[str, Any]) -> None:
    """Copy the state of files from `now` into the manifest if their content is the same: copies have new times."""
    before = manifest["settings"]
    for number, its_inputs in enumerate(inputs):
        key = f"corpus.sources.{number}.path"
        if number < len(manifest["sources"]) and before.get(key) != now[key]:
            paths = [path for item in its_inputs if not item.is_remote for path in item.paths]
            if (
                content_state({path: sha256_file(Path(path)) for path in paths})
                == manifest["sources"][number]["content"]
            ):
                before[key] = now[key]
