"""What the old sampling settings are here: sampler names, ramps, tiles. For two nodes alike."""

from __future__ import annotations

from .flow import Node
from .old_nodes import CONTROLS, SAMPLERS, SEED_CONTROL
from .values import Values

KEEP = "ComfyUI keeps, offloads and frees SUPIR's weights with its own models."
STRIPES = "The VAE runs in exact stripes of bounded memory here; there is no tile to set."


def move_seed(values: Values, new: Node) -> None:
    """Move the seed, and what becomes of it after a run."""
    values.move(new, "seed", "seed")
    new.values[SEED_CONTROL] = values.node.values.get(SEED_CONTROL, "fixed")
    source = values.flow.origin(values.node, "seed")
    if source is None or values.linked("seed"):
        return
    stored = values.flow.nodes[source.node].widgets
    if isinstance(stored, list) and len(stored) > 1 and stored[1] in CONTROLS:
        new.values[SEED_CONTROL] = stored[1]
        if stored[1] != "fixed":
            text = (
                f"came from node {source.node}, which was set to {stored[1]}: this node changes its own "
                "seed after a run now, apart from every other reader of that node."
            )
            values.note("means_other", "seed", text)


def move_sampler(values: Values, new: Node) -> bool | None:
    """Move the sampler; return whether the old one sampled in tiles, None if that is not known."""
    values.moved["sampler"] = (new.id, "sampler")
    if values.linked("sampler"):
        values.note("to_do", "sampler", "came over a link, and the names differ here: choose one.")
        return None
    ours, tiled = SAMPLERS[values.get("sampler")]
    new.values["sampler"] = ours
    return tiled


def move_restore(values: Values, new: Node, name: str) -> None:
    """Move the exponent of the pull towards the first stage."""
    values.move(new, "restore_cfg", name)
    value = new.values["restore_cfg"]
    if "restore_cfg" in new.links or value <= 0:
        return
    if new.values["sampler"] == "restore_dpmpp_2m":
        text = f"was {value:g} and had no effect with DPM++, there as here."
        values.note("means_other", name, text)
    else:
        values.note(
            "means_other",
            name,
            f"is {value:g}, an exponent there as here: a smaller value pulls harder and longer towards "
            "the first stage, a larger one only in the first steps. What it pulls to is now scaled as "
            "in the original.",
        )


def check_ramp(values: Values, new: Node, start: str) -> None:
    """Note what DPM++ does not use."""
    ramped = new.values["control_start"] != new.values["control_end"]
    if new.values["sampler"] == "restore_dpmpp_2m" and ramped:
        text = "is not used with restore_dpmpp_2m: control_end holds for the whole run."
        values.note("means_other", start, text)


def move_tiles(values: Values, new: Node, tiled: bool) -> None:
    """Move size and stride of the sampling tiles; an untiled run lets the size be planned."""
    if not tiled:
        new.values["tile_px"] = 0
        text = (
            "0 here: untiled while the picture is small enough for this device, planned tiles above. "
            "-1 never tiles, as the old sampler did."
        )
        values.note("means_other", "tile_px", text)
        return
    values.move(new, "tile_px", "sampler_tile_size")
    move_overlap(values, new, "sampler_tile_size", "sampler_tile_stride")


def move_overlap(values: Values, new: Node, size_name: str, stride_name: str) -> None:
    """Set the overlap of tiles from their size and stride."""
    if values.linked(size_name) or values.linked(stride_name):
        text = (
            "came over a link, and here the overlap is set: tile size minus stride. It is {} now."
        )
        values.note("to_do", stride_name, text.format(new.values["tile_overlap_px"]))
        return
    size, stride = int(values.get(size_name)), int(values.get(stride_name))
    new.values["tile_overlap_px"] = max(0, size - stride)
    if stride > size:
        text = f"{stride} is larger than the tile of {size}, which left strips out; no overlap now."
        values.note("means_other", stride_name, text)
    elif stride < 1:
        new.values["tile_overlap_px"] = size // 2
        values.note("means_other", stride_name, f"is {stride}; an overlap of half a tile is set.")


def move_typed_caption(values: Values, new: Node) -> None:
    """Put a caption typed into an API prompt before the prompt; saved workflows kept leftovers there."""
    caption = values.node.values.get("captions")
    if not isinstance(caption, str) or not caption.strip():
        return
    if values.node.raw.get("widgets_values") is not None:
        text = f"held {caption!r}, which was not used: only a link to captions counted."
        values.note("ignored", "captions", text)
        return
    if "positive" in new.links:
        text = (
            f"held {caption!r}, which stood before the positive prompt. That comes over a link: put the "
            "caption into its text by hand."
        )
        values.note("to_do", "captions", text)
        return
    prompt = str(new.values["positive"])
    new.values["positive"] = f"{caption}, {prompt}" if prompt.strip() else caption
    values.note("converted", "captions", "stands before the positive prompt now.")


def note_lost_caption(values: Values) -> None:
    """Note a link to captions whose other end is gone."""
    if "captions" in values.node.links:
        values.note(
            "to_do", "captions", "came over a link that cannot be followed: connect it anew."
        )
