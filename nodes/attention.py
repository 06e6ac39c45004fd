"""Attention: planned attention pieces and the governor for any MODEL."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io, ui

from ..supir.injection import ATTENTION_OVERRIDE
from .execution import Execution
from .types import CATEGORY


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
        execution = Execution.for_run()
        if execution is None:
            text = "No Intel GPU in use: the model is passed through unchanged."
            return io.NodeOutput(model, ui=ui.PreviewText(text))
        clone = model.clone()
        options = clone.model_options["transformer_options"]
        options[ATTENTION_OVERRIDE] = execution.override(options.get(ATTENTION_OVERRIDE))
        facts = execution.facts
        text = f"Planned attention for {facts.name or facts.family} ({facts.fused_sdpa} kernel)"
        return io.NodeOutput(clone, ui=ui.PreviewText(text))
