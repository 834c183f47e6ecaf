"""What a folder of sentence-transformers says beside the encoder: how it pools, and its longest text.

sentence-transformers 5: models/Pooling.py (config.json of the module), models/Transformer.py
(sentence_bert_config.json).
"""

from __future__ import annotations

from pathlib import Path

from pretrain.checkpoint.layouts.pooled import POOLING
from pretrain.checkpoint.weight_files import read_json

_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    # The mean times the square root of the length: a linear layer after it has the length as an input.
    "pooling_mode_mean_sqrt_len_tokens": "mean",
}


def sentence_pooling(folder: Path) -> dict[str, str]:
    """The pooling as a field of config.json, {} if the folder says nothing that a head can do."""
    path = next(iter(sorted(folder.glob("*_Pooling/config.json"))), None)
    values = read_json(path) if path else {}
    chosen = [mode for key, mode in _MODES.items() if values.get(key)]
    named = values.get("pooling_mode")  # one name instead of flags
    mode = chosen[0] if len(chosen) == 1 else named if named in _MODES.values() else ""
    return {POOLING: mode} if mode else {}


def longest_text(folder: Path) -> int | None:
    """Tokens of the longest text that the model was trained for, special tokens included; None if it is not said."""
    path = folder / "sentence_bert_config.json"
    limit = read_json(path).get("max_seq_length") if path.is_file() else None
    return limit if isinstance(limit, int) and limit > 0 else None
