"""What an encode or decode costs: the striped plan's launches and memory, with arithmetic and traffic.

Arithmetic equals the untiled network's exactly. Traffic is the untiled network's too; stripes read
a few border rows twice and take one more pass for statistics, which is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from .plan_tape import Attention, Sym, Tape
from .striped import MIB, KLLayout, Limits, Step, StripePlan, plan_steps
from .striped.layout import Kind
from .striped.sweeps import Pass

MIN_WORKSPACE_BYTES = 256 * MIB
MAX_WORKSPACE_BYTES = 1024 * MIB

MAP_ELEMENTS = 2
"""Full-resolution maps alive at once, each as wide as the network's first level."""


@dataclass(frozen=True)
class VaeNumbers:
    """One encode or decode of one picture.

    host_peak_bytes: stripes waiting in host memory. The rest as in ``StepNumbers``.
    """

    launches: int
    flops: int
    bytes_moved: int
    largest_tensor_bytes: int
    live_peak_bytes: int
    host_peak_bytes: int
    workspace_bytes: int
    parameters: int


def choose_workspace(free_bytes: int, other_bytes: int = 0) -> int:
    """Return the transient memory of a stripe: half of what is free beside everything else.

    Args:
        free_bytes: on the device; 0 = unknown.
        other_bytes: what the run holds besides the workspace.
    Returns: 256 MiB to 1 GiB; 256 MiB when unknown.
    """
    if free_bytes <= 0:
        return MIN_WORKSPACE_BYTES
    spare = (free_bytes - other_bytes) // 2
    return min(max(spare, MIN_WORKSPACE_BYTES), MAX_WORKSPACE_BYTES)


def fit_limits(
    free_bytes: int,
    height_px: int,
    width_px: int,
    layout: KLLayout,
    element_bytes: int,
    workspace_bytes: int = 0,
) -> Limits:
    """Return budgets for an encode or decode of a picture of this size.

    Args:
        free_bytes: on the device; 0 = unknown, nothing is spilled then.
        workspace_bytes: as wanted; 0 = automatic.
    """
    pixels = height_px * width_px
    cells = pixels // cell_px(layout) ** 2
    maps = MAP_ELEMENTS * layout.ch * pixels * element_bytes
    keys = 2 * layout.ch * layout.ch_mult[-1] * cells * element_bytes
    result = layout.out_channels * pixels * element_bytes
    workspace = workspace_bytes or choose_workspace(free_bytes, maps + keys + result)
    store: int | None = None
    if free_bytes > 0 and maps + keys + result + workspace > free_bytes:
        store = max(0, free_bytes - workspace - keys - result)
    return Limits(workspace, element_bytes, store_budget_bytes=store, own_attention=True)


def cell_px(layout: KLLayout) -> int:
    """Return the pixels of a latent cell's side."""
    return 2 ** (len(layout.ch_mult) - 1)


def plan_vae(
    steps: tuple[Step, ...],
    height: int,
    width: int,
    limits: Limits,
    attention: Attention | None = None,
) -> VaeNumbers:
    """Count one encode (of a picture of height x width px) or decode (of a latent of that size).

    Args:
        steps: of the network. limits: its budgets.
        attention: cost of an attention call; None = one fused kernel each.
    Raises: ShapeError when a side is too short for the network.
    """
    striped = _striped(steps, height, width, limits)
    tape = Tape(attention)
    x = Sym((1, steps[0].cin, height, width), limits.element_bytes)
    for step in steps:
        x = _run(tape, step, x, fused=attention is None)
    launches, largest, flops, moved, temps = striped.launches, 0, 0, 0, 0
    if attention is not None:
        for call, times in _attention_calls(striped).items():
            cost = attention(1, 1, *call)
            launches += (cost.launches - 1) * times
            flops += cost.flops * times
            moved += cost.bytes_moved * times
            largest = max(largest, cost.largest_bytes)
            temps = max(temps, cost.temp_bytes)
    return VaeNumbers(
        launches=launches,
        flops=tape.flops + flops,
        bytes_moved=tape.bytes_moved + moved,
        largest_tensor_bytes=max(striped.largest_tensor_bytes, largest),
        live_peak_bytes=striped.live_peak_bytes + temps,
        host_peak_bytes=striped.host_peak_bytes,
        workspace_bytes=limits.workspace_bytes,
        parameters=tape.parameters,
    )


@lru_cache(maxsize=64)
def _striped(steps: tuple[Step, ...], height: int, width: int, limits: Limits) -> StripePlan:
    """Plans of large pictures take a while and are asked for again and again."""
    return plan_steps(steps, height, width, limits)


def _attention_calls(plan: StripePlan) -> dict[tuple[int, int, int], int]:
    """Return how often each (queries, keys, width) is attended."""
    calls: dict[tuple[int, int, int], int] = {}
    for sweep in plan.sweeps:
        if sweep.work is Pass.QUERIES:
            keys = sweep.height * sweep.width
            for task in sweep.tasks:
                call = (task.rows * sweep.width, keys, sweep.cin)
                calls[call] = calls.get(call, 0) + 1
        elif sweep.work is Pass.NATIVE and sweep.step.kind is Kind.ATTN:
            tokens = sweep.height * sweep.width
            call = (tokens, tokens, sweep.cin)
            calls[call] = calls.get(call, 0) + 1
    return calls


def _run(tape: Tape, step: Step, x: Sym, fused: bool) -> Sym:
    """The untiled step on the tape."""
    if step.kind is Kind.CONV_IN:
        return tape.conv(x, step.cout)
    if step.kind is Kind.UP:
        batch, channels, height, width = x.shape
        x = tape.run("elementwise", [x], (batch, channels, 2 * height, 2 * width))
        return tape.conv(x, step.cout)
    if step.kind is Kind.DOWN:  # padded on two sides, so an odd last row is dropped
        x = tape.copy(x)
        height, width = (side // 2 * 2 for side in x.shape[2:])
        return tape.conv(x.view(*x.shape[:2], height, width), step.cout, stride=2)
    if step.kind is Kind.OUT:
        return tape.conv(tape.point(tape.group_norm(x)), step.cout)
    if step.kind is Kind.ATTN:
        return _attention(tape, step, x, fused)
    h = tape.conv(tape.point(tape.group_norm(x)), step.cout)
    h = tape.conv(tape.point(tape.group_norm(h)), step.cout)
    return tape.point(tape.conv(x, step.cout, kernel=1) if step.shortcut else x, h)


def _attention(tape: Tape, step: Step, x: Sym, fused: bool) -> Sym:
    batch, channels, height, width = x.shape
    h = tape.group_norm(x)
    q, k, v = (
        tape.conv(h, channels, kernel=1).view(batch, height * width, channels) for _ in range(3)
    )
    out = tape.attend(q, k, v, 1) if fused else q
    return tape.point(x, tape.conv(out.view(*x.shape), step.cout, kernel=1))


def encoder_steps(layout: KLLayout | Sequence[Step]) -> tuple[Step, ...]:
    """Return the encoder of a layout as hashable steps."""
    return tuple(layout.encoder_steps() if isinstance(layout, KLLayout) else layout)


def decoder_steps(layout: KLLayout | Sequence[Step]) -> tuple[Step, ...]:
    """Return the decoder of a layout as hashable steps."""
    return tuple(layout.decoder_steps() if isinstance(layout, KLLayout) else layout)
