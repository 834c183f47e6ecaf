"""The dashboard as a W&B workspace: kept as JSON, and saved to W&B where there is a key.

The only place that knows `wandb_workspaces`.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.common.errors import InputError
from pretrain.common.files import atomic_open
from pretrain.reporting.dashboard.panels import EVENTS, Panel, panels_for
from pretrain.reporting.dashboard.runs import RunRecords
from pretrain.reporting.dashboard.subjects import by_subject, differing
from pretrain.tracking.mirror import wandb_entity, wandb_mode, wandb_names

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Workspace

_STEP = "train/global_step"
_MOST_RANKS = 32  # with a curve each


def write(runs: Sequence[RunRecords], path: Path) -> str:
    """Write the workspace to `path` and, where there is a W&B key, save it to W&B too; returns what was done.

    Saved again, it replaces the one of before, whose id `path` keeps. Where W&B does not take it, the file is
    there all the same.
    """
    os.environ["WANDB_SILENT"] = "true"  # its own lines would stand between ours
    before = read(path) if path.is_file() else None
    said = f"{path}: the W&B workspace; it is saved to W&B where a key is set (WANDB_API_KEY or `wandb login`)"
    workspace = make(runs, "")
    if _is_online(runs[0]):
        try:
            workspace = make(runs, wandb_entity())
            _continue(workspace, before)
            workspace.save()
            said = f"{workspace.url}\n{path}: the same as JSON"
        except Exception as error:
            said = f"{path}: the W&B workspace; W&B did not take it ({_without_secrets(error)})"
    with atomic_open(path, "w") as file:
        file.write(json.dumps(_as_data(workspace), indent=1) + "\n")
    return said


def make(runs: Sequence[RunRecords], entity: str) -> Workspace:
    """The workspace of `runs`: their panels, in W&B's names, and no other runs."""
    from wandb_workspaces import workspaces

    several = len(runs) > 1
    groups = list(dict.fromkeys(_tracking(run).get("group") or run.name for run in runs))
    name = ", ".join(groups[:3]) if several else runs[0].name
    return workspaces.Workspace(
        # The library refuses emojis, and takes signs such as < for some.
        name=re.sub(r"[^\w .,:()/-]", "", f"{name} dashboard"),
        entity=entity,
        project=_tracking(runs[0]).get("project") or "bertrain",
        auto_generate_panels=False,
        sections=_sections(runs),
        settings=workspaces.WorkspaceSettings(x_axis=_STEP, max_runs=max(10, len(runs))),
        runset_settings=workspaces.RunsetSettings(
            query="" if several else _query(runs[0]),
            regex_query=not several,
            filters=f'Metric("Group") in {_literal(groups)}',
            groupby=_grouping(runs),
        ),
    )


def read(path: Path) -> Workspace:
    """The workspace that `write` kept at `path`; `InputError` where the file is something else."""
    from wandb_workspaces.workspaces import Workspace, internal

    try:
        return Workspace._from_model(internal.View.model_validate_json(path.read_bytes()))
    except ValueError as error:
        raise InputError(
            f"{path}: is no W&B workspace ({type(error).__name__}). Remove it, or name another file."
        ) from None


def _tracking(run: RunRecords) -> dict[str, str]:
    """The run's settings of tracking, as its config has them."""
    return run.config.get("tracking") or {}


def _grouping(runs: Sequence[RunRecords]) -> list[Any]:
    """The settings that tell what fine-tunings learnt, so that W&B averages seeds alone; [] where all learnt the same."""
    from wandb_workspaces import expr

    subjects = list(by_subject((run.subject, run) for run in runs))
    if len(subjects) < 2:
        return []
    names = [one.data_key for one in subjects]
    names += [name for name in ("start_from", "random_weights") if len({run.config.get(name) for run in runs}) > 1]
    return [expr.Config(name) for name in dict.fromkeys([*names, *differing(subjects)])]


def _query(run: RunRecords) -> str:
    """What finds the run in W&B: the id that was given to it, or its name and eight digits."""
    given = _tracking(run).get("run_id")
    return f"^{re.escape(given)}$" if given else f"^{re.escape(run.name)}-[0-9a-f]{{8}}$"


def _literal(texts: list[str]) -> str:
    """`texts` for a filter, whose parser would make <= of < within quotes too."""
    return repr(texts).replace("<", r"\x3c").replace(">", r"\x3e")


def _sections(runs: Sequence[RunRecords]) -> list[Any]:
    from wandb_workspaces.workspaces import Section, SectionLayoutSettings

    by_name: dict[str, list[Any]] = {}
    for panel in panels_for(record for run in runs for record in run.records):
        by_name.setdefault(panel.section, []).extend(_plots(panel, runs))
    by_name["Events"] = _event_panels(runs)
    return [
        Section(
            name=name,
            panels=panels,
            is_open=True,
            layout_settings=SectionLayoutSettings(columns=3, rows=-(-len(panels) // 3)),
        )
        for name, panels in by_name.items()
    ]


def _plots(panel: Panel, runs: Sequence[RunRecords]) -> list[Any]:
    from wandb_workspaces.reports.v2 import BarPlot, LinePlot

    names = _names(panel, runs)
    plots = [LinePlot(title=panel.title, x=_STEP, y=names, title_x="step", title_y=panel.unit or None)]
    if panel.kind == "scores":
        first = dict.fromkeys(
            name
            for metric in dict.fromkeys(run.score for run in runs if run.score)
            for name in _names(replace(panel, metrics=(metric,)), runs)[:1]  # none where it never had a value
        )
        plots += [BarPlot(title=f"{name.partition('/')[2]}, last", metrics=[name]) for name in first]
    return plots


def _names(panel: Panel, runs: Sequence[RunRecords]) -> list[Any]:
    """The panel's metrics under the names that the runs' records have in W&B."""
    names: dict[str, None] = {}
    for metric in panel.metrics:
        for records in itertools.chain.from_iterable((run.training, run.evaluations) for run in runs):
            last = next((record for record in reversed(records) if record.get(metric) is not None), {})
            value = last.get(metric)
            one = {metric: value[:_MOST_RANKS] if isinstance(value, list) else value}
            if last:
                names.update(dict.fromkeys(wandb_names({**one, "split": ""} if "split" in last else one)))
    return list(names)


def _event_panels(runs: Sequence[RunRecords]) -> list[Any]:
    """Marks over the steps for what happens, and a table of what has."""
    from wandb_workspaces.reports.v2 import LinePlot, MarkdownPanel

    names: list[Any] = [name for kind in EVENTS for name in wandb_names({"event": kind}) if name.endswith(kind)]
    panels: list[Any] = [LinePlot(title="Events", x=_STEP, y=names, title_x="step")]
    events = [(run, event) for run in runs for event in run.events]
    if events:
        rows = [
            f"| {run.name} | {event['step']} | {_cell(event['event'])} | {_cell(event.get('message', ''))} |"
            for run, event in events
        ]
        table = "\n".join(["| run | step | event | |", "|---|---|---|---|", *rows])
        panels.append(MarkdownPanel(markdown=table))
    return panels


def _cell(text: object) -> str:
    """Text that ends neither its cell nor its row, and is no markup."""
    return re.sub(r"([\\`*_{}\[\]<>|#!])", r"\\\1", " ".join(str(text).split()))


def _is_online(run: RunRecords) -> bool:
    """Whether the run's own records go to W&B from here: what is offline or off has no workspace there."""
    asked = _tracking(run).get("wandb", "auto")
    return asked in ("auto", "online") and wandb_mode("auto") == "online"


def _continue(workspace: Workspace, before: Workspace | None) -> None:
    """Let `workspace` replace `before` when saved, if that was saved in the same project."""
    if before and (before.entity, before.project) == (workspace.entity, workspace.project):
        workspace._internal_name, workspace._internal_id = before._internal_name, before._internal_id


def _as_data(workspace: Workspace) -> dict[str, Any]:
    return workspace._to_model().model_dump(mode="json", by_alias=True, exclude_none=True)


def _without_secrets(error: Exception) -> str:
    """The first line of what went wrong, without anything that could be a key."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: " + re.sub(r"[\w-]{32,}", "...", lines[0])[:200]
