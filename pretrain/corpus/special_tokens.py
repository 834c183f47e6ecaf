"""The special tokens of a tokenizer by role (pad, unk, cls, sep, mask), whatever their names."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pretrain.common.errors import InputError

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # names in the vocabularies that `prepare` trains
ROLES = ("pad", "unk", "cls", "sep", "mask")
_REQUIRED = ("pad", "cls", "sep", "mask")
# Role -> names in the tokenizers of BERT, RoBERTa, EuroBERT and Gemma.
_NAMES = {
    "pad": ("[PAD]", "<pad>", "<|pad|>"),
    "unk": ("[UNK]", "<unk>", "<|unk|>"),
    "cls": ("[CLS]", "<s>", "<|begin_of_text|>", "<bos>"),
    "sep": ("[SEP]", "</s>", "<|end_of_text|>", "<eos>"),
    "mask": ("[MASK]", "<mask>", "<|mask|>"),
}
_ALTERNATIVE_KEYS = {"cls": "bos_token", "sep": "eos_token"}  # role -> alternative key in tokenizer_config.json


def special_ids(tokenizer: Tokenizer, tokenizer_config: Mapping[str, Any] | None = None) -> dict[str, int]:
    """Return {role: id} in the order of `ROLES`, without the roles that the tokenizer lacks.

    If the tokenizer adds one token before a string and one after it, these are cls and sep. In all other cases, the
    token of a role is the one that `tokenizer_config` (tokenizer_config.json) names or, failing that, the first of the
    role's known names that is in the vocabulary.
    """
    ids = _surrounding_ids(tokenizer)
    for role in ROLES:
        names = (*_declared_names(role, tokenizer_config or {}), *_NAMES[role])
        named_ids = [token_id for name in names if (token_id := tokenizer.token_to_id(name)) is not None]
        if role not in ids and named_ids:
            ids[role] = named_ids[0]
    return {role: ids[role] for role in ROLES if role in ids}


def special_added_ids(folder: Path) -> list[int]:
    """Return the ids of all tokens that the tokenizer.json in `folder` marks as special, with or without a role."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special]


def check_special_tokens(ids: Mapping[str, int], where: object) -> None:
    """Raise `InputError`, prefixed with `where`, if `ids` lacks a role that pretraining needs."""
    missing = [role for role in _REQUIRED if role not in ids]
    if missing:
        raise InputError(
            f"{where}: has no {missing[0]} token with a known name; pretraining needs one. Name it as "
            f"{missing[0]}_token in the tokenizer_config.json beside tokenizer.json."
        )


def declared_settings(folder: Path) -> dict[str, Any]:
    """Read tokenizer_config.json in `folder`, and add the special tokens that only special_tokens_map.json names.

    Returns {} if neither file exists. Raises `InputError` if one cannot be read.
    """
    values: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            values |= {key: value for key, value in content.items() if value is not None}
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise InputError(f"{path}: cannot be read ({error}). Download it again.") from None
    return values


def _surrounding_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the ids of cls and sep if the tokenizer adds one token before and one after a string; otherwise {}."""
    text = "a"
    plain, ids = tokenizer.encode(text, add_special_tokens=False).ids, tokenizer.encode(text).ids
    return {"cls": ids[0], "sep": ids[-1]} if plain == ids[1:-1] and len(ids) == len(plain) + 2 else {}


def _declared_names(role: str, tokenizer_config: Mapping[str, Any]) -> list[str]:
    """Return the names of a role's token in tokenizer_config.json, where a token may be a string or an object."""
    keys = (f"{role}_token", *([_ALTERNATIVE_KEYS[role]] if role in _ALTERNATIVE_KEYS else []))
    tokens = (tokenizer_config.get(key) for key in keys)
    names = (token.get("content") if isinstance(token, dict) else token for token in tokens)
    return [name for name in names if isinstance(name, str)]
