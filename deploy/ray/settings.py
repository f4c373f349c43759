"""Which Ray is joined or started, and for what."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from runtime.config.cluster import LOCAL_RAY


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings:
    """Which Ray, and for what."""

    run_id: str
    token: str = field(repr=False)
    """Of a Ray of our own."""
    address: str = LOCAL_RAY
    """See ``cluster.ray_address``."""
    num_slots: int = 1
    """Of a Ray of our own: processes that can be placed, whatever the number of cores."""
    num_devices: int = 0
    outlives_us: bool = False
    """What is started goes on when the controller dies."""
    head: str = ""
    """Where a Ray of our own is that outlived a controller; empty: there is none."""
    start_timeout_s: float = 120.0
    """How long a Ray of our own may take to start."""
    log_dir: str = ""
    """Where the logs of one that did not start are left; empty: nowhere."""

    @property
    def is_own(self) -> bool:
        """Whether the Ray is ours to start and stop."""
        return self.address == LOCAL_RAY

    @property
    def namespace(self) -> str:
        """Of all that this run has in Ray."""
        return f"tandem-{self.run_id}"

    def join(self, ray: Any, address: str) -> None:
        """Connect the module ``ray`` to the Ray at ``address``."""
        ray.init(
            address=address,
            namespace=self.namespace,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
            **({"_node_ip_address": "127.0.0.1"} if self.is_own else {}),
        )
