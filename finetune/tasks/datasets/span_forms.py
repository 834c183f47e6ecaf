"""Records of other tools, as `sentence_records` wants them: a text, and entities with start, end and type.

Doccano       {"text": "", "label": [[0, 3, "PER"]]}, also `labels`; with ids {"entities": [{"start_offset": 0, ...}]}
Label Studio  {"data": {"text": ""}, "annotations": [{"result": [{"value": {"start": 0, "end": 3, ...}}]}]},
              and its short form {"text": "", "label": [{"start": 0, "end": 3, "labels": ["PER"]}]}
spaCy         ["", {"entities": [[0, 3, "PER"]]}], and {"text": "", "ents": [{"start": 0, "end": 3, "label": "PER"}]}
"""

from collections.abc import Mapping, Sequence
from typing import Any

_SPANS = ("entities", "spans", "ents", "label", "labels")
_NAMES = {"start": ("start", "start_offset"), "end": ("end", "end_offset"), "type": ("type", "label", "labels")}


def usual_form(record: Any) -> Any:
    """`record` with its spans as `entities`; what is of none of these forms stays as it is."""
    if isinstance(record, Sequence) and len(record) == 2 and isinstance(record[1], Mapping):
        record = {"text": record[0], **record[1]}
    if not isinstance(record, Mapping):
        return record
    if isinstance(record.get("data"), Mapping) and isinstance(record.get("annotations"), list):
        record = _of_label_studio(record)
    name = next((name for name in _SPANS if _are_spans(record, name)), None)
    if name is None:
        return record
    return {
        **{key: value for key, value in record.items() if key != name},
        "entities": [_span(one) for one in record[name]],
    }


def named_tags(record: Any, names: Sequence[str], keys: Sequence[str]) -> Any:
    """`record` with names in place of the numbers of tags under one of `keys`; other numbers stay as they are."""

    def named(tag: Any) -> Any:
        return names[tag] if type(tag) is int and 0 <= tag < len(names) else tag

    if not (names and isinstance(record, Mapping)):
        return record
    lists = {key: record[key] for key in keys if isinstance(record.get(key), list)}
    return {**record, **{key: [named(tag) for tag in tags] for key, tags in lists.items()}}


def _of_label_studio(record: Mapping[str, Any]) -> dict[str, Any]:
    """The first annotation that was not canceled; without any, the text alone."""
    data = record["data"]
    text = data.get("text", next((value for value in data.values() if isinstance(value, str)), None))
    made = {"id": record.get("id"), "text": text}
    done = (one for one in record["annotations"] if isinstance(one, Mapping) and not one.get("was_cancelled"))
    results = next((one["result"] for one in done if isinstance(one.get("result"), list)), None)
    if results is None:
        return made
    values = [one.get("value") for one in results if isinstance(one, Mapping) and one.get("type", "labels") == "labels"]
    return {**made, "entities": values}


def _are_spans(record: Mapping[str, Any], name: str) -> bool:
    value = record.get(name)
    if not isinstance(value, list):
        return False
    if not value:  # no entity, unless it may be the tags of no words
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
