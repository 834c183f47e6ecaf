"""What a folder of sentence-transformers says beside the encoder: how it pools, and its longest text.

sentence-transformers 5: models/Pooling.py (config.json of the module), models/Transformer.py
(sentence_bert_config.json).
"""

from pathlib import Path
from typing import Any

from pretrain.checkpoint.layouts.pooled import POOLING
from pretrain.common.files import read_json

_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    # The mean times the square root of the length: a linear layer after it has the length as an input.
    "pooling_mode_mean_sqrt_len_tokens": "mean",
}


def sentence_pooling(folder: Path) -> dict[str, str]:
    """The pooling as a field of config.json, {} if the folder says nothing that a head can do."""
    values = _pooling(folder)
    chosen = [mode for key, mode in _MODES.items() if values.get(key)]
    named = values.get("pooling_mode")  # one name instead of flags
    mode = chosen[0] if len(chosen) == 1 else named if named in _MODES.values() else ""
    return {POOLING: mode} if mode else {}


def longest_text(folder: Path) -> int | None:
    """Tokens of the longest text that the model was trained for, special tokens included; None if it is not said."""
    path = folder / "sentence_bert_config.json"
    limit = read_json(path).get("max_seq_length") if path.is_file() else None
    return limit if isinstance(limit, int) and limit > 0 else None


def remarks(folder: Path, max_length: int) -> list[str]:
    """What a fine-tuning of this model with windows of `max_length` tokens should know."""
    found = []
    if (values := _pooling(folder)) and not sentence_pooling(folder):
        named = [key for key, value in values.items() if key.startswith("pooling_mode") and value]
        found.append(f"its pooling ({', '.join(named) or 'none'}) is not supported: classifiers read the first token.")
    longest = longest_text(folder)
    if longest is not None and max_length > longest:
        found.append(
            f"max_length is {max_length}, but it was trained for at most {longest} tokens "
            f"(sentence_bert_config.json). Set max_length: {longest}."
        )
    return [f"warning: {folder}: {one}" for one in found]


def _pooling(folder: Path) -> dict[str, Any]:
    path = next(iter(sorted(folder.glob("*_Pooling/config.json"))), None)
    return read_json(path) if path else {}
