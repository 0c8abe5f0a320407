"""Place, move, cost: three instruments for sharded JAX programs."""

from .checks import assert_no_full_copy as assert_no_full_copy
from .drawing import Drawing as Drawing
from .drawing import show as show
from .footprint import memory as memory
from .moves import Collective as Collective
from .moves import Collectives as Collectives
from .moves import UnparsedCollective as UnparsedCollective
from .moves import collectives as collectives
from .moves import diff as diff
