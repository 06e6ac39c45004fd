"""Workflows of the older SUPIR wrapper as people share them, rebuilt small from their description.

Structures A to E are those found in published examples and scripts. ``foreign=False`` puts
ComfyUI's own nodes where shared workflows have nodes of other packs, so that they can run.
"""

from __future__ import annotations

from typing import Any

from supir_xpu.migrate.old_nodes import OLD_NODES

OLD_OUTPUTS = {
    "SUPIR_model_loader": ["SUPIR_model:SUPIRMODEL", "SUPIR_VAE:SUPIRVAE"],
    "SUPIR_model_loader_v2": ["SUPIR_model:SUPIRMODEL", "SUPIR_VAE:SUPIRVAE"],
    "SUPIR_model_loader_v2_clip": ["SUPIR_model:SUPIRMODEL", "SUPIR_VAE:SUPIRVAE"],
    "SUPIR_first_stage": [
        *("SUPIR_VAE:SUPIRVAE", "denoised_image:IMAGE", "denoised_latents:LATENT"),
    ],
    "SUPIR_encode": ["latent:LATENT"],
    "SUPIR_conditioner": ["positive:SUPIR_cond_pos", "negative:SUPIR_cond_neg"],
    "SUPIR_sample": ["latent:LATENT"],
    "SUPIR_decode": ["image:IMAGE"],
    "SUPIR_tiles": ["image_tiles:IMAGE", "tile_size:INT", "tile_stride:INT"],
    "SUPIR_Upscale": ["upscaled_image:IMAGE"],
}
OUTPUTS = {
    **OLD_OUTPUTS,
    "LoadImage": ["IMAGE:IMAGE", "MASK:MASK"],
    "CheckpointLoaderSimple": ["MODEL:MODEL", "CLIP:CLIP", "VAE:VAE"],
    "CLIPLoader": ["CLIP:CLIP"],
    "ImageResize+": ["IMAGE:IMAGE", "width:INT", "height:INT"],
    "ImageScale": ["IMAGE:IMAGE"],
    "ColorMatch": ["image:IMAGE"],
    "ImageBlend": ["IMAGE:IMAGE"],
    "MoondreamQueryCaptions": ["captions:STRING"],
    "PrimitiveString": ["STRING:STRING"],
    "PrimitiveNode": ["INT:INT"],
    "Reroute": [":*"],
    "SetNode": ["*:*"],
    "GetNode": ["*:*"],
    "PreviewImage": [],
    "SaveImage": [],
    "Image Comparer (rgthree)": [],
    "VAEDecode": ["IMAGE:IMAGE"],
}
PACKS = {
    "ImageResize+": "comfyui_essentials",
    "ColorMatch": "comfyui-kjnodes",
    "SetNode": "comfyui-kjnodes",
    "GetNode": "comfyui-kjnodes",
    "Image Comparer (rgthree)": "rgthree-comfy",
    "MoondreamQueryCaptions": "comfyui-moondream",
}


class Canvas:
    """A saved workflow in the making: ``add`` nodes, ``data`` is the file."""

    def __init__(self) -> None:
        self.nodes: list[dict[str, Any]] = []
        self.links: list[list[Any]] = []

    def add(self, kind: str, stored: Any, /, *, title: str = "", mode: int = 0, **sources: Any):
        """Add a node; ``sources`` are (node id, output) by input name. Returns its id."""
        number = len(self.nodes) + 1
        inputs, kinds = [], [text.split(":")[1] for text in OUTPUTS[kind]]
        sockets = OLD_NODES[kind].sockets if kind in OLD_NODES else ()
        for name in dict.fromkeys([*sockets, *sources]):
            given = {"name": name, "type": "*", "link": None}
            if kind in OLD_NODES and name not in sockets:
                given["widget"] = {"name": name}
            if name in sources:
                origin, slot = sources[name]
                outputs = self.nodes[origin - 1]["outputs"]
                given["type"] = outputs[slot]["type"]
                link = len(self.links) + 1
                self.links.append([link, origin, slot, number, len(inputs), given["type"]])
                outputs[slot]["links"].append(link)
                given["link"] = link
            inputs.append(given)
        names = [text.split(":")[0] for text in OUTPUTS[kind]]
        outputs = [{"name": n, "type": t, "links": []} for n, t in zip(names, kinds, strict=True)]
        pack = "comfyui-supir" if kind in OLD_NODES else PACKS.get(kind, "comfy-core")
        self.nodes.append(
            {
                "id": number,
                "type": kind,
                "pos": [number * 300, 100],
                "size": [210, 80],
                "flags": {},
                "order": number - 1,
                "mode": mode,
                "inputs": inputs,
                "outputs": outputs,
                "properties": {"Node name for S&R": kind, "cnr_id": pack},
                "widgets_values": stored,
                **({"title": title} if title else {}),
            }
        )
        return number

    @property
    def data(self) -> dict[str, Any]:
        return {
            "last_node_id": len(self.nodes),
            "last_link_id": len(self.links),
            "nodes": self.nodes,
            "links": self.links,
            "groups": [{"title": "Restore", "bounding": [0, 0, 500, 500]}],
            "config": {},
            "extra": {"ds": {"scale": 1, "offset": [0, 0]}},
            "version": 0.4,
        }


def _resized(canvas: Canvas, image: int, side: int, foreign: bool) -> tuple[int, int]:
    if foreign:
        stored = [side, side, "lanczos", "keep proportion", "always", 16]
        return canvas.add("ImageResize+", stored, image=(image, 0)), 0
    return canvas.add("ImageScale", ["lanczos", side, side, "disabled"], image=(image, 0)), 0


def _matched(canvas: Canvas, image: int, reference: tuple[int, int], foreign: bool) -> int:
    if foreign:
        return canvas.add("ColorMatch", ["mkl"], image_ref=reference, image_target=(image, 0))
    return canvas.add("ImageBlend", [0.0, "normal"], image1=(image, 0), image2=reference)


def structure_a(foreign: bool = True, side: int = 1536, steps: int = 10) -> dict[str, Any]:
    """The Lightning example: v2 loader, bundles over Set/Get nodes and a Reroute."""
    c = Canvas()
    picture = _resized(c, c.add("LoadImage", ["example.png", "image"]), side, foreign)
    base = c.add("CheckpointLoaderSimple", ["juggernautXL_v9Rdphoto2Lightning.safetensors"])
    parts = {"model": (base, 0), "clip": (base, 1), "vae": (base, 2)}
    stored = ["SUPIR-v0F_fp16.safetensors", False, "auto", False]
    loader = c.add("SUPIR_model_loader_v2", stored, **parts)
    route = c.add("Reroute", [], **{"": (loader, 0)})
    c.add("SetNode", ["SUPIR_VAE"], SUPIRVAE=(loader, 1))
    vae = {"SUPIR_VAE": (c.add("GetNode", ["SUPIR_VAE"]), 0)}
    stage = c.add("SUPIR_first_stage", [True, 512, 512, "auto"], image=picture, **vae)
    encode = c.add("SUPIR_encode", [True, 512, "auto"], SUPIR_VAE=(stage, 0), image=(stage, 1))
    prompts = ["high quality, detailed", "bad quality, blurry, messy"]
    words = c.add("SUPIR_conditioner", prompts, SUPIR_model=(route, 0), latents=(stage, 2))
    settings = [174277455657960, "fixed", steps, 2, 1.5, 5, 1.003, 1, 1, 0.9, 1, False]
    run = c.add(
        "SUPIR_sample",
        [*settings, "RestoreDPMPP2MSampler", 1024, 512],
        SUPIR_model=(route, 0),
        latents=(encode, 0),
        positive=(words, 0),
        negative=(words, 1),
        title="My sampler",
    )
    again = {"SUPIR_VAE": (c.add("GetNode", ["SUPIR_VAE"]), 0)}
    decode = c.add("SUPIR_decode", [True, 512], latents=(run, 0), **again)
    matched = _matched(c, decode, picture, foreign)
    c.add("SaveImage", ["a"], images=(matched, 0))
    if foreign:
        c.add("Image Comparer (rgthree)", [], image_a=picture, image_b=(matched, 0))
    return c.data


def structure_b(
    foreign: bool = True, side: int = 1536, steps: int = 45, tile: int = 768
) -> dict[str, Any]:
    """Tiled with a caption per tile: legacy loader, SUPIR_tiles feeding the sampler's tile size."""
    c = Canvas()
    picture = _resized(c, c.add("LoadImage", ["example.png", "image"]), side, foreign)
    files = ["SUPIR-v0Q.ckpt", "SDXL/juggernautXL_v8Rundiffusion.safetensors", False, "auto"]
    loader = c.add("SUPIR_model_loader", files)
    stage = c.add(
        "SUPIR_first_stage", [True, 512, 512, "auto"], SUPIR_VAE=(loader, 1), image=picture
    )
    tiles = c.add("SUPIR_tiles", [tile, tile // 2], image=(stage, 1))
    size = c.add("Reroute", [], **{"": (tiles, 1)})
    stride = c.add("Reroute", [], **{"": (tiles, 2)})
    if foreign:
        captions = c.add("MoondreamQueryCaptions", ["What is this?"], image=(tiles, 0))
    else:
        captions = c.add("PrimitiveString", ["a picture"])
    c.add("PreviewImage", [], images=(tiles, 0))
    kept = c.add("SetNode", ["denoised"], IMAGE=(stage, 1))
    encode = c.add("SUPIR_encode", [True, 512, "auto"], SUPIR_VAE=(stage, 0), image=(kept, 0))
    words = c.add(
        "SUPIR_conditioner",
        ["detailed", "blurry", ""],
        SUPIR_model=(loader, 0),
        latents=(stage, 2),
        captions=(captions, 0),
    )
    settings = [123, "fixed", steps, 4, 7.5, 5, 1.003, 1, 1, -1, False, "TiledRestoreEDMSampler"]
    run = c.add(
        "SUPIR_sample",
        [*settings, 512, 256],
        SUPIR_model=(loader, 0),
        latents=(encode, 0),
        positive=(words, 0),
        negative=(words, 1),
        sampler_tile_size=(size, 0),
        sampler_tile_stride=(stride, 0),
    )
    decode = c.add("SUPIR_decode", [True, 512], SUPIR_VAE=(stage, 0), latents=(run, 0))
    got = c.add("GetNode", ["denoised"])
    c.add("SaveImage", ["b"], images=(_matched(c, decode, (got, 0), foreign), 0))
    return c.data


def structure_c(side: int = 1024, steps: int = 50, tile: int = 1024) -> dict[str, Any]:
    """Separate CLIP files; the encoded picture is both control and center."""
    c = Canvas()
    picture = _resized(c, c.add("LoadImage", ["example.png", "image"]), side, False)
    base = c.add("CheckpointLoaderSimple", ["sd_xl_base_1.0.safetensors"])
    clip_l = c.add("CLIPLoader", ["clip-vit-large-patch14.safetensors", "stable_diffusion"])
    clip_g = c.add("CLIPLoader", ["CLIP-ViT-bigG-14-laion2B-39B-b160k.safetensors", "sdxl"])
    loader = c.add(
        "SUPIR_model_loader_v2_clip",
        ["SUPIR/SUPIR-v0Q.ckpt", False, "auto", True],
        model=(base, 0),
        clip_l=(clip_l, 0),
        clip_g=(clip_g, 0),
        vae=(base, 2),
    )
    stage = c.add(
        "SUPIR_first_stage", [True, 1024, 1024, "auto"], SUPIR_VAE=(loader, 1), image=picture
    )
    encode = c.add("SUPIR_encode", [True, 1024, "auto"], SUPIR_VAE=(stage, 0), image=(stage, 1))
    words = c.add(
        "SUPIR_conditioner",
        ["detailed", "blurry", "green hair"],
        SUPIR_model=(loader, 0),
        latents=(encode, 0),
    )
    settings = [9, "randomize", steps, 1, 1, 5, 1.003, 1, 0.9, 0.9, -1, True]
    run = c.add(
        "SUPIR_sample",
        [*settings, "TiledRestoreEDMSampler", tile, tile // 2],
        SUPIR_model=(loader, 0),
        latents=(encode, 0),
        positive=(words, 0),
        negative=(words, 1),
    )
    decode = c.add("SUPIR_decode", [True, 1024, "auto"], SUPIR_VAE=(loader, 1), latents=(run, 0))
    c.add("SaveImage", ["c"], images=(decode, 0))
    return c.data


def structure_d(**inputs: Any) -> dict[str, Any]:
    """API prompt with the single legacy node and few of its inputs, without ``_meta``."""
    given = {
        "supir_model": "SUPIR-v0Q_fp16.safetensors",
        "sdxl_model": "sd_xl_base_1.0.safetensors",
        "image": ["1", 0],
        "seed": 42,
        "scale_by": 1.0,
        "steps": 45,
        **inputs,
    }
    return {
        "1": {"class_type": "LoadImage", "inputs": {"image": "example.png"}},
        "2": {"class_type": "SUPIR_Upscale", "inputs": given},
        "3": {"class_type": "SaveImage", "inputs": {"images": ["2", 0], "filename_prefix": "d"}},
    }


def structure_e(**inputs: Any) -> dict[str, Any]:
    """API prompt with the split nodes, written by hand: no ``_meta``, no optional inputs."""

    def node(kind: str, **given: Any) -> dict[str, Any]:
        return {"class_type": kind, "inputs": given}

    model, vae = ["2", 0], ["2", 1]
    sampler = {"seed": 1, "steps": 45, "cfg_scale_start": 4.0, "cfg_scale_end": 4.0}
    return {
        "1": node("LoadImage", image="example.png"),
        "base": node("CheckpointLoaderSimple", ckpt_name="sd_xl_base_1.0.safetensors"),
        "2": node(
            "SUPIR_model_loader_v2",
            **{"model": ["base", 0], "clip": ["base", 1], "vae": ["base", 2]},
            supir_model="SUPIR-v0Q_fp16.safetensors",
        ),
        "3": node("SUPIR_first_stage", SUPIR_VAE=vae, image=["1", 0]),
        "4": node("SUPIR_encode", SUPIR_VAE=["3", 0], image=["3", 1]),
        "5": node(
            "SUPIR_conditioner",
            **{"SUPIR_model": model, "latents": ["3", 2]},
            positive_prompt="detailed",
            negative_prompt="blurry",
        ),
        "6": node(
            "SUPIR_sample",
            **{"SUPIR_model": model, "latents": ["4", 0]},
            **{"positive": ["5", 0], "negative": ["5", 1], **sampler, **inputs},
        ),
        "7": node("SUPIR_decode", SUPIR_VAE=vae, latents=["6", 0]),
        "8": node("SaveImage", images=["7", 0], filename_prefix="e"),
    }
