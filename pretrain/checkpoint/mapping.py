"""The mapping of each tensor of a file to one of our parameters, and a table of it for the user."""

import itertools
import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import NamedTuple

from pretrain.common.wording import counted

LEFT_OUT = "left out: "
_MAX_NAMES = 2  # maximum number of names to list for tensors that are left out and match no pattern


class MappedTensor(NamedTuple):
    """The mapping of one tensor of a file."""

    name: str
    shape: tuple[int, ...]
    target: str  # our parameter that it fills, as `layouts` names them, or `LEFT_OUT` and the reason

    @property
    def is_read(self) -> bool:
        """Return whether the tensor fills a parameter."""
        return not self.target.startswith(LEFT_OUT)


def mapping_table(tensors: Iterable[MappedTensor]) -> str:
    """Return one line for each module that tensors fill, then one line for each reason to leave tensors out."""
    targets: dict[str, list[str]] = defaultdict(list)  # module -> names of the tensors that fill it
    reasons: dict[str, list[str]] = defaultdict(list)  # reason -> names of the tensors that are left out
    for tensor in tensors:
        if tensor.is_read:
            targets[re.sub(r"^(layers|embeddings|heads?\.[a-z]+).*", r"\1.*", tensor.target)].append(tensor.name)
        else:
            reasons[tensor.target].append(tensor.name)
    rows = [(_pattern(names), counted(len(names), "tensor"), target) for target, names in targets.items()]
    name_width, count_width = (max((len(row[column]) for row in rows), default=0) for column in (0, 1))
    lines = [f"{pattern:<{name_width}}  {count:>{count_width}} -> {target}" for pattern, count, target in rows]
    read_names = [name for names in targets.values() for name in names]
    for reason, names in reasons.items():
        lines.append(f"{_summary(names, read_names)}: {counted(len(names), 'tensor')} {reason}")
    return "\n".join(lines)


def _summary(names: list[str], read_names: Collection[str]) -> str:
    """Return the pattern of `names` if none of the `read_names` matches it, otherwise the first two of `names`."""
    pattern = _pattern(names)
    if len(names) == 1 or not any(name.startswith(pattern.rstrip("*")) for name in read_names):
        return pattern
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"{', '.join(names[:_MAX_NAMES])}{more}"


def _pattern(names: list[str]) -> str:
    """Return the common prefix of all names, up to a separator, followed by a star; a single name is returned as is."""
    if len(names) == 1:
        return names[0]
    parts = zip(*(re.split(r"(?<=[./])", name) for name in names), strict=False)
    common_parts = itertools.takewhile(lambda column: len(set(column)) == 1, parts)
    return "".join(column[0] for column in common_parts) + "*"
