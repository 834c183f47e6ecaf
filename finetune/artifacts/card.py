"""README.md of a fine-tuned model: what it is, what it was trained on and how, what it scores; with the hub's metadata."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from finetune.config import FinetuneConfig
from pretrain.common.settings import dump

if TYPE_CHECKING:
    from finetune.tasks.base import Task
    from pretrain.config import ModelConfig

_MOST_CLASSES = 20  # of a confusion matrix that is shown whole
_MOST_CONFUSIONS = 20  # of a larger one

_FAMILIES = {"bert": "BERT", "distilbert": "DistilBERT", "roberta": "RoBERTa", "electra": "ELECTRA"}
_PIPELINES = {
    "sequence": "text-classification",
    "tokens": "token-classification",
    "spans": "question-answering",
}
# Our scores under the names that the hub has for metrics; other scores stand in the text alone.
_HUB_METRICS = {
    "accuracy": "accuracy",
    "subset_accuracy": "accuracy",
    "f1": "f1",
    "macro_f1": "f1",
    "micro_f1": "f1",
    "precision": "precision",
    "recall": "recall",
    "matthews": "matthews_correlation",
    "pearson": "pearsonr",
    "spearman": "spearmanr",
    "exact": "exact_match",
    "exact_match": "exact_match",
}


def model_card(
    config: FinetuneConfig,
    task: Task[Any],
    *,
    family: str,
    shape: ModelConfig,
    parameters: int,
    step: int,
    chosen_on: str,
    examples: Mapping[str, int],
    scores: Mapping[str, Mapping[str, float]],
    details: Mapping[str, Any],
) -> str:
    """The card in Markdown.

    Args:
        family, shape, parameters: of the model.
        step: whose weights they are.
        chosen_on: the set whose score chose that step, and what the task tunes; "" for none.
        examples: how many each set has, the training set under "train".
        scores, details: of each labelled dev and test set, as the task gives them.
    """
    import jinja2

    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("finetune.artifacts"),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    repeated = config.repeated_sets()
    templates.filters |= {"cell": _cell, "code": "`{}`".format, "number": _number}
    return templates.get_template("model_card.md.j2").render(
        metadata=yaml.safe_dump(_metadata(config, task, family, scores), sort_keys=False, allow_unicode=True),
        config=config,
        task=task,
        takes_pairs=getattr(task, "takes_pairs", False),
        family=_FAMILIES.get(family, family),
        shape=shape,
        parameters=parameters,
        step=step,
        chosen_on=chosen_on,
        untouched=[name for name in scores if name not in (chosen_on, *dict(repeated))],
        remarks=[repeated_remark(*pair) for pair in repeated],
        sets=[(name, _source(config, name), count) for name, count in examples.items()],
        scores=scores,
        score_names=list(dict.fromkeys(name for values in scores.values() for name in values)),
        details=details,
        most_classes=_MOST_CLASSES,
        confusions=_confusions,
        config_yaml=dump(config).strip(),
    )


def repeated_remark(name: str, earlier: str) -> str:
    """What a reader must know where the set `name` is the same file as `earlier`, for terminal and card."""
    known = "that the model has learnt" if earlier == "train" else "that chose the checkpoint"
    return f"{name} is the same file as {earlier}: its scores are of examples {known}, and say nothing of others."


# ---- the hub's metadata, https://huggingface.co/docs/hub/model-cards


def _metadata(
    config: FinetuneConfig, task: Task[Any], family: str, scores: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    pipeline = _PIPELINES[task.head]
    known = {name: [score for score in values if score in _HUB_METRICS] for name, values in scores.items() if values}
    results = [
        {
            "task": {"type": pipeline},
            "dataset": _dataset(config, name),
            "metrics": [
                {"type": _HUB_METRICS[score], "name": score, "value": round(scores[name][score], 6)} for score in chosen
            ],
        }
        for name, chosen in known.items()
    ]
    metadata: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": pipeline}
    if (base := _hub_name(config.start_from)) and not config.random_weights:
        metadata["base_model"] = base
    metadata["tags"] = ["bertrain", family]
    if hub := [_dataset(config, "dev")["type"]] if _is_on_hub(config) else []:
        metadata["datasets"] = hub
    if results:
        metadata["metrics"] = sorted({_HUB_METRICS[score] for chosen in known.values() for score in chosen})
        metadata["model-index"] = [{"name": config.name, "results": results}]
    return metadata


def _hub_name(folder: str) -> str | None:
    """The hub's name of a model in its cache (.../models--google-bert--bert-base-uncased/snapshots/86b5e09...)."""
    match = re.search(r"/models--([^/]+)/snapshots/[^/]+$", str(Path(folder).absolute()))
    return match and match[1].replace("--", "/")


def _is_on_hub(config: FinetuneConfig) -> bool:
    section = config.classification
    return section is not None and bool(section.glue or (section.dataset and section.revision))


def _dataset(config: FinetuneConfig, name: str) -> dict[str, str]:
    """What the hub wants to know of the set `name`; of files its "type" is the run's name, as there is no other."""
    section = config.classification
    if section is not None and section.glue:
        from finetune.datasets.glue import TASKS

        split = name.replace("dev", "validation")
        title = f"GLUE {TASKS[section.glue].title}"
        return {"name": title, "type": "nyu-mll/glue", "config": section.glue, "split": split}
    if section is not None and section.dataset and _is_on_hub(config):
        found = {
            "name": section.dataset,
            "type": section.dataset,
            "split": _file(config, name) or "train",  # dev_share's dev set is of the training split
        }
        return found | {
            key: value for key, value in (("config", section.subset), ("revision", section.revision)) if value
        }
    return {"name": Path(_file(config, name) or name).name, "type": config.name, "split": name}


# ---- the text


def _source(config: FinetuneConfig, name: str) -> str:
    """Where the set `name` came from."""
    section = config.classification
    if section is not None and section.glue:
        return f"GLUE {section.glue} in {section.glue_dir}"
    if section is not None and name != "train" and section.dev_share and not _file(config, name):
        return f"{section.dev_share:.0%} of the training set, by a hash of the texts"
    split = _file(config, name)
    if section is not None and section.dataset:
        where = " ".join(part for part in (section.dataset, section.subset) if part)
        return f"{where}, split {split or 'train'}" + (f", {section.revision}" if section.revision else "")
    return split


def _file(config: FinetuneConfig, name: str) -> str:
    """The setting `name` of the task's section: a file, or a data set's split; "" where it has none."""
    return getattr(getattr(config, config.task_name), name, "")


def _confusions(labels: Sequence[str], counts: Sequence[Sequence[int]]) -> list[tuple[str, str, int]]:
    """(true, predicted, count) of the most frequent mistakes."""
    wrong = [
        (labels[true], labels[predicted], count)
        for true, row in enumerate(counts)
        for predicted, count in enumerate(row)
        if true != predicted and count
    ]
    return sorted(wrong, key=lambda mistake: -mistake[2])[:_MOST_CONFUSIONS]


def _cell(value: Any) -> str:
    """Text that stays within its cell of a table, and is shown as it is."""
    text = " ".join(str(value).split()).replace("\\", "\\\\")
    return re.sub(r"([|*_`<\[])", r"\\\1", text)


def _number(value: float, name: str = "") -> str:
    """Counts as such; scores count as floats what they call a total."""
    is_count = isinstance(value, int) or name.endswith("total")
    return f"{value:,.0f}" if is_count else f"{value:.4f}"
