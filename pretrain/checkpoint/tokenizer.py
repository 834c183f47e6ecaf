"""The tokenizer of a released model, from those of its files that exist."""

import contextlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer, normalizers, pre_tokenizers

from pretrain.checkpoint import store
from pretrain.common import settings
from pretrain.common.errors import InputError
from pretrain.common.files import write_json
from pretrain.config import CorpusConfig, config_of
from pretrain.corpus.special_tokens import declared_settings, special_ids
from pretrain.corpus.stored import fetch_without_tokens
from pretrain.corpus.tokenizer_files import CASING, SENTENCE_PIECES, declared_types, read_files
from pretrain.corpus.vocabulary import tokenizer_digest

# Besides tokenizer.json and tokenizer_config.json, which `copy_tokenizer` writes itself.
_COPIED = (
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    *SENTENCE_PIECES,
)


class ModelTokenizer(NamedTuple):
    """The tokenizer of a model as `read_tokenizer` reads it, with what else its files say."""

    folder: Path  # where the files are
    tokenizer: Tokenizer  # truncation and padding off
    special_ids: dict[str, int]  # by role

    @classmethod
    def read(cls, folder: Path, rows: int | None = None) -> "ModelTokenizer":
        """Arguments and errors are those of `read_tokenizer`."""
        return cls.read_files(tokenizer_folder(folder), rows)

    @classmethod
    def read_files(cls, folder: Path, rows: int | None = None) -> "ModelTokenizer":
        """As `read`, of a folder that has the files itself."""
        tokenizer = _for_rows(folder, rows)
        return cls(folder, tokenizer, special_ids(tokenizer, declared_settings(folder)))


def read_tokenizer(folder: Path, rows: int | None = None) -> Tokenizer:
    """The tokenizer of a released model's folder or of a run of ours, truncation and padding off.

    It is read from tokenizer.json, or vocab.txt (WordPiece), or vocab.json and merges.txt (RoBERTa's bytes). The casing
    comes from tokenizer_config.json (do_lower_case, strip_accents, tokenize_chinese_chars), else from tokenizer.json;
    else the model is cased if vocab.txt has entries with capital letters. transformers agrees, except if nothing is
    declared: then it lower-cases cased models, too.

    Args:
        folder: of the model.
        rows: of the model's word embeddings: at least as many as the tokenizer's entries (more are padding).

    Raises:
        InputError: none of these files exists, one is damaged, or the tokenizer is another model's.
    """
    return _for_rows(tokenizer_folder(folder), rows)


def _for_rows(folder: Path, rows: int | None) -> Tokenizer:
    tokenizer = read_files(folder)
    last = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if rows is not None and last >= rows:
        raise InputError(
            f"{folder}: the tokenizer has ids up to {last}, but the model's word embeddings have {rows} rows. Add the "
            "tokenizer that it was trained with to the folder."
        )
    return tokenizer


def released_folder(folder: Path) -> Path:
    """The folder of a model's files: for a run folder of a fine-tuning, its `model`; 0_Transformer if they are there.

    Raises:
        InputError: that fine-tuning is not finished.
    """
    if (folder / "model" / "finetune.json").is_file():
        return folder / "model"
    if is_run(folder) and "training" in settings.names(folder / "config.yaml"):
        raise InputError(f"{folder}: an unfinished fine-tuning has no model yet. Resume it first.")
    # Older folders of sentence-transformers
    inner = folder / "0_Transformer"
    return inner if (inner / "config.json").is_file() and not (folder / "config.json").is_file() else folder


def is_run(folder: Path) -> bool:
    """Whether this is a run folder with checkpoints, and no released model."""
    return (folder / "config.yaml").is_file() and (folder / "checkpoints").is_dir()


def tokenizer_folder(folder: Path) -> Path:
    """The folder of a model's tokenizer: the corpus for a run folder of ours, else that of the weights."""
    folder = released_folder(folder)
    if not is_run(folder):
        return folder
    return corpus_of(folder, config_of(folder).corpus, _trained_tokenizer(folder))


def corpus_of(run: Path, corpus: CorpusConfig, trained_with: str) -> Path:
    """The folder of `corpus`, that of a run of ours, whose tokenizer has the digest `trained_with`; "" is any.

    Raises `InputError` if it has another tokenizer by now.
    """
    for again in (False, True):  # at an address, it may have been prepared again since it was fetched
        folder = fetch_without_tokens(corpus, again=again)
        # One that is missing is not another one.
        if not trained_with or not (folder / "vocab.txt").is_file() or trained_with == tokenizer_digest(folder):
            return folder
    raise InputError(
        f"{corpus.folder}: its tokenizer is not the one that {run} was trained with. Prepare the corpus as it was, or "
        "give an export of the run, which has its own."
    )


def _trained_tokenizer(run: Path) -> str:
    """The digest of the tokenizer that a run was trained with, from its newest readable checkpoint; "" without one."""
    for checkpoint in reversed(store.list_checkpoints(run / "checkpoints")):
        with contextlib.suppress(InputError):
            if (checkpoint / "state.json").is_file():  # else it is damaged, or was just removed
                return store.read_state(checkpoint).get("tokenizer", "")
    return ""


def copy_tokenizer(
    read: ModelTokenizer,
    out: Path,
    *,
    tokenizer_class: str,
    max_positions: int,
    for_words: bool = False,
    fields: Mapping[str, Any] | None = None,
) -> None:
    """Write a tokenizer into the folder `out` so that transformers reads the same one.

    Args:
        tokenizer_class: transformers' class, if tokenizer_config.json names none.
        max_positions: tokens at most.
        for_words: for a model that was trained on single words: a text's first word gets a blank before it like all
            others, and so do words that are given one by one (transformers refuses them otherwise).
        fields: further ones of tokenizer_config.json.
    """
    tokenizer = _with_prefix_space(read.tokenizer) if for_words else read.tokenizer
    for name in _COPIED:
        if (read.folder / name).is_file():
            shutil.copyfile(read.folder / name, out / name)
    (out / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    # transformers knows no default of every family.
    special = {f"{role}_token": tokenizer.id_to_token(number) for role, number in read.special_ids.items()}
    declared = {"tokenizer_class": tokenizer_class, **special, **declared_types(read.folder)}
    declared["model_max_length"] = min(declared.get("model_max_length", max_positions), max_positions)
    normalizer: Any = tokenizer.normalizer
    if isinstance(tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel):
        declared["add_prefix_space"] = tokenizer.pre_tokenizer.add_prefix_space
    if isinstance(normalizer, normalizers.BertNormalizer):
        declared |= {flag: getattr(normalizer, name) for flag, name in CASING.items()}
    write_json(out / "tokenizer_config.json", {**declared, **(fields or {})})


def _with_prefix_space(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer with a blank before every text, if a word at a text's beginning has other tokens without."""
    first, second, both = (tokenizer.encode(text, add_special_tokens=False).ids for text in ("a", "b", "a b"))
    if first + second == both:
        return tokenizer
    if not isinstance(tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel):
        # A ByteLevel after others would put a blank before each of their pieces.
        tokenizer = Tokenizer.from_str(tokenizer.to_str())
        blank, own = normalizers.Prepend(" "), tokenizer.normalizer
        tokenizer.normalizer = blank if own is None else normalizers.Sequence([blank, own])  # pyright: ignore[reportAttributeAccessIssue]
        return tokenizer
    described = json.loads(tokenizer.to_str())
    for part in ("pre_tokenizer", "post_processor"):
        if "add_prefix_space" in (described[part] or {}):
            described[part]["add_prefix_space"] = True
    return Tokenizer.from_str(json.dumps(described))
