"""NNX: blocks read from modules, and a module that evaluates their contraction."""

from jaxfold._layers._initializers import isometry as isometry
from jaxfold.nnx._block_paths import block_paths as block_paths
from jaxfold.nnx._contracted_dense import ContractedDense as ContractedDense
from jaxfold.nnx._read import block as block
from jaxfold.nnx._read import contract as contract
