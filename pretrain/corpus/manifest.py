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
from pretrain.common.extensions import hashes, is_own
from pretrain.common.files import MANIFEST, read_manifest, sha256_file
from pretrain.config import CorpusConfig, SourceConfig
from pretrain.corpus.byte_level import LINE_JOINER
from pretrain.corpus.card import CARD_FILES
from pretrain.corpus.filters import filter_settings
from pretrain.corpus.inputs import Input
from pretrain.corpus.shards import FOLDED, FORMAT, check_version, source_fingerprint, token_dtype
from pretrain.corpus.special_tokens import special_ids
from pretrain.corpus.vocabulary import TOKENIZER_FILES, tokens_digest, vocabulary_size

VOCABULARY_BYTES = 1 << 30  # of text, at most, on which a vocabulary is trained; sampled by document hash
_OTHER_FILES = ("config.json", "*.safetensors", "pytorch_model*.bin")  # of models
_SOURCE = re.compile(r"corpus\.sources\.(\d+)\.(.+)")


def make_manifest(
    folder: Path,
    tokenizer: Tokenizer,
    *,
    sources: list[dict[str, Any]],
    shards: list[dict[str, Any]],
    settings: dict[str, Any],
    hashes: dict[str, str],
    declared: dict[str, Any],
    others: Sequence[str],
    before: Mapping[str, Any],
) -> dict[str, Any]:
    """The manifest of the files in `folder`, without the card.

    `hashes` has {name: SHA-256} of the shards' files, `declared` what `special_ids` takes, `others` names further
    files. `before` has the files of the corpus that this one grew from; they are not looked at.
    """
    kept = {name: entry for name, entry in before.items() if name not in CARD_FILES}
    written = [name for name in [*hashes, *TOKENIZER_FILES, *others] if name not in kept]
    size = vocabulary_size(tokenizer)
    manifest = {
        "format": FORMAT,
        FOLDED: True,
        "fingerprint": "",
        "vocabulary_size": size,
        "dtype": token_dtype(size).name,
        "special_ids": special_ids(tokenizer, declared),
        "sources": sources,
        "shards": shards,
        "settings": settings,
        "files": {
            **kept,
            **{
                name: {
                    "bytes": (folder / name).stat().st_size,
                    "sha256": hashes.get(name) or sha256_file(folder / name),
                }
                for name in written
            },
        },
    }
    manifest["fingerprint"] = fingerprint(manifest)
    for number, source in enumerate(sources):
        source["fingerprint"] = source_fingerprint(manifest, number)
    return manifest


def without_card(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest without the files of the card, which can then be replaced while the corpus is in use."""
    files = {name: entry for name, entry in manifest["files"].items() if name not in CARD_FILES}
    return {**manifest, "files": files}


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
    corpus: CorpusConfig,
    inputs: list[list[Input]],
    tokenizer: Tokenizer | None,
    states: Mapping[int, str] | None = None,
) -> dict[str, Any]:
    """The settings that decide the tokens, by their names in the config.

    `tokenizer` is None if one is to be trained; `states` has the state of the files of sources without inputs.
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
    for number, (source, its_inputs) in enumerate(zip(corpus.sources, inputs, strict=True)):
        settings |= numbered(number, _source_settings(source, (states or {}).get(number) or _files_state(its_inputs)))
    return settings


def _source_settings(source: SourceConfig, state: str) -> dict[str, Any]:
    """The settings of a source that decide its tokens, and the state of its files."""
    settings = {key: getattr(source, key) for key in ("kind", "subset", "split", "revision", "text_column")}
    if is_own(source.kind):
        settings["module"] = hashes().get(source.kind)
    if source.held_out:
        settings["held_out"] = True
    if source.quoting != "auto":
        settings["quoting"] = source.quoting
    return {**settings, "path": state}


def numbered(number: int, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a source by their names in the config, where it has this number."""
    return {f"corpus.sources.{number}.{key}": value for key, value in settings.items()}


def by_source(settings: dict[str, Any], *, vocabulary: bool = True) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """Deciding settings as (those of the corpus, maybe without `vocabulary`, those of each source by its number)."""
    general, own = {}, {}
    for key, value in settings.items():
        if match := _SOURCE.fullmatch(key):
            own.setdefault(int(match[1]), {})[match[2]] = value
        elif vocabulary or not key.startswith("corpus.vocabulary."):
            general[key] = value
    return general, own


def recognized(
    folder: Path,
    manifest: dict[str, Any],
    sources: Sequence[SourceConfig],
    inputs: list[list[Input]],
    now: dict[str, Any],
    *,
    vocabulary: bool,
) -> list[int]:
    """The number in the corpus of each source of the config; those that it has not follow its own.

    A source is known by its settings and the state of its files, else by its content (of copies the manifest takes the
    state), else by its name. Without `vocabulary`, the settings that describe it may differ.

    Raises `InputError` if the settings of a manifest, or the content of a source that it has, are others.
    """
    (general, own), (before, old) = (by_source(one, vocabulary=vocabulary) for one in (now, manifest["settings"]))
    numbers = _matched(manifest, sources, inputs, own, old)
    for place, number in numbers.items():
        before |= numbered(place, old[number])
    own = {place: settings for place, settings in own.items() if place in numbers}
    for place, settings in own.items():
        general |= numbered(place, settings)
    refuse_changes(folder, before, general)
    names, count = [entry["name"] for entry in manifest["sources"]], len(manifest["sources"])
    for place, source in enumerate(sources):
        if place not in numbers:
            name = source_name(source)
            if name in names:
                raise InputError(
                    f"corpus.sources.{place}: {folder} has another source with the name {name}. Give it a name of its "
                    "own (name: ...) to add it."
                )
            names.append(name)
            numbers[place] = count
            count += 1
    return [numbers[place] for place in range(len(sources))]


def _matched(
    manifest: dict[str, Any],
    sources: Sequence[SourceConfig],
    inputs: list[list[Input]],
    now: dict[int, dict[str, Any]],
    old: dict[int, dict[str, Any]],
) -> dict[int, int]:
    """The number in the manifest of each source of the config that it has; of copies, `old` takes the state."""
    entries, found = manifest["sources"], {}
    named = [source_name(source) for source in sources]

    def match(fits: Callable[[int, int], bool]) -> None:
        for place in range(len(sources)):
            free = (n for n in range(len(entries)) if n not in found.values() and n in old)
            number = None if place in found else next((n for n in free if fits(place, n)), None)
            if number is not None:
                found[place] = number

    def is_named(place: int, number: int) -> bool:
        return named[place] == entries[number]["name"]

    def is_copy(place: int, number: int) -> bool:
        state = {"path": now[place]["path"]}
        copied = {**old[number], **state} == now[place] and _is_content(inputs[place], entries[number])
        if copied and "path" in old[number]:
            old[number] |= state
            manifest["settings"] |= numbered(number, state)
        return copied

    match(lambda place, number: now[place] == old[number] and is_named(place, number))
    match(lambda place, number: now[place] == old[number])
    match(lambda place, number: is_named(place, number) and is_copy(place, number))
    match(is_copy)
    match(is_named)
    return found


def _is_content(inputs: list[Input], entry: dict[str, Any]) -> bool:
    """Whether the files have the content of a source in the manifest."""
    if sum(item.bytes for item in inputs) != entry.get("input_bytes"):
        return False
    paths = [path for item in inputs if not item.is_remote for path in item.paths]
    return bool(paths) and content_state({path: sha256_file(Path(path)) for path in paths}) == entry["content"]


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
    manifest = None
    with contextlib.suppress(InputError):  # damaged: the corpus is prepared again
        manifest = read_manifest(folder) if (folder / MANIFEST).exists() else None
    if manifest and "shards" not in manifest:
        other = folder / MANIFEST
    elif manifest:
        check_version(manifest, folder)
    if other is not None:
        raise InputError(f"{folder}: holds something else than a corpus ({other.name}). Choose another corpus.dir.")


def refuse_changed_settings(
    folder: Path, manifest: dict[str, Any], sources: Sequence[SourceConfig], now: dict[str, Any], *, vocabulary: bool
) -> list[int]:
    """As `recognized`, without a look at the files: sources are known by their names. The places of the new ones."""
    (general, own), (before, old) = (by_source(one, vocabulary=vocabulary) for one in (now, manifest["settings"]))
    numbers = {entry["name"]: number for number, entry in enumerate(manifest["sources"])}
    for place, source in enumerate(sources):
        if (number := numbers.get(source_name(source))) is not None:
            before |= numbered(place, {**old[number], "path": None})
            general |= numbered(place, {**own[place], "path": None})
    refuse_changes(folder, before, general)
    return [place for place, source in enumerate(sources) if source_name(source) not in numbers]


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
    added = "give a source that changed a name of its own to add it, " if _SOURCE.fullmatch(key) else ""
    raise InputError(
        f"{folder}: prepared with other settings. {what}{others}. Restore them, {added}or choose another corpus.dir."
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
    """What a tokenizer does to text before its vocabulary is used; whether it has line ends is the corpus's choice."""
    described = json.loads(tokenizer.to_str())
    normalizer = None if described["normalizer"] == LINE_JOINER else described["normalizer"]
    added = [token for token in described["added_tokens"] if not token["special"]]
    return [normalizer, described["pre_tokenizer"], added]


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
