"""Exact contraction of Dense-norm-Dense blocks in JAX."""

from importlib.metadata import version as _version

from jaxfold._block._apply import apply as apply
from jaxfold._block._block import Block as Block
from jaxfold._block._contract import contract as contract
from jaxfold._block._contraction import Contraction as Contraction
from jaxfold._block._convert import convert as convert
from jaxfold._block._plan import Cost as Cost
from jaxfold._block._plan import Plan as Plan
from jaxfold._block._plan import plan as plan
from jaxfold._block._traced import contract_traced as contract_traced
from jaxfold._block._verify import Certificate as Certificate
from jaxfold._block._verify import Errors as Errors
from jaxfold._block._verify import verify as verify
from jaxfold._errors import CoefficientError as CoefficientError
from jaxfold._errors import ConcretenessError as ConcretenessError
from jaxfold._errors import DtypeError as DtypeError
from jaxfold._errors import GrowthError as GrowthError
from jaxfold._errors import JaxfoldError as JaxfoldError
from jaxfold._errors import NotFoldedError as NotFoldedError
from jaxfold._errors import OptionError as OptionError
from jaxfold._errors import ShapeError as ShapeError
from jaxfold._errors import StructureError as StructureError
from jaxfold._fold._certificate import FoldCertificate as FoldCertificate
from jaxfold._fold._fold import Folded as Folded
from jaxfold._fold._fold import fold as fold
from jaxfold._tree._block_paths import BlockPaths as BlockPaths
from jaxfold._tree._contract_tree import contract_tree as contract_tree
from jaxfold._tree._fold_report import FoldReport as FoldReport
from jaxfold._tree._fold_report import FoldRow as FoldRow

__version__ = _version("jaxfold")
