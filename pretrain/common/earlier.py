"""Settings of earlier versions: those that left, and those that have another name now."""

from collections.abc import Mapping
from typing import Any, NamedTuple

_LEFT_IN, _READ_UNTIL = "0.2", "0.3"

LEFT_AFTER: dict[str, dict[str, dict[str, Any]]] = {
    "02149e8": {
        "model": {"attention_gate": "none", "bigram_rows": 0, "norm_before_output": False, "zero_output_init": False},
        "masking": {"shifted_targets": False, "span_longest": 10, "span_probability": 0.2, "z_loss": 0.0},
        "phases": {"causal_share": 0.0},
        "optimizer": {"cautious_weight_decay": False},
        "engine": {"flash_attention": "torch", "fp8": False},
    },
    "acc156f": {
        "model": {"qk_norm": False},
        "optimizer": {"muon_momentum": 0.95, "normalised": False},
        "checkpoint": {"background": True},
        "guard": {"spike_share": 0.2},
        "tracking": {"straggler_factor": 1.5},
        "evaluation": {"attention": True},
        "vocabulary": {"training_bytes": 1 << 30},
        "language": {"sample_characters": 500},
        "near_duplicates": {"ngram": 3, "bands": 32, "rows": 4},
        "contamination": {"ngram": 13, "shortest": 8},
        "classification": {"train_examples_seed": 0, "containment_pairs": 60_000},
        "training": {"reinitialised_layers": 0, "reinitialise_pooler": False},
    },
    "2ccec66": {
        "adaptation": {"freeze_embeddings": False, "freeze_layers": 0},
        "checkpoint": {"retry_seconds": 60.0},
        "classification": {"label_names": [], "overlap": None},
        "contamination": {"drop": True},
        "distillation": {"temperature": 2.0, "soft_weight": 5.0, "mlm_weight": 2.0, "cosine_weight": 1.0},
        "electra": {"mlm_weight": 1.0, "temperature": 1.0},
        "engine": {"max_bad_steps": 5, "static_shapes": False},
        "entities": {"decoding": "viterbi", "overlap": 64},
        "guard": {"max_rollbacks": 3},
        "pairs": {"random_next_share": 0.5},
        "phases": {"decay_power": 0.5},
        "quality": {"skip": []},
        "questions": {"n_best": 20},
        "training": {"decay": "linear", "output_layer": "fitted"},
    },
}
"""The last commit that had the settings -> section -> name -> the value without effect, which is still read."""

INSTEAD = {
    "freeze_embeddings": "set adaptation.layer_decay below 1 for lower rates of lower layers, or remove the line",
    "freeze_layers": "set adaptation.layer_decay below 1 for lower rates of lower layers, or remove the line",
    "label_names": "give the files the names in place of the numbers",
    "skip": "name the rules in rules without it, or set a threshold that all texts keep",
}
"""Setting that left -> what to do, where more can be said than to remove the line."""

IGNORED = {
    "model": {"scaled_output_init": "model.family: modernbert scales them"},
    "scheduling": {
        "cluster": "give --on CLUSTER with --dry-run",
        "data_stall_seconds": "the limit is ten times hang_seconds",
    },
    "tracking": {"tags": "set the environment variable WANDB_TAGS"},
    "adaptation": {
        "finetuning": "give --finetune CONFIG to adapt",
        "finetuning_seeds": "give --seeds N to adapt",
    },
}
"""Section -> setting that left and did not change what a run learns -> what to do instead. Every value is read, with a
remark."""

LEFT_PRESETS = ("few-sample",)  # of `training.preset`, after acc156f


class Renamed(NamedTuple):
    """The name that a setting has now, and its value there for each value of the old one; {} for the same values."""

    name: str
    values: Mapping[Any, Any] = {}

    def value(self, old: Any) -> Any:
        """The value now; None if `old` is none of the setting's."""
        if not self.values:
            return old
        return self.values.get(old) if isinstance(old, (bool, str)) else None


RENAMED: dict[str, dict[str, Renamed]] = {
    "pairs": {"next_sentence": Renamed("objective", {True: "nsp", False: "none"})},
    "masking": {"whole_word": Renamed("scheme", {True: "whole_words", False: "tokens"})},
    "model": {"attention_init": Renamed("attention_init", {"neighbours": "neighbors"})},
    "optimizer": {"muon_rate": Renamed("muon_lr_scale")},
    "adaptation": {"general": Renamed("replay_corpus")},
    "distillation": {"initialise": Renamed("initialize")},
    "sources": {"licence": Renamed("license")},  # and those of a corpus's manifest and card
    "progress": {"passed_over": Renamed("skipped")},  # of a checkpoint
}
"""Section -> old name -> new one. Both may be given, as in recorded configs: then the new one decides."""


MOVED = {
    "masking": {"final_probability": "phases.N.final_masking_probability"},
    "pretraining": {"averaging": "phases.N.averaged_share"},
}
"""Settings that spread over a whole run, and are a phase's own now."""


class LeftError(ValueError):
    """A setting that left, with an effect, by its name within its section."""

    def __init__(self, name: str, last_commit: str = "02149e8") -> None:
        advice = INSTEAD.get(name, "remove the line")
        super().__init__(f"{name} left in {_LEFT_IN}; the last commit that had it is {last_commit}; {advice}")


def as_now(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a section with today's names. Raises `LeftError` if one had an effect that left."""
    now = {name: value for name, value in values.items() if name not in IGNORED.get(section, {})}
    for commit, left in LEFT_AFTER.items():
        for name, without_effect in left.get(section, {}).items():
            if now.pop(name, without_effect) != without_effect:
                raise LeftError(name, commit)
    for old, new in RENAMED.get(section, {}).items():
        if (value := new.value(now.get(old))) is not None:
            del now[old]
            if now.get(new.name) in (None, ""):
                now[new.name] = value
    return _with_own_settings(now) if section == "pretraining" else now


def _with_own_settings(values: dict[str, Any]) -> dict[str, Any]:
    """The values of a pretraining, where each phase has its part of what spread over the whole run."""
    masking, averaging, phases = (values.get(name) for name in ("masking", "averaging", "phases"))
    masking, averaging = (one if isinstance(one, Mapping) else {} for one in (masking, averaging))
    final, share = masking.get("final_probability", 0), averaging.get("share", 0)
    try:
        own = [dict(phase) for phase in phases or ()]
        total = sum(phase["steps"] for phase in own)
        left = max(1, round(share * total)) if share else 0  # steps that are averaged, the last ones
        before = total
        for phase in reversed(own):
            steps, averaged = phase["steps"], min(left, phase["steps"])
            before, left = before - steps, left - averaged
            if averaged:
                phase["averaged_share"] = averaged / steps
            if final and not phase.get("masking_probability"):
                ends = (before / total, (before + steps) / total)
                first, last = (masking.get("probability", 0.15) * (1 - at) + final * at for at in ends)
                phase.update(masking_probability=first, final_masking_probability=last)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return values  # not valid; the check of the settings says where
    now = {name: value for name, value in values.items() if name != "averaging"}
    if masking:
        now["masking"] = {name: value for name, value in masking.items() if name != "final_probability"}
    return {**now, "phases": tuple(own)} if final or share else now


def as_before(values: Mapping[str, Any]) -> dict[str, Any]:
    """Sections with the names that earlier versions had: for a digest of them that does not change with a name."""
    before = dict(values)
    for section in RENAMED.keys() & values.keys():
        before[section] = dict(values[section])
        for old, new in RENAMED[section].items():
            if new.name in before[section] and (not new.values or new.name == old):
                value = before[section].pop(new.name)
                before[section][old] = next((was for was, now in new.values.items() if now == value), value)
    return before


def as_trained(config: Mapping[str, Any]) -> dict[str, Any]:
    """A saved model's recorded config without what left since: how it was trained has no effect on its use."""
    gone: dict[str, set[str]] = {}
    for left in LEFT_AFTER.values():
        for section, names in left.items():
            gone.setdefault(section, set()).update(names)
    now = {
        section: {name: value for name, value in values.items() if name not in gone.get(section, ())}
        if isinstance(values, Mapping)
        else values
        for section, values in config.items()
    }
    if now.get("training", {}).get("preset") in LEFT_PRESETS:
        now["training"]["preset"] = "auto"
    return now


def name_now(section: str, name: Any) -> Any:
    """The name that a setting has now, if its values are the same; `name` if it is no old one."""
    renamed = RENAMED.get(section, {}).get(name)
    return name if renamed is None or renamed.values else renamed.name


def remark(section: str, path: tuple[Any, ...], value: Any) -> str:
    """What to write in place of the old name that `path` ends with; "" if it is no old one."""
    if place := MOVED.get(section, {}).get(path[-1]):
        return f"{'.'.join(map(str, path))} is now {place}; the old name is read until {_READ_UNTIL}"
    if instead := IGNORED.get(section, {}).get(path[-1]):
        return f"{'.'.join(map(str, path))} left in {_LEFT_IN}, and has no effect; {instead}"
    renamed = RENAMED.get(section, {}).get(path[-1])
    now = renamed.value(value) if renamed else None
    if renamed is None or now is None:
        return ""
    old, new = (".".join(map(str, (*path[:-1], name))) for name in (path[-1], renamed.name))
    if renamed.values:
        old, new = f"{old}: {str(value).lower()}", f"{new}: {now}"
    return f"{old} is now {new}; the old name is read until {_READ_UNTIL}"
