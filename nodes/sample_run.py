"""A sampling run: checked before a model moves, then restored picture by picture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import comfy.model_management as mm
import torch

from ..supir.conditioning import choose_captions
from ..supir.constants import WORK_KEY
from ..supir.demo_model import SIZE_EMBEDDING as SIZE_CHANNELS
from ..supir.errors import ShapeError
from ..supir.injection import replaced_attention
from ..supir.layout import SupirDims
from ..xpu.device import host_region
from . import host
from .condition import caption_count, pick_rows
from .execution import check_stage
from .guarded_run import GuardedRun, Judged
from .guider import GuiderInputs, SupirGuider, check_conditioning
from .host import BatchProgress
from .judging import judge_run
from .model_check import check_base, check_pair
from .picture import fit_to_canvas, picture_part, read_latent
from .planning import sample_networks
from .sample_request import (
    SampleSettings,
    chosen_tile,
    latent_ratio,
    sampling_request,
    tile_cells,
)
from .sampler import image_seed, make_sampler, schedule, start_noise
from .sockets import check_prompts, check_supir
from .types import Canvas, SupirModel


@dataclass(frozen=True)
class SampleRun:
    """One checked request: everything ``run`` needs, validated before a model moves."""

    model: Any
    supir: SupirModel
    positive: Any
    negative: Any
    control: Any
    center: Any
    settings: SampleSettings
    notes: list[str]
    tile: tuple[int, int]
    captions: str
    judged: Judged


def prepare_run(
    model: Any,
    supir: SupirModel,
    positive: Any,
    negative: Any,
    control: Any,
    center: Any,
    settings: SampleSettings,
    judged: Judged | None = None,
) -> SampleRun:
    """Check a request and judge it, unless it was judged already as part of a larger one.

    Raises: ModelError, ShapeError, SettingsError naming the input; RiskBlockedError.
    """
    check_supir(supir)
    check_prompts(positive, negative)
    check_base(model)
    check_pair(model, supir.dims, supir.name)
    samples = read_latent(control, "control")
    channels = supir.dims.control.hint_channels
    if samples.shape[1] != channels:
        raise ShapeError(
            f"control has {samples.shape[1]} channels and SUPIR needs {channels}. Connect the "
            "control output of First Stage, made with the VAE of an SDXL checkpoint."
        )
    notes = settings.notes()
    if center is not None:
        size = read_latent(center, "center").shape
        if size[1:] != samples.shape[1:] or size[0] not in (1, samples.shape[0]):
            raise ShapeError(
                f"center is {tuple(size)} and control is {tuple(samples.shape)} (batch, channels, "
                "height, width). Connect both from the same First Stage node."
            )
    elif settings.effective_guidance.uses_restore:
        notes.append("center is not connected: restore_cfg pulls towards control instead.")
        center = control
    networks = sample_networks(model, supir, latent_ratio(control))
    tile = tile_cells(settings.tile_px, settings.tile_overlap_px, control, networks)
    if judged is None:
        request = sampling_request(positive, negative, control, settings, tile)
        loads = not host.is_loaded(model)
        judged = judge_run(request, networks, settings.risk, loads_model=loads, starts=True)
    tile = chosen_tile(judged, tile, latent_ratio(control))
    probe = GuiderInputs(settings.guidance, samples[:1], None, *tile)
    count = len(probe.tiles())
    for name, conds in (("positive", positive), ("negative", negative)):
        check_conditioning(name, conds, count)
        check_widths(name, conds, supir.dims)
    check_same_picture(control, center)
    replaced = replaced_attention(
        model.model.diffusion_model, model.model_options["transformer_options"]
    )
    if replaced:
        notes.append(f"{replaced} attention calls per step are replaced by another pack.")
    captions = choose_captions(caption_count(positive), samples.shape[0], count)
    check_rows(negative, samples.shape[0])
    return SampleRun(
        model,
        supir,
        positive,
        negative,
        control,
        center,
        settings,
        notes,
        tile,
        captions,
        judged,
    )


def run_sample(run: SampleRun, guard: GuardedRun) -> torch.Tensor:
    """Restore every picture; picture k equals a single run with seed + k, bit for bit.

    Returns: [B, 4, h, w] unscaled latent on the intermediate device.
    """
    settings, model = run.settings, run.model
    samples = run.control["samples"]
    batch = samples.shape[0]
    levels = schedule(settings.sampler, settings.steps)
    sampler = make_sampler(settings.sampler, settings.s_churn, settings.s_noise, settings.eta)
    indices = batch_indices(run.control, batch)
    progress = BatchProgress(model, len(levels) - 1, batch)
    done: list[torch.Tensor] = []
    for k in range(batch):
        seed = image_seed(settings.seed, indices[k % len(indices)], settings.batch_seed)
        guider = _guider(run, k, guard)
        mask, latent = _mask(run, k)
        noise = start_noise(tuple(samples[k : k + 1].shape), seed)
        with host.naming_picture(k, batch):
            out = guider.sample(
                noise,
                latent,
                sampler,
                levels,
                denoise_mask=mask,
                callback=_on_step(progress.callback(k), guard, k * (len(levels) - 1)),
                disable_pbar=True,
                seed=seed,
            )
            check_stage("Sampling", out, guard.execution)
        done.append(out.to(mm.intermediate_device()))
        guard.settle_between_images(k, batch)
    return torch.cat(done)


def batch_indices(latent: Any, batch: int) -> list[int]:
    """Return the place of each picture in the batch it was taken from; it decides its seed.

    Raises: ShapeError when the LATENT carries something else under ``batch_index``.
    """
    found = latent.get("batch_index")
    if found is None:
        return list(range(batch))
    if not isinstance(found, list) or not all(isinstance(i, int) for i in found) or not found:
        raise ShapeError(
            f"control carries batch_index {found!r:.60}, but it is a list of whole numbers. Look at "
            "the node that cut the batch."
        )
    return found


def check_rows(negative: Any, batch: int) -> None:
    """Refuse a negative conditioning with rows for other pictures than these. Raises: ShapeError."""
    for cond, _ in negative:
        if cond.shape[0] not in (1, batch):
            raise ShapeError(
                f"negative holds {cond.shape[0]} rows, but there are {batch} picture(s). Give one "
                "negative prompt, or one row for each picture."
            )


def check_widths(name: str, conds: Any, dims: SupirDims) -> None:
    """Refuse conditioning of another text encoder. Raises: ShapeError naming what differs."""
    context, vector = dims.control.context_dim, dims.control.adm_in_channels - SIZE_CHANNELS
    if not conds:
        raise ShapeError(f"{name} is empty. Connect the {name} output of SUPIR Conditioning.")
    for cond, extra in conds:
        pooled = extra.get("pooled_output")
        shape = tuple(getattr(cond, "shape", ()))
        if len(shape) != 3 or 0 in shape or shape[-1] != context:
            raise ShapeError(
                f"{name} is {shape or type(cond).__name__} (batch, tokens, width), and the model wants "
                f"a width of {context}. Connect a prompt encoded with the CLIP of the same checkpoint."
            )
        found = tuple(getattr(pooled, "shape", ()))
        if len(found) != 2 or found[-1] != vector:
            raise ShapeError(
                f"{name} has a pooled output of {found or type(pooled).__name__}, and the model wants "
                f"(batch, {vector}). Connect a prompt encoded with the CLIP of the same checkpoint."
            )
        with host_region():  # a check of the input, not work of the run
            finite = bool(torch.isfinite(cond).all())
        if not finite:
            raise ShapeError(f"{name} holds NaN or infinite values. Look at what encodes it.")


def check_same_picture(control: Any, center: Any) -> None:
    """Refuse latents of pictures of different sizes on one canvas. Raises: ShapeError."""
    sizes = [
        (c.width_px, c.height_px)
        for latent in (control, center)
        if latent is not None and isinstance(c := latent.get(WORK_KEY), Canvas)
    ]
    if len(set(sizes)) > 1:
        raise ShapeError(
            f"control belongs to a picture of {sizes[0][0]}x{sizes[0][1]} px and center to one of "
            f"{sizes[1][0]}x{sizes[1][1]}. Connect both from the same First Stage node."
        )


def fit_masks(conds: Any, latent: Any) -> Any:
    """Return conditioning whose masks lie on the latent's canvas as on its picture."""
    return [
        [
            cond,
            {**extra, "mask": fit_to_canvas(extra["mask"], latent)} if "mask" in extra else extra,
        ]
        for cond, extra in conds
    ]


def _on_step(callback: Any, guard: GuardedRun, before: int) -> Any:
    """Return the host's step callback that also tells the run's record."""

    def on_step(step: int, x0: torch.Tensor, x: torch.Tensor, total: int) -> None:
        callback(step, x0, x, total)
        guard.step(before + step + 1)

    return on_step


def _guider(run: SampleRun, k: int, guard: GuardedRun) -> SupirGuider:
    scale = run.model.get_model_object("latent_format").process_in
    hint = scale(run.control["samples"][k : k + 1].float())
    center = None
    if run.center is not None:
        rows = run.center["samples"]
        center = scale(rows[k % rows.shape[0]][None].float())
    inputs = GuiderInputs(
        run.settings.effective_guidance,
        hint,
        center,
        *run.tile,
        picture=picture_part(run.control),
        captions_per_tile=run.captions in ("tile", "image_tile"),
    )
    guider = SupirGuider(
        run.model, run.supir, inputs, guard.execution, on_first_call=guard.settle_after_load
    )
    rows = {"image": 1, "image_tile": len(inputs.tiles())}.get(run.captions)
    positive = run.positive if rows is None else pick_rows(run.positive, k * rows, rows)
    negative = run.negative
    if any(cond.shape[0] > 1 for cond, _ in negative):
        negative = pick_rows(negative, k, 1)
    guider.set_conds(fit_masks(positive, run.control), fit_masks(negative, run.control))
    return guider


def _mask(run: SampleRun, k: int) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return (noise mask, latent whose unmasked area is kept) of picture k; no mask keeps nothing."""
    samples = run.control["samples"][k : k + 1]
    mask = run.control.get("noise_mask")
    if mask is None:
        return None, torch.zeros_like(samples, dtype=torch.float32, device="cpu")
    kept = run.control if run.center is None else run.center
    rows = kept["samples"]
    if not isinstance(mask, torch.Tensor) or mask.ndim < 2 or 0 in mask.shape:
        raise ShapeError(
            f"control carries a noise_mask that is {getattr(mask, 'shape', type(mask).__name__)}, but "
            "a mask has at least one pixel. Look at the node that sets it."
        )
    mask = fit_to_canvas(mask.float().reshape(-1, 1, *mask.shape[-2:]), run.control)
    return mask[k % mask.shape[0]][None], rows[k % rows.shape[0]][None].float()


def describe(run: SampleRun) -> str:
    """Return what a sampling run does, in a few words."""
    tile, overlap = run.tile
    ratio = latent_ratio(run.control)
    tiles = f"tiles of {tile * ratio} px, overlap {overlap * ratio} px" if tile else "no tiles"
    return f"{run.control['samples'].shape[0]} picture(s), {run.settings.steps} steps, {tiles}"
