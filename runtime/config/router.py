"""``[router]``: the HTTP side."""

from __future__ import annotations

from dataclasses import dataclass, replace

from runtime.config.checks import at_least, check_origin, check_port, one_of
from runtime.errors import ConfigError

TOOL_PARSERS = (
    *("auto", "none", "deepseek-v3", "deepseek-v3.1", "deepseek-v3.2"),
    *("glm-4.5", "hermes", "kimi-k2", "llama3-json"),
)
POLICIES = ("least-loaded", "round-robin", "prefix-affinity", "lmetric", "predicted-ttft")
REASONING_PARSERS = ("auto", "none", "think", "deepseek-r1")

MAX_PRIORITY = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSection:
    """``[router]``: the HTTP side."""

    host: str = ""
    """Interface of HTTP alone; empty: ``cluster.host``."""
    keys_file: str = ""
    """TOML file of API keys (`tandem keys add`), followed while the router runs; empty: the keys in
    TANDEM_API_KEYS, and without those none is asked for."""
    models_file: str = ""
    """TOML file of models that this router serves beside ``model``; empty: none."""
    allow_anonymous: bool = False
    """Let HTTP listen beyond this machine though it asks nobody for a key."""
    metrics_access: str = "open"
    """Who reads ``/metrics`` and ``/targets``, where there are keys: "open" (whoever asks, as the
    workers' metrics) or "key" (a key with the right metrics or operations)."""
    port: int = 8000
    """OpenAI-compatible HTTP; 0: any free port."""
    control_port: int = 8100
    """gRPC registry of workers; 0: any free port."""
    instances: int = 1
    """Routers that ``tandem up`` starts, of which any may die; further ones at the next ports, and
    on other hosts, if there are any."""
    http_processes: int = 1
    max_concurrent_requests: int = 0
    """Concurrent requests, each of n choices counted; others wait. 0: three quarters of what the
    decode ranks take on, divided by the routers that they are registered at."""
    max_priority: int = 0
    """A request's ``priority`` may be from its negative to this, the lowest goes first; 0: it says
    nothing."""
    max_choices_per_request: int = 1024
    """Prompts of one request times its ``n``."""
    queue_timeout_s: float = 900.0
    """A request that waited so long for a place is answered 429."""
    max_queue_bytes: int = 256 * 2**20
    """Bodies that are read or wait for a place, together; beyond, a request is answered 429."""
    request_timeout_s: float = 7200.0
    """From a request's arrival to its last token, queues included, whatever happens meanwhile."""
    first_token_timeout_s: float = 1800.0
    """From a request's arrival to its first token, queues included."""
    token_timeout_s: float = 120.0
    """Between two tokens of a request, moves to other workers included."""
    max_migrations: int = 8
    """How often a request may go on at other workers after theirs failed."""
    worker_wait_s: float = 30.0
    """How long a request waits for a worker where all of a role went away, and how long after its
    start a router that knows no workers lets requests wait for them; 0: not at all."""
    resume_timeout_s: float = 3.0
    """A stream of tokens that is broken for so long is lost, and its requests move."""
    max_body_bytes: int = 8 * 2**20
    """A larger body is answered 413."""
    max_connections: int = 16384
    """Open at once, and never more than the process may open files; beyond, the oldest that has not
    sent its headers is closed."""
    header_timeout_s: float = 30.0
    """For the headers of a request, from the connection or from their first byte on."""
    body_timeout_s: float = 60.0
    """For the body of a request, from its headers on."""
    client_stall_timeout_s: float = 60.0
    """A client that takes no byte of its answer for so long is cut off."""
    keep_alive_s: float = 10.0
    """A stream with nothing to send gets a comment so often: silence is taken for a dead line."""
    cors_origins: str = ""
    """Origins whose pages may call this server from a browser, as "https://chat.example", separated
    by commas, or "*" for all; empty: none."""
    max_mailbox_bytes: int = 16 * 2**20
    """Output of one request that its client has not taken; beyond, it is cut off."""
    policy: str = "least-loaded"
    """How a pair is picked: "least-loaded", "round-robin", or by what prefix caches hold:
    "predicted-ttft", "lmetric", "prefix-affinity"."""
    lease_ttl_s: float = 5.0
    """A worker that is silent for so long is out of the pool."""
    tool_parser: str = "auto"
    """How tool calls are read from answers: "deepseek-v3", "deepseek-v3.1", "glm-4.5",
    "hermes", "llama3-json", "none", or "auto": as the chat template writes earlier turns' calls."""
    reasoning_parser: str = "auto"
    """How reasoning is told from the answer: "think", "deepseek-r1" (it reasons from the first
    token on, also where the template does not say so), "none", or "auto": "think" where the chat
    template knows </think>."""

    def __post_init__(self) -> None:
        if self.keys_file and self.allow_anonymous:
            problem = "router.keys_file is set: every request needs a key"
            raise ConfigError("router.allow_anonymous", True, problem, "one of the two")
        one_of("router.metrics_access", self.metrics_access, ("open", "key"))
        check_port("router.port", self.port)
        check_port("router.control_port", self.control_port)
        at_least("router.instances", self.instances, 1)
        self._check_ports_of_all()
        at_least("router.http_processes", self.http_processes, 1)
        at_least("router.max_concurrent_requests", self.max_concurrent_requests, 0)
        at_least("router.max_priority", self.max_priority, 0)
        if self.max_priority > MAX_PRIORITY:
            fix = f"{MAX_PRIORITY} or less"
            raise ConfigError("router.max_priority", self.max_priority, "is too large", fix)
        at_least("router.max_choices_per_request", self.max_choices_per_request, 1)
        at_least("router.queue_timeout_s", self.queue_timeout_s, 0.001)
        at_least("router.max_queue_bytes", self.max_queue_bytes, 1024)
        at_least("router.request_timeout_s", self.request_timeout_s, 0.001)
        at_least("router.first_token_timeout_s", self.first_token_timeout_s, 0.001)
        at_least("router.token_timeout_s", self.token_timeout_s, 0.001)
        at_least("router.max_migrations", self.max_migrations, 0)
        at_least("router.worker_wait_s", self.worker_wait_s, 0.0)
        at_least("router.resume_timeout_s", self.resume_timeout_s, 0.0)
        at_least("router.max_body_bytes", self.max_body_bytes, 1024)
        at_least("router.max_connections", self.max_connections, 1)
        at_least("router.header_timeout_s", self.header_timeout_s, 0.001)
        at_least("router.body_timeout_s", self.body_timeout_s, 0.001)
        at_least("router.client_stall_timeout_s", self.client_stall_timeout_s, 0.001)
        at_least("router.keep_alive_s", self.keep_alive_s, 0.01)
        for origin in self.allowed_origins:
            check_origin("router.cors_origins", origin)
        at_least("router.max_mailbox_bytes", self.max_mailbox_bytes, 1024)
        one_of("router.policy", self.policy, POLICIES)
        at_least("router.lease_ttl_s", self.lease_ttl_s, 0.1)
        one_of("router.tool_parser", self.tool_parser, TOOL_PARSERS)
        one_of("router.reasoning_parser", self.reasoning_parser, REASONING_PARSERS)

    @property
    def allowed_origins(self) -> tuple[str, ...]:
        """Those in ``cors_origins``."""
        origins = (origin.strip() for origin in self.cors_origins.split(","))
        return tuple(origin for origin in origins if origin)

    def numbered(self, index: int) -> RouterSection:
        """Of router ``index`` of several, from 0."""
        port = self.port and self.port + index
        control_port = self.control_port and self.control_port + index
        return replace(self, port=port, control_port=control_port)

    def _check_ports_of_all(self) -> None:
        for name in ("port", "control_port"):
            port = getattr(self, name)
            if port and port + self.instances - 1 > 65535:
                problem = f"is followed by too few ports for router.instances = {self.instances}"
                raise ConfigError(f"router.{name}", port, problem, "a lower one, or 0 for any")
        distance = abs(self.port - self.control_port)
        if self.port and self.control_port and 0 < distance < self.instances:
            problem = f"is within router.instances = {self.instances} of router.port = {self.port}"
            fix = f"ports that are at least {self.instances} apart"
            raise ConfigError("router.control_port", self.control_port, problem, fix)
