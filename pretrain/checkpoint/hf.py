"""Exports pretraining runs in the layout of their family or in ours, and reads exports back.

`layouts` defines the names (invariant 6 in docs/invariants.md). As in transformers, a tied decoder is not written.
"""

import functools
import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from pretrain.checkpoint import store
from pretrain.checkpoint.layouts import BERT, BERTRAIN, LAYOUTS, layout_of, unsupported_parts, write_config
from pretrain.checkpoint.released import read_released
from pretrain.checkpoint.released_writer import with_position_table, write_part, written_architecture
from pretrain.checkpoint.sentence_transformers import SENTENCE, write_sentence_files
from pretrain.checkpoint.tokenizer import ModelTokenizer, corpus_of
from pretrain.checkpoint.weight_files import atomic_folder
from pretrain.common.errors import InputError
from pretrain.common.files import read_json
from pretrain.common.records import read_records
from pretrain.common.run_files import START_FILE, read_fork
from pretrain.common.settings import dump
from pretrain.config import ModelConfig, PretrainConfig, config_of
from pretrain.corpus.released import kind_of
from pretrain.corpus.vocabulary import vocabulary_size
from pretrain.objectives import make_objective, objective_metrics
from pretrain.objectives.objective import Exported

logger = logging.getLogger(__name__)

# Fields of BERT's config.json besides the shape, as transformers 5 writes them; version 4 reads them, too.
_BERT_FIELDS = {
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": True,
    "use_cache": True,
    "classifier_dropout": None,
    "is_decoder": False,
    "add_cross_attention": False,
}


def export(
    state: Mapping[str, Tensor],
    model: ModelConfig,
    tokenizer_folder: Path,
    out: Path,
    *,
    next_sentence: bool,
    card: str,
    family: str = "",
    config: Mapping[str, Any] | None = None,
    sentence_files: Mapping[str, Any] | None = None,
    class_suffix: str = "",
) -> None:
    """Write a model in its family's layout, atomically; an earlier export at `out` is replaced.

    Args:
        state: the parameters under our names.
        model: the shape of the model.
        tokenizer_folder: contains tokenizer.json, vocab.txt and tokenizer_config.json.
        out: folder to create.
        next_sentence: whether to write the next-sentence head, as BertForPreTraining. Other families have no such
            head: it is left out, with a warning.
        card: content of README.md.
        family: a key of `layouts.LAYOUTS`, for a model that started from a released one; "" uses the model's family,
            or `layouts.BERTRAIN` if that layout cannot represent the model.
        config: config.json of that released model; the fields that the shape does not determine are kept.
        sentence_files: as in `assembly.ReleasedModel`.
        class_suffix: suffix of the class's name, such as ForPreTraining; "" if `next_sentence` decides it.

    Raises:
        InputError: the family's layout cannot represent the model, or the tokenizer is incomplete or has another size.
    """
    model, state = with_position_table(model, state)
    layout, rows = LAYOUTS[family] if family else layout_of(model), len(state["embeddings.word"])
    tokenizer = ModelTokenizer.read_files(tokenizer_folder, rows)
    if not family and model.rows(entries := vocabulary_size(tokenizer.tokenizer)) != rows:
        reason = f"{entries} entries, but the model has {rows}. Use the corpus that the model was trained on."
        raise InputError(f"{tokenizer_folder}: {reason}")
    config = _roberta_fields(tokenizer) if layout.padded_positions and not config else config
    if not next_sentence and config and config.get("type_vocab_size") == 1:
        state = _with_equal_types(state)
    arch, ids = written_architecture(layout, model, state, config or {}, tokenizer.special_ids)
    if next_sentence and not layout.next_sentence:
        logger.warning("the layout of %s has no next-sentence head: it is left out of %s", layout.family, out)
        next_sentence = False
    config = config if config is not None or family or layout is not BERT else _BERT_FIELDS
    class_suffix = class_suffix or ("ForPreTraining" if next_sentence else "ForMaskedLM")
    values = write_config(config or {}, arch, class_suffix, rows, ids["pad"], ids)
    skipped_prefixes = () if next_sentence else ("heads.pooler_", "heads.nsp_")
    exported = {name: tensor for name, tensor in state.items() if not name.startswith(skipped_prefixes)}
    with atomic_folder(out) as temporary:
        # Otherwise, transformers would pass token types to a model that accepts none.
        fields: dict[str, Any] = {} if arch.token_types else {"model_input_names": ["input_ids", "attention_mask"]}
        fields |= {} if family else {"model_max_length": model.max_positions}
        write_part(temporary, values, exported, arch, tokenizer, fields=fields)
        write_sentence_files(sentence_files or {}, temporary)
        (temporary / "README.md").write_text(card, encoding="utf-8")


def export_run(
    run_dir: Path, out: Path, checkpoint: str | None = None, *, averaged: bool = False, other_runs: Sequence[Path] = ()
) -> str:
    """Export a checkpoint of a run with its model card: `checkpoint` (a name or "best"), or the latest intact one.

    `averaged` exports the checkpoint's mean of the last steps' weights. If there are `other_runs`, folders of runs with
    the same model and vocabulary, the mean over all runs is exported (model soups, Wortsman et al. 2022).

    Returns:
        The settings that transformers does not support; "" if transformers can load the export.

    Raises:
        InputError: the run, the checkpoint or the corpus's tokenizer is missing, damaged or does not match.
    """
    if not (run_dir / "config.yaml").is_file():
        raise InputError(f"{run_dir}: not a run folder (no config.yaml). Use one such as runs/bert-mini.")
    config = config_of(run_dir)
    make_objective(config)  # raises if its module is missing
    path = store.choose(run_dir / "checkpoints", checkpoint)
    checkpoint_state = store.read_state(path)
    corpus = corpus_of(run_dir, config.corpus, checkpoint_state.get("tokenizer", ""))
    step = store.step_of(path)
    phase, _ = config.phase_at(max(1, min(step, config.total_steps)) - 1)
    phase_config = config.model_copy(update={"model": config.model_in(phase)})
    state = store.read_weights(path, averaged=averaged)
    for run_count, other_run in enumerate(other_runs, 2):
        other_path = store.choose(other_run / "checkpoints", checkpoint)
        _check_same_model(path, checkpoint_state, other_path, store.read_state(other_path))
        for name, weights in store.read_weights(other_path, averaged=averaged).items():
            state[name].lerp_(weights, 1 / run_count)
    start, objective, unsupported = _released_start(run_dir), make_objective(phase_config), ""
    averaged_steps = checkpoint_state["averaged"] if averaged else 0
    names = [other_run.name for other_run in other_runs]
    card = functools.partial(_model_card, config, run_dir, step, averaged_steps=averaged_steps, other_names=names)
    for part in objective.exported:
        weights = part.weights(state)
        written_shape, _ = with_position_table(part.shape, {})
        layout = layout_of(written_shape, part.layout or start.get("family", ""))
        unsupported = unsupported_parts(written_shape) if layout is BERTRAIN else ""
        export(
            weights,
            part.shape,
            corpus,
            out.with_name(f"{out.name}{part.suffix}"),
            next_sentence=config.pairs.has_classifier,
            card=card(part, weights, unsupported=unsupported),
            family=layout.family if part.layout else start.get("family", ""),
            config=start.get("config"),
            sentence_files={} if unsupported or part.suffix else start.get(SENTENCE),
            class_suffix=part.head,
        )
    return unsupported


def _check_same_model(path: Path, state: Mapping[str, Any], other: Path, other_state: Mapping[str, Any]) -> None:
    """Raise `InputError` if two checkpoints, passed with their states, have different models or vocabularies."""
    for noun, key in (("vocabulary", "tokenizer"), ("shape", "shapes")):
        if state.get(key) != other_state.get(key):
            raise InputError(
                f"{other}: has a different {noun} than {path}, so their weights cannot be averaged. Use runs of the "
                "same model, such as forks of one run."
            )


def _roberta_fields(tokenizer: ModelTokenizer) -> dict[str, Any]:
    """Return fields of config.json: the number of token types and, for XLM-R (by its tokenizer), the model type."""
    is_xlm_r = kind_of(tokenizer.tokenizer) == "released"
    return {"type_vocab_size": 1, **({"model_type": "xlm-roberta"} if is_xlm_r else {})}


def _with_equal_types(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy the first token type's embedding to the second: a run without pairs trains only the first."""
    name = "embeddings.token_type"
    return {**state, **({name: state[name][:1].expand(2, -1)} if name in state else {})}


def fill_mask_export(run_dir: Path, config: PretrainConfig) -> Path:
    """Return the export in a run's folder whose model predicts masked tokens."""
    suffix = next((part.suffix for part in make_objective(config).exported if not part.usage), "")
    return run_dir / f"export{suffix}"


def auto_class(folder: Path) -> str:
    """Return the transformers class that loads an export with all of its heads."""
    # Only families with a second pretraining head have such a class.
    has_second_head = read_json(folder / "config.json")["architectures"][0].endswith("ForPreTraining")
    return "AutoModelForPreTraining" if has_second_head else "AutoModelForMaskedLM"


def load(folder: Path) -> tuple[ModelConfig, dict[str, Tensor], bool]:
    """Read a model with its pretraining heads: (shape, our parameters in fp32, whether it has a next-sentence head).

    Raises `InputError` as `read_released` does.
    """
    released = read_released(folder)
    return released.model, {**released.backbone, **released.pretraining}, "heads.nsp_weight" in released.pretraining


# ---- a run


def _released_start(run_dir: Path) -> dict[str, Any]:
    """Return START_FILE's values about the released model that a run started from, None for a missing one."""
    path = run_dir / START_FILE
    start = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {key: start.get(key) for key in (("family", "config", SENTENCE) if start.get("config") else (SENTENCE,))}


def _model_card(
    config: PretrainConfig,
    run_dir: Path,
    step: int,
    part: Exported,
    state: Mapping[str, Tensor],
    *,
    averaged_steps: int,
    other_names: Sequence[str],
    unsupported: str,
) -> str:
    """Render README.md of an export: the model, its training and evaluation, and its corpus.

    Args:
        part, state: the exported model, and its parameters.
        averaged_steps: the number of steps whose weights are averaged; 0 for the weights of a single step.
        other_names: names of the runs whose weights are averaged with this run's.
        unsupported: the settings that no released layout supports; "" if the export has a released layout.
    """
    import jinja2

    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("pretrain.checkpoint"),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    corpus = ModelTokenizer.read_files(config.corpus.folder)
    mask, corpus_card = corpus.special_ids.get("mask"), corpus.folder / "card.md"
    return templates.get_template("model_card.md.j2").render(
        config=config,
        decays=" and ".join(dict.fromkeys(f"{config.weight_decay(n):.4g}" for n in range(len(config.phases)))),
        fork=read_fork(run_dir),
        model=part.shape,
        part=part,
        mask_token="[MASK]" if mask is None else corpus.tokenizer.id_to_token(mask),
        parameters=sum(tensor.numel() for tensor in state.values()),
        step=step,
        averaged=averaged_steps,
        other_names=other_names,
        unsupported=unsupported,
        measured=_measurements(run_dir, step, averaged=averaged_steps > 0),
        # Headings of the corpus card become subheadings.
        corpus_card=re.sub(r"^#", "###", corpus_card.read_text(encoding="utf-8"), flags=re.MULTILINE).strip()
        if corpus_card.is_file()
        else "",
        config_yaml=dump(config).strip(),
    )


def _measurements(run_dir: Path, step: int, *, averaged: bool = False) -> list[tuple[str, str]]:
    """Return (label, value) pairs of the last evaluation up to `step`; if `averaged`, of the mean weights there."""
    key, value, earliest = ("event", "average", step) if averaged else ("split", "validation", 0)
    evaluations = (record for record in reversed(read_records(run_dir)) if record.get(key) == value)
    last = next((record for record in evaluations if earliest <= record.get("step", 0) <= step), None)
    if last is None:
        return []
    rows = [
        (metric.title, metric.text(last[name], extra_digits=1))
        for name, metric in objective_metrics().items()
        if last.get(name) is not None
    ]
    return [("step", f"{last['step']:,}"), *rows]
