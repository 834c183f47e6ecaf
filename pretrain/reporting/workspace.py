"""The panels of runs as a W&B workspace: written as JSON, and saved to W&B if a key is set.

The only module that uses `wandb_workspaces`.
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
from urllib.parse import urlsplit

from pydantic import TypeAdapter

from pretrain.common.errors import InputError
from pretrain.common.files import write_json
from pretrain.reporting.panels import GENERAL_TEXT_PREFIX, Panel, panels_for
from pretrain.reporting.runs import RunRecords
from pretrain.reporting.subjects import differing_settings
from pretrain.tracking.events import EVENTS
from pretrain.tracking.mirror import MAX_NAME_LENGTH, MAX_RANK_SUFFIX, wandb_entity, wandb_mode, wandb_names
from pretrain.tracking.rows import PROBE_STEP

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Workspace

_STEP = "train/global_step"


def write(runs: Sequence[RunRecords], path: Path) -> str:
    """Write the workspace to `path` and, if a W&B key is set, save it to W&B; return a message.

    `path` stores the workspace's URL, so saving again replaces it in W&B. The file is written even if W&B fails. Raises
    `InputError` if `path` is another file.
    """
    os.environ["WANDB_SILENT"] = "true"  # otherwise W&B prints its messages, too
    url = _read_url(path)
    message = f"{path}: the W&B workspace; set a W&B key to save it to W&B (WANDB_API_KEY or `wandb login`)"
    workspace = make(runs, "")
    if _is_online(runs[0]):
        try:
            workspace = make(runs, wandb_entity())
            url = _save(workspace, url)
            message = f"{url}\n{path}: the same workspace as JSON"
        except Exception as error:
            message = f"{path}: the W&B workspace; saving it to W&B failed ({_without_secrets(error)})"
    write_json(path, {"url": url, "workspace": as_data(workspace)})
    return message


def make(runs: Sequence[RunRecords], entity: str) -> Workspace:
    """Create the workspace of `runs`: their panels under W&B's metric names, filtered to these runs."""
    from wandb_workspaces import workspaces

    several = len(runs) > 1
    groups = list(dict.fromkeys(_tracking(run).get("group") or run.name for run in runs))
    name = ", ".join(groups[:3]) if several else runs[0].name
    return workspaces.Workspace(
        # The library rejects emojis, and mistakes characters such as < for emojis.
        name=re.sub(r"[^\w .,:()/-]", "", f"{name} report"),
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


def _read_url(path: Path) -> str:
    """Read the URL that `write` stored; "" if there is none. Raises `InputError` if `path` is another file."""
    try:
        return json.loads(path.read_bytes())["url"] if path.is_file() else ""
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{path}: not a W&B workspace. Remove the file, or choose another name.") from None


def _tracking(run: RunRecords) -> dict[str, str]:
    """Return the `tracking` section of the run's config."""
    return run.config.get("tracking") or {}


def _grouping(runs: Sequence[RunRecords]) -> list[Any]:
    """Return the settings by which W&B groups fine-tunings, to average only over seeds; [] for a single subject."""
    from wandb_workspaces import expr

    subjects = list(dict.fromkeys(run.subject for run in runs if run.subject))
    if len(subjects) < 2:
        return []
    names = [subject.data_key for subject in subjects]
    names += [name for name in ("start_from", "random_weights") if len({run.config.get(name) for run in runs}) > 1]
    return [expr.Config(name) for name in dict.fromkeys([*names, *differing_settings(subjects)])]


def _query(run: RunRecords) -> str:
    """Return a search expression for the run in W&B: its run_id, or the one that `Tracker` generates."""
    run_id = _tracking(run).get("run_id")
    return f"^{re.escape(run_id)}$" if run_id else f"^{re.escape(run.name[:MAX_NAME_LENGTH])}-[0-9a-f]{{8}}$"


def _literal(strings: list[str]) -> str:
    """Format a list for a filter, with < and > escaped: the filter's parser changes < to <= even inside quotes."""
    return repr(strings).replace("<", r"\x3c").replace(">", r"\x3e")


def _sections(runs: Sequence[RunRecords]) -> list[Any]:
    from wandb_workspaces.reports.v2 import LinePlot
    from wandb_workspaces.workspaces import Section, SectionLayoutSettings

    by_name: dict[str, list[Any]] = {}
    for panel in panels_for(record for run in runs for record in run.records):
        by_name.setdefault(panel.section, []).extend(_plots(panel, runs))
    events: list[Any] = [name for kind in EVENTS for name in wandb_names({"event": kind}) if name.endswith(kind)]
    by_name["Events"] = [LinePlot(title="Events", x=_STEP, y=events, title_x="step")]
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
    x = PROBE_STEP if panel.kind == "probes" else _STEP
    plots = [LinePlot(title=panel.title, x=x, y=names, title_x="step", title_y=panel.unit or None)]
    if panel.kind == "scores":
        main_metrics = dict.fromkeys(
            name
            for metric in dict.fromkeys(run.main_metric for run in runs if run.main_metric)
            for name in _names(replace(panel, metrics=(metric,)), runs)[:1]  # empty if the metric never had a value
        )
        plots += [BarPlot(title=f"{name.partition('/')[2]}, last", metrics=[name]) for name in main_metrics]
    return plots


def _names(panel: Panel, runs: Sequence[RunRecords]) -> list[Any]:
    """Return the panel's metrics under their W&B names, except rank indices, which have no unit in common with them."""
    names: dict[str, None] = {}
    for metric in (*panel.metrics, *(GENERAL_TEXT_PREFIX + metric for metric in panel.metrics)):
        for records in itertools.chain.from_iterable((run.training, run.evaluations, run.probes) for run in runs):
            record = next((record for record in reversed(records) if record.get(metric) is not None), {})
            if record:
                fields = {key: record[key] for key in (metric, "split") if key in record}
                names.update(dict.fromkeys(wandb_names(fields)))
    return [name for name in names if not name.endswith(f"/{MAX_RANK_SUFFIX}")]


def _is_online(run: RunRecords) -> bool:
    """Return whether this machine sends the run's records to W&B; offline runs have no workspace in W&B."""
    mode = _tracking(run).get("wandb", "auto")
    return mode in ("auto", "online") and wandb_mode("auto") == "online"


def _save(workspace: Workspace, url: str) -> str:
    """Save to W&B, replacing the workspace at `url` if it belongs to the same project; return the URL."""
    if urlsplit(url).path.strip("/") != f"{workspace.entity}/{workspace.project}":
        return workspace.save().url
    saved = type(workspace).from_url(url)
    for name in ("name", "sections", "settings", "runset_settings"):
        setattr(saved, name, getattr(workspace, name))
    return saved.save().url


def as_data(workspace: Workspace) -> dict[str, Any]:
    """Return a workspace as JSON data, with the field names of `wandb_workspaces`."""
    return TypeAdapter(type(workspace)).dump_python(workspace, mode="json", exclude_none=True)


def _without_secrets(error: Exception) -> str:
    """Return the first line of the error, without anything that could be a key."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: " + re.sub(r"[\w-]{32,}", "...", lines[0])[:200]
