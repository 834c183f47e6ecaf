"""The two models in the checkpoint of an ELECTRA run, apart: `pretrain.model.electra.ElectraModel` has them in one."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

GENERATOR_SUFFIX = "-generator"  # of the folder that the generator is exported to
_GENERATOR = "generator."
_TABLES = ("embeddings.word", "embeddings.position")


def discriminator_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of the model itself, with whole embeddings. Those of any other run are returned as they are."""
    own = {name: tensor for name, tensor in state.items() if not name.startswith(_GENERATOR)}
    for name in _TABLES:
        base = state.get(_GENERATOR + name)
        if base is not None:  # disentangled: the discriminator has the difference
            own[name] = own[name] + base
    return own


def generator_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of the generator as a `pretrain.model.heads.PretrainingModel`, shared embeddings included."""
    own = {name.removeprefix(_GENERATOR): tensor for name, tensor in state.items() if name.startswith(_GENERATOR)}
    shared = {
        name: tensor
        for name, tensor in state.items()
        if name.startswith("embeddings.") and not name.startswith("embeddings.project_")
    }
    return own if _TABLES[0] in own else {**shared, **own}
