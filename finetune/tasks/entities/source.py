"""Reads sentences from files in any tagging scheme, and converts their tags to IOB2."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Literal, cast

import numpy as np

from finetune.tasks.datasets import splits
from finetune.tasks.datasets.annotations import skipped_summary
from finetune.tasks.datasets.sentence_files import read_sentences
from finetune.tasks.datasets.sentences import Remarks, Segmenter, Sentence
from finetune.tasks.datasets.surrogates import check_surrogates, replace_surrogates
from finetune.tasks.datasets.word_cuts import WordSegmenter
from finetune.tasks.datasets.words import cut_words
from finetune.tasks.entities import metrics as metrics
from finetune.tasks.entities.settings import EntitiesSettings
from pretrain.common.errors import InputError
from pretrain.common.wording import counted

logger = logging.getLogger(__name__)

_BILOU_TO_BIOES = str.maketrans("LU", "ES")

FileUse = Literal["train", "dev", "other"]
"""What a file is used for. Types unknown to the model are errors in train and dev, and only remarks in others."""


class SentenceSource:
    """Reads the sentence files of one config. The training file defines types, tagging scheme and word segmentation.

    Args:
        state: the `state()` that was saved with the trained model; None before training.

    Attributes:
        types: entity types in the order of the labels; () until they are known.
        remarks: warnings about the files, as logged.
    """

    def __init__(self, settings: EntitiesSettings, state: Mapping[str, Any] | None = None) -> None:
        self._settings = settings
        self.types: tuple[str, ...] = tuple(state["types"]) if state else settings.labels
        self.remarks: list[str] = []
        self._scheme: metrics.Scheme | None = settings.scheme if settings.scheme != "auto" else None
        self._segmenter: WordSegmenter | None = None
        if state and self._scheme is None:
            self._scheme = state["scheme"]
        if state and "word_cuts" in state:  # older models do not have it
            self._segmenter = WordSegmenter.from_state(state["word_cuts"])
        self._is_fitted = state is not None

    @property
    def segment(self) -> Segmenter:
        """Function that segments plain text into words like the training set."""
        return self._segmenter or cut_words

    def state(self) -> dict[str, Any]:
        """Return "types" in label order, the "scheme" of the files and "word_cuts" (`WordSegmenter.state`)."""
        cuts = {"word_cuts": self._segmenter.state()} if self._segmenter else {}
        return {"types": list(self.types), "scheme": self._scheme or "iob2", **cuts}

    def read_train(self) -> list[Sentence]:
        """Return the training set without the part that `dev_share` holds out; learn types, scheme and segmentation."""
        if not self._settings.train:
            raise InputError("train: empty. Set it to the file of labeled training sentences.")
        sentences = self._read(self._settings.train, labeled=True, use="train")
        self._segmenter = WordSegmenter.learn(chain.from_iterable(sentence.words for sentence in sentences))
        self._is_fitted = True
        return self._select(sentences, held_out=False) if self._settings.dev_share else sentences

    def read_held_out(self) -> list[Sentence]:
        """Return the dev set, or the part of the training set that `dev_share` holds out; [] if neither is set."""
        if self._settings.dev_share:
            return self._select(self.read(self._settings.train, labeled=True, use="dev"), held_out=True)
        return self.read(self._settings.dev, labeled=True, use="dev") if self._settings.dev else []

    def _select(self, sentences: list[Sentence], *, held_out: bool) -> list[Sentence]:
        """Return the `dev_share` of sentences to hold out, stratified by entity type, or if not `held_out` the rest."""
        share = self._settings.dev_share
        types = [{metrics.parse_tag(tag)[1] for tag in sentence.tags or () if tag != "O"} for sentence in sentences]
        texts = ["\0".join(sentence.words) for sentence in sentences]
        is_held_out = splits.held_out(texts, types, round(share * len(set(texts))))
        selected = [sentence for sentence, flag in zip(sentences, is_held_out, strict=True) if flag == held_out]
        if not selected:  # possible because a sentence of each type stays in the training set
            sentence_count = counted(len(sentences), "sentence")
            raise InputError(
                f"{self._settings.train}: dev_share {share} of {sentence_count} leaves the dev set empty. Raise it."
            )
        return selected

    def read(self, path: str, *, labeled: bool, plain: bool = False, use: FileUse = "other") -> list[Sentence]:
        """Read any file of the task; with `plain`, a .txt may have one document per line."""
        if not self._is_fitted:
            self.read_train()
        return self._read(path, labeled=labeled, plain=plain, use=use)

    def _read(self, path: str, *, labeled: bool, use: FileUse, plain: bool = False) -> list[Sentence]:
        remarks, settings = Remarks(), self._settings
        sentences = read_sentences(
            path,
            remarks,
            token_column=settings.token_column,
            label_column=settings.label_column,
            encoding=settings.encoding,
            labeled=labeled,
            plain=plain,
            segment=cut_words if use == "train" else self.segment,
            tag_names=settings.tag_names,
        )
        if settings.document_context:
            _check_documents(sentences, remarks)
        tagged = [sentence for sentence in sentences if sentence.tags is not None]
        skipped = []
        if labeled and len(tagged) < len(sentences):
            reasons = (sentence.missing_reason for sentence in sentences if sentence.tags is None)
            skipped.append(skipped_summary(path, len(sentences), reasons))
            if not tagged:
                raise InputError(f'{skipped[0]}. Give columns of words and tags, or records with "tags" or "entities".')
        if tagged:
            converted, kept = iter(self._convert_to_iob2(tagged, remarks, use)), tagged if labeled else sentences
            sentences = [sentence if sentence.tags is None else next(converted) for sentence in kept]
        for warning in (line for line in (*skipped, *remarks.lines()) if line not in self.remarks):
            self.remarks.append(warning)
            logger.warning("%s", warning)
        return sentences

    def _convert_to_iob2(self, sentences: list[Sentence], remarks: Remarks, use: FileUse) -> list[Sentence]:
        """Convert the tags of `sentences` from the file's scheme to IOB2."""
        tags = _read_tags(sentences)
        scheme = self._find_scheme(sentences, tags, is_train=use == "train")
        if use == "train":
            self._set_types(sentences, tags)
        self._check_types(sentences, tags, remarks if use == "other" else None)
        _check_scheme(sentences, tags, scheme, remarks)
        prefixes = metrics.write_prefixes(metrics.find_entities(tags), tags.starts, "iob2")
        tag_names = np.array([[f"{prefix}-{name}" for name in tags.names] + ["O"] for prefix in "OBI"], object)
        converted = tag_names[prefixes, np.where(prefixes == metrics.OUTSIDE, -1, tags.types)].tolist()
        bounds = zip(tags.starts[:-1].tolist(), tags.starts[1:].tolist(), strict=True)
        pairs = zip(sentences, bounds, strict=True)
        return [replace(sentence, tags=converted[start:stop]) for sentence, (start, stop) in pairs]

    def _find_scheme(
        self, sentences: list[Sentence], tags: metrics.TaggedSentences, *, is_train: bool
    ) -> metrics.Scheme:
        """Return the tagging scheme of a file; detect it if it is unknown or if the file's tags do not fit it."""
        scheme = "iob2" if all(sentence.from_spans for sentence in sentences) else self._scheme
        # A file may use another scheme than the training file: `find_entities` reads entities alike in all schemes.
        has_other_scheme = self._settings.scheme == "auto" and scheme != "bioes" and metrics.has_ends(tags)
        if scheme is None or has_other_scheme:
            scheme = metrics.detect_scheme(tags)
            if is_train:
                self._scheme = scheme
        return scheme

    def _set_types(self, sentences: list[Sentence], tags: metrics.TaggedSentences) -> None:
        if not tags.names:
            raise InputError(
                f"{sentences[0].source}: no entity in {counted(len(sentences), 'sentence')}, only O, so nothing to "
                f"learn. Check label_column ({self._settings.label_column})."
            )
        if not self.types:
            self.types = tuple(sorted(tags.names))

    def _check_types(self, sentences: list[Sentence], tags: metrics.TaggedSentences, remarks: Remarks | None) -> None:
        """Raise `InputError` for types that the model does not know, or add them to the `remarks`."""
        unknown = np.array([name not in self.types for name in tags.names] + [False])
        if not unknown.any():
            return
        word_index = int(np.flatnonzero(unknown[tags.types])[0])
        if remarks is not None:
            names = ", ".join(name for name in tags.names if name not in self.types)
            remark = f"the model does not know the types {names}; they stay in the gold labels and count as missed"
            return remarks.add(remark, _location(sentences, tags, word_index))
        raise InputError(
            f"{_location(sentences, tags, word_index)}: the type {tags.names[tags.types[word_index]]!r} is not in "
            f"{'labels' if self._settings.labels else 'the training set'} ({', '.join(self.types)}). "
            f"Correct it, or train with `labels` set to all types."
        )


def _read_tags(sentences: list[Sentence]) -> metrics.TaggedSentences:
    """Return the tags of all sentences; BILOU's L and U become E and S."""
    distinct_tags = {tag for sentence in sentences for tag in cast(Sequence[str], sentence.tags)}
    bioes = {tag: tag[:1].upper().translate(_BILOU_TO_BIOES) + tag[1:] for tag in distinct_tags}
    _check_tags(sentences, distinct_tags)
    return metrics.encode_tags([[bioes[tag] for tag in cast(Sequence[str], sentence.tags)] for sentence in sentences])


def _check_tags(sentences: list[Sentence], distinct_tags: set[str]) -> None:
    invalid = {tag for tag in distinct_tags if not _is_tag(tag)}
    if not invalid:
        return
    for sentence in sentences:
        for word, tag in enumerate(cast(Sequence[str], sentence.tags)):
            if tag in invalid:
                check_surrogates(tag, "the tag", sentence.where(word))
                is_column_file = sentence.one_word_per_line
                advice = "Check label_column; each line has one word and its tag." if is_column_file else "Correct it."
                raise InputError(
                    f"{sentence.where(word)}: {tag!r} is not a tag; expected O, or a prefix and a type such as "
                    f"B-PER. {advice}"
                )


def _is_tag(tag: str) -> bool:
    has_type = tag[1:2] == "-" and tag[2:] != "" and tag == replace_surrogates(tag)
    return tag in ("O", "o") or (tag[:1].upper() in set("BIESLU") and (tag[1:] == "" or has_type))


def _check_scheme(
    sentences: list[Sentence], tags: metrics.TaggedSentences, scheme: metrics.Scheme, remarks: Remarks
) -> None:
    if scheme != "bioes" and metrics.has_ends(tags):
        where = _location(sentences, tags, int(np.flatnonzero(tags.prefixes > metrics.INSIDE)[0]))
        raise InputError(f"{where}: a bioes tag, but the scheme is {scheme}. Set `scheme: bioes` or auto.")
    violations = metrics.scheme_violations(tags, scheme)
    if len(violations):
        where = _location(sentences, tags, int(violations[0]))
        remarks.add(f"a tag that does not follow {scheme}; it is read as conlleval reads it", where, len(violations))


def _check_documents(sentences: list[Sentence], remarks: Remarks) -> None:
    """Add a remark for each document whose sentences are not adjacent."""
    seen: set[str] = set()
    for sentence in sentences:
        if sentence.index == 0 and (name := sentence.document_name) is not None:
            if name in seen:
                remarks.add(
                    f"document {name!r} continues after another one; its parts are treated as separate documents",
                    sentence.where(),
                )
            seen.add(name)


def _location(sentences: list[Sentence], tags: metrics.TaggedSentences, word_index: int) -> str:
    """Return the file and line of a word, given its index over all sentences."""
    index = int(np.searchsorted(tags.starts, word_index, "right")) - 1
    return sentences[index].where(word_index - int(tags.starts[index]))
