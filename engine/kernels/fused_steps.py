"""Which small steps of a layer run fused with their neighbours; each has an unfused form beside it.

Few tokens leave a GPU waiting for launches and for memory more than for work, so a decode step is
faster the fewer kernels it has. Nothing else depends on what is chosen here.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedSteps:
    """Chosen once, when the kernels are created.

    Attributes:
        latents: norm and quantise query latents in the kernel that stores the others.
        absorption: rotate, round and quantise in the kernels of absorbed attention's products.
        absorbs_fp8: and multiply with their weights in e4m3.
        scored_tokens: most tokens whose experts are scored in parts, which the choice adds up.
    """

    latents: bool = False
    absorption: bool = False
    absorbs_fp8: bool = False
    scored_tokens: int = 0

    @classmethod
    def everything(cls) -> "FusedSteps":
        """Return all of them on."""
        return cls(latents=True, absorption=True, absorbs_fp8=True, scored_tokens=256)


UNFUSED: Final = FusedSteps()

MEASURED: Final = UNFUSED
"""What was faster on an H200."""
