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
# {Prodigy's "answer": why the example is not used, or None}
_ANSWERS = {"accept": None, "reject": _REJECTED, "ignore": NoLabel("ignored")}
_METADATA = {"id", "annotator", "annotation_id", "lead_time", "created_at", "updated_at", "agreement", "history"}


def skipped_summary(source: str, num_rows: int, reasons: Iterable[NoLabel]) -> str:
    """Return a line such as "a.jsonl: 60 of 90 rows left out: 40 rejected, 20 ignored"."""
    counts = Counter(entry.reason for entry in reasons)
    listed = ", ".join(f"{count:,} {reason}" for reason, count in counts.most_common())
    return f"{source}: {sum(counts.values()):,} of {num_rows:,} rows left out: {listed}"


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


def read_annotations(record: Mapping[str, Any], read_result: Callable[[list[Any]], Any]) -> Any:
    """Return the result that `read_result` reads from a task's finished annotations, or `NoLabel` if they disagree.

    If some are marked as ground truth, only they are read.
    """
    entries = [entry for entry in record["annotations"] if isinstance(entry, Mapping)]
    finished = [entry for entry in entries if unused_reason(entry) is None and isinstance(entry.get("result"), list)]
    finished = [entry for entry in finished if entry.get("ground_truth") is True] or finished
    return _consensus([read_result(entry["result"]) for entry in finished]) if finished or not entries else _SKIPPED


def reject_label_ids(record: Mapping[str, Any], where: str) -> None:
    """Raise `InputError` for a record whose labels are numbers, as older versions of Doccano exported them."""
    entries = record.get("annotations")
    ids = [entry.get("label") for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, list) else []
    if any(type(label) is int for label in ids):
        raise InputError(f"{where}: annotations have label ids, such as {ids[0]}. Export the names of the labels.")


def example_key(record: Any, text_columns: Sequence[str]) -> Hashable:
    """Return a key shared by all annotations of an example; None if each record is a separate example."""
    if not isinstance(record, Mapping) or not ("annotation_id" in record or is_prodigy(record)):
        return None
    key = [record.get(name) for name in (["id"] if "annotation_id" in record else text_columns)]
    return tuple(key) if all(isinstance(value, str | int) for value in key) else id(record)


def merge_annotations(values: list[Any], keys: Sequence[Hashable]) -> None:
    """Change `values` in place: keep the first value of each example key if all agree; the others become `NoLabel`."""
    positions_by_key: dict[Hashable, list[int]] = defaultdict(list)
    for position, key in enumerate(keys):
        if key is not None and not isinstance(values[position], NoLabel):
            positions_by_key[key].append(position)
    for group in positions_by_key.values():
        value = _consensus([values[position] for position in group])
        values[group[0]] = value
        for position in group[1:]:
            values[position] = value if value is _DISPUTED else _MERGED


def _consensus(values: Sequence[Any]) -> Any:
    """Return the value that all annotations have; `NoLabel` if there is none."""
    if not values:
        return UNLABELED
    return values[0] if all(value == values[0] for value in values) else _DISPUTED


def labeled_rows(
    records: list[Any], where: Callable[[int], str], *, text_columns: list[Any], label_column: str, inputs: list[Any]
) -> list[Any]:
    """Convert records of annotation tools to rows with these columns; the label is a `NoLabel` if there is none.

    The input columns, `inputs`, cannot be the label. Items that are not records are returned unchanged. `where`
    returns the location of an item, for errors.
    """
    names = {name for record in records if isinstance(record, dict) for name in record}
    candidates = names - _METADATA - set(inputs)
    # In Label Studio's short form, the only column besides metadata and inputs is the label column, whatever its name.
    is_renamed = "annotation_id" in names and label_column not in names and len(candidates) == 1
    found_column = candidates.pop() if is_renamed else label_column
    rows: list[Any] = []
    for index, record in enumerate(records):
        if isinstance(record, dict) and is_label_studio(record):
            record = _task_row(record, text_columns[0], label_column, where(index))
        elif isinstance(record, dict) and (value := _record_label(record, found_column, where(index))) is not None:
            record = {**record, label_column: value}
        rows.append(record)
    if not any(isinstance(row, dict) and label_column in row for row in rows):
        return rows
    labels = [row.get(label_column) if isinstance(row, dict) else None for row in rows]
    values = [UNLABELED if value is None else value for value in labels]
    merge_annotations(values, [example_key(record, text_columns) for record in records])
    pairs = zip(rows, values, strict=True)
    return [{**row, label_column: value} if isinstance(row, dict) else row for row, value in pairs]


def _task_row(record: Mapping[str, Any], text_column: str, label_column: str, where: str) -> dict[str, Any]:
    """Return the row of a Label Studio task; if its data has only one string, that becomes the text column."""
    texts = [value for value in record["data"].values() if isinstance(value, str)]
    text = {text_column: texts[0]} if len(texts) == 1 else {}
    value = read_annotations(record, lambda result: _choices(result, label_column, where))
    return {**text, **record["data"], "id": record.get("id"), label_column: value}


def _record_label(record: Mapping[str, Any], column: str, where: str) -> Any:
    """Return the label of a record, a `NoLabel` if it is not used, or None if it has no label."""
    if (reason := unused_reason(record)) is not None:
        return reason
    if isinstance(record.get("accept"), list) and (is_prodigy(record) or "options" in record):
        texts = {item.get("id"): item.get("text") for item in record.get("options") or () if isinstance(item, Mapping)}
        return sorted((texts.get(item, item) if isinstance(item, int) else item for item in record["accept"]), key=str)
    value = record.get(column)
    if isinstance(value, Mapping) and isinstance(value.get("choices"), list):
        return sorted(value["choices"], key=str)
    if column not in record:
        reject_label_ids(record, where)
    return [value] if is_prodigy(record) and isinstance(value, str) else value


def _choices(result: list[Any], label_column: str, where: str) -> Any:
    """Return the choices of one annotator for the label column, sorted."""
    entries = [entry for entry in result if isinstance(entry, Mapping) and isinstance(entry.get("value"), Mapping)]
    choices = [entry for entry in entries if isinstance(entry["value"].get("choices"), list)]
    names = {str(entry.get("from_name")) for entry in choices}
    if label_column not in names and len(names) > 1:
        raise InputError(f"{where}: choices of {listing(sorted(names))}. Set label_column to one of them.")
    choices = [entry for entry in choices if label_column not in names or entry.get("from_name") == label_column]
    return sorted((name for entry in choices for name in entry["value"]["choices"]), key=str)
