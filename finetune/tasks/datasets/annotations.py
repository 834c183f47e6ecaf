"""Records of annotation tools: what people decided about each text, or why they decided nothing.

Prodigy       {"text": "", "label": "A", "answer": "accept"}, {"text": "", "options": [], "accept": ["A"], "answer": ""}
Label Studio  {"data": {"text": ""}, "annotations": [{"result": [{"type": "choices", "value": {"choices": ["A"]}}]}]},
              and a row of each annotator {"text": "", "mood": "A", "annotation_id": 1}, or {"mood": {"choices": ["A"]}}
spaCy         ["", {"cats": {"A": 1.0, "B": 0.0}}], and {"text": "", "cats": {"A": 1.0}}
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetune.tasks.datasets.table import listed
from pretrain.common.errors import InputError


@dataclass(frozen=True)
class Missing:
    """In place of a label: the reason for having none, as in "40 rejected"."""

    why: str


@dataclass(frozen=True)
class _Vote:
    """Answer to whether a text has a label."""

    label: Any
    accepted: bool


UNLABELED, _SKIPPED, _REJECTED = Missing("unlabeled"), Missing("skipped"), Missing("rejected")
_DISPUTED, _MERGED = Missing("disputed by annotators"), Missing("merged with another of their text")
_ANSWERS = {"accept": None, "reject": _REJECTED, "ignore": Missing("ignored")}
_MIN = {"id", "annotator", "annotation_id", "lead_time", "created_at", "updated_at", "agreement", "history"}


def left_out(source: str, rows: int, missing: Iterable[Missing]) -> str:
    """A line such as "a.jsonl: 60 of 90 rows left out: 40 rejected, 20 ignored"."""
    counts = Counter(one.why for one in missing)
    reasons = ", ".join(f"{count:,} {why}" for why, count in counts.most_common())
    return f"{source}: {sum(counts.values()):,} of {rows:,} rows left out: {reasons}"


def is_answered(record: Mapping[str, Any]) -> bool:
    """Whether a record is Prodigy's."""
    return isinstance(record.get("answer"), str) and record["answer"] in _ANSWERS


def state(record: Mapping[str, Any]) -> Missing | None:
    """The reason for not using a record, or the annotation of a task, if it says one."""
    if record.get("was_cancelled") is True or record.get("skipped") is True:
        return _SKIPPED
    return _ANSWERS[record["answer"]] if is_answered(record) else None


def is_task(record: Mapping[str, Any]) -> bool:
    """Whether a record is a task of Label Studio's full JSON."""
    return isinstance(record.get("data"), Mapping) and isinstance(_annotations(record), list)


def of_task(record: Mapping[str, Any], read: Callable[[list[Any]], Any]) -> Any:
    """What `read` makes of the results of a task's annotations, which must agree; ground truth overrules others."""
    every = [one for one in _annotations(record) if isinstance(one, Mapping)]
    done = [one for one in every if state(one) is None and isinstance(one.get("result"), list)]
    done = [one for one in done if one.get("ground_truth") is True] or done
    return _agreed([read(one["result"]) for one in done]) if done or not every else _SKIPPED


def refuse_ids(record: Mapping[str, Any], where: str) -> None:
    """Raise `InputError` for a record whose annotations have numbers for labels, as Doccano exported them once."""
    every = record.get("annotations")
    ids = [one.get("label") for one in every if isinstance(one, Mapping)] if isinstance(every, list) else []
    if any(type(label) is int for label in ids):
        raise InputError(f"{where}: annotations have ids of labels, such as {ids[0]}. Export labels by their names.")


def subject(record: Any, text: str) -> Hashable:
    """What several records may be about, one for each annotator or question; None if records are independent."""
    if not isinstance(record, Mapping) or not ("annotation_id" in record or is_answered(record)):
        return None
    about = record.get("id" if "annotation_id" in record else "_input_hash", record.get(text))
    return about if isinstance(about, str | int) else id(record)


def settle(values: list[Any], subjects: Sequence[Hashable], *, several: bool = False) -> int:
    """Keep one value about each subject, if all agree, and put `Missing` in place of the others.

    Returns:
        number of subjects with votes on some labels only, if a text may have `several` labels.
    """
    places: dict[Hashable, list[int]] = defaultdict(list)
    for place, about in enumerate(subjects):
        if about is not None and not isinstance(values[place], Missing):
            places[about].append(place)
    labels = {value.label for value in values if isinstance(value, _Vote)}
    few = 0
    for group in places.values():
        given = [values[place] for place in group]
        are_votes = all(isinstance(one, _Vote) for one in given)
        value = _counted(given, several=several) if are_votes else _agreed(given)
        few += several and are_votes and len({vote.label for vote in given}) < len(labels)
        refused = [are_votes and not several and not vote.accepted for vote in given]
        for place, is_refused in zip(group, refused, strict=True):
            values[place] = _DISPUTED if value is _DISPUTED else _REJECTED if is_refused else _MERGED
        if False in refused:
            values[group[refused.index(False)]] = value
    return few


def _counted(votes: list[_Vote], *, several: bool) -> Any:
    accepted, rejected = ({vote.label for vote in votes if vote.accepted is answer} for answer in (True, False))
    if accepted & rejected or (len(accepted) > 1 and not several):
        return _DISPUTED
    return sorted(accepted, key=str) if several else next(iter(accepted), _REJECTED)


def _agreed(values: Sequence[Any]) -> Any:
    if not values:
        return UNLABELED
    return values[0] if all(value == values[0] for value in values) else _DISPUTED


def _annotations(record: Mapping[str, Any]) -> Any:
    return record.get("annotations", record.get("completions"))


@dataclass(frozen=True)
class ClassForms:
    """Makes rows of texts and labels of records of annotation tools.

    Attributes:
        text, label: columns of the rows.
        inputs: all columns that are not labels.
        several: whether a text may have several labels.
    """

    text: str
    label: str
    inputs: Sequence[Any]
    several: bool

    def rows(self, records: list[Any], where: Callable[[int], str]) -> tuple[list[Any], list[str]]:
        """(`records` with `Missing` in place of labels that they lack, remarks); other records stay as they are.

        Args:
            where: the place of a record, for errors.
        """
        column = self._column(records)
        remarks = [] if column == self.label else [f"labels are those of {column!r}"]
        rows = [self._row(record, column, where(number)) for number, record in enumerate(records)]
        if not any(isinstance(row, dict) and self.label in row for row in rows):
            return rows, remarks
        found = [row.get(self.label) if isinstance(row, dict) else None for row in rows]
        values = [UNLABELED if value is None else value for value in found]
        if few := settle(values, [subject(record, self.text) for record in records], several=self.several):
            remarks.append(f"{few:,} texts were not asked about every label; other labels count as absent")
        same = [value is old or not isinstance(row, dict) for row, value, old in zip(rows, values, found, strict=True)]
        return [row if same[n] else {**row, self.label: values[n]} for n, row in enumerate(rows)], remarks

    def _column(self, records: list[Any]) -> str:
        """The column of the labels; in Label Studio's short form it may be the only one that is not an input."""
        names = {name for record in records if isinstance(record, dict) for name in record}
        others = names - _MIN - set(self.inputs)
        return others.pop() if "annotation_id" in names and self.label not in names and len(others) == 1 else self.label

    def _row(self, record: Any, column: str, where: str) -> Any:
        if isinstance(record, list) and len(record) == 2 and isinstance(record[1], dict):
            record = {self.text: record[0], **record[1]}
        if not isinstance(record, dict):
            return record
        if is_task(record):
            texts = [value for value in record["data"].values() if isinstance(value, str)]
            only = {self.text: texts[0]} if len(texts) == 1 else {}
            value = of_task(record, lambda result: self._chosen(result, where))
            return {**only, **record["data"], "id": record.get("id"), self.label: value}
        value = self._value(record, column, where)
        return record if value is None else {**record, self.label: value}

    def _value(self, record: dict[str, Any], column: str, where: str) -> Any:
        """The label of a record, or None."""
        value, missing = record.get(column), state(record)
        if is_answered(record) and missing in (None, _REJECTED) and isinstance(value, str | int):
            return _Vote(value, missing is None)
        if missing is not None:
            return missing
        if isinstance(record.get("accept"), list) and (is_answered(record) or "options" in record):
            names = {one.get("id"): one.get("text") for one in record.get("options") or () if isinstance(one, Mapping)}
            return sorted((names.get(one, one) if isinstance(one, int) else one for one in record["accept"]), key=str)
        if isinstance(value, Mapping) and isinstance(value.get("choices"), list):
            return sorted(value["choices"], key=str)
        if column in record:
            return value
        if isinstance(cats := record.get("cats"), Mapping):
            return [name for name, share in cats.items() if share == 1] if cats else UNLABELED
        refuse_ids(record, where)
        return None

    def _chosen(self, result: list[Any], where: str) -> Any:
        """The choices of one annotator, sorted."""
        every = [one for one in result if isinstance(one, Mapping) and isinstance(one.get("value"), Mapping)]
        made = [one for one in every if isinstance(one["value"].get("choices"), list)]
        names = {str(one.get("from_name")) for one in made}
        if self.label not in names and len(names) > 1:
            raise InputError(f"{where}: choices of {listed(sorted(names))}. Set label_column to one of them.")
        made = [one for one in made if self.label not in names or one.get("from_name") == self.label]
        return sorted((name for one in made for name in one["value"]["choices"]), key=str)
