"""Picture sizes through an API graph, from constants and file headers alone.

Owns the table of nodes whose output sizes follow from their inputs, and the rules of our own nodes.
What is not in it is unknown, never guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..supir.errors import SupirError
from ..supir.prepare import plan_geometry
from . import graph_rules as core
from .graph import Graph
from .graph_rules import LatentSize as LatentSize
from .graph_rules import Node, Rule, Size
from .picture import picture_size
from .picture_file import ImageSize as ImageSize
from .types import Canvas


class Sizes:
    """The sizes of every output of the nodes of ``order``.

    Args:
        ratio_of: pixels per cell of the VAE connected to a node, or None when not known.
    """

    def __init__(
        self, graph: Graph, order: Iterable[str], ratio_of: Callable[[str], int | None]
    ) -> None:
        self.graph, self.ratio_of = graph, ratio_of
        self._found: dict[str, list[Size]] = {}
        for node_id in order:
            rule = RULES.get(graph.kind(node_id))
            if rule is not None:
                self._found[node_id] = rule(Node(self, node_id))

    def at(self, node_id: str, name: str) -> Size:
        """Return the size that arrives at an input."""
        link = self.graph.link(node_id, name)
        if link is None:
            return None
        outputs = self._found.get(link[0], [])
        return outputs[link[1]] if 0 <= link[1] < len(outputs) else None


def on_canvas(size: ImageSize, by: float, ratio: int | None) -> tuple[Size, Size]:
    """Return (picture, latent) of a picture our nodes scale by ``by`` and encode."""
    try:
        g = plan_geometry(size.width_px, size.height_px, by)
    except SupirError:  # said by the judgement of the node itself
        return None, None
    picture = ImageSize(g.width_px, g.height_px, size.images)
    if ratio is None:
        return picture, None
    canvas = Canvas(g.width_px, g.height_px, g.padded_width_px, g.padded_height_px, ratio=ratio)
    width, height = g.padded_width_px // ratio, g.padded_height_px // ratio
    return picture, LatentSize(width, height, size.images, canvas)


def first_stage(node: Node) -> list[Size]:
    size, by = node.image(), node.float("upscale_by")
    if size is None or by is None:
        return [None, None, None]
    picture, latent = on_canvas(size, by, node.ratio)
    return [picture, latent, latent]


def our_upscale(node: Node) -> list[Size]:
    return first_stage(node)[:1]


def our_encode(node: Node) -> list[Size]:
    size = node.image()
    return [None] if size is None else [on_canvas(size, 1.0, node.ratio)[1]]


def our_decode(node: Node) -> list[Size]:
    size, ratio = node.latent("latent"), node.ratio
    if size is None or ratio is None:
        return [None]
    whole = (size.width * ratio, size.height * ratio)
    picture = None if size.canvas is None else picture_size(*whole, size.canvas)
    return [ImageSize(*(picture or whole), size.images)]


def same_as(name: str, outputs: int = 1) -> Rule:
    """Return the rule of a node whose outputs have the size of one of its inputs."""
    return lambda node: [node.sizes.at(node.id, name)] * outputs


RULES: dict[str, Rule] = {
    "LoadImage": core.load_image,
    "LoadImageOutput": core.load_image,
    "EmptyImage": core.empty_image,
    "ImageScale": core.scale,
    "ImageScaleBy": core.scale_by,
    "ImageScaleToTotalPixels": core.scale_to_pixels,
    "ImageScaleToMaxDimension": core.scale_to_side,
    "ImageCrop": core.crop,
    "ImageCropV2": core.crop_region,
    "ImagePadForOutpaint": core.pad,
    "ResizeAndPadImage": lambda n: core.resized(
        n.image(), n.int("target_width"), n.int("target_height")
    ),
    "ImageRotate": core.rotate,
    "RepeatImageBatch": core.repeat_image,
    "ImageBatch": core.image_batch,
    "ImageFromBatch": core.image_from_batch,
    "JoinImageWithAlpha": core.join_alpha,
    **dict.fromkeys(
        ("ImageInvert", "ImageBlur", "ImageSharpen", "ImageQuantize", "ImageAddNoise", "ImageFlip"),
        same_as("image"),
    ),
    "SplitImageWithAlpha": same_as("image"),
    "EmptyLatentImage": core.empty_latent,
    "LatentUpscale": core.latent_upscale,
    "LatentUpscaleBy": core.latent_upscale_by,
    "LatentCrop": core.latent_crop,
    "LatentRotate": core.latent_rotate,
    "LatentFlip": same_as("samples"),
    "RepeatLatentBatch": core.latent_repeat,
    "LatentFromBatch": core.latent_from_batch,
    "LatentBatch": core.latent_batch,
    "SetLatentNoiseMask": same_as("samples"),
    "KSampler": same_as("latent_image"),
    "KSamplerAdvanced": same_as("latent_image"),
    "SamplerCustom": same_as("latent_image", 2),
    "SamplerCustomAdvanced": same_as("latent_image", 2),
    "VAEEncode": core.core_encode,
    "VAEEncodeTiled": core.core_encode,
    "VAEEncodeForInpaint": core.core_encode,
    "VAEDecode": core.core_decode,
    "VAEDecodeTiled": core.core_decode,
    "SUPIR_XPU_FirstStage": first_stage,
    "SUPIR_XPU_Upscale": our_upscale,
    "SUPIR_XPU_Encode": our_encode,
    "SUPIR_XPU_Decode": our_decode,
    "SUPIR_XPU_Sample": same_as("control"),
    "SUPIR_XPU_ColorFix": same_as("image"),
    "SUPIR_XPU_RiskCheck": same_as("anything"),
    "SUPIR_XPU_Cooldown": same_as("anything"),
    "SUPIR_XPU_Preflight": same_as("anything"),
}
"""Output sizes by node class. Source: the nodes themselves, ComfyUI 0.16.3 to 0.30.0."""
