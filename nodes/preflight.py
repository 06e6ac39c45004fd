"""Preflight: the whole health battery of the device, anywhere in a graph.

The checks run in child processes. This node only frees the device for them, waits, and reports.
"""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..xpu.faults import refuse_if_lost
from ..xpu.probe import Preflight
from ..xpu.probe_report import verdict_lines
from . import host
from .health import Health, is_final
from .machine import Machine, machine
from .risk_nodes import UNCHANGED
from .types import CATEGORY

USUAL_CHECKS = 90
"""Checks of a whole battery, roughly; the length of the progress bar."""


def no_device_line(device: Machine) -> str:
    """Return the one line for a ComfyUI that does not compute on a real Intel GPU."""
    name = host.device_words()
    if device.facts.is_xpu:
        return (
            f"The Intel GPU is described in the user's settings and is not there: nothing to check; "
            f"ComfyUI uses {name}."
        )
    return f"ComfyUI does not use an Intel GPU here: nothing to check; it uses {name}."


def run_battery(health: Health, refresh: bool) -> Preflight | None:
    """Return the judgement of the whole battery; free the device for it unless it is remembered.

    Blocks the thread that runs prompts, as every node does, so nothing else of the graph is on the
    device meanwhile; the server goes on. Raises: the cancel; DeviceLostError.
    """
    known = health.known()
    if not refresh and known is not None and is_final(known):
        return known
    refuse_if_lost()
    host.free_device()
    bar, said = host.PhasedProgress(1).phase(0), [0]

    def progress(text: str) -> None:
        said[0] += 1
        bar(min(said[0], USUAL_CHECKS - 1), USUAL_CHECKS)
        host.tell_preflight(text)

    found = health.check_all(refresh=True, check_cancel=host.check_cancel, progress=progress)
    bar(USUAL_CHECKS, USUAL_CHECKS)
    return found


def report_of(health: Health, found: Preflight | None) -> str:
    """Return a judgement in words."""
    if found is None:
        return health.problem or "The device could not be checked."
    lines = verdict_lines(found.verdict)
    age = health.as_dict()["age_s"]
    if found.from_cache and age is not None:
        lines.append(f"Note: judged {age / 60:.0f} minutes ago; nothing was tried again.")
    return "\n".join(lines)


class PreflightCheck(io.ComfyNode):
    """Judge the device."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        template = io.MatchType.Template("anything")
        return io.Schema(
            node_id="SUPIR_XPU_Preflight",
            display_name="XPU Preflight",
            category=CATEGORY,
            description=(
                "Tries the Intel GPU in child processes and says whether it can be trusted: healthy, "
                "degraded or retreat. Takes about a minute; models leave the device meanwhile. Says "
                "one line on other devices. Passes through what comes in."
            ),
            search_aliases=["supir", "xpu", "health", "doctor", "check", "arc"],
            inputs=[
                io.MatchType.Input(
                    "anything",
                    template=template,
                    optional=True,
                    tooltip="Passed through unchanged; needs no connection.",
                ),
                io.Boolean.Input(
                    "refresh",
                    default=False,
                    optional=True,
                    tooltip=(
                        "Run every check again, also if this device was judged completely since the "
                        "computer started."
                    ),
                ),
            ],
            outputs=[
                io.MatchType.Output(template=template, display_name="anything"),
                io.String.Output("report", display_name="report"),
            ],
            is_output_node=True,
        )

    @classmethod
    def fingerprint_inputs(cls, **_: Any) -> str:
        return UNCHANGED

    @classmethod
    def execute(cls, anything: Any = None, refresh: bool = False) -> io.NodeOutput:
        device = machine()
        if device.health is None or not device.facts.is_xpu:
            report = no_device_line(device)
            shown: dict[str, Any] | None = None
        else:
            report = report_of(device.health, run_battery(device.health, refresh))
            shown = device.health.as_dict()
        ui: dict[str, Any] = {"text": (report,), "supir_xpu": ({"preflight": shown},)}
        return io.NodeOutput(anything, report, ui=ui)
