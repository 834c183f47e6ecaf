"""YAML that people read: keys in their order, texts of several lines as blocks."""

from __future__ import annotations

from typing import Any

import yaml


def as_yaml(documents: list[dict[str, Any]], header: str) -> str:
    """The documents of one file below `header`, lines that become comments."""
    comment = "".join(f"# {line}".rstrip() + "\n" for line in header.strip().splitlines())
    return comment + yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


class _Dumper(yaml.SafeDumper):
    """Without anchors, which `kubectl` reads but people do not."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)
