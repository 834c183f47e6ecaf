"""What `bench prepare` works on: a WikiExtractor file, its sentences, and a vocabulary."""

from __future__ import annotations

import argparse
import html
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pretrain.common.errors import InputError
from pretrain.config import PretrainConfig, SourceConfig
from pretrain.corpus import prepare, sources
from pretrain.corpus.inputs import Problems
from pretrain.corpus.sentences import split_sentences
from pretrain.corpus.sources import docstrings
from pretrain.corpus.vocabulary import load_vocabulary

SEQUENCE_LENGTH = 512  # what group_texts cuts to
_LANGUAGE = "en"
_DOCSTRINGS_MB = 16  # of the default file, unless --limit-mb says otherwise
_UNLIMITED = 10**9  # tokens, so that transformers does not warn of long documents


def source_file(options: argparse.Namespace, scratch: Path) -> Path:
    """The WikiExtractor file to work on: the given one, its beginning, or one made of docstrings."""
    limit = int(options.limit_mb * 1e6)
    if options.file is None:
        return _write_docstrings(scratch / "docstrings.txt", limit or int(_DOCSTRINGS_MB * 1e6))
    if not options.file.is_file():
        raise InputError(f"--file: {options.file}: not found, or not a file.")
    if not limit or options.file.stat().st_size <= limit:
        return options.file
    with options.file.open("rb") as file:
        text = file.read(limit)
    end = text.rfind(b"</doc>\n")
    if end < 0:
        raise InputError(f"--file: {options.file}: no article ends in its first {options.limit_mb:g} MB.")
    path = scratch / "beginning.txt"
    path.write_bytes(text[: end + len(b"</doc>\n")])
    return path


def _write_docstrings(path: Path, limit: int) -> Path:
    """About `limit` bytes of the docstrings of this Python and its packages, as WikiExtractor would write them."""
    modules = tuple(docstrings.installed_modules())
    with path.open("wb") as file:
        for number, text in enumerate(docstrings.documents(modules, lambda *_: None)):
            title = f"Module {number}"
            body = html.escape(text, quote=False).replace("\n", "\n\n")
            file.write(f'<doc id="{number}" url="" title="{title}">\n{title}\n\n{body}\n\n</doc>\n'.encode())
            if file.tell() >= limit:
                break
    return path


@dataclass(frozen=True)
class Vocabulary:
    """A folder with a BERT tokenizer.json, and whether it lower-cases."""

    folder: Path
    lowercase: bool

    @classmethod
    def of(cls, folder: Path) -> Vocabulary:
        """Raises `InputError` if it is missing or not BERT's."""
        path = folder / "tokenizer.json"
        try:
            lowercase = bool(json.loads(path.read_text(encoding="utf-8"))["normalizer"]["lowercase"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"--vocabulary: {path}: not a BERT tokenizer.json ({type(error).__name__}). "
                "Give a prepared corpus or a folder with a released BERT's tokenizer.json."
            ) from None
        vocabulary = cls(folder, lowercase)
        vocabulary.tokenizer()
        return vocabulary

    def tokenizer(self) -> Tokenizer:
        """As our preparation has it."""
        return load_vocabulary(self.folder, lowercase=self.lowercase)

    def transformers_tokenizer(self) -> Any:
        """As transformers has it. Special tokens written out in a text are ordinary characters, as for us."""
        import transformers

        transformers.logging.set_verbosity_error()
        return transformers.BertTokenizer.from_pretrained(
            self.folder, split_special_tokens=True, model_max_length=_UNLIMITED
        )


def train_vocabulary(file: Path, scratch: Path) -> Path:
    """Prepare `file` in a folder below `scratch`, with a vocabulary of its own; returns the folder."""
    folder = scratch / "trained"
    prepare.prepare(PretrainConfig.model_validate(settings_for(file, folder)), quiet=True)
    return folder


def settings_for(file: Path, folder: Path, vocabulary: Vocabulary | None = None) -> dict[str, Any]:
    """A run's settings that prepare `file` in `folder`; a vocabulary is trained unless given."""
    given = {"path": str(vocabulary.folder), "lowercase": vocabulary.lowercase} if vocabulary else {}
    source = {"kind": "wikiextractor", "path": str(file)}
    corpus = {"dir": str(folder), "sources": [source], "vocabulary": given, "language": _LANGUAGE}
    phase = {"sequence_length": SEQUENCE_LENGTH, "global_sequences": 1, "steps": 1, "peak_learning_rate": 1e-4}
    return {"name": "bench", "corpus": corpus, "phases": [phase]}


def read_documents(file: Path) -> Iterator[list[str]]:
    """The sentences of each document of a WikiExtractor file, as our preparation splits them."""
    source, problems = SourceConfig(kind="wikiextractor", path=str(file)), Problems()
    for number, item in enumerate(sources.find_inputs(source, "--file")):
        for chunk in sources.cut(source, 0, number, item):
            for text in sources.documents(chunk, problems):
                lines = "\n".join(split_sentences(text, _LANGUAGE)).split("\n")
                yield [line for line in lines if line.strip(" \t\r")]
