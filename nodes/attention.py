"""Attention: planned attention pieces and the governor for any MODEL."""

from __future__ import annotations

from typing import Any

from comfy.patcher_extension import WrappersMP
from comfy_api.latest import io, ui

from ..supir.constants import WORK_KEY
from ..supir.injection import ATTENTION_OVERRIDE
from .execution import Execution
from .health import run_notes
from .judging import require_usable
from .machine import machine
from .types import CATEGORY

RUN_KEY = f"{WORK_KEY}_attention"
"""Our key for the wrapper around a sampling of the MODEL."""


def _one_run(execution: Execution) -> Any:
    """Return a wrapper that gives every sampling its own fault budget, watch and final wait."""

    def wrapper(executor: Any, *args: Any, **kwargs: Any) -> Any:
        execution.budget.reset()
        with execution.phase("sampling with planned attention", "Attention"):
            return executor(*args, **kwargs)

    return wrapper


class Attention(io.ComfyNode):
    """Attach planned attention to a MODEL of any kind."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SUPIR_XPU_Attention",
            display_name="XPU Planned Attention",
            category=CATEGORY,
            description=(
                "Runs the attention of any model (SDXL, Flux, ...) in exact pieces that fit the Intel "
                "GPU's limits, bounds what is in flight and recovers from known faults. Passes the "
                "model through on other devices. The SUPIR nodes do this by themselves."
            ),
            search_aliases=["xpu", "arc", "attention", "chunked"],
            inputs=[io.Model.Input("model", tooltip="Any model; it is cloned, not changed.")],
            outputs=[io.Model.Output("model", display_name="MODEL")],
        )

    @classmethod
    def execute(cls, model: Any) -> io.NodeOutput:
        device = machine()
        require_usable(device, "warn")
        execution = Execution.for_run(device)
        if execution is None:
            text = "No Intel GPU in use: the model is passed through unchanged."
            return io.NodeOutput(model, ui=ui.PreviewText(text))
        clone = model.clone()
        options = clone.model_options["transformer_options"]
        options[ATTENTION_OVERRIDE] = execution.override(options.get(ATTENTION_OVERRIDE))
        clone.remove_wrappers_with_key(WrappersMP.OUTER_SAMPLE, RUN_KEY)
        clone.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, RUN_KEY, _one_run(execution))
        facts = execution.facts
        text = f"Planned attention for {facts.name or facts.family} ({facts.fused_sdpa} kernel)"
        text = "\n".join([text, *run_notes(device.verdict, "")])
        return io.NodeOutput(clone, ui=ui.PreviewText(text))
