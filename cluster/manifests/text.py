"""Readable YAML, and parts of shell scripts that carry arbitrary text safely."""

import re
from typing import Any

import yaml


def as_yaml(documents: list[dict[str, Any]], header: str) -> str:
    """The documents of one file, below `header` as comment lines."""
    text = yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
    return f"{as_comment(header.strip())}\n{text}"


def as_comment(text: str) -> str:
    """`text` as comment lines of YAML or of a shell script; every line separator of either starts a new comment."""
    return "\n".join(f"# {line}".rstrip() for line in text.splitlines())


def here_document(command: str, text: str) -> str:
    """Shell lines that pass `text` to the standard input of `command`, unchanged but for line breaks at its end."""
    lines = text.rstrip("\n")
    end = "CONFIG"
    while end in lines.split("\n"):
        end += "_"
    return f"{command} <<'{end}'\n{lines}\n{end}"


class _Dumper(yaml.SafeDumper):
    """Without anchors, which people find hard to read."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


# PyYAML leaves 1e3 and 0o17 plain, which are numbers in the YAML 1.2 of `kubectl`.
_LIKE_A_NUMBER = re.compile(r"[-+.]*[0-9]")


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    lines = text.split("\n")
    if not all(line.isprintable() for line in lines):
        style = '"'  # the only one that has escapes: YAML reads a bare \x85 as the end of a line
    elif len(lines) > 1:
        style = "|"
    else:
        style = "'" if _LIKE_A_NUMBER.match(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
