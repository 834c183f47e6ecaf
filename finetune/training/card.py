"""README.md of a fine-tuned model: its task, data, training and scores, with metadata for the Hugging Face Hub."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from finetune.tasks.base import Task
from finetune.training.config import FinetuneConfig
from pretrain.common.settings import dump
from pretrain.common.wording import score_title, shown_scores
from pretrain.config import ModelConfig

_MAX_CLASSES = 20  # a larger confusion matrix is not shown in full
_MAX_CONFUSIONS = 20  # maximum number of confusions to list instead

# {layout: name of the model in the card}, for layouts whose models have another `model.family`.
_LAYOUT_NAMES = {"distilbert": "DistilBERT", "roberta": "RoBERTa", "electra": "ELECTRA"}
_PIPELINES = {
    "sequence": "text-classification",
    "tokens": "token-classification",
    "spans": "question-answering",
}
_AUTO_MODELS = {
    "sequence": "AutoModelForSequenceClassification",
    "tokens": "AutoModelForTokenClassification",
    "spans": "AutoModelForQuestionAnswering",
}

Scores = Mapping[str, Mapping[str, float]]
"""{set: {score: value}}."""


@dataclass(frozen=True)
class CardFacts:
    """Facts about a trained model for its card.

    Attributes:
        step: training step at which the weights were saved.
        chosen_on: name of the set that selected this step and tuned the task; "" if there was none.
        examples: number of examples of each set; the training set is "train".
        scores, details: the task's scores and details for each labeled dev and test set.
        temperature: divisor of the logits, chosen to calibrate the probabilities on `chosen_on`; 1 if there is none.
        unsupported: model settings that no published layout supports; "" if the model has a published layout.
        includes_code: whether the folder includes code, which transformers runs with `trust_remote_code`.
    """

    family: str
    shape: ModelConfig
    parameters: int
    step: int
    chosen_on: str
    examples: Mapping[str, int]
    scores: Scores
    details: Mapping[str, Any]
    temperature: float = 1.0
    unsupported: str = ""
    includes_code: bool = False


def model_card(config: FinetuneConfig, task: Task[Any], facts: CardFacts) -> str:
    """Render the card as Markdown."""
    scores = facts.scores
    repeated_sets = config.repeated_sets()
    metadata = _metadata(config, task, facts)
    return _template().render(
        metadata=yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True),
        config=config,
        task=task,
        facts=facts,
        family=_LAYOUT_NAMES.get(facts.family, facts.shape.family_title),
        auto_model=_AUTO_MODELS[task.head],
        untouched=[name for name in scores if name not in (facts.chosen_on, *dict(repeated_sets))],
        remarks=[repeated_remark(*pair) for pair in repeated_sets],
        sets=[
            (name, f"{config.fold} of train" if name == "fold" else task.origin(name), count)
            for name, count in facts.examples.items()
        ],
        title=lambda name: score_title(name, task.positive),
        score_names=list(
            dict.fromkeys(name for values in scores.values() for name in shown_scores(values, task.metric))
        ),
        interval=lambda name, score: interval_text(facts.details.get(name, {})) if score == task.metric else "",
        max_classes=_MAX_CLASSES,
        confusions=_confusions,
        config_yaml=dump(config).strip(),
    )


def repeated_remark(name: str, earlier: str) -> str:
    """Return the remark that the set `name` is the same file as the set `earlier`, for the terminal and the card."""
    use = "trained the model" if earlier == "train" else "selected the checkpoint"
    return f"{name} is the same file as {earlier}: its examples {use}, so its scores do not measure generalization."


def _template() -> Any:
    import jinja2

    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("finetune.training"),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {"cell": _cell, "code": "`{}`".format, "number": _number, "literal": _literal}
    return templates.get_template("model_card.md.j2")


# ---------------------------------------------------------------- metadata for the Hub
# https://huggingface.co/docs/hub/model-cards


def _metadata(config: FinetuneConfig, task: Task[Any], facts: CardFacts) -> dict[str, Any]:
    library = "bertrain" if facts.unsupported else "transformers"
    metadata: dict[str, Any] = {"library_name": library, "pipeline_tag": _PIPELINES[task.head]}
    if (base := _hub_name(config.start_from)) and not config.random_weights:
        metadata["base_model"] = base
    return {**metadata, "tags": list(dict.fromkeys(("bertrain", facts.family)))}


def _hub_name(folder: str) -> str | None:
    """Return the Hub name of a model in the Hub cache (.../models--google-bert--bert-base-uncased/snapshots/86b...)."""
    match = re.search(r"/models--([^/]+)/snapshots/[^/]+$", str(Path(folder).absolute()))
    return match and match[1].replace("--", "/")


# ---------------------------------------------------------------- parts of the card


def _confusions(labels: Sequence[str], counts: Sequence[Sequence[int]]) -> list[tuple[str, str, int]]:
    """Return (true label, predicted label, count) of the most frequent errors."""
    confusions = [
        (labels[true], labels[predicted], count)
        for true, row in enumerate(counts)
        for predicted, count in enumerate(row)
        if true != predicted and count
    ]
    return sorted(confusions, key=lambda confusion: -confusion[2])[:_MAX_CONFUSIONS]


def interval_text(details: Mapping[str, Any]) -> str:
    """Format the 95 % confidence interval from the details of a set, in parentheses; "" if there is none."""
    return " (95 %: {:.4f} to {:.4f})".format(*details["interval"]) if "interval" in details else ""


def _cell(value: Any) -> str:
    """Escape a value for a cell of a Markdown table."""
    text = " ".join(str(value).split()).replace("\\", "\\\\")
    return re.sub(r"([|*_`<\[])", r"\\\1", text)


def _number(value: float, name: str = "") -> str:
    """Format scores with four decimals, and counts as integers: ints, and floats whose name has the suffix "total"."""
    is_count = isinstance(value, int) or name.endswith("total")
    return f"{value:,.0f}" if is_count else f"{value:.4f}"


def _literal(value: Any) -> str:
    """Format a string, or a dict of strings, as Python code with double quotes."""
    return json.dumps(value, ensure_ascii=False)
