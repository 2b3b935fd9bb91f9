"""From a config to an engine: in this process, or on many ranks whose nodes get the files that they lack."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from pathlib import Path

from mmrl.cluster import local
from mmrl.cluster.files import Node
from mmrl.cluster.group import RankGroup
from mmrl.cluster.jobs import Installation, RankJob, Rendezvous
from mmrl.cluster.nodes import PACKAGES, fingerprints, installed_versions, probe_file
from mmrl.cluster.ranks import RankLocation
from mmrl.config.sections import Config
from mmrl.engine import device
from mmrl.engine.learner.collation import shares_prefix
from mmrl.engine.learner.counting import UnitCost
from mmrl.engine.machine.host_memory import check_hosts
from mmrl.engine.memory_needs import host_memory, least_memory
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.spec import EngineSpec
from mmrl.engine_api import Engine, NetworkFiles
from mmrl.errors import ConfigError, PluginError, ResourceError, plural
from mmrl.plugin_host.used import used_plugins
from mmrl.system.machine_memory import total_bytes


def start_engine(spec: EngineSpec, *, progress: Callable[[str], object] = lambda text: None) -> Engine:
    """The engine that ``cluster`` asks for.

    The memory that a learner needs is compared with the machines before anything is fetched or loaded.

    Args:
        progress: Called with what begins.

    Raises:
        ResourceError: Too few devices, too little memory, nodes with other versions, or a GPU that torch cannot use.
        PluginError: A node lacks a plugin, or has another version of it.
    """
    config, folder = spec.config, spec.folder
    if config.cluster.name == "local":
        least = 0
        if spec.algorithm is not None and spec.trains:
            memory = device.total_memory_bytes(device.detect())
            least = check_memory(["this machine"], [memory], [total_bytes()], spec)
        return local.start_engine(spec, progress, least)
    if config.cluster.is_split:
        raise ConfigError(
            "ranks of their own that sample are not served yet",
            where="cluster.sampler_ranks",
            possible="cluster.ranks",
            remedy="set cluster.ranks in place of cluster.sampler_ranks and cluster.learner_ranks",
        )
    from mmrl.cluster.ray_ranks import RayRanks

    progress(f"starting {plural(config.cluster.num_ranks, 'rank')}")
    ranks = RayRanks(config.cluster)
    facts = {"model": folder.name, "model_commit": folder.commit}
    group = RankGroup(
        ranks,
        spec.media,
        UnitCost(folder),
        ranks_together=config.sampler.ranks_together,
        roles=spec.roles,
        shares_prefix=shares_prefix(config.learner, folder),
        facts=facts,
    )
    try:
        check_sets(group.nodes, config.sampler.tensor_parallel_size)
        check_installations(group, config)
        group.all("check_gpu")
        least = 0
        if spec.algorithm is not None and spec.trains:
            hosts = [node.host for node in group.nodes]
            least = check_memory(hosts, group.all("device_memory"), group.all("machine_memory"), spec)
        group.all("check_process", config.model_dump(mode="json"), spec.with_sampler, least)
        find_shared_files(group, spec.media.folder)
        models, checkpoints = send_model(group, folder), send_checkpoint(group, spec.checkpoint)
        initial = _sent(group, spec.initial, "initial")
        critics = _sent(group, spec.critic, "critic")
        sent = [send_model(group, each, f"teacher-{number}") for number, each in enumerate(spec.teachers)]
        teachers = list(zip(*sent, strict=True)) or [()] * len(group.nodes)
        meetings = rendezvous(group, ranks.locations)
        jobs = [
            RankJob(
                config=config.model_dump(mode="json"),
                rendezvous=own,
                model=model,
                media=str(spec.media.folder) if node.shares_files else node.path("media"),
                grid=spec.media.grid,
                max_images=spec.max_images,
                with_sampler=spec.with_sampler,
                with_learner=spec.algorithm is not None,
                checkpoint=state,
                trains=spec.trains,
                initial=first,
                template=folder.template,
                teachers=others,
                critic=critic,
            )
            for node, own, model, first, state, others, critic in zip(
                group.nodes, meetings, models, initial, checkpoints, teachers, critics, strict=True
            )
        ]
        progress("engines start on every rank")
        group.start(jobs)
        for node in {node for node in group.nodes if node.folder}:
            group.ask(node.leader, "remove_folder", node.path("checkpoint"))
    except BaseException:
        group.failed = True
        group.close()
        raise
    return group


def check_memory(hosts: Sequence[str], devices: Sequence[int | None], machines: Sequence[int], spec: EngineSpec) -> int:
    """Compare each rank's GPU and its machine with what a run needs; returns a GPU's bytes for the smallest setting.

    Args:
        devices: Bytes of its GPU; None if it has none.
        machines: Bytes of its machine's memory.

    Raises:
        ResourceError: Says how much is missing, and of what.
    """
    least = check_devices(list(zip(hosts, devices, strict=True)), lambda: least_memory(spec))
    kind: device.DeviceKind = "cpu" if None in devices else "cuda"
    check_hosts(list(zip(hosts, machines, strict=True)), host_memory(spec, kind))
    return least


def check_devices(devices: Sequence[tuple[str, int | None]], least: Callable[[], int]) -> int:
    """Refuse a GPU that no setting fits, before anything is loaded; returns the bytes of the smallest setting.

    Without a GPU nothing is counted, and the answer is 0.

    Args:
        devices: Each rank's host and the bytes of its GPU; None if it has none.

    Raises:
        ResourceError: Says how much is missing.
    """
    found = [(memory, host) for host, memory in devices if memory is not None]
    if not found:
        return 0
    (memory, host), needed = min(found), least()
    if memory < needed:
        raise ResourceError(
            f"a GPU of {host} has {memory / 1e9:.1f} GB, and the smallest setting needs about {needed / 1e9:.1f} GB: "
            f"{(needed - memory) / 1e9:.1f} GB are missing",
            where="model.path, cluster.ranks",
            remedy="train adapters (model.lora), raise cluster.ranks, lower data.max_prompt_tokens or "
            "sampler.max_new_tokens, or take larger GPUs; `mmrl plan CONFIG --gpus N --memory GB` tells what fits",
        )
    return needed


def check_sets(nodes: Sequence[Node], size: int) -> None:
    """Raises ResourceError if ``size`` neighbouring ranks are on different nodes; they share each layer."""
    for first in range(0, len(nodes), size):
        hosts = {node.id: node.host for node in nodes[first : first + size]}
        if len(hosts) > 1:
            raise ResourceError(
                f"ranks {first} to {first + size - 1} would sample together, and are on {', '.join(hosts.values())}",
                where=f"sampler.tensor_parallel_size: {size}",
                possible="a size that divides the number of ranks on every node",
                remedy="lower it, or change cluster.ranks",
            )


def check_installations(group: RankGroup, config: Config) -> None:
    """Make sure that all ranks run the same versions, and the driver's, which needs no vLLM.

    Raises:
        PluginError: A rank lacks a plugin, or has another version of it.
        ResourceError: A rank has another version of a package or of Python.
    """
    everything = used_plugins(config)
    # Ranks use no plugin but the algorithm; files of the others need not be on their nodes.
    used = [info for info in everything if info.distribution != "file" or info.kind == "algorithm"]
    wanted = {(info.kind, info.name): f"{info.distribution} {info.version}" for info in used}
    found: Sequence[Installation] = group.all("installation", list(wanted))
    here = installed_versions([package for package in PACKAGES if not package.startswith("vllm")])
    for node, installation in zip(group.nodes, found, strict=True):
        for (kind, name), version in wanted.items():
            if (there := installation.plugins[kind, name]) != version:
                raise PluginError(
                    f"node {node.host} has another {kind} plugin {name!r} than the driver",
                    where=f"{there}; the driver: {version}",
                    remedy="install the same version on every node",
                )
        for package, expected in {**found[0].versions, **here}.items():
            if (actual := installation.versions.get(package)) != expected:
                raise ResourceError(
                    f"node {node.host} has another version of {package} than {group.nodes[0].host} or the driver",
                    where=f"{actual or 'none'} and {expected}",
                    remedy="install the same versions on every node",
                )


def rendezvous(group: RankGroup, locations: Sequence[RankLocation]) -> list[Rendezvous]:
    """Each rank's number, address, threads and place on its node, and the address of rank 0."""
    address, across = locations[0].address, len({each.address for each in locations}) > 1
    port = group.ask(0, "reserve_port", address)
    shares = [cores // group.nodes.count(node) for node, cores in zip(group.nodes, group.all("cores"), strict=True)]
    return [
        Rendezvous(
            rank=rank,
            node_rank=rank - node.leader,
            world_size=len(locations),
            address=address,
            port=port,
            own_address=locations[rank].address if across else None,
            threads=None if "OMP_NUM_THREADS" in os.environ else max(shares[rank], 1),
        )
        for rank, node in enumerate(group.nodes)
    ]


def find_shared_files(group: RankGroup, folder: Path) -> None:
    """Learn which nodes see the run's files under the driver's paths; the others get a temporary folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with probe_file(folder) as probe:
        for node in set(group.nodes):
            node.shares_files = group.ask(node.leader, "holds", *probe)
            if not node.shares_files:
                node.folder = group.ask(node.leader, "make_folder")


def send_model(group: RankGroup, model: ModelFolder, name: str = "model") -> list[str]:
    """Each rank's path of a model, which its node fetches from the hub once, shares with the driver, or is sent.

    Args:
        name: The folder's name in the temporary folder of a node that is sent it.
    """
    if model.commit is not None:
        nodes = list(dict.fromkeys(group.nodes))
        wanted = model.name, model.commit, model.trust_remote_code
        futures = [group.call(node.leader, "fetch_model", *wanted) for node in nodes]
        wait(futures)
        group.check(futures)
        where = {node: future.result() for node, future in zip(nodes, futures, strict=True)}
        return [where[node] for node in group.nodes]
    return _send_folder(group, Path(model.path), model.files(), name)


def _sent(group: RankGroup, model: ModelFolder | None, name: str) -> list[str]:
    """As ``send_model``; empty paths if there is no such model."""
    return [""] * len(group.nodes) if model is None else send_model(group, model, name)


def send_checkpoint(group: RankGroup, checkpoint: Path | None) -> list[str]:
    """Each rank's path of the checkpoint; nodes that do not see it there get its files of the learner's networks."""
    if checkpoint is None:
        return [""] * len(group.nodes)
    networks = map(NetworkFiles.of, group.roles)
    folders = [checkpoint / folder for files in networks for folder in (files.model, files.state)]
    files = sorted(path for folder in folders for path in folder.rglob("*") if path.is_file())
    return _send_folder(group, checkpoint, [str(path.relative_to(checkpoint)) for path in files], "checkpoint")


def _send_folder(group: RankGroup, folder: Path, files: Sequence[str], name: str) -> list[str]:
    """Each rank's path, on its node, of a folder with these files of a folder here."""
    folder = folder.absolute()
    expected = fingerprints(str(folder), files)
    where = {}
    for node in dict.fromkeys(group.nodes):
        where[node] = str(folder)
        if group.ask(node.leader, "fingerprints", str(folder), files) != expected:
            node.folder = node.folder or group.ask(node.leader, "make_folder")
            where[node] = node.path(name)
            node.send(group.ask, folder, files, where[node])
    return [where[node] for node in group.nodes]
