#!/usr/bin/env python3
"""Count what one sampling step would submit to a device, on meta tensors, without a device.

Owns the true-size workloads (SDXL UNet, SUPIR's control net and adapters, VAE; the classes come
from a ComfyUI checkout) and the attention policies they are counted with. The counting rule itself
is ``xpu/counting.py``: one ATen operator that is not a view is one launch, a lower bound.

    count_ops.py --comfy PATH --model supir --latent 168x168 --attention planned:2048

Attention policies:
    fused            one kernel per call
    math             PyTorch's unfused path
    chunk:512[:fp32] the first report's loop: 512 query rows at a time if there are more than 2048
    sub_quad:8192[:fp32]  the host's sub-quadratic attention, MiB of free memory it believes in
    split:8192[:fp32]     the host's split attention, likewise
    planned:2048[:math|:unknown][:half]   this pack's plans, MiB of workspace
"""

from __future__ import annotations

import argparse
import json
import sys
import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from the_pack import load
from torch import Tensor
from torch.overrides import TorchFunctionMode

load("supir")

from supir_xpu.xpu import counting  # noqa: E402
from supir_xpu.xpu.attention import PlannedAttention, limits_from_facts  # noqa: E402
from supir_xpu.xpu.device import DeviceFacts  # noqa: E402

Policy = Callable[..., Tensor]

SDXL_UNET = {
    "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 320,
    "num_res_blocks": [2, 2, 2], "channel_mult": [1, 2, 4], "dropout": 0.0, "dims": 2,
    "num_classes": "sequential", "adm_in_channels": 2816, "use_checkpoint": False,
    "use_spatial_transformer": True, "legacy": False, "num_heads": -1, "num_head_channels": 64,
    "transformer_depth": [0, 0, 2, 2, 10, 10], "transformer_depth_middle": 10,
    "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10],
    "context_dim": 2048, "use_linear_in_transformer": True,
    "use_temporal_attention": False, "use_temporal_resblock": False,
}  # fmt: skip
SDXL_VAE = {
    "double_z": True, "z_channels": 4, "resolution": 256, "in_channels": 3, "out_ch": 3,
    "ch": 128, "ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0,
}  # fmt: skip
MODELS = ("unet", "control", "supir", "vae-encode", "vae-decode")


class Recount(TorchFunctionMode):
    """Replaces scaled_dot_product_attention by a policy and counts its calls."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy
        self.shapes: Counter[tuple[int, ...]] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        q, k = args[:2]
        self.shapes[(*q.shape[:3], k.shape[2], q.shape[3])] += 1
        return self.policy(*args[:3], kwargs.get("scale"))


def fused_kernel(mode: counting.CountOps) -> Policy:
    """One launch with the traffic of q, k, v and the result, which has q's memory layout."""

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: object = None, scale: object = None
    ) -> Tensor:
        out = torch.empty_like(q)
        work = 4 * q.numel() * k.shape[-2]
        moved = sum(map(counting.nbytes, (q, k, v, out)))
        mode.count.add(counting.ATTENTION, moved, work)
        return out

    return kernel


def chunk_loop(mode: counting.CountOps, chunk: int, fp32: bool) -> Policy:
    """The loop of the first report: einsum, scale, softmax, einsum per 512 queries, then cat."""
    kernel = fused_kernel(mode)

    def policy(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        if q.shape[2] <= 2048:
            return kernel(q, k, v)
        dtype, scale = q.dtype, scale or q.shape[-1] ** -0.5
        if fp32:
            k, v = k.float(), v.float()
        parts = []
        for start in range(0, q.shape[2], chunk):
            piece = q[:, :, start : start + chunk]
            scores = torch.einsum("bhid,bhjd->bhij", piece.float() if fp32 else piece, k) * scale
            parts.append(torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v).to(dtype))
            del scores
        return torch.cat(parts, dim=2)

    return policy


def host_policy(name: str, free_mib: int, fp32: bool) -> Policy:
    """One of ComfyUI's own attention functions, told how much memory is free."""
    import comfy.model_management as mm
    from comfy.ldm.modules import attention

    free = free_mib * 2**20
    mm.get_free_memory = lambda dev=None, torch_free_too=False: (
        (free, free) if torch_free_too else free
    )
    function = getattr(attention, f"attention_{name}")

    def policy(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        precision = torch.float32 if fp32 else None
        return function(
            q, k, v, q.shape[1],
            attn_precision=precision, skip_reshape=True, skip_output_reshape=True,
        )  # fmt: skip

    return policy


def planned(mode: counting.CountOps, workspace_mib: int, options: list[str]) -> PlannedAttention:
    """This pack's attention with a fixed workspace."""
    evidence = next((o for o in options if o in ("math", "unknown")), "fused")
    facts = DeviceFacts("xpu", fused_sdpa=evidence)
    limits = limits_from_facts(facts, workspace_mib * 2**20, half_scores="half" in options)
    return PlannedAttention(facts, limits, kernel=fused_kernel(mode))


def make_policy(text: str, mode: counting.CountOps) -> Policy:
    """Parse a policy as described in the module's text. Raises ValueError for an unknown one."""
    head, *rest = text.split(":")
    size = int(rest[0]) if rest and rest[0].isdigit() else 0
    if head == "fused":
        return lambda q, k, v, scale=None: fused_kernel(mode)(q, k, v)
    if head == "math":
        math = torch.ops.aten._scaled_dot_product_attention_math
        return lambda q, k, v, scale=None: math(q, k, v, scale=scale)[0]
    if head == "chunk":
        return chunk_loop(mode, size or 512, "fp32" in rest)
    if head in ("sub_quad", "split"):
        return host_policy(head, size or 8192, "fp32" in rest)
    if head == "planned":
        attend = planned(mode, size or 2048, rest)
        return lambda q, k, v, scale=None: attend(q, k, v, None, scale)
    raise ValueError(f"Attention policy {text!r} is unknown. Use one of those in --help.")


def count_with(
    run: Callable[[], object], attention: str, track_live: bool = True
) -> tuple[counting.Count, Counter[tuple[int, ...]]]:
    """Count a callable with an attention policy. Returns the count and how often
    attention was called with which (batch, heads, queries, keys, width)."""
    mode = counting.CountOps(track_live)
    recount = Recount(make_policy(attention, mode))
    with torch.no_grad(), mode, recount:
        run()
    return mode.count, recount.shapes


def load_comfy(path: str | None) -> Any:
    """Import ComfyUI's classes on the CPU, with attention as one SDPA call."""
    if path is not None and path not in sys.path:
        sys.path.insert(0, path)
    import comfy.options
    from comfy.cli_args import args

    args.cpu = True
    args.use_pytorch_cross_attention = True
    import comfy.ops
    from comfy.ldm.modules import attention
    from comfy.ldm.supir import supir_modules

    attention.optimized_attention = attention.attention_pytorch
    supir_modules.optimized_attention = attention.attention_pytorch
    return comfy.ops.disable_weight_init


def workload(
    model: str,
    height: int,
    width: int,
    batch: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    comfy: str | None = None,
) -> Callable[[], object]:
    """Return a callable that runs one forward of a true-size model on meta tensors."""
    return make_model(model, dtype, comfy)(height, width, batch)


def make_model(
    model: str, dtype: torch.dtype = torch.bfloat16, comfy: str | None = None
) -> Callable[[int, int, int], Callable[[], object]]:
    """Build a true-size model; the result takes (height, width, batch) of a latent."""
    ops = load_comfy(comfy)

    def meta(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    if model.startswith("vae"):
        vae = _vae(dtype)
        if model == "vae-decode":
            return lambda h, w, b: lambda: vae.decoder(meta(b, 4, h, w))
        return lambda h, w, b: lambda: vae.encoder(meta(b, 3, h * 8, w * 8))
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
    from comfy.ldm.supir.supir_modules import SUPIR

    def inputs(h: int, w: int, b: int) -> tuple[Tensor, ...]:
        return meta(b, 4, h, w), meta(b, dtype=torch.float32), meta(b, 77, 2048), meta(b, 2816)

    if model != "control":
        net = UNetModel(**SDXL_UNET, dtype=dtype, device="meta", operations=ops)
    if model == "unet":
        return lambda h, w, b: lambda: net(*inputs(h, w, b))
    parts = SUPIR(device="meta", dtype=dtype, operations=ops)
    if model == "control":

        def control(h: int, w: int, b: int) -> Callable[[], object]:
            x, t, context, y = inputs(h, w, b)
            return lambda: parts.control_model(x, t, x, context, y)

        return control
    return lambda h, w, b: _supir_step(net, parts, inputs(h, w, b), meta(1, 4, h, w))


def _supir_step(
    net: Any, parts: Any, inputs: tuple[Tensor, ...], hint: Tensor
) -> Callable[[], object]:
    """One UNet forward with ComfyUI's own SUPIR patches."""
    from comfy.ldm.modules.diffusionmodules.openaimodel import Upsample
    from comfy.ldm.supir.supir_patch import SUPIRPatch

    owner = types.SimpleNamespace(model=parts)
    patch = SUPIRPatch(owner, parts.project_modules, hint, 1.0, 1.0)
    patches = {
        "middle_block_after_patch": [patch.middle_after],
        "output_block_patch": [patch.output_block],
        "forward_timestep_embed_patch": [(Upsample, patch.pre_upsample)],
    }

    def run() -> object:
        out = net(*inputs, transformer_options={"patches": dict(patches)})
        patch.cached_features = None
        return out

    return run


def _vae(dtype: torch.dtype) -> Any:
    from comfy.ldm.models.autoencoder import AutoencodingEngine

    base = "comfy.ldm.modules.diffusionmodules.model."
    return AutoencodingEngine(
        regularizer_config={"target": "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"},
        encoder_config={"target": base + "Encoder", "params": SDXL_VAE},
        decoder_config={"target": base + "Decoder", "params": SDXL_VAE},
    ).to(device="meta", dtype=dtype)


def main(argv: list[str] | None = None) -> int:
    """Print one count, as text or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--comfy", required=True, help="path of a ComfyUI checkout")
    parser.add_argument("--model", default="supir", choices=MODELS)
    parser.add_argument("--latent", default="128x128", help="latent HxW")
    parser.add_argument("--batch", type=int, default=2, help="2 = cond and uncond together")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--attention", default="fused")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    height, width = (int(side) for side in args.latent.lower().split("x"))
    dtype = getattr(torch, args.dtype)
    run = workload(args.model, height, width, args.batch, dtype, args.comfy)
    found, shapes = count_with(run, args.attention)
    row = {
        "launches": found.launches,
        "attention_calls": shapes.total(),
        "tflop": round(found.flops / 1e12, 2),
        "gb_moved": round(found.bytes_moved / 1e9, 1),
        "largest_mib": round(found.largest[0] / 2**20, 1),
        "largest": f"{found.largest[1]} {list(found.largest[2])}",
        "peak_live_mib": round(found.live.peak / 2**20),
        "kinds": dict(found.kinds.most_common()),
    }
    if args.json:
        print(json.dumps(row, indent=1))
    else:
        print(
            f"{args.model}, latent {height}x{width}, batch {args.batch}, attention {args.attention}"
        )
        for key, value in row.items():
            print(f"  {key:16s} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
