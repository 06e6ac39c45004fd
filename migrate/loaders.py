"""The three old loaders: each becomes Load SUPIR, and its bundles are taken apart."""

from __future__ import annotations

from .flow import Node, Source
from .rewrite import Parts, Rewrite
from .values import Values

CLIP_LOADER = "CLIPLoader"
PRECISION = (
    "ComfyUI chooses precision and placement of the weights; its start options --fp8_e4m3fn-unet, "
    "--bf16-unet, --highvram and the like do what this did."
)


def load_supir(rewrite: Rewrite, node: Node, values: Values) -> Source:
    """Put Load SUPIR in a loader's place; return its output."""
    new = rewrite.instead("SUPIR_XPU_LoadSUPIR", node)
    values.move(new, "supir_name", "supir_model")
    rewrite.need_file(new, "supir_name", node)
    values.without_equal("fp8_unet", "diffusion_dtype", "high_vram", why=PRECISION)
    values.note("converted", "", "is Load SUPIR now; nodes get MODEL, CLIP and VAE themselves.")
    return Source(new.id, 0)


def given_by(rewrite: Rewrite, node: Node, name: str) -> Source | None:
    """Return what a loader was given, in the new graph."""
    return rewrite.new_source(rewrite.flow.origin(node, name))


def loader_v2(rewrite: Rewrite, node: Node, values: Values) -> None:
    """Take apart a loader that was given MODEL, CLIP and VAE."""
    given = {name: given_by(rewrite, node, name) for name in ("model", "clip", "vae")}
    rewrite.parts[node.id] = Parts(**given, supir=load_supir(rewrite, node, values))


def loader_v2_clip(rewrite: Rewrite, node: Node, values: Values) -> None:
    """Take apart a loader that was given the two text encoders of SDXL one by one."""
    files: list[str] = []
    for name in ("clip_l", "clip_g"):
        source = rewrite.flow.origin(node, name)
        found = None if source is None else rewrite.flow.nodes.get(source.node)
        if found is not None and found.kind == CLIP_LOADER and found.id not in files:
            files.append(found.id)
    clip: Source | None = None
    if len(files) == 2:
        both = rewrite.make("DualCLIPLoader", node, dx=-380, dy=160)
        for place, node_id in enumerate(files, 1):
            loader = rewrite.flow.nodes[node_id]
            both.values[f"clip_name{place}"] = _file_of(loader)
            if "clip_name" in loader.links:
                both.links[f"clip_name{place}"] = loader.links["clip_name"]
            rewrite.need_file(both, f"clip_name{place}", node)
        clip = Source(both.id, 0)
        rewrite.droppable.update(files)
        text = f"and clip_g are loaded by one DualCLIPLoader (node {both.id}, type sdxl) now."
        values.note("converted", "clip_l", text)
    else:
        text = "and clip_g do not come from two Load CLIP nodes. Connect a CLIP that holds both to clip."
        values.note("to_do", "clip_l", text)
    given = {name: given_by(rewrite, node, name) for name in ("model", "vae")}
    supir = load_supir(rewrite, node, values)
    rewrite.parts[node.id] = Parts(given["model"], clip, given["vae"], supir)


def _file_of(loader: Node) -> str:
    """Return the file a Load CLIP node names, in either format."""
    if "clip_name" in loader.values:
        return str(loader.values["clip_name"])
    stored = loader.widgets
    if isinstance(stored, dict):
        return str(stored.get("clip_name", ""))
    return str(stored[0]) if isinstance(stored, list) and stored else ""


def loader_legacy(rewrite: Rewrite, node: Node, values: Values) -> None:
    """Take apart the loader that read the SDXL checkpoint by itself."""
    given = {name: given_by(rewrite, node, name) for name in ("model", "clip", "vae")}
    if any(source is None for source in given.values()):
        base = checkpoint_of(rewrite, node, values, dy=120)
        given = {
            name: source or Source(base.id, slot)
            for slot, (name, source) in enumerate(given.items())
        }
    rewrite.parts[node.id] = Parts(**given, supir=load_supir(rewrite, node, values))


def checkpoint_of(rewrite: Rewrite, node: Node, values: Values, dy: float) -> Node:
    """Return the Load Checkpoint node for an old node's ``sdxl_model``."""
    if values.linked("sdxl_model"):
        base = rewrite.make("CheckpointLoaderSimple", node, dx=-380, dy=dy)
        values.move(base, "ckpt_name", "sdxl_model")
    else:
        base = rewrite.checkpoint(values.get("sdxl_model"), node, dy)
        values.moved["sdxl_model"] = (base.id, "ckpt_name")
    rewrite.need_file(base, "ckpt_name", node)
    text = f"is loaded by Load Checkpoint (node {base.id}) now."
    values.note("converted", "sdxl_model", text)
    return base


HANDLERS = {
    "SUPIR_model_loader_v2": loader_v2,
    "SUPIR_model_loader_v2_clip": loader_v2_clip,
    "SUPIR_model_loader": loader_legacy,
}
