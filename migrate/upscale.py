"""The legacy single node: SUPIR Upscale with its loaders, or the chain where captions are linked."""

from __future__ import annotations

from .flow import Node, Source
from .loaders import PRECISION, checkpoint_of
from .new_nodes import NEW_NODES
from .old_nodes import COLOR_FIX
from .rewrite import Parts, Rewrite
from .sampling import (
    KEEP,
    STRIPES,
    check_ramp,
    move_restore,
    move_sampler,
    move_seed,
    move_tiles,
    move_typed_caption,
    note_lost_caption,
)
from .values import Values

LARGEST_SCALE_BY = 8.0
"""Largest factor of ComfyUI's ImageScaleBy."""

BATCH = "Pictures of a batch run one after the other, each as it would alone."


def upscale(rewrite: Rewrite, node: Node, values: Values) -> None:
    """Convert the single node with its two file names."""
    base = checkpoint_of(rewrite, node, values, dy=0)
    model, clip, vae = (Source(base.id, slot) for slot in range(3))
    parts = Parts(model, clip, vae, _supir(rewrite, node, values))
    captions = rewrite.new_source(node.links.get("captions"))
    image = rewrite.new_source(node.links.get("image"))
    if captions is None:
        new = rewrite.instead("SUPIR_XPU_Upscale", node)
        image = _resized(rewrite, new, values, image)
        rewrite.connect(new, model=model, clip=clip, vae=vae, supir=parts.supir, image=image)
        values.move(new, "positive", "a_prompt")
        values.move(new, "negative", "n_prompt")
        note_lost_caption(values)
        move_typed_caption(values, new)
        _settings(values, new)
        new.values["color_fix"] = _color(values, new, "color_fix")
        values.note("converted", "", "is SUPIR Upscale now.")
        rewrite.require(new, node)
    else:
        _chain(rewrite, node, values, parts, image, captions)
    _no_equal(values)


def _supir(rewrite: Rewrite, node: Node, values: Values) -> Source:
    """Return the output of Load SUPIR for the old file name, one node for each file."""
    if values.linked("supir_model"):
        new = rewrite.make("SUPIR_XPU_LoadSUPIR", node, dx=-380, dy=150)
        values.move(new, "supir_name", "supir_model")
        rewrite.need_file(new, "supir_name", node)
        return Source(new.id, 0)
    name = values.get("supir_model")
    if name not in rewrite.supir_files:
        new = rewrite.make("SUPIR_XPU_LoadSUPIR", node, dx=-380, dy=150)
        new.values["supir_name"] = name
        rewrite.supir_files[name] = new
    new = rewrite.shared(rewrite.supir_files[name], node)
    values.moved["supir_model"] = (new.id, "supir_name")
    rewrite.need_file(new, "supir_name", node)
    values.note("converted", "supir_model", f"is loaded by Load SUPIR (node {new.id}) now.")
    return Source(new.id, 0)


def _resized(rewrite: Rewrite, new: Node, values: Values, image: Source | None) -> Source | None:
    """Set the size; another resizing method than ours is a node of its own before."""
    method = values.get("resize_method")
    factor = 0.0 if values.linked("scale_by") else float(values.get("scale_by"))
    if values.linked("resize_method") and factor != 1.0:
        text = "came over a link, and here the node resizes with lanczos."
        values.note("means_other", "resize_method", text)
    if method == "lanczos" or factor == 1.0 or image is None:
        values.move(new, "upscale_by", "scale_by")
        return image
    if factor > LARGEST_SCALE_BY:
        values.move(new, "upscale_by", "scale_by")
        text = f"was {method}; a factor of {factor:g} is resized with lanczos here."
        values.note("means_other", "resize_method", text)
        return image
    scale = rewrite.make("ImageScaleBy", values.node, dx=-380, dy=260)
    scale.values["upscale_method"] = method
    scale.links["image"] = image
    values.move(scale, "scale_by", "scale_by")
    new.values["upscale_by"] = 1.0
    text = f"{method} is done by Upscale Image By (node {scale.id}) now; upscale_by is 1."
    values.note("converted", "resize_method", text)
    return Source(scale.id, 0)


def _settings(values: Values, new: Node) -> None:
    """Move what Sample and Upscale have in common. In the old node, a start of 0 meant no ramp."""
    move_seed(values, new)
    move_sampler(values, new)
    for field_name, name in (("steps", "steps"), ("s_churn", "s_churn"), ("s_noise", "s_noise")):
        values.move(new, field_name, name)
    for prefix in ("cfg", "control"):
        end, start = f"{prefix}_scale", f"{prefix}_scale_start"
        values.move(new, f"{prefix}_end", end)
        ramp = values.linked(start) or float(values.get(start)) > 0
        values.move(new, f"{prefix}_start", start if ramp else end)
        if not ramp and values.given(start):
            text = f"was 0, which meant no ramp: {prefix}_start is {prefix}_end here."
            values.note("means_other", start, text)
    move_restore(values, new, "restoration_scale")
    check_ramp(values, new, "control_scale_start")
    if values.linked("use_tiled_sampling"):
        size, stride = values.get("sampler_tile_size"), values.get("sampler_tile_stride")
        text = (
            "came over a link; here tile_px says it, and is 0 now. For the tiles of the old node set "
            f"tile_px to {size} and tile_overlap_px to {max(0, int(size) - int(stride))}."
        )
        values.note("to_do", "use_tiled_sampling", text)
        move_tiles(values, new, False)
        return
    move_tiles(values, new, bool(values.get("use_tiled_sampling")))


def _color(values: Values, new: Node, field_name: str) -> str:
    values.moved["color_fix_type"] = (new.id, field_name)
    if values.linked("color_fix_type"):
        text = "came over a link, and the names differ here: choose one. It is wavelet now."
        values.note("to_do", "color_fix_type", text)
        return "wavelet"
    return COLOR_FIX[values.get("color_fix_type")]


def _no_equal(values: Values) -> None:
    tiles = ("use_tiled_vae", "encoder_tile_size_pixels", "decoder_tile_size_latent")
    values.without_equal(*tiles, why=STRIPES)
    values.without_equal("keep_model_loaded", why=KEEP)
    precision = ("diffusion_dtype", "encoder_dtype", "fp8_unet", "fp8_vae")
    values.without_equal(*precision, why=PRECISION)
    values.without_equal("batch_size", why=BATCH)


def _chain(
    rewrite: Rewrite,
    node: Node,
    values: Values,
    parts: Parts,
    image: Source | None,
    captions: Source,
) -> None:
    """The same restoration with the single nodes, as only they take captions over a link."""
    stage = rewrite.make("SUPIR_XPU_FirstStage", node, dx=0, dy=0)
    image = _resized(rewrite, stage, values, image)
    rewrite.connect(stage, vae=parts.vae, supir=parts.supir, image=image)
    words = rewrite.make("SUPIR_XPU_Conditioning", node, dx=0, dy=220)
    rewrite.connect(words, clip=parts.clip, captions=captions)
    values.move(words, "positive", "a_prompt")
    values.move(words, "negative", "n_prompt")
    run = rewrite.make("SUPIR_XPU_Sample", node, dx=420, dy=0)
    rewrite.connect(run, model=parts.model, supir=parts.supir)
    rewrite.connect(run, positive=Source(words.id, 0), negative=Source(words.id, 1))
    rewrite.connect(run, control=Source(stage.id, 1), center=Source(stage.id, 2))
    _settings(values, run)
    decode = rewrite.make("SUPIR_XPU_Decode", node, dx=800, dy=0)
    rewrite.connect(decode, vae=parts.vae, latent=Source(run.id, 0))
    fix = rewrite.instead("SUPIR_XPU_ColorFix", node)
    fix.pos = (node.pos[0] + 800, node.pos[1] + 180)
    rewrite.connect(fix, image=Source(decode.id, 0), reference=Source(stage.id, 0))
    fix.values["method"] = _color(values, fix, "method")
    chain = ", ".join(NEW_NODES[n.kind].title for n in (stage, words, run, decode, fix))
    text = f"is a chain now, as only the single nodes take captions over a link: {chain}."
    values.note("converted", "", text)
    for new in (stage, words, run, decode, fix):
        rewrite.require(new, node)


HANDLERS = {"SUPIR_Upscale": upscale}
