"""Linen: blocks read from modules, and a module that evaluates their contraction."""

from jaxfold._layers._initializers import isometry as isometry
from jaxfold.linen._block_paths import block_paths as block_paths
from jaxfold.linen._contracted_dense import ContractedDense as ContractedDense
from jaxfold.linen._read import block as block
from jaxfold.linen._read import contract as contract
