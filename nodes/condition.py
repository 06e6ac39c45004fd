"""Conditioning: prompts and captions with SUPIR's size conditioning."""

from __future__ import annotations

import math
from typing import Any

import torch
from comfy_api.latest import io

from ..supir.conditioning import SIZE_CONDITIONING, flatten_captions, join_prompt
from ..supir.errors import SettingsError
from . import widgets
from .sockets import check_clip
from .types import CATEGORY

CAPTIONS = "supir_xpu_captions"
"""Key in a conditioning: how many captions its rows hold (absent = one prompt for everything)."""


MAX_TOKENS = 77 * 24
"""Longest common token count of captions that are run together."""


def encode(clip: Any, text: str) -> Any:
    """Return a CONDITIONING of one prompt that tells SDXL what SUPIR always tells it."""
    return clip.encode_from_tokens_scheduled(clip.tokenize(text), add_dict=dict(SIZE_CONDITIONING))


def encode_many(clip: Any, texts: list[str]) -> Any:
    """Return one CONDITIONING whose rows are the prompts, tokens repeated to a common length."""
    encoded = [encode(clip, text) for text in texts]
    if len(texts) == 1:
        return encoded[0]
    result = []
    for parts in zip(*encoded, strict=True):
        tokens = math.lcm(*(cond.shape[1] for cond, _ in parts))
        if tokens > MAX_TOKENS:
            lengths = sorted({cond.shape[1] for cond, _ in parts})
            raise SettingsError(
                f"captions have lengths of {lengths} tokens, whose common length is {tokens}; more "
                f"than {MAX_TOKENS} cannot be run together. Shorten the longest captions."
            )
        rows = [cond.repeat(1, tokens // cond.shape[1], 1) for cond, _ in parts]
        extra = dict(parts[0][1])
        if extra.get("pooled_output") is not None:
            extra["pooled_output"] = torch.cat([one["pooled_output"] for _, one in parts])
        extra[CAPTIONS] = len(texts)
        result.append([torch.cat(rows), extra])
    return result


def caption_count(positive: Any) -> int:
    """Return how many captions a positive CONDITIONING holds (1 = shared by everything)."""
    counts = {extra.get(CAPTIONS, cond.shape[0]) for cond, extra in positive}
    if len(counts - {1}) > 1:
        raise SettingsError(
            f"positive combines conditionings of {sorted(counts)} captions, which fit no batch "
            "together. Combine conditionings of the same number of captions."
        )
    return max(counts, default=1)


def pick_rows(positive: Any, first: int, count: int) -> Any:
    """Return the conditioning with only the captions first .. first + count - 1."""
    picked = []
    for cond, extra in positive:
        if extra.get(CAPTIONS, 1) > 1 or (count == 1 and cond.shape[0] > 1):
            extra = dict(extra)
            extra[CAPTIONS] = count
            if extra.get("pooled_output") is not None:
                extra["pooled_output"] = extra["pooled_output"][first : first + count]
            cond = cond[first : first + count]
        picked.append([cond, extra])
    return picked


class Conditioning(io.ComfyNode):
    """Encode the prompts, with captions for pictures or tiles."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SUPIR_XPU_Conditioning",
            display_name="SUPIR Conditioning",
            category=CATEGORY,
            description=(
                "Encodes the prompts with the size conditioning SUPIR was trained with. Captions go "
                "before the positive prompt: one for all, one per picture, or one per tile."
            ),
            search_aliases=["supir", "prompt", "caption"],
            is_input_list=True,
            inputs=[
                io.Clip.Input("clip", tooltip="CLIP of the SDXL checkpoint (both text encoders)."),
                widgets.positive(),
                widgets.negative(),
                io.String.Input(
                    "captions",
                    optional=True,
                    force_input=True,
                    tooltip=(
                        "What the picture shows: one text, a list with one per picture, or a list "
                        "with one per tile in reading order."
                    ),
                ),
            ],
            outputs=[
                io.Conditioning.Output("positive", display_name="positive"),
                io.Conditioning.Output("negative", display_name="negative"),
            ],
        )

    @classmethod
    def execute(
        cls, clip: list[Any], positive: list[str], negative: list[str], captions: Any = None
    ) -> io.NodeOutput:
        for name, values in (("clip", clip), ("positive", positive), ("negative", negative)):
            if len(values) != 1:
                raise SettingsError(
                    f"{name} brings {len(values)} values, but one serves all pictures. Connect one, "
                    "and give texts that differ from picture to picture or tile to tile to captions."
                )
        check_clip(clip[0])
        texts = [join_prompt(one, positive[0]) for one in flatten_captions(captions or "")]
        conds = encode_many(clip[0], texts or [positive[0]])
        return io.NodeOutput(conds, encode(clip[0], negative[0]))
