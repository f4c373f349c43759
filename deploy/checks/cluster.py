"""What can be found wrong with a configuration before anything starts.

``runtime.config`` checks each field by itself; here are the checks that need the checkpoint, the
devices of this machine, or its ports. Everything wrong is a ConfigError with the field's path.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path

from deploy.certificates import check_certificate
from deploy.checkpoint.model_folder import with_model
from deploy.checks.decode_memory import plan_decode_memory
from deploy.checks.drafts import with_drafts_decided
from deploy.checks.prefill_memory import plan_prefill_memory
from deploy.devices import count_devices
from deploy.plan import num_devices_needed, plan_instances
from deploy.ports import free_ports, listen_at
from deploy.ray.connection import FAR_AWAY, ray_host
from engine.model.registry import read_config, spec_of
from engine.model.spec import CommonConfig, check_dims, num_expert_slots
from kv_transfer.transports import expected_transport
from router.keys.source import KeySource, key_source
from router.keys.tiers import check_tiers_of, unreachable_tiers
from runtime.config import ClusterConfig, ClusterSection, DecodeSection, PrefillSection
from runtime.config.file import on_this_host
from runtime.config.sizes import AUTO
from runtime.errors import ConfigError
from runtime.net.credentials import is_loopback, is_wildcard
from runtime.net.hosts import address_towards, own_address
from runtime.tiers import Tiers
from runtime.tokenizer_file import TIKTOKEN, TOKENIZER, has_tokenizer
from worker.engine_options import parallel_dims, recorded_load

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def resolve_config(config: ClusterConfig, *, shape: CommonConfig | None = None) -> ClusterConfig:
    """``config`` with what it leaves open: the model's folder, name and compute type, ports, and
    whether there can be drafts, with a model of that ``shape`` if one is given.

    Raises:
        ConfigError: ``cluster.host`` or ``router.host`` is no address of this machine, or this
            machine has none in ``cluster.network``.
    """
    config = _with_own_address(config)
    field = "router.host" if config.router.host else "cluster.host"
    number = config.router.instances
    # Drawn also where they are given: it shows whether the address is one of this machine.
    free = free_ports(config.http_host, number, field)
    control = free_ports(config.cluster.host, number)
    router = dataclasses.replace(
        config.router,
        port=config.router.port or free,
        control_port=config.router.control_port or control,
    )
    found = with_model(config)
    model = dataclasses.replace(found.model, dtype=found.compute_dtype)
    return with_drafts_decided(dataclasses.replace(found, model=model, router=router), shape)


def _with_own_address(config: ClusterConfig) -> ClusterConfig:
    """``config`` as this machine's processes, the router first, see it."""
    cluster = config.cluster
    if not cluster.spans_hosts:
        return on_this_host(config)
    for field in ("host", "advertise"):
        given, usual = getattr(cluster, field), getattr(ClusterSection(), field)
        if given != usual:
            problem = "is one address, and on the hosts of a Ray cluster each listens at its own"
            fix = "leave it out, and set cluster.network where Ray's address is the wrong one"
            raise ConfigError(f"cluster.{field}", given, problem, fix)
    if cluster.network:
        host = own_address(cluster.network).address
    else:
        # A loopback address in it says only that this is the head's machine.
        towards = ray_host(cluster.ray_address)
        host = address_towards(FAR_AWAY if is_loopback(towards) else towards)
        if not host:
            problem = f"is needed: no way leads from here to {towards}"
            raise ConfigError("cluster.network", "", problem, "a CIDR or an interface of this host")
    return dataclasses.replace(config, cluster=dataclasses.replace(cluster, host=host))


def check_config(
    config: ClusterConfig, *, num_devices: int, shape: CommonConfig | None = None
) -> None:
    """Refuse what can be known to fail; ``config`` is resolved, ports are not looked at.

    With a ``shape`` no folder of a model is needed.

    Raises:
        ConfigError: with the field's path and the fix.
    """
    name = config.cluster.name
    if not _NAME.fullmatch(name):
        fix = "1 to 63 letters, digits, '.', '_' or '-', a letter or digit first"
        raise ConfigError("cluster.name", name, "also names a folder", fix)
    _check_router_host(config)
    _check_certificate(config)
    _check_data_ports(config)
    model = shape or read_model(config)
    if shape is None:
        _check_files(config)
    for role in ("prefill", "decode"):
        spec_of(model).check_device(f"{role}.device", getattr(config, role).device)
    _check_parallel(config, model)
    _check_drafts(config, model)
    _check_lengths(config, model)
    plan_prefill_memory(config, model)
    plan_decode_memory(config, model)
    _check_places(config)
    _check_devices(config, num_devices)


def checked_keys(config: ClusterConfig) -> KeySource | None:
    """The API keys of ``config``; None: no key is asked for.

    Raises:
        ConfigError: they cannot be used, or one names a tier of service that is not configured;
            or strangers could ask, and nothing says that this is meant.
    """
    keys = key_source(config)
    if keys is not None:
        check_tiers_of(keys.current().by_name.values(), Tiers(config.tiers))
    return keys


def check_ports(config: ClusterConfig) -> None:
    """Refuse ports that something else listens on.

    Raises:
        ConfigError: names the field and how to choose another.
    """
    hosts = {"port": config.http_host, "control_port": config.cluster.host}
    for index, (field, host) in itertools.product(range(config.router.instances), hosts.items()):
        port = getattr(config.router.numbered(index), field)
        try:
            with listen_at(host, port):
                pass
        except OSError as error:
            raise ConfigError(
                f"router.{field}",
                port,
                f"cannot listen on {host} ({error.strerror})",
                f"stop what listens there, or set router.{field} to a free port (0: any)",
            ) from error


def count_devices_for(config: ClusterConfig) -> int:
    """CUDA devices that can be counted on; those of other hosts Ray counts when it places."""
    if config.cluster.spans_hosts:
        return num_devices_needed(plan_instances(config))
    return count_devices()


def read_model(config: ClusterConfig) -> CommonConfig:
    """The shape of the model that ``config``, resolved, names.

    Raises:
        ConfigError: no checkpoint there, or one that cannot be served.
    """
    path = config.model.path
    try:
        return read_config(path)
    except ConfigError as error:
        if error.path.startswith("model."):
            raise
        problem = f"{error.path} = {error.value!r} in its config.json: {error.problem}"
        raise ConfigError("model.path", path, problem, error.fix) from error


def remarks_of(config: ClusterConfig) -> list[str]:
    """What works and is hardly meant, in sentences."""
    on_gpus = [role for role in ("prefill", "decode") if getattr(config, role).device == "cuda"]
    if config.compute_dtype == "float32" and on_gpus:
        return [
            f"{' and '.join(on_gpus)} on GPUs in float32: the plain PyTorch operations run, many "
            'times slower, and FP8 weights take four times the memory; model.dtype = "auto" or '
            '"bfloat16" is what GPUs are for'
        ]
    return []


def remarks_of_tiers(config: ClusterConfig, keys: KeySource | None) -> list[str]:
    """The tiers of service that no request can have, in sentences."""
    records = keys.current().by_name.values() if keys is not None else ()
    tiers = Tiers(config.tiers)
    return [
        f"tiers.{name}: no request may have it: a key that lists it is made by `tandem keys add "
        f"NAME --tier {name}`"
        + ("" if name in tiers.open else f", and tiers.{name}.open = true lets anybody ask for it")
        for name in unreachable_tiers(tiers, records)
    ]


def _check_router_host(config: ClusterConfig) -> None:
    host, number = config.router.host, config.router.instances
    if config.cluster.spans_hosts and number > 1 and host and not is_wildcard(host):
        problem = f"is one address, and the {number} routers are on several hosts"
        raise ConfigError("router.host", host, problem, '"0.0.0.0", or leave it out')


def _check_certificate(config: ClusterConfig) -> None:
    files = config.tls.files
    if files is not None:
        reached = dict.fromkeys((config.cluster.reach, config.http_reach))
        check_certificate(files, tuple(reached))


def _check_data_ports(config: ClusterConfig) -> None:
    section = config.kv_transfer
    section.check_data_ports(expected_transport(section.transport), config.cluster.host)


def _check_files(config: ClusterConfig) -> None:
    folder = Path(config.model.path)
    if not has_tokenizer(folder):
        problem = f"holds no {TOKENIZER}, and no {TIKTOKEN}"
        raise ConfigError("model.path", str(folder), problem, "a complete checkpoint folder")
    if config.model.load_format == "safetensors" and not any(folder.glob("*.safetensors")):
        fix = 'a complete checkpoint folder, or model.load_format = "dummy"'
        raise ConfigError("model.path", str(folder), "holds no *.safetensors", fix)


def _check_parallel(config: ClusterConfig, model: CommonConfig) -> None:
    prefill, decode = config.prefill, config.decode
    for role, section in (("prefill", prefill), ("decode", decode)):
        field = f"{role}.num_redundant_experts"
        num_slots = num_expert_slots(model, section.num_redundant_experts, field=field)
        dims = parallel_dims(section)
        try:
            check_dims(dims, model, num_physical_experts=num_slots)
        except ConfigError as error:
            path, value = section.ranks_field, section.num_ranks
            raise ConfigError(path, value, error.problem, error.fix) from error
        load = recorded_load(config, role)
        if load is None:
            continue
        if model.experts is None:
            problem = f"{model.architecture} has no experts"
            raise ConfigError(load.field, str(load.path), problem, "leave it out")
        layers = model.expert_layers(with_mtp=config.decode.has_drafts)
        load.table(model.experts, layers=layers, num_slots=num_slots, num_ranks=dims.ep)


def _check_drafts(config: ClusterConfig, model: CommonConfig) -> None:
    wanted = config.decode.num_speculative_tokens
    if wanted and not model.num_nextn_predict_layers:
        problem = "the checkpoint has no layer for multi-token prediction"
        raise ConfigError("decode.num_speculative_tokens", wanted, problem, "0")


def _check_lengths(config: ClusterConfig, model: CommonConfig) -> None:
    most = model.max_position_embeddings
    wanted = config.model.max_model_len
    if wanted > most:
        raise ConfigError(
            "model.max_model_len",
            wanted,
            f"the checkpoint's max_position_embeddings is {most}",
            f"{most} or less (0: what the checkpoint says)",
        )
    length = wanted or most
    for role in ("prefill", "decode"):
        section: PrefillSection | DecodeSection = getattr(config, role)
        num_blocks = section.sizes.num_blocks
        if not num_blocks:
            continue  # known when the rank has measured its GPU
        most = (num_blocks - 1) * section.block_size
        if most < length:
            needed = -(-length // section.block_size) + 1
            chosen = f"{num_blocks} blocks on a CPU: " if section.num_blocks == AUTO else ""
            all_that_fit = f'"{AUTO}" (as many as fit), ' if section.device == "cuda" else ""
            raise ConfigError(
                f"{role}.num_blocks",
                section.num_blocks,
                f"{chosen}one request of {length} tokens (model.max_model_len) does not fit",
                f"{all_that_fit}{needed} or more, or model.max_model_len of {most} or less",
            )


def _check_places(config: ClusterConfig) -> None:
    """Refuse a router that lets in fewer requests than decode runs at once."""
    decode, router = config.decode, config.router
    num_slots = decode.instances * decode.dp * decode.sizes.max_num_seqs
    problem = f"decode runs {num_slots} requests at once (instances * dp * max_num_seqs)"
    if 0 < router.max_concurrent_requests < num_slots:
        fix = f"0 (as many as decode can hold), or {num_slots} or more"
        most = router.max_concurrent_requests
        raise ConfigError("router.max_concurrent_requests", most, problem, fix)
    if router.max_connections < num_slots:
        fix = f"{num_slots} or more, and an open files limit to match"
        raise ConfigError("router.max_connections", router.max_connections, problem, fix)


def _check_devices(config: ClusterConfig, num_devices: int) -> None:
    needed = num_devices_needed(plan_instances(config))
    if needed <= num_devices:
        return
    prefill, decode = config.prefill, config.decode
    prefill_needs = prefill.instances * prefill.num_ranks if prefill.device == "cuda" else 0
    section = prefill if prefill_needs > num_devices else decode
    devices = "1 CUDA device" if needed == 1 else f"{needed} CUDA devices"
    problem = f"all ranks together need {devices}, this machine has {num_devices}"
    if not num_devices:
        field = section.ranks_field.partition(".")[0]
        fix = 'a machine with GPUs (`tandem doctor` says what is here), or device = "cpu"'
        raise ConfigError(f"{field}.device", section.device, problem, fix)
    fix = "fewer instances or ranks"
    raise ConfigError(section.ranks_field, section.num_ranks, problem, fix)
