"""Reads and writes the files of sentence-transformers next to an encoder: its pooling and maximum length.

The formats of version 6 and older versions are read. The older format is written, which text-embeddings-inference also
reads (backends/src/lib.rs, ModuleType; router/src/lib.rs, get_pool). Version 6 reads and writes these files in
sentence_transformer/modules/pooling.py (1_Pooling/config.json), base/modules/transformer.py (sentence_bert_config.json)
and base/model.py (the other two files).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pretrain.checkpoint.layouts.pooled import ENCODER, POOLING
from pretrain.checkpoint.tokenizer import is_run, released_folder
from pretrain.common.files import read_json, write_json
from pretrain.common.run_files import START_FILE
from pretrain.config import ModelConfig

SENTENCE = "sentence_transformers"  # key of these files in START_FILE of a run
_MODULES, _POOLING, _PROMPTS = "modules.json", "1_Pooling/config.json", "config_sentence_transformers.json"
_TRANSFORMER = "sentence_bert_config.json"
# File -> glob pattern that its name may match in a folder that is read.
_NAME_PATTERNS = {_POOLING: "*_Pooling/config.json", _TRANSFORMER: "sentence_*_config.json"}
_MODE_BY_FLAG = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# Mode -> pooling of a task's head. mean_sqrt_len_tokens is read as mean, without its factor sqrt(length).
_HEAD_POOLINGS = {"cls": "cls", "max": "max", "mean": "mean", "mean_sqrt_len_tokens": "mean"}


def sentence_pooling(folder: Path) -> dict[str, str]:
    """Return the pooling as a field of config.json; {} if the folder declares none that a task's head supports."""
    modes = _pooling_modes(_read_files(folder))
    return {POOLING: _HEAD_POOLINGS[modes[0]]} if len(modes) == 1 and modes[0] in _HEAD_POOLINGS else {}


def declared_max_length(folder: Path) -> int | None:
    """Return the maximum length that the model was trained for, including special tokens; None if not declared."""
    limit = _read_files(folder).get(_TRANSFORMER, {}).get("max_seq_length")
    return limit if isinstance(limit, int) and limit > 0 else None


def length_warnings(folder: Path, max_length: int) -> list[str]:
    """Return warnings about fine-tuning the model in `folder` with windows of `max_length` tokens."""
    warnings, source_files = [], _read_files(folder)
    if (modes := _pooling_modes(source_files)) and not sentence_pooling(folder):
        warnings.append(f"its pooling ({', '.join(modes)}) is not supported: classifiers read the first token.")
    longest = declared_max_length(folder)
    if longest is not None and max_length > longest:
        warnings.append(
            f"max_length is {max_length}, but it was trained for at most {longest} tokens "
            f"(sentence_bert_config.json). Set max_length: {longest}."
        )
    return [f"warning: {folder}: {text}" for text in warnings] + module_warnings(folder)


def module_warnings(folder: Path) -> list[str]:
    """Return a warning that names the modules of `folder` that are neither read nor exported; [] if there are none."""
    ignored = [name for name in _classes(_read_files(folder)) if name not in ("Transformer", "Pooling", "Normalize")]
    return [f"warning: {folder}: exports leave out its modules {', '.join(ignored)}."] if ignored else []


def sentence_files(folder: Path, model: ModelConfig, pooling: str = "") -> dict[str, Any]:
    """Return the files (name -> content) that make other programs use an export as they use the model in `folder`.

    Args:
        pooling: the pooling of the model if `folder` has no such files; "" if it is unknown: then the result is {}.
    """
    source_files = _read_files(folder)
    modes = _pooling_modes(source_files) or [pooling]
    if modes == [""]:
        return {}
    module_folders = {"Transformer": "", "Pooling": "1_Pooling"}
    if "Normalize" in _classes(source_files):
        module_folders["Normalize"] = "2_Normalize"
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(module_folders.items())
    ]
    flags = {flag: mode in modes for flag, mode in _MODE_BY_FLAG.items()}
    pooling_config = {"word_embedding_dimension": model.hidden, **flags}
    pooling_config["include_prompt"] = source_files.get(_POOLING, {}).get("include_prompt", True)
    files: dict[str, Any] = {_MODULES: modules, _POOLING: pooling_config}
    lowercase = bool(source_files.get(_TRANSFORMER, {}).get("do_lower_case", False))
    if longest := declared_max_length(folder) or lowercase * model.max_positions:
        files[_TRANSFORMER] = {"max_seq_length": min(longest, model.max_positions), "do_lower_case": lowercase}
    return files | ({_PROMPTS: source_files[_PROMPTS]} if _PROMPTS in source_files else {})


def write_sentence_files(files: Mapping[str, Any], out: Path) -> None:
    """Write the files that `sentence_files` returns."""
    for name, content in files.items():
        (out / name).parent.mkdir(exist_ok=True)
        write_json(out / name, content)


def _read_files(folder: Path) -> dict[str, Any]:
    """Return name -> content of the files in `folder`; for our runs, of the model that they started from."""
    inner = released_folder(folder)
    if is_run(inner):
        start = inner / START_FILE
        return read_json(start).get(SENTENCE, {}) if start.is_file() else {}
    found = {}
    for name in (_MODULES, _POOLING, _TRANSFORMER, _PROMPTS):
        folders = (folder, inner, inner / ENCODER)
        if paths := [path for parent in folders for path in sorted(parent.glob(_NAME_PATTERNS.get(name, name)))]:
            found[name] = read_json(paths[0], list if name == _MODULES else dict)
    return found


def _pooling_modes(source_files: Mapping[str, Any]) -> list[str]:
    """Return the pooling modes, whose results are concatenated; [] if no pooling is declared."""
    if _POOLING not in source_files:
        return []
    values = source_files[_POOLING]
    modes = values.get("pooling_mode") or [mode for flag, mode in _MODE_BY_FLAG.items() if values.get(flag)] or "mean"
    return [modes] if isinstance(modes, str) else list(modes)


def _classes(source_files: Mapping[str, Any]) -> list[str]:
    """Return the class names of the modules, in order."""
    modules = (module for module in source_files.get(_MODULES, ()) if isinstance(module, dict))
    return [str(module.get("type", "")).rpartition(".")[2] for module in modules]
