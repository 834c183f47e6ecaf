"""The tokenizer of a released model, from those of its files that exist."""

import contextlib
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from pretrain.checkpoint import store
from pretrain.checkpoint.weight_files import read_json
from pretrain.common import settings
from pretrain.common.errors import InputError
from pretrain.common.files import sha256_file, write_json
from pretrain.common.setting_errors import shortened
from pretrain.config import CorpusConfig, load_config
from pretrain.corpus.released import class_stem, refuse_python
from pretrain.corpus.special_tokens import declared_settings, special_ids
from pretrain.corpus.stored import fetch_without_tokens
from pretrain.corpus.vocabulary import bert_tokenizer, numbered, read_vocabulary, tokenizer_digest, vocabulary_size

_SENTENCE_PIECES = ("sentencepiece.bpe.model", "spm.model")
# Besides tokenizer.json and tokenizer_config.json, which `copy_tokenizer` writes itself.
_COPIED = (
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    *_SENTENCE_PIECES,
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
        tokenizer = _read_files(folder, rows)
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
    return _read_files(tokenizer_folder(folder), rows)


def _read_files(folder: Path, rows: int | None) -> Tokenizer:
    declared = _declared(folder)
    refuse_python(folder)
    if (folder / "tokenizer.json").is_file():
        tokenizer = _from_json(folder / "tokenizer.json", declared)
    elif (folder / "vocab.txt").is_file():
        _check_class(folder, declared, _WORD_PIECES)
        tokenizer = _from_vocabulary(folder / "vocab.txt", declared)
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        _check_class(folder, declared, _BYTE_PAIRS)
        tokenizer = _from_merges(folder, declared)
    else:
        raise InputError(_missing(folder))
    _add_tokens(tokenizer, folder, declared)
    last = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if rows is not None and last >= rows:
        raise InputError(
            f"{folder}: the tokenizer has ids up to {last}, but the model's word embeddings have {rows} rows. Add the "
            "tokenizer that it was trained with to the folder."
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _missing(folder: Path) -> str:
    pieces = next((name for name in _SENTENCE_PIECES if (folder / name).is_file()), None)
    if pieces is not None:
        return (
            f"{folder}: has {pieces} but no tokenizer.json, which is read in its place. Write one with transformers "
            "(save_pretrained of a fast tokenizer)."
        )
    return (
        f"{folder}: has no tokenizer: neither tokenizer.json, nor vocab.txt, nor vocab.json with merges.txt. "
        "Add the model's own tokenizer files to the folder."
    )


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
    return corpus_of(folder, load_config(folder / "config.yaml").corpus) if is_run(folder) else folder


def corpus_of(run: Path, corpus: CorpusConfig) -> Path:
    """The folder of `corpus`, that of a run of ours, whose tokenizer is the run's.

    Raises `InputError` if it has another tokenizer by now; checkpoints of earlier versions tell less of it, or nothing.
    """
    trained_with = _trained_tokenizer(run)
    folder = fetch_without_tokens(corpus)
    if not _is_tokenizer(folder, trained_with):  # at an address, it may have been prepared again since it was fetched
        folder = fetch_without_tokens(corpus, again=True)
    if not _is_tokenizer(folder, trained_with):
        raise InputError(
            f"{folder}: its tokenizer is not the one that {run} was trained with. Prepare the corpus as it was, or "
            "give an export of the run, which has its own."
        )
    return folder


def _is_tokenizer(corpus: Path, trained_with: Mapping[str, str]) -> bool:
    """Whether a corpus has the tokenizer that `_trained_tokenizer` tells; what is missing is not another one."""
    if not (corpus / "vocab.txt").is_file():
        return True
    if "tokenizer" in trained_with:
        return trained_with["tokenizer"] == tokenizer_digest(corpus)
    return trained_with.get("vocabulary", "") in ("", sha256_file(corpus / "vocab.txt"))


def _trained_tokenizer(run: Path) -> dict[str, str]:
    """What the newest checkpoint that tells anything tells of the tokenizer that a run was trained with.

    `tokenizer` is its digest; checkpoints of earlier versions have `vocabulary`, the SHA-256 of vocab.txt alone.
    """
    for checkpoint in reversed(store.list_checkpoints(run / "checkpoints")):
        with contextlib.suppress(InputError):
            if not (checkpoint / "state.json").is_file():  # damaged, or just removed
                continue
            state = store.read_state(checkpoint)
            if found := {name: state[name] for name in ("tokenizer", "vocabulary") if state.get(name)}:
                return found
    return {}


def copy_tokenizer(
    read: ModelTokenizer, out: Path, *, tokenizer_class: str, max_positions: int, for_words: bool = False
) -> None:
    """Write a tokenizer into the folder `out` so that transformers reads the same one.

    Args:
        tokenizer_class: transformers' class, if tokenizer_config.json names none.
        max_positions: tokens at most.
        for_words: for a model that was trained on single words: a text's first word gets a blank before it like all
            others, and so do words that are given one by one (transformers refuses them otherwise).
    """
    tokenizer = _with_prefix_space(read.tokenizer) if for_words else read.tokenizer
    for name in _COPIED:
        if (read.folder / name).is_file():
            shutil.copyfile(read.folder / name, out / name)
    (out / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    declared = {"tokenizer_class": tokenizer_class, **_declared(read.folder)}
    declared["model_max_length"] = min(declared.get("model_max_length", max_positions), max_positions)
    normalizer: Any = tokenizer.normalizer
    if isinstance(tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel):
        declared["add_prefix_space"] = tokenizer.pre_tokenizer.add_prefix_space
    if isinstance(normalizer, normalizers.BertNormalizer):
        declared |= {flag: getattr(normalizer, name) for flag, name in _CASING.items()}
    write_json(out / "tokenizer_config.json", declared)


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


# transformers' tokenizers that read vocab.txt as BERT does, and vocab.json with merges.txt as RoBERTa does.
_WORD_PIECES = (
    "Bert",
    "DistilBert",
    "Electra",
    "ConvBert",
    "Funnel",
    "LayoutLM",
    "Lxmert",
    "MobileBert",
    "RetriBert",
    "SqueezeBert",
    "PreTrained",
    "Tokenizers",
)
_BYTE_PAIRS = ("Roberta", "GPT2", "Bart", "Deberta", "Longformer", "LED", "PreTrained", "Tokenizers")


def _check_class(folder: Path, declared: dict[str, Any], known: tuple[str, ...]) -> None:
    """Refuse classes that are not `known`: some split words first, so the files alone give other tokens."""
    name = declared.get("tokenizer_class", f"{known[0]}Tokenizer")
    if class_stem(name) not in known:
        raise InputError(
            f"{folder / 'tokenizer_config.json'}: tokenizer_class is {name}, which does not tokenize like BERT, "
            "and there is no tokenizer.json. Write one with transformers (save_pretrained of a fast "
            "tokenizer)."
        )


# tokenizer_config.json's flags and the fields of tokenizers' BertNormalizer.
_CASING = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}


def _declared(folder: Path) -> dict[str, Any]:
    """What tokenizer_config.json declares. null counts as missing, except for accents: they then follow the case."""
    path = folder / "tokenizer_config.json"
    declared = read_json(path) if path.is_file() else {}
    for name, kinds in _KINDS.items():
        if declared.get(name) is not None and not isinstance(declared[name], kinds):
            raise InputError(f"{path}: {name} is {declared[name]!r}. Download it again.")
    return {name: value for name, value in declared.items() if value is not None or name == "strip_accents"}


_KINDS = {
    **dict.fromkeys(_CASING, (bool,)),
    "model_max_length": (int, float),
    "added_tokens_decoder": (dict,),
    "additional_special_tokens": (list,),
}


def _add_tokens(tokenizer: Tokenizer, folder: Path, declared: dict[str, Any]) -> None:
    """Add the tokens that the tokenizer's own file does not hold: markers of a task or a domain, with their flags."""
    path, config, special_map = (
        folder / name for name in ("added_tokens.json", "tokenizer_config.json", "special_tokens_map.json")
    )
    described = declared.get("added_tokens_decoder", {})
    listed = {
        token: _number(number, token, path) for token, number in (read_json(path) if path.is_file() else {}).items()
    }
    flags: dict[str, dict[str, Any]] = {}
    for number, token in described.items():
        listed[_content(token, config)] = _number(number, token, config)
        flags[_content(token, config)] = token if isinstance(token, dict) else {}
    marked = [token for token in described.values() if isinstance(token, dict) and token.get("special")]
    specials = _contents([*marked, *declared.get("additional_special_tokens", [])], config)
    if special_map.is_file():
        specials |= _contents(read_json(special_map).get("additional_special_tokens") or [], special_map)
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for token, number in sorted(listed.items(), key=lambda item: item[1]):
        if token in known:
            continue
        expected = tokenizer.token_to_id(token)
        expected = vocabulary_size(tokenizer) if expected is None else expected
        if number != expected:
            raise InputError(
                f"{folder}: the added token {token!r} has the id {number}, but the next free one is {expected}. Add "
                "the model's own tokenizer files to the folder."
            )
        given = {flag: flags.get(token, {})[flag] for flag in _FLAGS if flag in flags.get(token, {})}
        added = AddedToken(token, special=token in specials, **{"normalized": token not in specials, **given})
        (tokenizer.add_special_tokens if token in specials else tokenizer.add_tokens)([added])


_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


def _casing(declared: dict[str, Any]) -> dict[str, Any]:
    return {name: declared[flag] for flag, name in _CASING.items() if flag in declared}


def _from_json(path: Path, declared: dict[str, Any]) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise InputError(f"{path}: not a tokenizer.json ({error}). Download it again.") from None
    normalizer: Any = tokenizer.normalizer
    if isinstance(normalizer, normalizers.BertNormalizer):
        for name, value in _casing(declared).items():
            setattr(normalizer, name, value)
        tokenizer.normalizer = normalizer
    return tokenizer


def _from_vocabulary(path: Path, declared: dict[str, Any]) -> Tokenizer:
    entries = read_vocabulary(path, advice="Download it again.")
    vocabulary = numbered(path, entries)
    cased = any(token != token.lower() for token in entries if not re.fullmatch(r"\[.*\]|<.*>", token))
    casing = {"lowercase": not cased, **_casing(declared)}
    return bert_tokenizer(vocabulary, normalizers.BertNormalizer(**casing))


def _from_merges(folder: Path, declared: dict[str, Any]) -> Tokenizer:
    """transformers' models/roberta/tokenization_roberta.py; `<mask>` includes the blank before it, as released."""
    try:
        vocabulary, merges = models.BPE.read_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
        tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    except Exception as error:  # tokenizers raises bare Exception
        raise InputError(f"{folder}: vocab.json and merges.txt are damaged ({error}). Download them again.") from None
    config = folder / "tokenizer_config.json"
    specials = {
        name: _content(declared.get(f"{name}_token", default), config) for name, default in _ROBERTA_SPECIALS.items()
    }
    missing = [token for token in specials.values() if token not in vocabulary]
    if missing:
        raise InputError(f"{folder / 'vocab.json'}: has no {', '.join(missing)}. Give the vocabulary of RoBERTa.")
    prefix_space = bool(declared.get("add_prefix_space", False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False, lstrip=name == "mask") for name, token in specials.items()]
    )
    sep, cls = specials["sep"], specials["cls"]
    tokenizer.post_processor = processors.RobertaProcessing(
        (sep, vocabulary[sep]), (cls, vocabulary[cls]), trim_offsets=True, add_prefix_space=prefix_space
    )
    return tokenizer


_ROBERTA_SPECIALS = {"cls": "<s>", "pad": "<pad>", "sep": "</s>", "unk": "<unk>", "mask": "<mask>"}


def _contents(tokens: Any, path: Path) -> set[str]:
    """The texts of a list of tokens in the file `path`."""
    if not isinstance(tokens, list):
        raise InputError(f"{path}: {_shown(tokens)} is not a list of tokens. Download it again.")
    return {_content(token, path) for token in tokens}


def _content(token: Any, path: Path) -> str:
    """The text of a token as the file `path` writes it: that alone, or an object that has it."""
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise InputError(f"{path}: {_shown(token)} is not a token. Download it again.")
    return text


def _number(number: Any, token: Any, path: Path) -> int:
    """The id of a token as the file `path` writes it."""
    if isinstance(number, int) or (isinstance(number, str) and number.isdecimal()):
        return int(number)
    raise InputError(f"{path}: the token {_shown(token)} has the id {_shown(number)}. Download it again.")


def _shown(value: Any) -> str:
    """A wrong value for a message."""
    return shortened(repr(value), 60)
