"""One compute node's run: judged before anything moves, waited for, recorded, reported."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import comfy.model_management as mm

from ..xpu.auto_plan import AutoRequest, AutoResult, Settings, find_safe_plan, needed_waits
from ..xpu.history import History
from ..xpu.journal import Journal, RunInfo
from ..xpu.risk import JudgeSettings, PlanNumbers, Waits, enforce, explain, make_judge
from . import host
from .execution import Execution
from .health import override_words, refusal_action, run_notes
from .journal import open_journal
from .machine import Machine, machine
from .phase_event import phase_event

RISK_MODES = ("auto", "block", "warn", "off")
"""Risk modes; frozen."""

SAFER_TILES_PX = (1024, 768, 512, 1536, 2048, 0)
"""Tile sizes ``auto`` may change to, in order of preference; 0 is untiled. Larger ones make fewer
launches, smaller ones less memory and shorter attention."""

Planner = Callable[[Settings], PlanNumbers]


@dataclass(frozen=True)
class Judged:
    """A request that may start: the plan to run, and what was found about it."""

    result: AutoResult
    mode: str
    machine: Machine

    @property
    def text(self) -> str:
        """Plan and verdict in words; nothing on devices without risk and without findings."""
        lines = [*run_notes(self.machine.verdict, self.mode), *self.result.changes]
        if self.result.verdict.risks:
            lines.append(explain(self.result.verdict))
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Plan and verdict as JSON values."""
        plan, verdict = self.result.plan, self.result.verdict
        facts, health = self.machine.facts, self.machine.health
        return {
            "risk": self.mode,
            "preflight": None if health is None else health.as_dict(),
            "device": {"kind": facts.kind, "name": facts.name, "driver": facts.driver},
            "plan": {
                "output_px": [plan.output_width_px, plan.output_height_px],
                "latent": [plan.latent_w, plan.latent_h],
                "tile_px": plan.tile_px,
                "tiles": plan.tiles,
                "steps": plan.steps,
                "images": plan.images,
                "launches_per_step": plan.launches_per_step,
                "launches_total": plan.launches_total,
                "attention": plan.attention_policy,
                "largest_tensor_bytes": plan.largest_tensor_bytes,
                "live_peak_bytes": plan.live_peak_bytes,
                "weight_bytes": plan.weight_bytes,
                "flops": plan.flops_total,
                "bytes_moved": plan.bytes_moved_total,
                "phases": [{"name": p.name, "launches": p.launches} for p in plan.phases],
                "seconds": verdict.size.seconds,
            },
            "score": verdict.score,
            "severity": verdict.severity,
            "risks": [
                {
                    "code": r.code,
                    "severity": r.severity,
                    "points": r.points,
                    "message": r.message,
                    "action": r.action,
                    "input": r.input,
                }
                for r in verdict.risks
            ],
            "changes": list(self.result.changes),
            "waits_s": self.result.waits_s,
        }


def judge_request(
    planner: Planner,
    asked: Settings,
    mode: str,
    *,
    loads_model: bool = False,
    may_tile: bool = True,
    device: Machine | None = None,
) -> Judged:
    """Judge a request, and in mode ``auto`` on an Intel GPU find the cheapest safe plan for it.

    Args:
        planner: settings -> plan numbers; called again for other settings.
        loads_model: weights will move to the device.
        may_tile: whether another tile size may be chosen.
    Raises: RiskBlockedError with codes, numbers and what to change.
    """
    device = device or machine()
    facts = device.now()
    now = time.time()
    history = History(driver=facts.driver)
    if facts.is_xpu:
        history = open_journal().history(facts.name, facts.driver)
    settings = judge_settings(device, loads_model)
    judge = make_judge(facts, device.profile, history, now, settings)
    waits = needed_waits(device.profile, history, now, settings) if facts.is_xpu else Waits()
    if mode == "auto" and facts.is_xpu:
        tiles = SAFER_TILES_PX if may_tile else ()
        request = AutoRequest(asked, tiles, full_waits=waits)
        return Judged(find_safe_plan(request, planner, judge), mode, device)
    plan = planner(asked)
    if mode == "off":
        waits = Waits()
    verdict = judge(plan, waits)
    enforce(verdict, mode)  # pyright: ignore[reportArgumentType]
    return Judged(AutoResult(asked, plan, verdict, (), waits), mode, device)


def judge_settings(device: Machine, loads_model: bool) -> JudgeSettings:
    """Return what the judge must know besides plan, device and history."""
    if device.health is None:
        return JudgeSettings(loads_model=loads_model)
    verdict = device.verdict
    return JudgeSettings(
        loads_model=loads_model,
        preflight=device.health.word,
        preflight_reason="" if verdict is None else verdict.reason,
        preflight_action="" if verdict is None else refusal_action(verdict),
    )


def run_summary(node: str, judged: Judged) -> str:
    """Return the plan in one line, as the journal keeps it."""
    plan = judged.result.plan
    tiles = f"{plan.tiles} tiles of {plan.tile_px} px" if plan.tiles > 1 else "one piece"
    largest, peak = (round(n / 2**20) for n in (plan.largest_tensor_bytes, plan.live_peak_bytes))
    line = (
        f"{node} {plan.output_width_px}x{plan.output_height_px} px, {plan.images} picture(s) in "
        f"{tiles}, {plan.steps} steps, largest tensor {largest} MiB, at most {peak} MiB besides the "
        f"weights, risk {judged.mode}"
    )
    verdict = judged.machine.verdict
    if verdict is not None and verdict.status == "retreat":
        line += f"; preflight retreat ({verdict.criterion}). {override_words(judged.mode)}"
    return line


@dataclass
class GuardedRun:
    """A judged run while it goes on. Use it in a ``with`` block; phases inside.

    Attributes:
        node: what the report calls it.
        phases: name and seconds of what ended.
    """

    node: str
    judged: Judged
    execution: Execution | None
    phases: list[tuple[str, float]] = field(default_factory=list[tuple[str, float]])
    _journal: Journal | None = None
    _info: RunInfo | None = None
    _row: int = 0
    _settled: bool = False

    @classmethod
    def start(cls, node: str, judged: Judged, execution: Execution | None = None) -> GuardedRun:
        """Begin a judged run: wait for what it must wait for. Raises: DeviceLostError, the cancel.

        Args: execution: made already; None makes one.
        """
        run = cls(node, judged, execution or Execution.for_run(judged.machine))
        facts, plan = judged.machine.facts, judged.result.plan
        if facts.is_xpu:
            run._journal = open_journal()
            verdict = judged.result.verdict
            run._info = RunInfo(
                run_id=uuid.uuid4().hex,
                device=facts.name,
                driver=facts.driver,
                torch=facts.torch_version,
                policy=plan.attention_policy,
                launches=plan.launches_total,
                seconds=verdict.size.seconds,
                heavy=verdict.heavy,
                summary=run_summary(node, judged),
            )
        host.wait(judged.result.waits.before_s, "cool-down before the run")
        return run

    def __enter__(self) -> GuardedRun:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._journal is None or self._info is None:
            return
        cancelled = kind is not None and issubclass(kind, mm.InterruptProcessingException)
        result = "ok" if kind is None else "cancel" if cancelled else "error"
        self._journal.close_run(self._info, result)

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Record a phase: open before it, closed after it, whatever becomes of it."""
        started = time.monotonic()
        total_s = self.judged.result.verdict.size.seconds
        ended = [done for done, _ in self.phases]
        start = phase_event(self.node, self.judged.result.plan, total_s, name, ended)
        host.send_event("supir_xpu.phase", start)
        planned = {p.name: p.launches for p in self.judged.result.plan.phases}
        so_far = sum(planned.get(ended, 0) for ended, _ in self.phases)
        executing = nullcontext()
        if self.execution is not None:
            executing = self.execution.phase(name, self.node)
        try:
            if self._journal is None or self._info is None:
                with executing:
                    yield
            else:
                cancel = (mm.InterruptProcessingException,)
                with self._journal.phase(
                    self._info, name, launches=so_far, xpu=True, cancelled_by=cancel
                ) as row:
                    self._row = row
                    with executing:
                        yield
        finally:
            self._row = 0
            seconds = time.monotonic() - started
            self.phases.append((name, seconds))
            done = {"node": self.node, "phase": name, "state": "end", "seconds": seconds}
            host.send_event("supir_xpu.phase", done)

    def step(self, step: int) -> None:
        """Note that a step ended; step counts over the pictures of the batch."""
        if self.execution is not None:
            self.execution.beat()
        if self._journal is not None and self._row:
            launches = step * self.judged.result.plan.launches_per_step
            self._journal.progress(self._row, step=step, launches=launches)

    def settle_after_load(self) -> None:
        """Wait once, between the loading of the weights and the first step, if the plan says so."""
        if not self._settled:
            self._settled = True
            host.wait(self.judged.result.waits.after_load_s, "settling after loading")

    def settle_between_images(self, index: int, count: int) -> None:
        """Wait after each picture but the last, if the plan says so."""
        if index + 1 < count:
            host.wait(self.judged.result.waits.per_image_s, "settling between pictures")

    def text(self, *notes: str) -> str:
        """Return the run report in words."""
        seconds = ", ".join(f"{name} {s:.1f} s" for name, s in self.phases)
        lines = [*notes, self.judged.text]
        if self.execution is not None:
            lines += self.execution.lines()
        return "\n".join(line for line in [*lines, seconds] if line)

    def as_dict(self) -> dict[str, Any]:
        """Return the run report as JSON values."""
        phases = [{"name": name, "seconds": s} for name, s in self.phases]
        events = [] if self.execution is None else self.execution.lines()
        return {"node": self.node, **self.judged.as_dict(), "ran": phases, "execution": events}

    def ui(self, *notes: str) -> dict[str, Any]:
        """Return what the node shows: the report as text, and as JSON under our key."""
        return {"text": (self.text(*notes),), "supir_xpu": (self.as_dict(),)}
