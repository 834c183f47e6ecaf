"""Records of annotation tools: the label of each example, or the reason why it has none.

Prodigy       {"text": "", "label": "A", "answer": "accept"}, {"text": "", "options": [], "accept": ["A"], "answer": ""}
Label Studio  {"data": {"text": ""}, "annotations": [{"result": [{"type": "choices", "value": {"choices": ["A"]}}]}]},
              and a row per annotator {"text": "", "mood": "A", "annotation_id": 1}, or {"mood": {"choices": ["A"]}}
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetune.tasks.datasets.table import listing
from pretrain.common.errors import InputError


@dataclass(frozen=True)
class NoLabel:
    """Replaces the label of an unlabeled example; `reason` completes messages such as "40 rejected"."""

    reason: str


UNLABELED, _SKIPPED, _REJECTED = NoLabel("unlabeled"), NoLabel("skipped"), NoLabel("rejected")
_DISPUTED, _MERGED = NoLabel("disputed by annotators"), NoLabel("merged with another annotation")
_ANSWERS = {"accept": None, "reject": _REJECTED, "ignore": NoLabel("ignored")}  # {"answer" of Prodigy: reason}
_METADATA = {"id", "annotator", "annotation_id", "lead_time", "created_at", "updated_at", "agreement", "history"}


def left_out_line(source: str, rows: int, missing: Iterable[NoLabel]) -> str:
    """Return a line such as "a.jsonl: 60 of 90 rows left out: 40 rejected, 20 ignored"."""
    counts = Counter(entry.reason for entry in missing)
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in counts.most_common())
    return f"{source}: {sum(counts.values()):,} of {rows:,} rows left out: {reasons}"


def is_prodigy(record: Mapping[str, Any]) -> bool:
    """Return whether a record is from Prodigy."""
    return isinstance(record.get("answer"), str) and record["answer"] in _ANSWERS


def unused_reason(record: Mapping[str, Any]) -> NoLabel | None:
    """Return why a record, or an annotation of a Label Studio task, is not used; None if it is used."""
    if record.get("was_cancelled") is True or record.get("skipped") is True:
        return _SKIPPED
    return _ANSWERS[record["answer"]] if is_prodigy(record) else None


def is_label_studio(record: Mapping[str, Any]) -> bool:
    """Return whether a record is a task of Label Studio's full JSON."""
    return isinstance(record.get("data"), Mapping) and isinstance(record.get("annotations"), list)


def read_annotations(record: Mapping[str, Any], read: Callable[[list[Any]], Any]) -> Any:
    """Return what `read` finds in all annotations of a task, or only in ground truth; `NoLabel` if they disagree."""
    entries = [entry for entry in record["annotations"] if isinstance(entry, Mapping)]
    finished = [entry for entry in entries if unused_reason(entry) is None and isinstance(entry.get("result"), list)]
    finished = [entry for entry in finished if entry.get("ground_truth") is True] or finished
    return _consensus([read(entry["result"]) for entry in finished]) if finished or not entries else _SKIPPED


def refuse_label_ids(record: Mapping[str, Any], where: str) -> None:
    """Raise `InputError` for a record whose labels are numbers, as older versions of Doccano exported them."""
    entries = record.get("annotations")
    ids = [entry.get("label") for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, list) else []
    if any(type(label) is int for label in ids):
        raise InputError(f"{where}: annotations have label ids, such as {ids[0]}. Export the names of the labels.")


def example_key(record: Any, texts: Sequence[str]) -> Hashable:
    """Return a key shared by all annotations of an example; None if each record is a separate example."""
    if not isinstance(record, Mapping) or not ("annotation_id" in record or is_prodigy(record)):
        return None
    key = [record.get(name) for name in (["id"] if "annotation_id" in record else texts)]
    return tuple(key) if all(isinstance(value, str | int) for value in key) else id(record)


def merge_annotations(values: list[Any], keys: Sequence[Hashable]) -> None:
    """In `values`, keep one value per example key if all agree; replace all others by `NoLabel`."""
    positions: dict[Hashable, list[int]] = defaultdict(list)
    for position, key in enumerate(keys):
        if key is not None and not isinstance(values[position], NoLabel):
            positions[key].append(position)
    for group in positions.values():
        value = _consensus([values[position] for position in group])
        values[group[0]] = value
        for position in group[1:]:
            values[position] = value if value is _DISPUTED else _MERGED


def _consensus(values: Sequence[Any]) -> Any:
    """Return the value that all annotations have; `NoLabel` if there is none."""
    if not values:
        return UNLABELED
    return values[0] if all(value == values[0] for value in values) else _DISPUTED


def class_rows(
    records: list[Any], where: Callable[[int], str], *, texts: Sequence[Any], label: str, inputs: Sequence[Any]
) -> list[Any]:
    """Convert records of annotation tools to rows with the columns `texts` and `label`, a `NoLabel` if unlabeled.

    `inputs` are columns that cannot be the label. Items that are not records are returned unchanged. `where` returns
    the location of an item, for errors.
    """
    names = {name for record in records if isinstance(record, dict) for name in record}
    candidates = names - _METADATA - set(inputs)
    # In Label Studio's short form, the label column may have any name if it is the only other column.
    is_renamed = "annotation_id" in names and label not in names and len(candidates) == 1
    column = candidates.pop() if is_renamed else label
    rows: list[Any] = []
    for index, record in enumerate(records):
        if isinstance(record, dict) and is_label_studio(record):
            record = _task_row(record, texts[0], label, where(index))
        elif isinstance(record, dict) and (value := _record_label(record, column, where(index))) is not None:
            record = {**record, label: value}
        rows.append(record)
    if not any(isinstance(row, dict) and label in row for row in rows):
        return rows
    labels = [row.get(label) if isinstance(row, dict) else None for row in rows]
    values = [UNLABELED if value is None else value for value in labels]
    merge_annotations(values, [example_key(record, texts) for record in records])
    return [{**row, label: value} if isinstance(row, dict) else row for row, value in zip(rows, values, strict=True)]


def _task_row(record: Mapping[str, Any], text: str, label: str, where: str) -> dict[str, Any]:
    """Return the row of a Label Studio task; if its data has a single string, that is the column `text`."""
    texts = [value for value in record["data"].values() if isinstance(value, str)]
    text_column = {text: texts[0]} if len(texts) == 1 else {}
    value = read_annotations(record, lambda result: _choices(result, label, where))
    return {**text_column, **record["data"], "id": record.get("id"), label: value}


def _record_label(record: Mapping[str, Any], column: str, where: str) -> Any:
    """Return the label of a record, a `NoLabel`, or None if there is neither."""
    if (missing := unused_reason(record)) is not None:
        return missing
    if isinstance(record.get("accept"), list) and (is_prodigy(record) or "options" in record):
        texts = {item.get("id"): item.get("text") for item in record.get("options") or () if isinstance(item, Mapping)}
        return sorted((texts.get(item, item) if isinstance(item, int) else item for item in record["accept"]), key=str)
    value = record.get(column)
    if isinstance(value, Mapping) and isinstance(value.get("choices"), list):
        return sorted(value["choices"], key=str)
    if column not in record:
        refuse_label_ids(record, where)
    return [value] if is_prodigy(record) and isinstance(value, str) else value


def _choices(result: list[Any], label: str, where: str) -> Any:
    """Return the choices of one annotator for the column `label`, sorted."""
    entries = [entry for entry in result if isinstance(entry, Mapping) and isinstance(entry.get("value"), Mapping)]
    choices = [entry for entry in entries if isinstance(entry["value"].get("choices"), list)]
    names = {str(entry.get("from_name")) for entry in choices}
    if label not in names and len(names) > 1:
        raise InputError(f"{where}: choices of {listing(sorted(names))}. Set label_column to one of them.")
    choices = [entry for entry in choices if label not in names or entry.get("from_name") == label]
    return sorted((name for entry in choices for name in entry["value"]["choices"]), key=str)
