"""Stratified splits of a training set: held-out sets and folds of a cross-validation.

Splits depend on hashes of the strings, so they are equal in every run and for any order of the examples. Examples with
equal strings stay together. An example has one class, several (its labels, the types of its entities) or none.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Sequence

Classes = Sequence[Collection[str]]  # the classes of each example


def held_out(texts: Sequence[str], classes: Classes, count: int) -> list[bool]:
    """Return, for each example, whether it is held out: `count` distinct strings, stratified by class.

    At least one string of each class is not held out.
    """
    candidates: list[str] = []
    seen: set[str] = set()
    for text, text_classes in _sorted_by_class(texts, classes).items():
        if text_classes <= seen:  # another string of each of its classes is not held out
            candidates.append(text)
        seen |= text_classes
    count = min(count, len(candidates))
    # Choose `count` evenly spaced candidates: each one at which the quota rises.
    quota = [index * count // max(1, len(candidates)) for index in range(len(candidates) + 1)]
    chosen = {candidates[index] for index in range(len(candidates)) if quota[index + 1] > quota[index]}
    return [text in chosen for text in texts]


def folds(texts: Sequence[str], classes: Classes, count: int) -> list[int]:
    """Return the fold index of each example, from 0 to `count` - 1; every class is spread over all folds."""
    fold_of_text = {text: index % count for index, text in enumerate(_sorted_by_class(texts, classes))}
    return [fold_of_text[text] for text in texts]


def _sorted_by_class(texts: Sequence[str], classes: Classes) -> dict[str, set[str]]:
    """Return {distinct string: its classes}, sorted by the rarest class of the string (rare first), then by a hash."""
    groups: dict[str, set[str]] = {}
    for text, names in zip(texts, classes, strict=True):
        groups.setdefault(text, set()).update(names)
    counts = Counter(name for names in groups.values() for name in names)

    def sort_key(text: str) -> tuple[tuple[int, str], bytes]:
        rarest = min(((counts[name], name) for name in groups[text]), default=(0, ""))
        return rarest, hashlib.blake2b(text.encode(), digest_size=8).digest()

    return {text: groups[text] for text in sorted(groups, key=sort_key)}
