"""The loop of ``run.py stress``, in a process of its own: bursts of work, a line before each.

Attention in a loop over query rows, in the sizes SDXL has it, and the convolutions between. Started
by path with one JSON argument; prints JSON lines. Imports torch and the pack, nothing of ComfyUI.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from the_pack import load

WIDTH = 64
"""Width of a head in SDXL."""

LEVELS = ((2, 10, 1), (4, 20, 6))
"""(downscale, heads, calls per burst) of SDXL's two levels with attention. With SUPIR one step makes
15 and 91 self-attention calls on them, about 1 to 6; counted on meta tensors."""

CHANNELS = ((1, 320), (2, 640), (4, 1280))
"""(downscale, channels) of SDXL's levels: one 3x3 convolution each per burst."""

LEAST_BURSTS = 5
"""Bursts before a slow one is called an outlier; the first ones compile kernels."""

OUTLIER_FACTOR, OUTLIER_S = 5.0, 0.5
"""A burst is an outlier from this many times the median on, and this much longer (our choice)."""

ORPHANED = 4
"""Exit code of a loop whose parent is gone."""

PARENT_CHECK_S = 1.0
"""Seconds between two looks for the parent (our choice)."""

DRIFT = 1e-2
"""Change of a result, relative to its largest value, that is no rounding (our choice)."""


@dataclass(frozen=True)
class Job:
    """What to run: device, latent cells, images in a batch, query rows per piece, and for how long."""

    device: str = "xpu:0"
    height: int = 168
    width: int = 168
    batch: int = 2
    rows: int = 512
    dtype: str = "float16"
    seconds: float = 300.0
    bursts: int = 0
    channels_divided_by: int = 1


def attend(q: Any, k: Any, v: Any, rows: int) -> Any:
    """Attend piece by piece over query rows, scores in the inputs' dtype, as the first report did.

    Args: q, k, v: [B, H, N, 64]; rows: queries of a piece; up to four pieces' worth run whole.
    """
    import torch

    tokens, factor = q.shape[2], q.shape[3] ** -0.5
    step = rows if tokens > 4 * rows else tokens
    pieces: list[Any] = []
    for start in range(0, tokens, step):
        scores = torch.einsum("bhqd,bhkd->bhqk", q[:, :, start : start + step], k) * factor
        pieces.append(torch.einsum("bhqk,bhkd->bhqd", scores.softmax(dim=-1), v))
    return torch.cat(pieces, dim=2)


def make_inputs(job: Job, place: str | None = None) -> tuple[list[Any], list[Any]]:
    """Return q, k, v of each level and (image, kernel) of each convolution, from a fixed seed.

    Random numbers are made on the processor. Args: place: another device, for counting.
    """
    import torch

    dtype, target = getattr(torch, job.dtype), place or job.device
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Any:
        if target == "meta":
            return torch.empty(shape, dtype=dtype, device=target)
        return torch.randn(shape, generator=generator).to(target, dtype)

    attention = [
        [random(job.batch, heads, job.height // down * (job.width // down), WIDTH) for _ in "qkv"]
        for down, heads, _ in LEVELS
    ]
    convolutions: list[Any] = []
    for down, channels in CHANNELS:
        c = channels // job.channels_divided_by
        image = random(job.batch, c, job.height // down, job.width // down)
        convolutions.append((image, random(c, c, 3, 3) * (9 * c) ** -0.5))
    return attention, convolutions


def burst(job: Job, attention: list[Any], convolutions: list[Any]) -> list[Any]:
    """Run one burst; return the last result of every kind."""
    import torch

    results: list[Any] = []
    for (_, _, calls), (q, k, v) in zip(LEVELS, attention, strict=True):
        for _ in range(calls):
            out = attend(q.clone(), k, v, job.rows)
        results.append(out)
    results += [torch.nn.functional.conv2d(x, kernel, padding=1) for x, kernel in convolutions]
    return results


def launches_of(job: Job) -> int:
    """Return the operators one burst submits, counted on tensors without data: a lower bound."""
    inputs = make_inputs(job, "meta")
    counted, _ = load("xpu.counting").count(lambda: burst(job, *inputs), track_live=False)
    return int(counted.launches)


def fingerprint(results: list[Any]) -> list[list[float]]:
    """Return a few values of every result, read back; raises FloatingPointError if one is not finite."""
    import torch

    taken: list[list[float]] = []
    for number, result in enumerate(results):
        values = result.flatten()
        if not bool(torch.isfinite(values).all().item()):
            raise FloatingPointError(f"result {number} of the burst holds NaN or infinity")
        step = max(1, values.numel() // 64)
        taken.append(values[::step].float().to("cpu").tolist())
    return taken


def drift(first: list[list[float]], now: list[list[float]]) -> float:
    """Return the largest change of a value relative to its result's largest value."""
    worst = 0.0
    for a, b in zip(first, now, strict=True):
        largest = max(map(abs, a)) or 1.0
        worst = max(worst, max(abs(x - y) for x, y in zip(a, b, strict=True)) / largest)
    return worst


def run(
    job: Job,
    say: Callable[..., None],
    clock: Callable[[], float] = time.monotonic,
    one: Callable[..., list[Any]] = burst,
) -> str:
    """Run bursts until the time is over or something is wrong; return what ended it, or ``done``.

    Args:
        say: ``say(event, **numbers)`` before each burst and after it; what it writes must survive a
            crash of the machine.
        one: runs a burst; replaceable for simulation.
    """
    import torch

    attention, convolutions = make_inputs(job)
    first: list[list[float]] | None = None
    times: list[float] = []
    end, number = clock() + job.seconds, 0
    while clock() < end and not (job.bursts and number >= job.bursts):
        number += 1
        say("before", burst=number)
        started = clock()
        try:
            with torch.inference_mode():
                now = fingerprint(one(job, attention, convolutions))
        except FloatingPointError as e:
            return f"non-finite: {e}"
        except (RuntimeError, ValueError, MemoryError) as e:
            return f"error: {type(e).__name__}: {str(e)[:400]}"
        seconds = clock() - started
        say("after", burst=number, seconds=seconds)
        first = first or now
        if (changed := drift(first, now)) > DRIFT:
            return f"wrong numbers: a result changed by {changed:.1%} of its largest value"
        usual = sorted(times)[len(times) // 2] if len(times) >= LEAST_BURSTS else 0.0
        if usual and seconds > max(OUTLIER_FACTOR * usual, usual + OUTLIER_S):
            return f"time outlier: this burst took {seconds:.2f} s, the usual one {usual:.2f} s"
        times.append(seconds)
    return "done"


def main(argument: str) -> int:
    """Run one job as a child: JSON lines on standard output, also into the breadcrumb file."""
    asked = json.loads(argument)
    boot = load("xpu.boot")
    if "parent" in asked:
        end_with(boot.Owner(**asked["parent"]), boot)
    breadcrumbs = load_breadcrumbs(asked["breadcrumbs"])

    def say(event: str, **numbers: Any) -> None:
        line = {"event": event, **numbers}
        if event != "after":
            breadcrumbs.write(line)
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()

    job = Job(**asked["job"])
    try:
        owner = asdict(boot.current_owner())
        say("ready", launches=launches_of(job), job=asdict(job), owner=owner)
        ended = run(job, say)
    except (RuntimeError, ValueError, MemoryError, ImportError, AssertionError) as e:
        ended = f"error: {type(e).__name__}: {str(e)[:400]}"
    except KeyboardInterrupt:
        ended = "stopped by the user"
    say("end", ended=ended)
    return 0


def end_with(parent: Any, boot: Any) -> None:
    """End this process soon after its parent is gone: nobody would end it when it is silent.

    The parent is looked for by its number and start. An end of file on standard input would tell
    sooner, but on Windows a thread that waits there blocks whatever loads a library meanwhile.

    Args: parent: its ``xpu.boot.Owner``. boot: the pack's ``xpu.boot``.
    """
    here = boot.current_owner()

    def watch() -> None:
        while boot.is_alive(parent, here, boot.process_start):
            time.sleep(PARENT_CHECK_S)
        os._exit(ORPHANED)

    threading.Thread(target=watch, daemon=True).start()


def load_breadcrumbs(path: str) -> Any:
    """Return the open breadcrumb file of this session."""
    from stress_log import Breadcrumbs

    return Breadcrumbs(path)


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(encoding="utf-8", errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    sys.exit(main(sys.argv[1]))
