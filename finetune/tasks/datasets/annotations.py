"""Records of annotation tools: the label of each example, or the reason why it has none.

Prodigy       {"text": "", "label": "A", "answer": "accept"}, {"text": "", "options": [], "accept": ["A"], "answer": ""}
Label Studio  {"data": {"text": ""}, "annotations": [{"result": [{"type": "choices", "value": {"choices": ["A"]}}]}]},
              and a row of each annotator {"text": "", "mood": "A", "annotation_id": 1}, or {"mood": {"choices": ["A"]}}
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetune.tasks.datasets.table import listed
from pretrain.common.errors import InputError


@dataclass(frozen=True)
class Missing:
    """Stands in for a label: the reason why there is none, as in "40 rejected"."""

    why: str


UNLABELED, _SKIPPED, _REJECTED = Missing("unlabeled"), Missing("skipped"), Missing("rejected")
_DISPUTED, _MERGED = Missing("disputed by annotators"), Missing("merged with another of their text")
_ANSWERS = {"accept": None, "reject": _REJECTED, "ignore": Missing("ignored")}
_METADATA = {"id", "annotator", "annotation_id", "lead_time", "created_at", "updated_at", "agreement", "history"}


def left_out(source: str, rows: int, missing: Iterable[Missing]) -> str:
    """Return a line such as "a.jsonl: 60 of 90 rows left out: 40 rejected, 20 ignored"."""
    counts = Counter(one.why for one in missing)
    reasons = ", ".join(f"{count:,} {why}" for why, count in counts.most_common())
    return f"{source}: {sum(counts.values()):,} of {rows:,} rows left out: {reasons}"


def is_answered(record: Mapping[str, Any]) -> bool:
    """Return whether a record is from Prodigy."""
    return isinstance(record.get("answer"), str) and record["answer"] in _ANSWERS


def state(record: Mapping[str, Any]) -> Missing | None:
    """Return the reason for not using a record or a task's annotation, None if it is used."""
    if record.get("was_cancelled") is True or record.get("skipped") is True:
        return _SKIPPED
    return _ANSWERS[record["answer"]] if is_answered(record) else None


def is_task(record: Mapping[str, Any]) -> bool:
    """Return whether a record is a task of Label Studio's full JSON."""
    return isinstance(record.get("data"), Mapping) and isinstance(record.get("annotations"), list)


def of_task(record: Mapping[str, Any], read: Callable[[list[Any]], Any]) -> Any:
    """Apply `read` to the results of a task's annotations, which must agree; ground truth overrules the others."""
    every = [one for one in record["annotations"] if isinstance(one, Mapping)]
    done = [one for one in every if state(one) is None and isinstance(one.get("result"), list)]
    done = [one for one in done if one.get("ground_truth") is True] or done
    return _agreed([read(one["result"]) for one in done]) if done or not every else _SKIPPED


def refuse_ids(record: Mapping[str, Any], where: str) -> None:
    """Raise `InputError` for a record whose labels are numbers, as older versions of Doccano exported them."""
    every = record.get("annotations")
    ids = [one.get("label") for one in every if isinstance(one, Mapping)] if isinstance(every, list) else []
    if any(type(label) is int for label in ids):
        raise InputError(f"{where}: annotations have ids of labels, such as {ids[0]}. Export labels by their names.")


def subject(record: Any, texts: Sequence[str]) -> Hashable:
    """Return a key that records on the same example share; None if the record is independent of others."""
    if not isinstance(record, Mapping) or not ("annotation_id" in record or is_answered(record)):
        return None
    key = [record.get(name) for name in (["id"] if "annotation_id" in record else texts)]
    return tuple(key) if all(isinstance(one, str | int) for one in key) else id(record)


def settle(values: list[Any], subjects: Sequence[Hashable]) -> None:
    """Keep one value per subject, if all agree, and replace the others by `Missing`."""
    places: dict[Hashable, list[int]] = defaultdict(list)
    for place, key in enumerate(subjects):
        if key is not None and not isinstance(values[place], Missing):
            places[key].append(place)
    for group in places.values():
        value = _agreed([values[place] for place in group])
        values[group[0]] = value
        for place in group[1:]:
            values[place] = value if value is _DISPUTED else _MERGED


def _agreed(values: Sequence[Any]) -> Any:
    if not values:
        return UNLABELED
    return values[0] if all(value == values[0] for value in values) else _DISPUTED


def class_rows(
    records: list[Any], where: Callable[[int], str], *, texts: Sequence[Any], label: str, inputs: Sequence[Any]
) -> list[Any]:
    """Return `records` with the columns `texts` and `label`, which is `Missing` in unlabeled ones.

    `inputs` are columns that cannot be the label. Items that are not records are returned unchanged. `where` returns
    the location of an item, for errors.
    """
    names = {name for record in records if isinstance(record, dict) for name in record}
    others = names - _METADATA - set(inputs)
    # In Label Studio's short form, the labels may be the only column that is not an input.
    is_only = "annotation_id" in names and label not in names and len(others) == 1
    column = others.pop() if is_only else label
    rows: list[Any] = []
    for number, record in enumerate(records):
        if isinstance(record, dict) and is_task(record):
            record = _of_task(record, texts[0], label, where(number))
        elif isinstance(record, dict) and (value := _value(record, column, where(number))) is not None:
            record = {**record, label: value}
        rows.append(record)
    if not any(isinstance(row, dict) and label in row for row in rows):
        return rows
    found = [row.get(label) if isinstance(row, dict) else None for row in rows]
    values = [UNLABELED if value is None else value for value in found]
    settle(values, [subject(record, texts) for record in records])
    return [{**row, label: value} if isinstance(row, dict) else row for row, value in zip(rows, values, strict=True)]


def _of_task(record: Mapping[str, Any], text: str, label: str, where: str) -> dict[str, Any]:
    """Return the row of a task; if it has a single string, this is `text`, whatever its name."""
    texts = [value for value in record["data"].values() if isinstance(value, str)]
    only = {text: texts[0]} if len(texts) == 1 else {}
    value = of_task(record, lambda result: _chosen(result, label, where))
    return {**only, **record["data"], "id": record.get("id"), label: value}


def _value(record: Mapping[str, Any], column: str, where: str) -> Any:
    """Return the label of a record, or None."""
    if (missing := state(record)) is not None:
        return missing
    if isinstance(record.get("accept"), list) and (is_answered(record) or "options" in record):
        names = {one.get("id"): one.get("text") for one in record.get("options") or () if isinstance(one, Mapping)}
        return sorted((names.get(one, one) if isinstance(one, int) else one for one in record["accept"]), key=str)
    value = record.get(column)
    if isinstance(value, Mapping) and isinstance(value.get("choices"), list):
        return sorted(value["choices"], key=str)
    if column not in record:
        refuse_ids(record, where)
    return [value] if is_answered(record) and isinstance(value, str) else value


def _chosen(result: list[Any], label: str, where: str) -> Any:
    """Return the choices of one annotator, sorted."""
    every = [one for one in result if isinstance(one, Mapping) and isinstance(one.get("value"), Mapping)]
    choices = [one for one in every if isinstance(one["value"].get("choices"), list)]
    names = {str(one.get("from_name")) for one in choices}
    if label not in names and len(names) > 1:
        raise InputError(f"{where}: choices of {listed(sorted(names))}. Set label_column to one of them.")
    choices = [one for one in choices if label not in names or one.get("from_name") == label]
    return sorted((name for one in choices for name in one["value"]["choices"]), key=str)
