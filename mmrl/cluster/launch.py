"""From a config to an engine: in this process, or on many ranks whose nodes get the files that they lack."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from mmrl.cluster import local
from mmrl.cluster.calls import RankCalls
from mmrl.cluster.files import Node
from mmrl.cluster.group import RankGroup, build
from mmrl.cluster.jobs import Installation, RankJob, Rendezvous
from mmrl.cluster.nodes import PACKAGES, fingerprints, installed_versions, probe_file
from mmrl.cluster.ranks import RankLocation, RankPart, Ranks
from mmrl.cluster.sides import Sides, of_one_side, sides_of
from mmrl.cluster.split import SplitEngine
from mmrl.config.sections import Config
from mmrl.engine import device
from mmrl.engine.learner.collation import shares_prefix
from mmrl.engine.learner.counting import UnitCost
from mmrl.engine.machine.host_memory import check_hosts
from mmrl.engine.memory_needs import host_memory, least_memory
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.spec import EngineSpec
from mmrl.engine.transfer.order import Meeting
from mmrl.engine_api import Engine, NetworkFiles
from mmrl.errors import PluginError, ResourceError, plural
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
    spec = of_one_side(spec)
    config = spec.config
    if config.cluster.name == "local":
        least = 0
        if spec.algorithm is not None and spec.trains:
            memory = device.total_memory_bytes(device.detect())
            least = check_memory(["this machine"], [memory], [total_bytes()], spec)
        return local.start_engine(spec, progress, least)
    from mmrl.cluster.ray_ranks import RayRanks

    progress(f"starting {plural(config.cluster.num_ranks, 'rank')}")
    ranks = RayRanks(config.cluster)
    make = group_maker(spec)
    group = RankCalls(ranks) if config.cluster.is_split else make(ranks)
    sides = sides_of(config)
    try:
        check_sets(group.nodes, config.sampler.tensor_parallel_size, sides.samplers)
        check_installations(group, config)
        group.all("check_gpu")
        least, devices = 0, group.all("device_memory")
        if spec.algorithm is not None and spec.trains:
            hosts, machines = [node.host for node in group.nodes], group.all("machine_memory")
            own = slice(sides.learners.start, sides.learners.stop)
            least = check_memory(hosts[own], devices[own], machines[own], spec)
        sampled, plain = sides.samplers if spec.with_sampler else (), config.model_dump(mode="json")
        everyone = range(len(group.nodes))
        needs = {rank: (plain, rank in sampled, least if rank in sides.learners else 0) for rank in everyone}
        group.some("check_process", needs)
        find_shared_files(group, spec.media.folder)
        jobs = make_jobs(group, spec, ranks.locations, sides)
        progress("engines start on every rank")
        found = build(group, dict(enumerate(jobs)), sides.turns(on_cpu=None in devices))
        if isinstance(group, RankGroup):
            group.descriptions = found
            engine: Engine = group
        else:
            engine = join_sides(ranks, group, jobs, found, make, spec, progress)
        for node in {node for node in group.nodes if node.folder}:
            group.ask(node.leader, "remove_folder", node.path("checkpoint"))
    except BaseException:
        ranks.close({node.id: node.folder for node in group.nodes if node.folder}, wait=False)
        raise
    return engine


def group_maker(spec: EngineSpec) -> Callable[[Ranks], RankGroup]:
    """Makes a group of ranks for a spec."""
    config, folder = spec.config, spec.folder
    return partial(
        RankGroup,
        media=spec.media,
        cost=UnitCost(folder),
        ranks_together=config.sampler.ranks_together,
        roles=spec.roles,
        shares_prefix=shares_prefix(config.learner, folder),
        ranks_of_a_row=config.learner.sequence_parallel_size,
        facts={"model": folder.name, "model_commit": folder.commit},
    )


def make_jobs(calls: RankCalls, spec: EngineSpec, locations: Sequence[RankLocation], sides: Sides) -> list[RankJob]:
    """Each rank's job; the files that it needs are on its node then."""
    folder, learners = spec.folder, sides.learners
    models = send_model(calls, folder)
    checkpoints = send_checkpoint(calls, spec.checkpoint, spec.roles, learners)
    initial, critics = (_sent(calls, *each, learners) for each in ((spec.initial, "initial"), (spec.critic, "critic")))
    teachers = [send_model(calls, each, f"teacher-{number}", learners) for number, each in enumerate(spec.teachers)]
    return [
        RankJob(
            config=spec.config.model_dump(mode="json"),
            rendezvous=own,
            model=models[rank],
            media=str(spec.media.folder) if node.shares_files else node.path("media"),
            grid=spec.media.grid,
            max_images=spec.max_images,
            with_sampler=spec.with_sampler and rank in sides.samplers,
            with_learner=spec.algorithm is not None and rank in learners,
            checkpoint=checkpoints.get(rank, ""),
            trains=spec.trains,
            initial=initial.get(rank, ""),
            template=folder.template,
            teachers=tuple(each[rank] for each in teachers if rank in each),
            critic=critics.get(rank, ""),
        )
        for rank, (node, own) in enumerate(zip(calls.nodes, rendezvous(calls, locations, sides.worlds), strict=True))
    ]


def join_sides(
    ranks: Ranks,
    calls: RankCalls,
    jobs: list[RankJob],
    descriptions: Sequence[Mapping[str, Any]],
    make: Callable[[Ranks], RankGroup],
    spec: EngineSpec,
    progress: Callable[[str], object],
) -> SplitEngine:
    """One engine of the two sides, whose ranks have theirs.

    Args:
        calls: Those to all ranks, whose nodes have their files.
    """
    sides = sides_of(spec.config)
    nodes = {node.id: node for node in calls.nodes}

    def side(numbers: range, known: Sequence[Mapping[str, Any]]) -> RankGroup:
        group = make(RankPart(ranks, numbers))
        group.descriptions = known
        for node in group.nodes:
            node.shares_files, node.folder = nodes[node.id].shares_files, nodes[node.id].folder
        return group

    def start_again(before: RankGroup, lost: Sequence[int]) -> RankGroup:
        ranks.restart(lost)  # those that sample come first, so they have the same numbers in both groups
        group = side(sides.samplers, before.descriptions)
        plain = spec.config.model_dump(mode="json")
        group.some("check_process", dict.fromkeys(lost, (plain, True, 0)))
        worlds = [world for world in sides.worlds if world[0] in lost]
        places = zip(lost, rendezvous(group, ranks.locations, worlds), strict=True)
        again = {rank: replace(jobs[rank], rendezvous=own) for rank, own in places}
        found = dict(enumerate(before.descriptions)) | dict(zip(lost, build(group, again, worlds), strict=True))
        group.descriptions = list(found.values())
        return group

    samplers, learners = (side(own, descriptions[own.start : own.stop]) for own in (sides.samplers, sides.learners))
    address = ranks.locations[sides.learners.start].address
    port = learners.ask(0, "host_weights", address, len(sides.samplers))
    meetings = [Meeting(address, port, rank, len(sides.samplers)) for rank in range(len(sides.samplers))]
    restarts = spec.config.trainer.max_restarts
    return SplitEngine(ranks, learners, samplers, meetings, start_again, restarts=restarts, progress=progress)


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


def check_sets(nodes: Sequence[Node], size: int, ranks: range | None = None) -> None:
    """Raises ResourceError if ``size`` neighbouring ranks are on different nodes; they share each layer.

    Args:
        ranks: Those that sample; None for all of them.
    """
    for first in (range(len(nodes)) if ranks is None else ranks)[::size]:
        hosts = {node.id: node.host for node in nodes[first : first + size]}
        if len(hosts) > 1:
            raise ResourceError(
                f"ranks {first} to {first + size - 1} would sample together, and are on {', '.join(hosts.values())}",
                where=f"sampler.tensor_parallel_size: {size}",
                possible="a size that divides the number of ranks on every node",
                remedy="lower it, or change the number of ranks that sample",
            )


def check_installations(group: RankCalls, config: Config) -> None:
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


def rendezvous(
    calls: RankCalls, locations: Sequence[RankLocation], worlds: Sequence[range] | None = None
) -> list[Rendezvous]:
    """The places of all ranks in their worlds, world by world: number, address of the first rank, threads.

    Args:
        locations: Those of all ranks of the run.
        worlds: Ranks that are to find each other; by default all of them.
    """
    here = [each.node for each in locations]
    across = len({each.address for each in locations}) > 1
    found = list[Rendezvous]()
    for world in [range(len(locations))] if worlds is None else worlds:
        address = locations[world[0]].address
        port = calls.ask(world[0], "reserve_port", address)
        cores = calls.some("cores", dict.fromkeys(world, ()))
        found += [
            Rendezvous(
                rank=number,
                node_rank=[here[other] for other in world[:number]].count(here[rank]),
                world_size=len(world),
                address=address,
                port=port,
                own_address=locations[rank].address if across else None,
                threads=None if "OMP_NUM_THREADS" in os.environ else max(cores[number] // here.count(here[rank]), 1),
            )
            for number, rank in enumerate(world)
        ]
    return found


def find_shared_files(group: RankCalls, folder: Path) -> None:
    """Learn which nodes see the run's files under the driver's paths; the others get a temporary folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with probe_file(folder) as probe:
        for node in set(group.nodes):
            node.shares_files = group.ask(node.leader, "holds", *probe)
            if not node.shares_files:
                node.folder = group.ask(node.leader, "make_folder")


def send_model(group: RankCalls, model: ModelFolder, name: str = "model", ranks: range | None = None) -> dict[int, str]:
    """Each rank's path of a model, which its node fetches from the hub once, shares with the driver, or is sent.

    Args:
        name: The folder's name in the temporary folder of a node that is sent it.
        ranks: Those that need it; None for all of them.
    """
    ranks = range(len(group.nodes)) if ranks is None else ranks
    if model.commit is not None:
        nodes = list(dict.fromkeys(group.nodes[rank] for rank in ranks))
        wanted = model.name, model.commit, model.trust_remote_code
        futures = [group.call(node.leader, "fetch_model", *wanted) for node in nodes]
        wait(futures)
        group.check(futures)
        where = {node: future.result() for node, future in zip(nodes, futures, strict=True)}
        return {rank: where[group.nodes[rank]] for rank in ranks}
    return _send_folder(group, Path(model.path), model.files(), name, ranks)


def _sent(group: RankCalls, model: ModelFolder | None, name: str, ranks: range) -> dict[int, str]:
    """As ``send_model``; empty if there is no such model."""
    return {} if model is None else send_model(group, model, name, ranks)


def send_checkpoint(
    group: RankCalls, checkpoint: Path | None, roles: Iterable[str], ranks: range | None = None
) -> dict[int, str]:
    """Each rank's path of the checkpoint; nodes that do not see it there get its files of the learner's networks.

    Args:
        roles: The roles of these networks.
        ranks: Those that need it; None for all of them.
    """
    if checkpoint is None:
        return {}
    networks = map(NetworkFiles.of, roles)
    folders = [checkpoint / folder for files in networks for folder in (files.model, files.state)]
    files = sorted(path for folder in folders for path in folder.rglob("*") if path.is_file())
    names = [str(path.relative_to(checkpoint)) for path in files]
    return _send_folder(group, checkpoint, names, "checkpoint", range(len(group.nodes)) if ranks is None else ranks)


def _send_folder(group: RankCalls, folder: Path, files: Sequence[str], name: str, ranks: range) -> dict[int, str]:
    """Each rank's path, on its node, of a folder with these files of a folder here."""
    folder = folder.absolute()
    expected = fingerprints(str(folder), files)
    where = {}
    for node in dict.fromkeys(group.nodes[rank] for rank in ranks):
        where[node] = str(folder)
        if group.ask(node.leader, "fingerprints", str(folder), files) != expected:
            node.folder = node.folder or group.ask(node.leader, "make_folder")
            where[node] = node.path(name)
            node.send(group.ask, folder, files, where[node])
    return {rank: where[group.nodes[rank]] for rank in ranks}
