"""The norm after the last layer of a pre-norm model, which BERT lacks.

Shape letters: R query positions, H hidden width.
"""

from torch import Tensor, nn

from pretrain.config import ModelConfig
from pretrain.model.block import BlockFunctions, apply_norm, norm_weights
from pretrain.model.compile import maybe_compile
from pretrain.model.initialization import create_parameters
from pretrain.model.parameters import final_parameters


class FinalNorm(nn.Module):
    """The norm of the last hidden states."""

    def __init__(self, shape: ModelConfig, compile: bool) -> None:
        super().__init__()
        self.functions, self.apply_norm = BlockFunctions.of(shape), maybe_compile(apply_norm, compile, ("M",))
        create_parameters(self, final_parameters(shape), shape.init_std)

    def forward(self, hidden_RH: Tensor) -> Tensor:
        """[R, H] -> [R, H]"""
        return self.apply_norm(hidden_RH, norm_weights(self, "norm", self.functions), self.functions)
