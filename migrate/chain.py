"""The single old nodes from first stage to decode, and the tiles preview."""

from __future__ import annotations

from .flow import PASSING, Node, Source
from .old_nodes import OLD_NODES
from .rewrite import CENTER, Rewrite
from .sampling import (
    KEEP,
    STRIPES,
    check_ramp,
    move_overlap,
    move_restore,
    move_sampler,
    move_seed,
    move_tiles,
    move_typed_caption,
    note_lost_caption,
)
from .values import Values

VAE_DTYPE = "ComfyUI chooses it; its start options --bf16-vae and --fp32-vae do what this did."


def first_stage(rewrite: Rewrite, node: Node, values: Values) -> None:
    """First Stage without resizing, as the old one left sizes to other nodes."""
    parts = rewrite.parts_for(node, "SUPIR_VAE")
    new = rewrite.instead("SUPIR_XPU_FirstStage", node)
    new.values["upscale_by"] = 1.0
    image = rewrite.new_source(node.links.get("image"))
    rewrite.connect(new, vae=parts.vae, supir=parts.supir, image=image)
    _vae_settings(values)
    values.note(
        "converted",
        "",
        "is SUPIR First Stage now, with upscale_by 1; it can also resize, so a node that only resizes "
        "before it is not needed.",
    )
    rewrite.require(new, node)


def _vae_settings(values: Values) -> None:
    tiles = ("use_tiled_vae", "encoder_tile_size", "decoder_tile_size")
    values.without_equal(*tiles, why=STRIPES)
    values.without_equal("encoder_dtype", "decoder_dtype", why=VAE_DTYPE)


def encode(rewrite: Rewrite, node: Node, values: Values) -> None:
    """Encode of the first stage's picture is its third output; anything else stays an encode."""
    _vae_settings(values)
    stage = _cleaning_stage(rewrite, node)
    if stage is not None:
        rewrite.merged[node.id] = Source(stage.id, CENTER)
        text = f"went into SUPIR First Stage (node {stage.id}): its output center is this latent."
        rewrite.report.add("converted", text, node.id, node.kind)
        return
    parts = rewrite.parts_for(node, "SUPIR_VAE")
    new = rewrite.instead("SUPIR_XPU_Encode", node)
    rewrite.connect(new, vae=parts.vae, image=rewrite.new_source(node.links.get("image")))
    values.note("converted", "", "is SUPIR Encode now.")
    rewrite.require(new, node)


def _cleaning_stage(rewrite: Rewrite, node: Node) -> Node | None:
    """Return the first stage whose picture an encode reads, with the VAE of the same loader."""
    source = rewrite.flow.origin(node, "image")
    stage = None if source is None else rewrite.flow.nodes.get(source.node)
    if stage is None or stage.kind != "SUPIR_first_stage" or source != Source(stage.id, 1):
        return None
    loader = rewrite.loader(node, "SUPIR_VAE")
    same = loader is not None and loader is rewrite.loader(stage, "SUPIR_VAE")
    return stage if same else None


def conditioner(rewrite: Rewrite, node: Node, values: Values) -> None:
    """Prompts only: the latents the old node took are the sampler's ``control`` here."""
    parts = rewrite.parts_for(node, "SUPIR_model")
    new = rewrite.instead("SUPIR_XPU_Conditioning", node)
    captions = rewrite.new_source(node.links.get("captions"))
    rewrite.connect(new, clip=parts.clip, captions=captions)
    values.move(new, "positive", "positive_prompt")
    values.move(new, "negative", "negative_prompt")
    if captions is None:
        note_lost_caption(values)
        move_typed_caption(values, new)
    else:
        text = "and the prompt are parted by a comma here; there they were joined without one."
        values.note("means_other", "captions", text)
    values.note("converted", "", "is SUPIR Conditioning now; its latents go to SUPIR Sample.")
    rewrite.require(new, node)


def sample(rewrite: Rewrite, node: Node, values: Values) -> None:
    """Sample: ``control`` is what the conditioner was given, ``center`` what the sampler was."""
    parts = rewrite.parts_for(node, "SUPIR_model")
    new = rewrite.instead("SUPIR_XPU_Sample", node)
    prompts = [rewrite.flow.origin(node, name) for name in ("positive", "negative")]
    positive, negative = (rewrite.new_source(source) for source in prompts)
    rewrite.connect(new, model=parts.model, supir=parts.supir, positive=positive, negative=negative)
    rewrite.connect(new, control=_control(rewrite, prompts[0]))
    rewrite.connect(new, center=_center(rewrite, node, values))
    move_seed(values, new)
    tiled = move_sampler(values, new)
    for field_name, name in (
        ("steps", "steps"),
        ("cfg_start", "cfg_scale_start"),
        ("cfg_end", "cfg_scale_end"),
        ("control_start", "control_scale_start"),
        ("control_end", "control_scale_end"),
        ("s_churn", "EDM_s_churn"),
        ("s_noise", "s_noise"),
        ("eta", "DPMPP_eta"),
    ):
        values.move(new, field_name, name)
    move_restore(values, new, "restore_cfg")
    check_ramp(values, new, "control_scale_start")
    keep = tiled or (tiled is None and values.given("sampler_tile_size"))
    if not (keep and _linked_tiles(rewrite, new, node, values)):
        move_tiles(values, new, keep)
    values.without_equal("keep_model_loaded", why=KEEP)
    values.note("converted", "", "is SUPIR Sample now.")
    if tiled is False:
        values.without_equal(
            *("sampler_tile_size", "sampler_tile_stride"),
            why="The chosen sampler did not tile, so it had no effect.",
        )
    rewrite.require(new, node)


def _control(rewrite: Rewrite, positive: Source | None) -> Source | None:
    """Return the latents of the conditioner a positive link comes from."""
    found = None if positive is None else rewrite.flow.nodes.get(positive.node)
    if found is None or found.kind != "SUPIR_conditioner":
        return None
    return rewrite.new_source(rewrite.flow.origin(found, "latents"))


def _center(rewrite: Rewrite, node: Node, values: Values) -> Source | None:
    """Return what the old sampler's latents are; noted when they are no picture of SUPIR's."""
    source = rewrite.flow.origin(node, "latents")
    found = None if source is None else rewrite.flow.nodes.get(source.node)
    if found is not None and found.kind not in OLD_NODES:
        text = (
            f"comes from {found.kind} (node {found.id}); it goes to center, whose size must be that of "
            "control. Without a picture in it, disconnect center and set restore_cfg to 0."
        )
        values.note("means_other", "latents", text)
    return rewrite.new_source(source)


def _linked_tiles(rewrite: Rewrite, new: Node, node: Node, values: Values) -> bool:
    """Size and stride that came from SUPIR_tiles: both outputs of our Tiles fit our inputs."""
    size = rewrite.flow.origin(node, "sampler_tile_size")
    stride = rewrite.flow.origin(node, "sampler_tile_stride")
    if size is None or stride is None or size.node != stride.node:
        return False
    found = rewrite.flow.nodes.get(size.node)
    if found is None or found.kind != "SUPIR_tiles" or (size.slot, stride.slot) != (1, 2):
        return False
    rewrite.connect(new, tile_px=Source(found.id, 1), tile_overlap_px=Source(found.id, 2))
    text = "is tile_overlap_px of SUPIR Tiles now."
    values.note("converted", "sampler_tile_stride", text)
    return True


def decode(rewrite: Rewrite, node: Node, values: Values) -> None:
    """Decode, which returns the exact size and never tiles visibly."""
    parts = rewrite.parts_for(node, "SUPIR_VAE")
    new = rewrite.instead("SUPIR_XPU_Decode", node)
    rewrite.connect(new, vae=parts.vae, latent=rewrite.new_source(node.links.get("latents")))
    _vae_settings(values)
    text = "is SUPIR Decode now. SUPIR Color Fix behind it gives the result the input's colours."
    values.note("converted", "", text)
    rewrite.require(new, node)


def tiles(rewrite: Rewrite, node: Node, values: Values) -> None:
    """Tiles also needs the latent, which says where the tiles lie."""
    new = rewrite.instead("SUPIR_XPU_Tiles", node)
    source = rewrite.flow.origin(node, "image")
    latent, image = None, rewrite.new_source(node.links.get("image"))
    for stage in rewrite.flow.nodes.values():
        if stage.kind != "SUPIR_first_stage":
            continue
        if source in (Source(stage.id, 1), rewrite.flow.origin(stage, "image")):
            latent, image = Source(stage.id, 1), Source(stage.id, 0)
            break
    rewrite.connect(new, image=image, latent=latent)
    values.move(new, "tile_px", "tile_size")
    move_overlap(values, new, "tile_size", "tile_stride")
    values.note(
        "converted", "", "is SUPIR Tiles now; it gives tile_overlap_px instead of a stride."
    )
    for reader in rewrite.flow.nodes.values():
        if reader.kind in OLD_NODES or reader.kind in PASSING:
            continue
        for name in reader.links:
            if rewrite.flow.origin(reader, name) == Source(node.id, 2):
                text = "read tile_stride; it gets tile_overlap_px now, which is size minus stride."
                rewrite.report.add("means_other", text, reader.id, reader.kind, name)
    rewrite.require(new, node)


HANDLERS = {
    "SUPIR_first_stage": first_stage,
    "SUPIR_encode": encode,
    "SUPIR_conditioner": conditioner,
    "SUPIR_tiles": tiles,
    "SUPIR_sample": sample,
    "SUPIR_decode": decode,
}
