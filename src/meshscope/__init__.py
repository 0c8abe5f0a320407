"""Place, move, cost: three instruments for sharded JAX programs."""

from .checks import assert_no_full_copy as assert_no_full_copy
from .drawing import Drawing as Drawing
from .drawing import show as show
from .footprint import memory as memory
from .programs import Collective as Collective
from .programs import Collectives as Collectives
from .programs import UnparsedCollective as UnparsedCollective
from .programs import collectives as collectives
from .programs import diff as diff
