"""Completion scripts for `bertrain` and ./launch.sh, in bash and zsh: from shtab, with completers for our arguments."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from pretrain.common.commands import Parser
from pretrain.common.examples import CONFIGS, KINDS, examples

# {attribute or first word of the metavar of an argument: suffix of the shell function that completes it}. Other
# arguments are completed from their choices. Of functions with `_file` or `_dir` in their names, shtab expects paths.
_COMPLETERS = {
    **dict.fromkeys(("start_from", "RUN", "MODEL", "JOB", "RUN@STEP"), "dir_of_run"),
    **dict.fromkeys(("texts", "general", "FILE", "PATH"), "file"),
    "DIR": "dir",
    "CONFIG": "file_of_any",
    "--": "file_of_job",
    "example": "example",
}
_CONFIG_KINDS = {"prepare": "pretrain", "pretrain": "pretrain", "finetune": "finetune", "sweep": "finetune"}


class CompletionParser(Parser):
    """A parser whose arguments have the attribute `complete`, which tells shtab their shell completion function."""

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        action = super().add_argument(*names, **options)
        suffix = _COMPLETERS.get(action.dest) or _COMPLETERS.get(str(action.metavar).split(" ")[0])
        if suffix == "file_of_any":
            suffix = f"file_of_{_CONFIG_KINDS.get(self.prog.split(' ')[-1], 'any')}"
        if suffix:
            action.complete = dict.fromkeys(("bash", "zsh"), f"_bertrain_{suffix}")  # type: ignore[attr-defined]
        return action


def script(parser: Parser, shell: str) -> str:
    """Return the completion script for `shell`, bash or zsh."""
    import shtab

    parser.prog = "bertrain"
    # The last lines of shtab's zsh script are for a single command, and would do nothing if the script is sourced.
    base = shtab.complete(parser, shell).partition("\ntypeset -A opt_args\n")[0]
    if shell == "zsh":
        base = base.replace("#compdef bertrain", "#compdef bertrain launch.sh").replace('"(*):', '"*:')
        base = re.sub(r'^(  "\*?--[\w-]+)(\[.*\]:)', r"\1=\2", base, flags=re.MULTILINE)  # accepts --keep=all, too
    extension = Path(__file__).with_suffix(f".{shell}").read_text(encoding="utf-8")
    for kind in KINDS:
        names = [name for name, path in examples().items() if path.is_relative_to(CONFIGS / kind)]
        extension = extension.replace(kind.upper(), " ".join(names))
    return f"{base}\n{extension}".rstrip()
