"""The files of sentence-transformers beside an encoder: how it pools, and its longest text; read and written.

They are read in old forms and in those of version 6, and written in the old ones, which text-embeddings-inference
reads as well (backends/src/lib.rs, ModuleType; router/src/lib.rs, get_pool). sentence-transformers 6:
sentence_transformer/modules/pooling.py (config.json of the module), base/modules/transformer.py
(sentence_bert_config.json), base/model.py (the two others).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pretrain.checkpoint.layouts.pooled import ENCODER, POOLING
from pretrain.checkpoint.tokenizer import is_run, released_folder
from pretrain.common.files import read_json, write_json
from pretrain.common.run_files import START_FILE
from pretrain.config import ModelConfig

SENTENCE = "sentence_transformers"  # these files in START_FILE of a run
_MODULES, _POOLING, _PROMPTS = "modules.json", "1_Pooling/config.json", "config_sentence_transformers.json"
_TRANSFORMER = "sentence_bert_config.json"
# File -> what it is called in other folders, if not the same.
_NAMES = {_POOLING: "*_Pooling/config.json", _TRANSFORMER: "sentence_*_config.json"}
_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# Of a head. The mean times the square root of the length: a linear layer after it has the length as an input.
_AS_HEADS = {"cls": "cls", "max": "max", "mean": "mean", "mean_sqrt_len_tokens": "mean"}


def sentence_pooling(folder: Path) -> dict[str, str]:
    """The pooling as a field of config.json, {} if the folder says nothing that a head can do."""
    chosen = _chosen(_said(folder))
    return {POOLING: _AS_HEADS[chosen[0]]} if len(chosen) == 1 and chosen[0] in _AS_HEADS else {}


def longest_text(folder: Path) -> int | None:
    """Tokens of the longest text that the model was trained for, special tokens included; None if it is not said."""
    limit = _said(folder).get(_TRANSFORMER, {}).get("max_seq_length")
    return limit if isinstance(limit, int) and limit > 0 else None


def remarks(folder: Path, max_length: int) -> list[str]:
    """What a fine-tuning of this model with windows of `max_length` tokens should know."""
    found, said = [], _said(folder)
    if (chosen := _chosen(said)) and not sentence_pooling(folder):
        found.append(f"its pooling ({', '.join(chosen)}) is not supported: classifiers read the first token.")
    longest = longest_text(folder)
    if longest is not None and max_length > longest:
        found.append(
            f"max_length is {max_length}, but it was trained for at most {longest} tokens "
            f"(sentence_bert_config.json). Set max_length: {longest}."
        )
    return [f"warning: {folder}: {one}" for one in found] + left_out(folder)


def left_out(folder: Path) -> list[str]:
    """A warning that names the modules of `folder` that are neither read nor exported; [] if there are none."""
    others = [kind for kind in _kinds(_said(folder)) if kind not in ("Transformer", "Pooling", "Normalize")]
    return [f"warning: {folder}: exports leave out its modules {', '.join(others)}."] if others else []


def sentence_files(folder: Path, model: ModelConfig, pooling: str = "") -> dict[str, Any]:
    """The files, name -> content, with which an export is read elsewhere as the model in `folder` is.

    Args:
        pooling: that of a folder without such files; "" for a model of no known pooling, which has none: {}.
    """
    said = _said(folder)
    chosen = _chosen(said) or [pooling]
    if chosen == [""]:
        return {}
    paths = {"Transformer": "", "Pooling": "1_Pooling"}
    if "Normalize" in _kinds(said):
        paths["Normalize"] = "2_Normalize"
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, path) in enumerate(paths.items())
    ]
    pooling_config = {"word_embedding_dimension": model.hidden, **{flag: _MODES[flag] in chosen for flag in _MODES}}
    pooling_config["include_prompt"] = said.get(_POOLING, {}).get("include_prompt", True)
    files: dict[str, Any] = {_MODULES: modules, _POOLING: pooling_config}
    lowercase = bool(said.get(_TRANSFORMER, {}).get("do_lower_case", False))
    if longest := longest_text(folder) or lowercase * model.max_positions:
        files[_TRANSFORMER] = {"max_seq_length": min(longest, model.max_positions), "do_lower_case": lowercase}
    return files | ({_PROMPTS: said[_PROMPTS]} if _PROMPTS in said else {})


def write_sentence_files(files: Mapping[str, Any], out: Path) -> None:
    """Write what `sentence_files` returns."""
    for name, content in files.items():
        (out / name).parent.mkdir(exist_ok=True)
        write_json(out / name, content)


def _said(folder: Path) -> dict[str, Any]:
    """The content of the files of `folder` by the names above; those of a run's start for a run of ours."""
    inner = released_folder(folder)
    if is_run(inner):
        start = inner / START_FILE
        return read_json(start).get(SENTENCE, {}) if start.is_file() else {}
    found = {}
    for name in (_MODULES, _POOLING, _TRANSFORMER, _PROMPTS):
        places = (folder, inner, inner / ENCODER)
        if paths := [path for place in places for path in sorted(place.glob(_NAMES.get(name, name)))]:
            found[name] = read_json(paths[0], list if name == _MODULES else dict)
    return found


def _chosen(said: Mapping[str, Any]) -> list[str]:
    """The modes of the pooling, whose results are concatenated; [] if there is none."""
    if _POOLING not in said:
        return []
    values = said[_POOLING]
    named = values.get("pooling_mode") or [mode for flag, mode in _MODES.items() if values.get(flag)] or "mean"
    return [named] if isinstance(named, str) else list(named)


def _kinds(said: Mapping[str, Any]) -> list[str]:
    """The names of the modules' classes, in order."""
    modules = (one for one in said.get(_MODULES, ()) if isinstance(one, dict))
    return [str(one.get("type", "")).rpartition(".")[2] for one in modules]
