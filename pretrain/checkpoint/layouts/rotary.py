"""Reads and writes rotary frequencies in a config.json, as transformers 5 and 4 do (modeling_rope_utils.py)."""

from collections.abc import Mapping
from typing import Any


def read_base(parameters: Mapping[str, Any], where: str, default: float) -> float:
    """Read the base of plain rotary frequencies. Scaled or partial ones raise a ValueError that names the field.

    Args:
        parameters: transformers 5's rope_parameters: rope_theta, rope_type and the type's parameters.
        where: the name of `parameters`, for errors.
        default: the base if `parameters` has none.
    """
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise ValueError(f"{where}.rope_type is {kind!r}; only 'default' is supported")
    factor = parameters.get("partial_rotary_factor", 1.0)
    if factor != 1:
        raise ValueError(f"{where}.partial_rotary_factor is {factor!r}; only 1.0 is supported")
    base = parameters.get("rope_theta")
    return float(default if base is None else base)


def read_shared_base(config: Mapping[str, Any], default: float) -> float:
    """Read the base that all layers share, from rope_parameters or transformers 4's rope_theta."""
    scaling = config.get("rope_scaling")
    if scaling:
        read_base(scaling, "rope_scaling", default)
    old = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if config.get(key) is not None}
    return read_base({**old, **(config.get("rope_parameters") or {})}, "rope_parameters", default)


def write_shared_base(base: float) -> dict[str, Any]:
    """Return config.json's fields for a base that all layers share, for transformers 5 and 4."""
    return {"rope_parameters": write_base(base), "rope_theta": base}


def write_base(base: float) -> dict[str, Any]:
    """Return transformers 5's rope_parameters for plain rotary frequencies."""
    return {"rope_type": "default", "rope_theta": base}
