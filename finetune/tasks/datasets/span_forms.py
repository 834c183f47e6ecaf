"""Convert records of other tools for `sentence_records`: text, and entities with start, end and type.

Doccano       {"text": "", "label": [[0, 3, "PER"]]}, also `labels`; with ids {"entities": [{"start_offset": 0, ...}]}
Label Studio  {"data": {"text": ""}, "annotations": [{"result": [{"value": {"start": 0, "end": 3, ...}}]}]},
              and its short form {"text": "", "label": [{"start": 0, "end": 3, "labels": ["PER"]}]}
spaCy         ["", {"entities": [[0, 3, "PER"]]}], and {"text": "", "ents": [{"start": 0, "end": 3, "label": "PER"}]}
"""

from collections.abc import Mapping, Sequence
from typing import Any

from finetune.tasks.datasets.annotations import Missing, is_answered, is_task, of_task, state
from finetune.tasks.datasets.sentences import Cut
from finetune.tasks.datasets.surrogates import replaced, utf16_places

_ONE_SPAN = Missing("with an answer about one span alone")
_TAGS = ("tags", "labels", "ner_tags")
_SPANS = ("entities", "spans", "ents", "label", "labels")
_NAMES = {"start": ("start", "start_offset"), "end": ("end", "end_offset"), "type": ("type", "label", "labels")}


def usual_form(record: Any) -> Any:
    """Return `record` with its spans as `entities`; records of other forms are returned unchanged."""
    if isinstance(record, Sequence) and len(record) == 2 and isinstance(record[1], Mapping):
        record = {"text": record[0], **record[1]}
    if not isinstance(record, Mapping):
        return record
    if is_task(record):
        record = _of_label_studio(record)
    missing = state(record)
    if missing is None and is_answered(record):
        missing = _ONE_SPAN if record.get("_view_id") == "ner" else None
        record = record if record.keys() & {*_SPANS, *_TAGS} else {**record, "entities": []}
    if missing is not None:
        return {**record, "entities": missing}
    names = (*_SPANS, *record) if "annotation_id" in record else _SPANS
    name = next((name for name in names if _are_spans(record, name)), None)
    if name is None:
        return record
    return {
        **{key: value for key, value in record.items() if key != name},
        "entities": [_span(one) for one in record[name]],
    }


def in_characters(records: list[Any], cut: Cut) -> list[Any]:
    """Convert offsets from UTF-16 units, as in JavaScript, to code points, if spans after emoji fit words better so.

    Spans start and end at word boundaries more often in the right unit.
    """
    converted_records, gain = list(records), 0
    for number, record in enumerate(records):
        text, spans = (record.get("text"), record.get("entities")) if isinstance(record, Mapping) else (None, None)
        if not isinstance(text, str) or not isinstance(spans, list) or max(text, default="") <= "\uffff":
            continue
        places = utf16_places(text)
        converted = [_moved(span, places) for span in spans]
        begins, ends = (set(edges) for edges in cut(replaced(text)).T.tolist())
        for candidates, sign in ((spans, -1), (converted, 1)):
            places = [(one.get("start"), one.get("end")) for one in candidates if isinstance(one, Mapping)]
            gain += sign * sum(begin in begins and end in ends for begin, end in places)
        converted_records[number] = {**record, "entities": converted}
    return converted_records if gain > 0 else records


def _moved(span: Any, places: Sequence[int]) -> Any:
    if not isinstance(span, Mapping):
        return span
    ends = {key: span.get(key) for key in ("start", "end")}
    return {**span, **{key: places[at] for key, at in ends.items() if type(at) is int and 0 <= at < len(places)}}


def named_tags(record: Any, names: Sequence[str], keys: Sequence[str]) -> Any:
    """Replace tag numbers under one of `keys` in `record` by their names; unknown numbers stay as they are."""

    def named(tag: Any) -> Any:
        return names[tag] if type(tag) is int and 0 <= tag < len(names) else tag

    if not (names and isinstance(record, Mapping)):
        return record
    lists = {key: record[key] for key in keys if isinstance(record.get(key), list)}
    return {**record, **{key: [named(tag) for tag in tags] for key, tags in lists.items()}}


def _of_label_studio(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the text, and the spans that all annotations agree on."""
    data = record["data"]
    text = data.get("text", next((value for value in data.values() if isinstance(value, str)), None))
    return {"id": record.get("id"), "text": text, "entities": of_task(record, _labels)}


def _labels(result: list[Any]) -> list[Any]:
    values = [one.get("value") for one in result if isinstance(one, Mapping) and one.get("type", "labels") == "labels"]
    return sorted(values, key=repr)


def _are_spans(record: Mapping[str, Any], name: str) -> bool:
    value = record.get(name)
    if not isinstance(value, list):
        return False
    if not value:  # empty: no entities, unless `labels` may be tags of no words
        return name != "labels" or bool(record.get("text") and not record.get("tokens"))
    return all(isinstance(one, Mapping) or (isinstance(one, list) and len(one) == 3) for one in value)


def _span(entity: Any) -> Any:
    if isinstance(entity, list):
        return dict(zip(_NAMES, entity, strict=True))
    found = {
        name: next((entity[key] for key in keys if entity.get(key) is not None), None) for name, keys in _NAMES.items()
    }
    if isinstance(found["type"], list) and len(found["type"]) == 1:
        found["type"] = found["type"][0]
    return {**entity, **found}
