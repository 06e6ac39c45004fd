"""Encode and decode with any VAE of ComfyUI: striped and exact where the network is known.

Pixels, dtypes, devices and cropping are the host's own choices; only the network runs through
``supir.striped``. A VAE that is not recognised takes the host's path, and the note says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import comfy.ldm.models.autoencoder as autoencoder
import comfy.model_management as mm
import comfy.sd
import torch

from ..supir import striped
from ..supir.layer_run import casting
from ..xpu.device import host_region
from . import host
from .execution import Execution

MIN_WORKSPACE_BYTES = 256 * striped.MIB
MAX_WORKSPACE_BYTES = 1024 * striped.MIB
RETRY_WORKSPACE_BYTES = 64 * striped.MIB

Progress = Callable[[int, int], None]
"""``progress(done, total)`` in stripes over the whole batch."""

Run = Callable[[striped.StripeOptions, torch.Tensor, torch.device, torch.dtype], torch.Tensor]
"""run(options, item, device, dtype): one item of a batch through the network."""

STRIPE_LAUNCHES = 32
"""Most launches of one stripe besides attention, every weight cast before its use; counted."""

log = logging.getLogger(__name__)


def encode_image(
    vae: Any,
    image_bhwc: torch.Tensor,
    *,
    workspace_mb: int = 0,
    progress: Progress | None = None,
    execution: Execution | None = None,
) -> tuple[torch.Tensor, str | None]:
    """Encode pictures as ``vae.encode`` would, in bounded memory.

    Args:
        vae: comfy.sd.VAE; what ``vae.patcher`` patches is in effect.
        image_bhwc: [B, H, W, C], 0 to 1; cropped to the VAE's grid as the host does.
        workspace_mb: transient memory per stripe in MiB; 0 chooses 256 to 1024 by free memory.
        progress: called after every stripe; raising in it stops the run cleanly.
        execution: of the run: its attention, its bound on what is in flight, its fault handling.
    Returns: latent [B, C, h, w], unscaled, on the VAE's output device; and a note or None.
    Raises: ShapeError for a picture too small for the VAE; the host's interruption.
    """
    vae.throw_exception_if_invalid()
    reason = _unsupported(vae, "encoder")
    if reason is not None:
        return vae.encode(image_bhwc), _host_note("encoded", reason)
    pixels = vae.vae_encode_crop_pixels(image_bhwc).movedim(-1, 1)  # BHWC -> BCHW
    model = vae.first_stage_model

    def run(
        options: striped.StripeOptions,
        item: torch.Tensor,
        device: torch.device,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        x = vae.process_input(item).to(dtype).to(device)
        moments = striped.encode(model.encoder, x, options)
        if hasattr(model, "quant_conv"):
            moments = model.quant_conv(moments)
        latent, _ = model.regularization(moments)
        return latent.to(device=vae.output_device, dtype=_output_dtype(vae), copy=True)

    options, reason = _prepare(vae, "encoder", pixels, workspace_mb, execution)
    if reason is not None:
        return vae.encode(image_bhwc), _host_note("encoded", reason)
    return _by_item(vae, pixels, run, options, progress, execution), None


def decode_latent(
    vae: Any,
    samples: torch.Tensor,
    *,
    workspace_mb: int = 0,
    progress: Progress | None = None,
    execution: Execution | None = None,
) -> tuple[torch.Tensor, str | None]:
    """Decode latents as ``vae.decode`` would, in bounded memory.

    Args:
        samples: [B, C, h, w], unscaled. The rest as in ``encode_image``.
    Returns: images [B, H, W, C], 0 to 1, on the VAE's output device; and a note or None.
    """
    vae.throw_exception_if_invalid()
    reason = _unsupported(vae, "decoder")
    if reason is not None:
        return vae.decode(samples), _host_note("decoded", reason)
    if samples.ndim == 5:  # a still among video latents
        samples = samples[:, :, 0]
    model = vae.first_stage_model

    def run(
        options: striped.StripeOptions,
        item: torch.Tensor,
        device: torch.device,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        z = item.to(device=device, dtype=dtype)
        if hasattr(model, "post_quant_conv"):
            z = model.post_quant_conv(z)
        image = striped.decode(model.decoder, z, options)
        image = image.to(device=vae.output_device, dtype=_output_dtype(vae), copy=True)
        return vae.process_output(image)

    options, reason = _prepare(vae, "decoder", samples, workspace_mb, execution)
    if reason is not None:
        return vae.decode(samples), _host_note("decoded", reason)
    return _by_item(vae, samples, run, options, progress, execution).movedim(
        1, -1
    ), None  # BCHW -> BHWC


def choose_budgets(
    vae: Any, steps: tuple[striped.Step, ...], size: tuple[int, int], limits: striped.Limits
) -> striped.Limits:
    """Fit workspace and stored stripes to the memory that is free now.

    Args:
        limits: with ``workspace_bytes`` as wanted, 0 for automatic.
    Returns: limits with a workspace, and a store budget where not all stripes fit the device.
    """
    wanted = limits.workspace_bytes
    limits = replace(limits, workspace_bytes=wanted or MIN_WORKSPACE_BYTES)
    if mm.is_device_cpu(vae.device):
        return limits
    free = mm.get_free_memory(vae.device) - mm.extra_reserved_memory()
    plan = striped.plan_steps(steps, *size, limits)
    if not wanted:
        spare = (free - (plan.live_peak_bytes - plan.workspace_bytes)) // 2
        workspace = min(max(spare, MIN_WORKSPACE_BYTES), MAX_WORKSPACE_BYTES)
        limits = replace(limits, workspace_bytes=workspace)
        plan = striped.plan_steps(steps, *size, limits)
    if plan.live_peak_bytes <= free:
        return limits
    store = free - plan.workspace_bytes - plan.kv_bytes - plan.output_bytes
    return replace(limits, store_budget_bytes=max(0, store))


def _unsupported(vae: Any, part: str) -> str | None:
    """Return why this VAE must take the host's path, or None."""
    reason = _foreign(vae, part)
    if reason is not None:
        return reason
    net = getattr(vae.first_stage_model, part)
    reason = striped.recognise(net)
    if reason is not None:  # perhaps a patch of another clone, undone when this one is loaded
        mm.load_models_gpu([vae.patcher])
        reason = striped.recognise(net)
    return reason


def _foreign(vae: Any, part: str) -> str | None:
    """Return what about this VAE, apart from its network, is not a plain KL image VAE."""
    model = vae.first_stage_model
    known = (
        autoencoder.AutoencoderKL,
        autoencoder.AutoencodingEngine,
        autoencoder.AutoencodingEngineLegacy,
    )
    method = "encode" if part == "encoder" else "decode"
    if getattr(type(vae), method, None) is not getattr(comfy.sd.VAE, method):
        return f"{type(vae).__name__} brings its own {method}"
    if type(model) not in known:
        return f"{type(model).__name__} is not a KL image autoencoder"
    if method in vars(vae) or method in vars(model):
        return f"its {method} was replaced"
    if getattr(model, "bn", None) is not None:
        return "its latent is batch-normalised"
    if vae.latent_dim != 2 or getattr(vae, "format_encoded", None) is not None:
        return "its latent is not that of an image"
    return None


def _host_note(done: str, reason: str) -> str:
    return (
        f"The picture was {done} by ComfyUI's own VAE path, because {reason}. Large pictures may "
        "need much memory or be tiled there. Connect the VAE of an SD or SDXL checkpoint for the "
        "exact path in bounded memory."
    )


def _prepare(
    vae: Any,
    part: str,
    x: torch.Tensor,
    workspace_mb: int,
    execution: Execution | None,
) -> tuple[striped.StripeOptions, str | None]:
    """Plan, load the VAE asking for our own memory figure, and set the budgets.

    Returns: the options; and why the loaded network cannot be striped after all, or None
        (patches take effect only on loading).
    Raises: ShapeError before anything is loaded.
    """
    net = getattr(vae.first_stage_model, part)
    steps, size = striped.describe(net), (x.shape[-2], x.shape[-1])
    limits = striped.Limits(
        workspace_bytes=workspace_mb * striped.MIB,
        element_bytes=vae.vae_dtype.itemsize,
        own_attention=execution is not None,
    )
    first = replace(limits, workspace_bytes=limits.workspace_bytes or MIN_WORKSPACE_BYTES)
    need = striped.plan_steps(steps, *size, first).live_peak_bytes
    most = mm.get_total_memory(vae.device) - vae.model_size() - mm.extra_reserved_memory()
    need = min(need, max(most, first.workspace_bytes))  # beyond it stripes are spilled
    full = getattr(vae, "disable_offload", False)
    mm.load_models_gpu([vae.patcher], memory_required=need, force_full_load=full)
    limits = choose_budgets(vae, steps, size, limits)
    options = striped.StripeOptions(
        workspace_bytes=limits.workspace_bytes,
        borrow_weights=host.borrow_weights,
        attention=None if execution is None else execution.run_stripe_attention,
        check_cancel=host.check_cancel,
        store_budget_bytes=limits.store_budget_bytes,
    )
    return options, striped.recognise(net)


def _by_item(
    vae: Any,
    batch: torch.Tensor,
    run: Run,
    options: striped.StripeOptions,
    progress: Progress | None,
    execution: Execution | None,
) -> torch.Tensor:
    """Run a batch one by one: memory stays that of one, and nothing is gained by more."""
    count = batch.shape[0]
    results: torch.Tensor | None = None
    context = getattr(mm, "cuda_device_context", None)
    with nullcontext() if context is None else context(vae.device):
        for k in range(count):
            ticked = replace(options, tick=_batch_tick(progress, k, count, execution))
            item = batch[k : k + 1]
            with host.naming_picture(k, count):
                if execution is None:
                    result = _run_or_retry(vae, run, ticked, item)
                else:
                    result = _run_guarded(vae, run, ticked, item, execution)
            if count == 1:
                return result
            if results is None:
                results = result.new_empty((count, *result.shape[1:]))
            results[k : k + 1] = result
    if results is None:
        raise ValueError("The batch is empty. Connect at least one picture or latent.")
    return results


def _run_or_retry(
    vae: Any, run: Run, options: striped.StripeOptions, item: torch.Tensor
) -> torch.Tensor:
    """Run one item; when the device is out of memory, once more with as little as possible."""
    try:
        return run(options, item, vae.device, vae.vae_dtype)
    except torch.OutOfMemoryError:
        log.warning("The VAE ran out of device memory; stripes are kept in host memory instead.")
    # outside the except block: the exception keeps the failed run's tensors alive
    mm.soft_empty_cache()
    return run(_smaller(options, 1), item, vae.device, vae.vae_dtype)


def _smaller(options: striped.StripeOptions, halvings: int) -> striped.StripeOptions:
    """Return options that keep stripes in host memory and work in little."""
    small = min(options.workspace_bytes, RETRY_WORKSPACE_BYTES) >> (halvings - 1)
    return replace(options, workspace_bytes=small, store_budget_bytes=0)


def _run_guarded(
    vae: Any,
    run: Run,
    options: striped.StripeOptions,
    item: torch.Tensor,
    execution: Execution,
) -> torch.Tensor:
    """Run one item; on a known fault of the device, the way the fault table says.

    A result with NaN or infinity is such a fault; another dtype may be the way around it.
    """
    item = item.contiguous()  # a picture comes with its channels last

    def go(options: striped.StripeOptions, item: torch.Tensor) -> torch.Tensor:
        return run(options, item, vae.device, vae.vae_dtype)

    def in_float() -> torch.Tensor:
        with casting(vae.first_stage_model):
            return run(options, item, vae.device, torch.float32)

    def on_cpu() -> torch.Tensor:
        with host_region(), casting(vae.first_stage_model):
            cpu = torch.device("cpu")
            return run(replace(options, attention=None), item, cpu, vae.vae_dtype)

    def checked(way: Callable[[], torch.Tensor]) -> torch.Tensor:
        result = way()
        execution.check("VAE", result)
        return result

    variants: dict[Any, Callable[[int], torch.Tensor]] = {
        "smaller": lambda n: checked(lambda: go(_smaller(options, n), item)),
        "contiguous": lambda _: checked(lambda: go(options, item.contiguous())),
        "cpu_block": lambda _: checked(on_cpu),
    }
    if vae.vae_dtype != torch.float32:
        variants["dtype"] = lambda _: checked(in_float)
    return execution.guard("VAE", lambda: checked(lambda: go(options, item)), variants)


def _batch_tick(
    progress: Progress | None, index: int, count: int, execution: Execution | None
) -> Progress | None:
    """Turn ticks of one item into progress over the batch, and tell the execution of them."""
    if progress is None and execution is None:
        return None

    def tick(done: int, total: int) -> None:
        if execution is not None:
            execution.governor.tick(STRIPE_LAUNCHES)
        if progress is not None:
            progress(index * total + done, count * total)

    return tick


def _output_dtype(vae: Any) -> torch.dtype:
    """Return the dtype of what the host's VAE gives; hosts before 0.20 always give float32."""
    ask = getattr(vae, "vae_output_dtype", None)
    return torch.float32 if ask is None else ask()
