"""The chunks of a model while it trains: how parameters enter and leave near, and where their gradients go."""

from pstar.chunks.activation_offload import LEAST_BYTES, Offload
from pstar.chunks.assemble import assemble
from pstar.chunks.hooks import Hooks
from pstar.chunks.parameters import TensorState
from pstar.chunks.step import Chunks

__all__ = ["LEAST_BYTES", "Chunks", "Hooks", "Offload", "TensorState", "assemble"]
