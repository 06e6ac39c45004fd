"""The judgement of a whole graph before it is queued, node by node.

The same planner and rules as at the head of each node's run (``judging.py``); this file decides
which nodes count, what refuses a prompt, and what to change. Alters no prompt.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from ..supir.errors import SupirError
from ..xpu.auto_plan import NoSafePlanError
from ..xpu.errors import DeviceError
from ..xpu.risk import Verdict, blocks
from .graph import Graph
from .graph_core import APPLY, CORE_NODES, core_job, judge_core
from .graph_jobs import JOBS, Context, Job, whole_run
from .graph_networks import known_networks, vae_ratio
from .graph_sizes import ImageSize, Sizes
from .guarded_run import Judged
from .judging import judge_run
from .machine import Machine
from .sample_request import DEFAULT_RATIO, SampleSettings

log = logging.getLogger(__name__)

SUGGEST_SECONDS = 2.0
"""Longest search for a change that lets a refused graph through (our choice)."""

JUDGE_SECONDS = 5.0
"""Longest time for one graph (our choice); what is left then counts as unknown, and judges itself
when it runs."""

SMALLER = (0.75, 0.5, 0.35, 0.25, 0.12)
FEWER_STEPS = (0.75, 0.5, 0.25)
"""Factors on upscale_by, and then on steps, that are tried for a suggestion."""


@dataclass(frozen=True)
class NodeJudgement:
    """What was found about one node.

    Attributes:
        judged: plan and verdict; None when a setting cannot work.
        error: why a setting cannot work; empty else. input: the input it names.
        refuses: the prompt must not be queued as it is.
        assumes: what was not known and how it was taken.
    """

    node_id: str
    kind: str
    judged: Judged | None = None
    error: str = ""
    input: str = ""
    refuses: bool = False
    ours: bool = True
    assumes: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict | None:
        """The verdict on the plan, if there is one."""
        return self.judged.result.verdict if self.judged else None

    @property
    def warns(self) -> bool:
        """Whether the user should hear of it though the prompt is queued."""
        return self.verdict is not None and self.verdict.severity != "ok" and not self.refuses

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        plan = self.judged.as_dict() if self.judged else {}
        known = {"node_id": self.node_id, "class_type": self.kind, "refuses": self.refuses}
        return {
            **known,
            **plan,
            "error": self.error,
            "input": self.input,
            "assumes": list(self.assumes),
        }


@dataclass(frozen=True)
class Change:
    """One input to change."""

    node_id: str
    input_name: str
    value: Any


@dataclass
class GraphJudgement:
    """The judgement of a graph; ``complete`` is False if time ran out before its last node."""

    nodes: list[NodeJudgement] = field(default_factory=list[NodeJudgement])
    unknown: list[str] = field(default_factory=list[str])
    suggestion: list[Change] = field(default_factory=list[Change])
    safe_plan: list[Change] = field(default_factory=list[Change])
    complete: bool = True

    @property
    def refused(self) -> list[NodeJudgement]:
        """The nodes for which the prompt must not be queued."""
        return [node for node in self.nodes if node.refuses]

    @property
    def warned(self) -> list[NodeJudgement]:
        """The nodes the user should hear of."""
        return [node for node in self.nodes if node.warns]


def judge_graph(
    graph: Graph, targets: Iterable[str], device: Machine, *, plans: bool | None = None
) -> GraphJudgement:
    """Judge every compute node the targets depend on.

    Args:
        plans: make plans and verdicts; None does so on an Intel GPU only. Without them only settings
            that cannot work are found.
    """
    plans = device.facts.is_xpu if plans is None else plans
    order = graph.order(targets)
    sizes = Sizes(graph, order, lambda node_id: vae_ratio(graph, node_id))
    at = Context(graph, sizes, plans)
    core = device.facts.is_xpu and any(graph.kind(n) == APPLY or _is_ours(graph, n) for n in order)
    found, end = GraphJudgement(), time.monotonic() + JUDGE_SECONDS
    for node_id in order:
        if time.monotonic() > end:
            found.unknown += [n for n in order[order.index(node_id) :] if _is_ours(graph, n)]
            found.complete = False
            break
        if _is_ours(graph, node_id):
            node = _judge_ours(at, node_id, device)
        elif core and graph.kind(node_id) in CORE_NODES:
            node = _judge_core(at, node_id, device)
        else:
            continue
        if node is not None:
            found.nodes.append(node)
        elif _is_ours(graph, node_id):
            found.unknown.append(node_id)
    return found


def _is_ours(graph: Graph, node_id: str) -> bool:
    return graph.kind(node_id) in JOBS


def _judge_ours(at: Context, node_id: str, device: Machine) -> NodeJudgement | None:
    """Judge one of our nodes; None when its size is not known or there is nothing to plan."""
    kind = at.graph.kind(node_id)
    try:
        job = JOBS[kind](at, node_id)
        if job is None:
            return None
        if not at.plans:
            return NodeJudgement(node_id, kind, assumes=job.assumes)
        judged = judge_job(job, device)
    except SupirError as e:
        text = str(e)
        return NodeJudgement(
            node_id, kind, error=text, input=_named(at.graph, node_id, text), refuses=True
        )
    refuses = not job.assumes and blocks(judged.result.verdict, _mode(job.mode))
    return NodeJudgement(node_id, kind, judged, refuses=refuses, assumes=job.assumes)


def _mode(mode: str) -> Any:
    return mode if mode in ("auto", "block", "warn", "off") else "auto"


def judge_job(job: Job, device: Machine) -> Judged:
    """Return plan and verdict of a job as its node would find them, whether it may start or not.

    Raises: SettingsError, ShapeError naming the input that cannot work.
    """
    searches = job.mode == "auto" and device.facts.is_xpu
    mode = "auto" if searches else "off" if job.mode == "off" else "warn"
    try:
        judged = judge_run(
            job.request,
            job.networks,
            mode,
            loads_model=job.loads_model,
            may_tile=job.may_tile,
            only=job.only,
            device=device,
        )
    except NoSafePlanError as e:
        judged = Judged(e.closest, job.mode, device)
    return replace(judged, mode=job.mode)


WARM_UP_PX = (2816, 1920)
"""A picture large enough that every usual tile size is planned for it."""


def warm_up(device: Machine) -> None:
    """Plan one usual job and forget the answer: the plans of single tiles are remembered.

    Takes about 0.1 s of one core; makes the judgement of the first graph as quick as later ones.
    """
    networks = known_networks(demo=False)
    for tile_px in (0, -1):
        settings = SampleSettings(tile_px=tile_px)
        try:
            request = whole_run(ImageSize(*WARM_UP_PX), 1.0, settings, networks, DEFAULT_RATIO)
            judge_job(Job(request, networks, "auto", may_tile=True), device)
        except (SupirError, DeviceError) as e:
            log.debug("nothing was planned ahead: %s", e)


def _judge_core(at: Context, node_id: str, device: Machine) -> NodeJudgement | None:
    kind = at.graph.kind(node_id)
    try:
        job = core_job(at.graph, node_id, at.sizes)
        judged = None if job is None else judge_core(job, device)
    except (SupirError, DeviceError) as e:
        log.debug("node %s (%s) was not judged: %s", node_id, kind, e)
        return None
    if judged is None:
        return None
    bad = judged.result.verdict.severity == "block"
    return NodeJudgement(
        node_id, kind, judged, refuses=bad and device.guard_core == "block", ours=False
    )


def _named(graph: Graph, node_id: str, text: str) -> str:
    """Return the input of a node an error text names first, or an empty text."""
    found = [(text.find(name), name) for name in graph.inputs(node_id) if name in text]
    return min(found)[1] if found else ""


def suggest(
    graph: Graph, targets: list[str], device: Machine, refused: list[NodeJudgement]
) -> list[Change]:
    """Return changes with which the same graph would be queued; none if a short search finds none."""
    verdict = device.verdict
    if verdict is not None and verdict.status == "retreat":
        return []  # no setting mends the device
    end = time.monotonic() + SUGGEST_SECONDS
    for changes in _candidates(graph, refused):
        if time.monotonic() > end:
            break
        changed = copy.deepcopy(dict(graph.nodes))
        for change in changes:
            changed[change.node_id]["inputs"][change.input_name] = change.value  # type: ignore[index]
        if not changes:
            continue
        found = judge_graph(Graph(changed), targets, device)
        if found.complete and not found.refused:
            return changes
    return []


def _candidates(graph: Graph, refused: list[NodeJudgement]) -> Iterable[list[Change]]:
    """Yield changes from the mildest to the strongest."""
    ours = [node for node in refused if node.ours]
    auto = [Change(n.node_id, "risk", "auto") for n in ours if _says(graph, n, "risk", "block")]
    yield auto
    tiles = [n.node_id for n in ours if n.input in ("tile_px", "tile_overlap_px")]
    half = [(n, (graph.integer(n, "tile_px") or 0) // 2) for n in tiles]
    yield [c for n, px in half if px > 0 for c in _unlike(graph, n, tile_overlap_px=px)]
    yield [c for n in tiles for c in _unlike(graph, n, tile_px=0, tile_overlap_px=256)]
    sources = graph.order([node.node_id for node in refused])
    scaled: list[tuple[str, float]] = []
    for node_id in sources:
        by = graph.number(node_id, "upscale_by")
        constant = graph.link(node_id, "upscale_by") is None
        if _is_ours(graph, node_id) and by is not None and constant:
            scaled.append((node_id, by))
    for factor in SMALLER:
        smaller = [
            Change(node_id, "upscale_by", max(0.01, round(by * factor, 2)))
            for node_id, by in scaled
        ]
        yield smaller
        if auto and smaller:
            yield [*auto, *smaller]
    for factor in FEWER_STEPS:
        yield [
            Change(n.node_id, "steps", max(1, int(steps * factor)))
            for n in ours
            if (steps := graph.integer(n.node_id, "steps")) is not None
            and graph.link(n.node_id, "steps") is None
        ]


def _unlike(graph: Graph, node_id: str, **values: int) -> Iterable[Change]:
    """Yield the changes that give a node these values, without those it has already."""
    for name, value in values.items():
        if graph.link(node_id, name) is None and graph.inputs(node_id).get(name) != value:
            yield Change(node_id, name, value)


def _says(graph: Graph, node: NodeJudgement, name: str, value: str) -> bool:
    return graph.link(node.node_id, name) is None and graph.inputs(node.node_id).get(name) == value
