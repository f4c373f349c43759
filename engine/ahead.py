"""What a decode step begins ahead of time. It changes when things happen, and no result.

A step of few tokens is bound by how fast weights are read, with holes in which nothing is read:
between two kernels, and while attention computes or tokens travel. Both are filled here, each as
far as it is asked for; nothing is by default. Without effect where no Hopper GPU runs the model.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchBudget:
    """Most bytes of weights that are brought into the L2 cache at each point of a layer.

    Attributes:
        attention: before attention: of what brings its result back to the hidden size.
        dispatch: before tokens travel to their experts: of the first experts.
        combine: before they travel back: of the next layer's first products.
    """

    attention: int = 0
    dispatch: int = 0
    combine: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """See the module.

    Attributes:
        dependent_launches: bring a kernel onto the GPU while the one before it runs.
        prefetch: of weights.
    """

    dependent_launches: bool = False
    prefetch: PrefetchBudget = PrefetchBudget()
