"""The two API prompts of ``run.py bench --full``: one restoration by this pack, one by ComfyUI's nodes.

Both compute the same thing: true-size files, the same words, noise and levels, Euler without churn,
control at full strength, restoration on. What differs is who computes it.
"""

from __future__ import annotations

from typing import Any

SDXL_NAME, SUPIR_NAME = "full_size_sdxl.safetensors", "full_size_supir.safetensors"
STEPS = 3
SIDE_PX = 256
SEED = 1
CFG = 4.0
RESTORE_CFG = 4.0
SCHEDULER = "simple"
"""Its levels are entries of the table: between two entries the sides differ, as the original rounds
to the nearest and ComfyUI's node does not (tests/nodes/test_core_supir.py)."""

Prompt = dict[str, Any]


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    """One node of an API prompt."""
    return {"class_type": class_type, "inputs": inputs}


def our_prompt(picture: str, side_px: int) -> Prompt:
    """The pack's nodes; ``sample`` is the node that samples, ``latent`` the one that keeps it."""
    return {
        **_common(picture, side_px),
        "supir": node("SUPIR_XPU_LoadSUPIR", supir_name=SUPIR_NAME),
        "first": node(
            "SUPIR_XPU_FirstStage",
            vae=["base", 2],
            supir=["supir", 0],
            image=["photo", 0],
            upscale_by=1.0,
        ),
        "guider": node(
            "SUPIR_XPU_Guider",
            model=["base", 0],
            supir=["supir", 0],
            positive=["words", 0],
            negative=["words", 1],
            control=["first", 1],
            center=["first", 2],
            **{"cfg_start": CFG, "cfg_end": CFG, "control_start": 1.0, "control_end": 1.0},
            restore_cfg=RESTORE_CFG,
        ),
        "noise": node("RandomNoise", noise_seed=SEED),
        "euler": node("KSamplerSelect", sampler_name="euler"),
        "levels": node(
            "BasicScheduler", model=["base", 0], scheduler=SCHEDULER, steps=STEPS, denoise=1.0
        ),
        "sample": node(
            "SamplerCustomAdvanced",
            noise=["noise", 0],
            guider=["guider", 0],
            sampler=["euler", 0],
            sigmas=["levels", 0],
            latent_image=["empty", 0],
        ),
        "decode": node("SUPIR_XPU_Decode", vae=["base", 2], latent=["sample", 0]),
    }


def core_prompt(picture: str, side_px: int) -> Prompt:
    """ComfyUI's own nodes; only the words are made by the pack, so that both sides get the same."""
    return {
        **_common(picture, side_px),
        "supir": node("ModelPatchLoader", name=SUPIR_NAME),
        "first": node(
            "SUPIRApply",
            model=["base", 0],
            model_patch=["supir", 0],
            vae=["base", 2],
            image=["photo", 0],
            **{"strength_start": 1.0, "strength_end": 1.0, "restore_cfg": RESTORE_CFG},
        ),
        "sample": node(
            "KSampler",
            model=["first", 0],
            positive=["words", 0],
            negative=["words", 1],
            latent_image=["empty", 0],
            **{"seed": SEED, "steps": STEPS, "cfg": CFG, "denoise": 1.0},
            **{"sampler_name": "euler", "scheduler": SCHEDULER},
        ),
        "decode": node("VAEDecode", vae=["base", 2], samples=["sample", 0]),
    }


def _common(picture: str, side_px: int) -> Prompt:
    return {
        "base": node("CheckpointLoaderSimple", ckpt_name=SDXL_NAME),
        "photo": node("LoadImage", image=picture),
        "empty": node("EmptyLatentImage", width=side_px, height=side_px, batch_size=1),
        "words": node(
            "SUPIR_XPU_Conditioning", clip=["base", 1], positive="a cat", negative="blurry"
        ),
        "latent": node("SaveLatent", samples=["sample", 0], filename_prefix="full_size"),
        "save": node("SaveImage", images=["decode", 0], filename_prefix="full_size"),
    }


def complete(prompt: Prompt, object_info: dict[str, Any]) -> None:
    """Give every required widget that a prompt does not set its default, in place."""
    for item in prompt.values():
        required = object_info[item["class_type"]]["input"].get("required", {})
        for name, (_, *options) in required.items():
            if name not in item["inputs"] and options and "default" in options[0]:
                item["inputs"][name] = options[0]["default"]
