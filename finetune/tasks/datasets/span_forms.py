"""Convert records of annotation tools to the format of `sentence_records`: text, and entities with start, end and type.

Doccano       {"text": "", "label": [[0, 3, "PER"]]} (or "labels"); with ids {"entities": [{"start_offset": 0, ...}]}
Label Studio  {"data": {"text": ""}, "annotations": [{"result": [{"value": {"start": 0, "end": 3, ...}}]}]},
              and its short form {"text": "", "label": [{"start": 0, "end": 3, "labels": ["PER"]}]}
spaCy         ["", {"entities": [[0, 3, "PER"]]}], and {"text": "", "ents": [{"start": 0, "end": 3, "label": "PER"}]}
"""

from collections.abc import Mapping, Sequence
from typing import Any

from finetune.tasks.datasets.annotations import NoLabel, is_label_studio, is_prodigy, read_annotations, unused_reason
from finetune.tasks.datasets.sentences import Segmenter
from finetune.tasks.datasets.surrogates import replace_surrogates, utf16_indices

_SINGLE_SPAN_ANSWER = NoLabel("with an answer about a single span")  # as in "3 with an answer ..."
# Possible keys of a record's tags and entities, and of an entity's fields.
_TAGS = ("tags", "labels", "ner_tags")
_ENTITIES = ("entities", "spans", "ents", "label", "labels")
_FIELDS = {"start": ("start", "start_offset"), "end": ("end", "end_offset"), "type": ("type", "label", "labels")}


def normalize_record(record: Any) -> Any:
    """Return `record` with its spans, or a `NoLabel` if it is unusable, as `entities`; unchanged in other formats."""
    if isinstance(record, Sequence) and len(record) == 2 and isinstance(record[1], Mapping):
        record = {"text": record[0], **record[1]}
    if not isinstance(record, Mapping):
        return record
    if is_label_studio(record):
        record = _from_label_studio(record)
    reason = unused_reason(record)
    if reason is None and is_prodigy(record):
        reason = _SINGLE_SPAN_ANSWER if record.get("_view_id") == "ner" else None
        record = record if record.keys() & {*_ENTITIES, *_TAGS} else {**record, "entities": []}
    if reason is not None:
        return {**record, "entities": reason}
    keys = (*_ENTITIES, *record) if "annotation_id" in record else _ENTITIES  # Label Studio's: under any key
    spans_key = next((key for key in keys if _has_spans(record, key)), None)
    if spans_key is None:
        return record
    return {
        **{key: value for key, value in record.items() if key != spans_key},
        "entities": [_convert_span(span) for span in record[spans_key]],
    }


def convert_offsets(records: list[Any], segment: Segmenter) -> list[Any]:
    """Convert offsets from UTF-16 units, as in JavaScript, to code points, if that makes more spans match words.

    Only records with characters outside the BMP, such as emoji, are considered: in others, both kinds of offsets agree.
    """
    converted_records, extra_matches = list(records), 0
    for index, record in enumerate(records):
        text, spans = (record.get("text"), record.get("entities")) if isinstance(record, Mapping) else (None, None)
        if not isinstance(text, str) or not isinstance(spans, list) or max(text, default="") <= "\uffff":
            continue
        indices = utf16_indices(text)
        converted = [_to_code_point_offsets(span, indices) for span in spans]
        starts, ends = (set(edges) for edges in segment(replace_surrogates(text)).T.tolist())
        for candidates, sign in ((spans, -1), (converted, 1)):
            bounds = [(span.get("start"), span.get("end")) for span in candidates if isinstance(span, Mapping)]
            extra_matches += sign * sum(start in starts and end in ends for start, end in bounds)
        converted_records[index] = {**record, "entities": converted}
    return converted_records if extra_matches > 0 else records


def _to_code_point_offsets(span: Any, indices: Sequence[int]) -> Any:
    if not isinstance(span, Mapping):
        return span
    bounds = {key: span[key] for key in ("start", "end") if type(span.get(key)) is int}
    return {**span, **{key: indices[unit] for key, unit in bounds.items() if 0 <= unit < len(indices)}}


def decode_tags(record: Any, names: Sequence[str], keys: Sequence[str]) -> Any:
    """Replace tag ids with names, in the lists under `keys` of `record`; out-of-range ids are kept."""

    def to_name(tag: Any) -> Any:
        return names[tag] if type(tag) is int and 0 <= tag < len(names) else tag

    if not (names and isinstance(record, Mapping)):
        return record
    lists = {key: record[key] for key in keys if isinstance(record.get(key), list)}
    return {**record, **{key: [to_name(tag) for tag in tags] for key, tags in lists.items()}}


def _from_label_studio(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with the text, and the spans on which all annotations agree."""
    data = record["data"]
    text = data.get("text", next((value for value in data.values() if isinstance(value, str)), None))
    return {"id": record.get("id"), "text": text, "entities": read_annotations(record, _span_values)}


def _span_values(result: list[Any]) -> list[Any]:
    values = [row.get("value") for row in result if isinstance(row, Mapping) and row.get("type", "labels") == "labels"]
    return sorted(values, key=repr)


def _has_spans(record: Mapping[str, Any], key: str) -> bool:
    value = record.get(key)
    if not isinstance(value, list):
        return False
    if not value:  # no entities; but empty `labels` may also be the tags of an empty sentence
        return key != "labels" or bool(record.get("text") and not record.get("tokens"))
    return all(isinstance(item, Mapping) or (isinstance(item, list) and len(item) == 3) for item in value)


def _convert_span(entity: Any) -> Any:
    if isinstance(entity, list):
        return dict(zip(_FIELDS, entity, strict=True))
    fields = {
        name: next((entity[key] for key in keys if entity.get(key) is not None), None) for name, keys in _FIELDS.items()
    }
    if isinstance(fields["type"], list) and len(fields["type"]) == 1:
        fields["type"] = fields["type"][0]
    return {**entity, **fields}
