"""Load the tokenizer of a released model from whichever files it has."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from pretrain.common.errors import InputError
from pretrain.common.files import read_json
from pretrain.common.setting_errors import shorten
from pretrain.corpus.released import class_stem, kind_of, reject_python_tokenizer, tokenizer_class_name
from pretrain.corpus.special_tokens import declared_settings
from pretrain.corpus.vocabulary import bert_tokenizer, entry_ids, read_vocabulary, tokenizer_from_json, vocabulary_size

SENTENCE_PIECES = ("sentencepiece.bpe.model", "spm.model")


def load_vocabulary(
    path: Path, *, lowercase: bool, kind: str = "wordpiece", strip_accents: bool | None = None
) -> Tokenizer:
    """Load the tokenizer of a BERT vocab.txt, a tokenizer.json, or a folder (see `read_files`).

    If `strip_accents` is None, the value in the files applies; by default, it equals `lowercase`.

    Raises `InputError` if the tokenizer is missing, damaged, of another kind, or contradicts `lowercase` or
    `strip_accents`.
    """
    path = path.expanduser()
    if not path.exists():
        raise InputError(f"corpus.vocabulary.path: {path}: not found.")
    tokenizer = read_files(path, {"lowercase": lowercase, "strip_accents": strip_accents})
    if (actual := kind_of(tokenizer)) != kind:
        raise InputError(
            f"corpus.vocabulary.kind: {kind}, but {path} is a vocabulary of kind {actual}. Make them agree."
        )
    return tokenizer_from_json(path, tokenizer.to_str(), lowercase=lowercase, strip_accents=strip_accents)


def read_files(path: Path, casing: Mapping[str, Any] | None = None) -> Tokenizer:
    """Load the tokenizer of a folder, or of its tokenizer.json or vocab.txt, with the settings in the folder's files.

    `casing` has settings for a vocab.txt, for which the files may have none; by default, the entries determine them.
    Truncation and padding are disabled. Raises errors like `checkpoint.tokenizer.read_tokenizer`.
    """
    folder = path if path.is_dir() else path.parent
    declared = read_tokenizer_settings(folder)
    reject_python_tokenizer(folder)
    file = next((file for file in (folder / "tokenizer.json", folder / "vocab.txt") if file.is_file()), folder)
    file = file if path.is_dir() else path
    if file.suffix == ".json":
        tokenizer = _from_json(file, declared)
    elif file.is_file():
        _check_class(folder, _WORD_PIECES)
        tokenizer = _from_vocabulary(file, declared, casing or {})
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        _check_class(folder, _BYTE_PAIRS)
        tokenizer = _from_merges(folder, declared)
    else:
        raise InputError(_missing_message(folder))
    _add_tokens(tokenizer, folder, declared)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _missing_message(folder: Path) -> str:
    model_file = next((name for name in SENTENCE_PIECES if (folder / name).is_file()), None)
    if model_file is not None:
        return (
            f"{folder}: has {model_file}, which is not read, but no tokenizer.json. Write one with transformers "
            "(save_pretrained of a fast tokenizer)."
        )
    return (
        f"{folder}: has no tokenizer: neither tokenizer.json, nor vocab.txt, nor vocab.json with merges.txt. "
        "Add the model's own tokenizer files to the folder."
    )


# Tokenizer classes of transformers that read vocab.txt like BERT, or vocab.json with merges.txt like RoBERTa.
_WORD_PIECES = (
    *("Bert", "DistilBert", "Electra", "ConvBert", "Funnel", "LayoutLM", "Lxmert", "MobileBert", "RetriBert"),
    *("SqueezeBert", "PreTrained", "Tokenizers"),
)
_BYTE_PAIRS = ("Roberta", "GPT2", "Bart", "Deberta", "Longformer", "LED", "PreTrained", "Tokenizers")


def _check_class(folder: Path, supported: tuple[str, ...]) -> None:
    """Raise `InputError` if the class is not `supported`, since it may split text in a way that no file describes."""
    path, name = tokenizer_class_name(folder)
    if name and class_stem(name) not in supported:
        raise InputError(
            f"{path}: tokenizer_class is {name}, which does not tokenize like {supported[0]}, and there is no "
            "tokenizer.json. Write one with transformers (save_pretrained of a fast tokenizer)."
        )


# Flag in tokenizer_config.json -> field of BertNormalizer in `tokenizers`.
CASING = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}


def read_tokenizer_settings(folder: Path) -> dict[str, Any]:
    """Read tokenizer_config.json and check the types of values. A null counts as missing, except for strip_accents."""
    path = folder / "tokenizer_config.json"
    declared = read_json(path) if path.is_file() else {}
    for name, types in _TYPES.items():
        if declared.get(name) is not None and not isinstance(declared[name], types):
            raise InputError(f"{path}: {name} is {declared[name]!r}. Download it again.")
    return {name: value for name, value in declared.items() if value is not None or name == "strip_accents"}


_TYPES = {  # key of tokenizer_config.json -> types of its value
    **dict.fromkeys(CASING, (bool,)),
    "model_max_length": (int, float),
    "added_tokens_decoder": (dict,),
    "additional_special_tokens": (list,),
}


def _add_tokens(tokenizer: Tokenizer, folder: Path, declared: dict[str, Any]) -> None:
    """Add the tokens that only other files of the folder list, such as markers of a task or a domain, with their flags.

    Existing tokens get the flags in `added_tokens_decoder`, as in transformers.
    """
    added_file, config_file, special_map_file = (
        folder / name for name in ("added_tokens.json", "tokenizer_config.json", "special_tokens_map.json")
    )
    decoder = declared.get("added_tokens_decoder", {})
    token_ids = {
        token: _checked_id(value, token, added_file)
        for token, value in (read_json(added_file) if added_file.is_file() else {}).items()
    }
    flags: dict[str, dict[str, Any]] = {}
    for value, token in decoder.items():
        token_ids[_content(token, config_file)] = _checked_id(value, token, config_file)
        flags[_content(token, config_file)] = token if isinstance(token, dict) else {}
    marked = [token for token in decoder.values() if isinstance(token, dict) and token.get("special")]
    specials = _contents([*marked, *declared.get("additional_special_tokens", [])], config_file)
    if special_map_file.is_file():
        specials |= _contents(read_json(special_map_file).get("additional_special_tokens") or [], special_map_file)
    existing = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for token, token_id in sorted(token_ids.items(), key=lambda item: item[1]):
        if token in existing and not flags.get(token):
            continue
        expected = tokenizer.token_to_id(token)
        expected = vocabulary_size(tokenizer) if expected is None else expected
        if token_id != expected and token not in existing:
            raise InputError(
                f"{folder}: the added token {token!r} has the id {token_id}, but the next free one is {expected}. Add "
                "the model's own tokenizer files to the folder."
            )
        declared_flags = {flag: flags.get(token, {})[flag] for flag in _FLAGS if flag in flags.get(token, {})}
        settings = {"normalized": token not in specials, **declared_flags}
        added = AddedToken(token, special=token in specials, **settings)
        (tokenizer.add_special_tokens if token in specials else tokenizer.add_tokens)([added])


_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")  # fields of AddedToken


def _casing(declared: dict[str, Any]) -> dict[str, Any]:
    return {name: declared[flag] for flag, name in CASING.items() if flag in declared}


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


def _from_vocabulary(path: Path, declared: dict[str, Any], casing: Mapping[str, Any]) -> Tokenizer:
    entries = read_vocabulary(path, advice="Download it again.")
    vocabulary = entry_ids(path, entries)
    for role in ("unk", "cls", "sep"):
        config_file, default = path.with_name("tokenizer_config.json"), f"[{role.upper()}]"
        if (name := _content(declared_settings(path.parent).get(f"{role}_token", default), config_file)) != default:
            raise InputError(
                f"{config_file}: {role}_token is {_shorten(name)}, but BERT's is {default}, and there is no "
                "tokenizer.json. Write one with transformers (save_pretrained of a fast tokenizer)."
            )
    is_cased = any(token != token.lower() for token in entries if not re.fullmatch(r"\[.*\]|<.*>", token))
    casing = {"lowercase": not is_cased, **casing, **_casing(declared)}
    return bert_tokenizer(vocabulary, normalizers.BertNormalizer(**casing))


def _from_merges(folder: Path, declared: dict[str, Any]) -> Tokenizer:
    """Build RoBERTa's tokenizer as in transformers (tokenization_roberta.py). `<mask>` includes the space before it."""
    try:
        vocabulary, merges = models.BPE.read_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
        tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    except Exception as error:  # tokenizers raises bare Exception
        raise InputError(f"{folder}: vocab.json and merges.txt are damaged ({error}). Download them again.") from None
    config_file = folder / "tokenizer_config.json"
    specials = {
        name: _content(declared.get(f"{name}_token", default), config_file)
        for name, default in _ROBERTA_SPECIALS.items()
    }
    missing = [token for token in specials.values() if token not in vocabulary]
    if missing:
        raise InputError(f"{folder / 'vocab.json'}: has no {', '.join(missing)}. Use the vocabulary of RoBERTa.")
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
    """Return the strings of a list of tokens in the file `path`."""
    if not isinstance(tokens, list):
        raise InputError(f"{path}: {_shorten(tokens)} is not a list of tokens. Download it again.")
    return {_content(token, path) for token in tokens}


def _content(token: Any, path: Path) -> str:
    """Return the string of a token in the file `path`, which is a string or an object with the string as `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise InputError(f"{path}: {_shorten(token)} is not a token. Download it again.")
    return text


def _checked_id(value: Any, token: Any, path: Path) -> int:
    """Return the id of a token in the file `path`. Raises `InputError` if `value` is not an id."""
    if isinstance(value, int) or (isinstance(value, str) and value.isdecimal()):
        return int(value)
    raise InputError(f"{path}: the token {_shorten(token)} has the id {_shorten(value)}. Download it again.")


def _shorten(value: Any) -> str:
    """Return the shortened repr of a wrong value, for a message."""
    return shorten(repr(value), 60)
