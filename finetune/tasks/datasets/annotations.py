"""Records of annotation tools: what people decided about each text, or why they decided nothing.

Prodigy       {"text": "", "label": "A", "answer": "accept"}, {"text": "", "options": [], "accept": ["A"], "answer": ""}
Label Studio  {"data": {"text": ""}, "annotations": [{"result": [{"type": "choices", "value": {"choices": ["A"]}}]}]},
              and a row of each annotator {"text": "", "mood": "A", "annotation_id": 1}, or {"mood": {"choices": ["A"]}}
Doccano       {"text": "", "annotations": [{"label": "A", "user": 1}]}
spaCy         ["", {"cats": {"A": 1.0, "B": 0.0}}], and {"text": "", "cats": {"A": 1.0}}
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetune.tasks.datasets.table import listed, shown
from pretrain.common.errors import InputError


@dataclass(frozen=True)
class Missing:
    """In place of a label: the reason for having none, as in "40 rejected"."""

    why: str


UNLABELED, SKIPPED = Missing("unlabeled"), Missing("skipped")
_DISPUTED, _REPEATED = Missing("disputed by annotators"), Missing("repeated by annotators")
_REJECTED, _MERGED = Missing("rejected"), Missing("merged with others of their text")
_ANSWERS = {"accept": None, "reject": _REJECTED, "ignore": Missing("ignored")}
_CHOICES = ("choices", "rating", "number")  # types of results that are labels
_MIN = {"id", "annotator", "annotation_id", "lead_time", "created_at", "updated_at", "agreement", "history"}
_PLAIN = object()  # in place of a label: the record is not of a tool


@dataclass(frozen=True)
class _Vote:
    """Whether a text has a label, from a question with two answers."""

    label: Any
    accepted: bool


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
        return SKIPPED
    return _ANSWERS[record["answer"]] if is_answered(record) else None


def is_task(record: Mapping[str, Any]) -> bool:
    """Whether a record is a task of Label Studio's full JSON."""
    return isinstance(record.get("data"), Mapping) and isinstance(_annotations(record), list)


def of_task(record: Mapping[str, Any], read: Callable[[list[Any]], Any]) -> Any:
    """What `read` makes of the results of a task's annotations, which must agree; ground truth overrules others."""
    every = [one for one in _annotations(record) if isinstance(one, Mapping)]
    done = [one for one in every if state(one) is None and isinstance(one.get("result"), list)]
    done = [one for one in done if one.get("ground_truth") is True] or done
    return agreed([read(one["result"]) for one in done]) if done or not every else SKIPPED


def agreed(values: Sequence[Any]) -> Any:
    """The value that all annotators gave; `Missing` if they disagree or there is none."""
    if not values:
        return UNLABELED
    return values[0] if all(value == values[0] for value in values) else _DISPUTED


def subject(record: Any, text: str) -> Hashable:
    """What several records may be about, one for each annotator or question; None if records are independent."""
    if not isinstance(record, Mapping) or not ("annotation_id" in record or is_answered(record)):
        return None
    name = "id" if "annotation_id" in record else "_input_hash"
    about = record.get(name, record.get(text))
    return about if isinstance(about, str | int) else None


def settle(values: list[Any], subjects: Sequence[Hashable]) -> None:
    """Keep one of the values about a subject if they agree; put `Missing` in place of all others."""
    for group in _groups(values, subjects):
        value = agreed([values[place] for place in group])
        for place in group:
            values[place] = value if value is _DISPUTED or place == group[0] else _REPEATED


def _groups(values: Sequence[Any], subjects: Sequence[Hashable]) -> list[list[int]]:
    """The places of the values about each subject."""
    places: dict[Hashable, list[int]] = defaultdict(list)
    for place, about in enumerate(subjects):
        if about is not None and not isinstance(values[place], Missing):
            places[about].append(place)
    return list(places.values())


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
        if any(isinstance(row, dict) and self.label in row for row in rows):
            without = {self.label: None}
            rows = [row | without if isinstance(row, dict) and self.label not in row else row for row in rows]
        subjects = [subject(record, self.text) for record in records]
        if any(about is not None for about in subjects):
            values = [row.get(self.label) if isinstance(row, dict) else None for row in rows]
            values = [UNLABELED if value is None else value for value in values]
            remarks += self._count_votes(values, subjects)
            settle(values, subjects)
            pairs = zip(rows, values, strict=True)
            rows = [{**row, self.label: value} if isinstance(row, dict) else row for row, value in pairs]
        return rows, remarks

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
        return record if value is _PLAIN else {**record, self.label: value}

    def _value(self, record: dict[str, Any], column: str, where: str) -> Any:
        value, missing = record.get(column), state(record)
        if is_answered(record) and missing in (None, _REJECTED) and isinstance(value, str | int):
            return _Vote(value, missing is None)
        if missing is not None:
            return missing
        if isinstance(record.get("accept"), list) and (is_answered(record) or "options" in record):
            names = {one.get("id"): one.get("text") for one in record.get("options") or () if isinstance(one, Mapping)}
            return sorted(names.get(one, one) if isinstance(one, int) else one for one in record["accept"])
        if isinstance(value, Mapping) and isinstance(value.get("choices"), list):
            return sorted(value["choices"])
        if column in record:
            return _PLAIN if column == self.label else value
        if isinstance(cats := record.get("cats"), Mapping):
            return sorted(name for name, share in cats.items() if share > 0.5) if cats else UNLABELED
        if isinstance(every := record.get("annotations"), list) and all(isinstance(one, Mapping) for one in every):
            return of_users(every, lambda mine: sorted(_named(one, where) for one in mine))
        return _PLAIN

    def _chosen(self, result: list[Any], where: str) -> Any:
        """The choices of one annotator, sorted, or a number."""
        made = [one for one in result if isinstance(one, Mapping) and one.get("type") in _CHOICES]
        names = {str(one.get("from_name")) for one in made}
        if self.label not in names and len(names) > 1:
            raise InputError(
                f"{where}: choices of {listed(sorted(names))}. Set classification.label_column to one of them."
            )
        made = [one for one in made if self.label not in names or one.get("from_name") == self.label]
        values = [one["value"].get(one["type"]) for one in made if isinstance(one.get("value"), Mapping)]
        if values and not isinstance(values[0], list):
            return values[0]
        return sorted(name for value in values for name in value)

    def _count_votes(self, values: list[Any], subjects: Sequence[Hashable]) -> list[str]:
        """Labels in place of votes, and a remark of texts that were not asked about every label."""
        votes = [about if isinstance(one, _Vote) else None for one, about in zip(values, subjects, strict=True)]
        groups, names = _groups(values, votes), {one.label for one in values if isinstance(one, _Vote)}
        asked = [len({values[place].label for place in group}) for group in groups]
        for group in groups:
            accepted = {values[place].label for place in group if values[place].accepted}
            rejected = {values[place].label for place in group if not values[place].accepted}
            disputed = accepted & rejected or (len(accepted) > 1 and not self.several)
            first = next((place for place in group if values[place].accepted), group[0])
            for place in group:
                spare = _MERGED if self.several else _REPEATED if values[place].accepted else _REJECTED
                values[place] = _DISPUTED if disputed else spare
            if not disputed and (self.several or accepted):
                values[first] = sorted(accepted) if self.several else accepted.pop()
        few = sum(count < len(names) for count in asked)
        if not (self.several and few):
            return []
        return [f"{few:,} of {len(groups):,} texts were not asked about every label; other labels count as absent"]


def of_users(annotations: list[Any], read: Callable[[list[Any]], Any]) -> Any:
    """What `read` makes of the annotations of each user of Doccano, who must agree."""
    users: dict[Any, list[Any]] = defaultdict(list)
    for one in annotations:
        users[one.get("user")].append(one)
    return agreed([read(mine) for mine in users.values()])


def _named(annotation: Mapping[str, Any], where: str) -> str:
    if not isinstance(label := annotation.get("label"), str):
        raise InputError(f"{where}: label {shown(label)} is an id of Doccano. Export labels by their names.")
    return label
