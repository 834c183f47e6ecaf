"""Reads and writes the tokenizer of a released model, from whichever of its files exist."""

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
from pretrain.corpus.tokenizer_files import CASING, SENTENCE_PIECES, read_files, read_tokenizer_settings
from pretrain.corpus.vocabulary import tokenizer_digest

# Files to copy, besides tokenizer.json and tokenizer_config.json, which `copy_tokenizer` writes itself.
_COPIED = (
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    *SENTENCE_PIECES,
)


class ModelTokenizer(NamedTuple):
    """The tokenizer of a model as `read_tokenizer` reads it, with further facts from its files."""

    folder: Path  # the folder of its files
    tokenizer: Tokenizer  # with truncation and padding off
    special_ids: dict[str, int]  # role of a special token (pad, mask, ...) -> its id

    @classmethod
    def read(cls, folder: Path, rows: int | None = None) -> "ModelTokenizer":
        """Read the tokenizer of the model in `folder`, with the arguments and errors of `read_tokenizer`."""
        return cls.read_files(tokenizer_folder(folder), rows)

    @classmethod
    def read_files(cls, folder: Path, rows: int | None = None) -> "ModelTokenizer":
        """Read as `read` does, from a folder that contains the files directly."""
        tokenizer = _read_checked(folder, rows)
        return cls(folder, tokenizer, special_ids(tokenizer, declared_settings(folder)))


def read_tokenizer(folder: Path, rows: int | None = None) -> Tokenizer:
    """Read the tokenizer of a released model or of one of our runs, with truncation and padding off.

    It is read from tokenizer.json, or vocab.txt (WordPiece), or vocab.json and merges.txt (byte-level BPE). The casing
    comes from tokenizer_config.json (do_lower_case, strip_accents, tokenize_chinese_chars), or else tokenizer.json. If
    neither declares it, the model is cased if vocab.txt has entries with capital letters. transformers does the same,
    except in the last case: then it lower-cases the text of cased models, too.

    Args:
        folder: the model's folder.
        rows: number of rows of the word embeddings, which must exceed every id. Further rows are padding.

    Raises:
        InputError: none of these files exists, one is damaged, or the tokenizer belongs to another model.
    """
    return _read_checked(tokenizer_folder(folder), rows)


def _read_checked(folder: Path, rows: int | None) -> Tokenizer:
    tokenizer = read_files(folder)
    largest_id = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if rows is not None and largest_id >= rows:
        raise InputError(
            f"{folder}: the tokenizer has ids up to {largest_id}, but the model's word embeddings have {rows} rows. "
            "Add the tokenizer that it was trained with to the folder."
        )
    return tokenizer


def released_folder(folder: Path) -> Path:
    """Return the folder with a model's files: `folder`, or its `model` (fine-tuning runs) or `0_Transformer` folder.

    Raises:
        InputError: the fine-tuning run is not finished.
    """
    if (folder / "model" / "finetune.json").is_file():
        return folder / "model"
    if is_run(folder) and "training" in settings.top_level_keys(folder / "config.yaml"):
        raise InputError(f"{folder}: an unfinished fine-tuning run has no model yet. Resume it first.")
    # Older versions of sentence-transformers put the encoder there.
    inner = folder / "0_Transformer"
    return inner if (inner / "config.json").is_file() and not (folder / "config.json").is_file() else folder


def is_run(folder: Path) -> bool:
    """Return whether `folder` is a run folder with checkpoints, not a released model."""
    return (folder / "config.yaml").is_file() and (folder / "checkpoints").is_dir()


def tokenizer_folder(folder: Path) -> Path:
    """Return the folder with a model's tokenizer: for one of our runs its corpus, otherwise the model's folder."""
    folder = released_folder(folder)
    if not is_run(folder):
        return folder
    return corpus_of(folder, config_of(folder).corpus, _trained_tokenizer_digest(folder))


def corpus_of(run: Path, corpus: CorpusConfig, expected_digest: str) -> Path:
    """Return the folder of a run's `corpus`. Its tokenizer must have the digest `expected_digest`; "" allows any.

    Raises `InputError` if the corpus has another tokenizer now.
    """
    for refresh in (False, True):  # at an address, the corpus may have been prepared again since it was fetched
        folder = fetch_without_tokens(corpus, refresh=refresh)
        # A missing tokenizer is reported when it is read.
        if not expected_digest or not (folder / "vocab.txt").is_file() or expected_digest == tokenizer_digest(folder):
            return folder
    raise InputError(
        f"{corpus.folder}: its tokenizer is not the one that {run} was trained with. Prepare the corpus as it was, or "
        "use an export of the run, which contains its tokenizer."
    )


def _trained_tokenizer_digest(run: Path) -> str:
    """Return the digest of a run's tokenizer, as recorded in its latest readable checkpoint; "" if it is unknown."""
    for checkpoint in reversed(store.list_checkpoints(run / "checkpoints")):
        with contextlib.suppress(InputError):
            if (checkpoint / "state.json").is_file():  # else it is damaged, or was just removed
                return store.read_state(checkpoint).get("tokenizer", "")
    return ""


def copy_tokenizer(
    source: ModelTokenizer,
    out: Path,
    *,
    tokenizer_class: str,
    max_positions: int,
    for_words: bool = False,
    fields: Mapping[str, Any] | None = None,
) -> None:
    """Write a tokenizer to the folder `out`, in the form that transformers reads.

    Args:
        tokenizer_class: the tokenizer's class in transformers, if tokenizer_config.json names none.
        max_positions: maximum number of tokens in a sequence.
        for_words: whether the model was trained on lists of words. Then every word, even the first one, gets a space
            before it, so that transformers accepts such lists.
        fields: further fields of tokenizer_config.json.
    """
    tokenizer = _with_prefix_space(source.tokenizer) if for_words else source.tokenizer
    for name in _COPIED:
        if (source.folder / name).is_file():
            shutil.copyfile(source.folder / name, out / name)
    (out / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    # transformers does not have default special tokens for every family.
    special_tokens = {f"{role}_token": tokenizer.id_to_token(index) for role, index in source.special_ids.items()}
    config = {"tokenizer_class": tokenizer_class, **special_tokens, **read_tokenizer_settings(source.folder)}
    config["model_max_length"] = min(config.get("model_max_length", max_positions), max_positions)
    normalizer: Any = tokenizer.normalizer
    if isinstance(tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel):
        config["add_prefix_space"] = tokenizer.pre_tokenizer.add_prefix_space
    if isinstance(normalizer, normalizers.BertNormalizer):
        config |= {flag: getattr(normalizer, name) for flag, name in CASING.items()}
    write_json(out / "tokenizer_config.json", {**config, **(fields or {})})


def _with_prefix_space(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer that adds a space before its input if the first word would otherwise get other tokens."""
    ids_a, ids_b, ids_both = (tokenizer.encode(text, add_special_tokens=False).ids for text in ("a", "b", "a b"))
    if ids_a + ids_b == ids_both:
        return tokenizer
    if not isinstance(tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel):
        # A ByteLevel after other pre-tokenizers would put a space before each of their pieces.
        tokenizer = Tokenizer.from_str(tokenizer.to_str())
        space, old = normalizers.Prepend(" "), tokenizer.normalizer
        tokenizer.normalizer = space if old is None else normalizers.Sequence([space, old])  # pyright: ignore[reportAttributeAccessIssue]
        return tokenizer
    content = json.loads(tokenizer.to_str())
    for part in ("pre_tokenizer", "post_processor"):
        if "add_prefix_space" in (content[part] or {}):
            content[part]["add_prefix_space"] = True
    return Tokenizer.from_str(json.dumps(content))
