"""Train the bundled demo model: ``train_demo.py vae``, then ``denoise``, ``net``, ``export``.

Runs inside ``.venv`` with the environment variable COMFYUI_ROOT naming ComfyUI's folder. Needs a
folder of photographs (docs/demo_model.md says which and where from). Each stage writes checkpoints
and goes on from it when started again. Seeds are fixed; the length of a stage is
given in minutes, so two trainings differ as two machines do.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from the_pack import load_with_host

sys.path.insert(0, str(Path(__file__).parent))
import demo_data
import demo_nets
import demo_scale
import demo_synth
from demo_degrade import degrade
from demo_metrics import psnr
from demo_optim import Trainer, rate

SYNTHETIC = 700
SAVE_SECONDS = 150.0
SDXL_SCALE = 0.13025
"""What the host multiplies an SDXL latent by before the UNet sees it."""


def synthetic_pool(folder: Path, count: int = SYNTHETIC) -> np.ndarray:
    """Return the synthetic training pictures, drawn once and kept in the working folder."""
    path = folder / "synth.npy"
    if not path.exists():
        np.save(path, np.stack([demo_synth.picture(seed) for seed in range(count)]))
    return np.load(path)


def psnrs(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the PSNR in dB of every picture of two batches."""
    return np.array([psnr(x, y) for x, y in zip(a, b, strict=True)])


class Stage:
    """One stage of the training: its clock, its checkpoint, its log."""

    def __init__(self, name: str, work: Path, minutes: float, trainer: Trainer, nets: Any) -> None:
        self.name, self.path, self.minutes = name, work / f"{name}.pt", minutes
        self.trainer, self.nets = trainer, nets
        self.seconds, self.step, self.losses = 0.0, 0, list[float]()
        self.saves_per_look = 1
        if self.path.exists():
            kept = torch.load(self.path, weights_only=True)
            nets.load_state_dict(kept["nets"])
            trainer.restore(kept["trainer"])
            self.seconds, self.step = kept["seconds"], kept["step"]
            self.say(f"goes on at step {self.step}")

    @property
    def progress(self) -> float:
        """How much of the stage is done, 0 to 1."""
        return self.seconds / (60.0 * self.minutes)

    def say(self, text: str) -> None:
        """Write one line of the log."""
        print(f"[{self.name} {self.step} {self.seconds / 60:.1f} min] {text}", flush=True)

    def save(self) -> None:
        """Write the checkpoint."""
        state = {"nets": self.nets.state_dict(), "trainer": self.trainer.state()}
        partial = self.path.with_suffix(".part")
        torch.save({**state, "seconds": self.seconds, "step": self.step}, partial)
        partial.replace(self.path)

    def run(self, loss_of: Any, look: Any) -> None:
        """Train until the minutes are used up, saving and now and then reporting what ``look`` says."""
        torch.manual_seed(1000 + self.step)
        last, saves = self.seconds, 0
        while self.progress < 1.0:
            begun = time.monotonic()
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(self.progress)
            loss.backward()
            self.trainer.step(rate(self.progress))
            self.losses.append(float(loss.detach()))
            self.step += 1
            self.seconds += time.monotonic() - begun
            if self.seconds - last > SAVE_SECONDS or self.progress >= 1.0:
                last, saves = self.seconds, saves + 1
                self.save()
                if saves % self.saves_per_look and self.progress < 1.0:
                    continue
                self.trainer.swap()
                with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                    found = look()
                self.trainer.swap()
                self.say(f"loss {np.mean(self.losses[-200:]):.4f}  {found}")
        self.trainer.swap()
        torch.save(self.nets.state_dict(), self.path.with_suffix(".done.pt"))


def in_batches(call: Any, *inputs: torch.Tensor) -> torch.Tensor:
    """Return call(...) of every picture by itself, joined."""
    return torch.cat([call(*(i[n : n + 1] for i in inputs)).float() for n in range(len(inputs[0]))])


def train_vae(args: argparse.Namespace) -> None:
    """Stage 1: the VAE."""
    photos, dev_photos = demo_data.load_photos(args.photos)
    crops = demo_data.Crops(synthetic_pool(args.work), photos, 1)
    dev = np.stack(list(demo_data.dev_set(args.photos).values()))
    target, patches = demo_nets.to_tensor(dev), colour_patches()
    vae = demo_nets.Autoencoder()
    stage = Stage("vae", args.work, args.minutes, Trainer([vae], 0.02, 2e-3), vae)
    crops.rng = np.random.default_rng([21, 1, stage.step])

    def loss_of(progress: float) -> torch.Tensor:
        count, size = (4, 64) if progress < 0.55 else (3, 96) if progress < 0.85 else (2, 128)
        clean = demo_nets.to_tensor(crops.batch(count, size))
        latent = vae.encode(clean)
        noisy = latent + 0.03 * torch.randn_like(latent)
        return demo_nets.picture_loss(vae.decode(noisy), clean) + 2e-4 * (latent**2).mean()

    def look() -> str:
        def through(x: torch.Tensor) -> torch.Tensor:
            return vae.decode(vae.encode(x))

        found = psnrs(demo_nets.to_pictures(in_batches(through, target)), dev)
        off = in_batches(through, patches) - patches
        error = off.mean((2, 3)).abs().mean(1) * 127.5
        n = len(dev_photos)
        return (
            f"dev PSNR photo {found[:n].mean():.2f} synthetic {found[n:].mean():.2f}; mean colour "
            f"error of saturated pictures /255: {' '.join(f'{e:.1f}' for e in error)}"
        )

    stage.run(loss_of, look)
    whiten(vae, crops)
    torch.save(vae.state_dict(), args.work / "vae.done.pt")


def finished_vae(work: Path) -> demo_nets.Autoencoder:
    """Return the frozen VAE of stage 1."""
    vae = demo_nets.Autoencoder()
    vae.load_state_dict(torch.load(work / "vae.done.pt", weights_only=True))
    return vae.requires_grad_(False)


def whiten(vae: demo_nets.Autoencoder, crops: demo_data.Crops) -> None:
    """Give the latent unit covariance in the host's SDXL scale."""
    with torch.no_grad():
        batches = [vae.encode(demo_nets.to_tensor(crops.batch(8, 128))) for _ in range(24)]
        vae.whiten(torch.cat(batches).float().permute(0, 2, 3, 1).flatten(0, 2), SDXL_SCALE)


def degraded_dev(dev: np.ndarray) -> np.ndarray:
    """Return the strongly degraded copies of the pictures looked at while training."""
    rng = np.random.default_rng(77)
    return np.stack([degrade(picture, rng) for picture in dev])


def train_denoise(args: argparse.Namespace) -> None:
    """Stage 2: the denoise encoder, through the frozen decoder."""
    photos, dev_photos = demo_data.load_photos(args.photos)
    crops = demo_data.Crops(synthetic_pool(args.work), photos, 2)
    dev = np.stack(list(demo_data.dev_set(args.photos).values()))
    damaged = degraded_dev(dev)
    source = demo_nets.to_tensor(damaged)
    vae = finished_vae(args.work)
    encoder = load_with_host("supir.host_blocks").Encoder(**vae_config())
    encoder.load_state_dict(vae.encoder.state_dict())
    demo_nets.narrow_norms(encoder)
    stage = Stage("denoise", args.work, args.minutes, Trainer([encoder], 0.01, 1e-3), encoder)
    crops.rng = np.random.default_rng([21, 2, stage.step])

    def loss_of(progress: float) -> torch.Tensor:
        count, size = (4, 64) if progress < 0.5 else (3, 96) if progress < 0.8 else (2, 128)
        low, high = crops.pairs(count, size)
        clean = demo_nets.to_tensor(high)
        with torch.no_grad():
            target = vae.encode(clean).float()
        latent = vae.encode(demo_nets.to_tensor(low), encoder)
        close = ((latent.float() - target) * SDXL_SCALE).square().mean()
        return demo_nets.picture_loss(vae.decode(latent), clean) + 0.1 * close

    def look() -> str:
        made = in_batches(lambda x: vae.decode(vae.encode(x, encoder)), source)
        gain = psnrs(demo_nets.to_pictures(made), dev) - psnrs(damaged, dev)
        n = len(dev_photos)
        better = (gain > 0).mean()
        return f"gain photo {gain[:n].mean():+.2f} synthetic {gain[n:].mean():+.2f}, better {better:.0%}"

    stage.run(loss_of, look)


def vae_config() -> dict[str, Any]:
    """Return the widths of the demo VAE."""
    return load_with_host("supir.demo_model").VAE_CONFIG


def encode_pair(
    vae: demo_nets.Autoencoder, encoder: torch.nn.Module, low: np.ndarray, high: np.ndarray
) -> tuple[torch.Tensor, ...]:
    """Return scaled latents: the hint, the clean picture, the degraded one through the plain encoder."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        degraded, clean = demo_nets.to_tensor(low), demo_nets.to_tensor(high)
        parts = (vae.encode(degraded, encoder), vae.encode(clean), vae.encode(degraded))
        return tuple(part.float() * SDXL_SCALE for part in parts)


def train_net(args: argparse.Namespace) -> None:
    """Stage 3: UNet, control network and adapters, on the latents of the frozen encoders."""
    import demo_texts

    photos, dev_photos = demo_data.load_photos(args.photos)
    crops = demo_data.Crops(synthetic_pool(args.work), photos, 3)
    vae = finished_vae(args.work)
    encoder = load_with_host("supir.host_blocks").Encoder(**vae_config())
    encoder.load_state_dict(torch.load(args.work / "denoise.done.pt", weights_only=True))
    demo_nets.narrow_norms(encoder.requires_grad_(False))
    texts = demo_texts.Texts()
    table = load_with_host("supir.sigmas").noise_table()
    net = demo_nets.Restorer()
    stage = Stage("net", args.work, args.minutes, Trainer([net], 0.01, 1e-3), net)
    stage.saves_per_look = 3
    crops.rng = np.random.default_rng([21, 3, stage.step])
    kept: list[tuple[torch.Tensor, ...]] = []

    def batch(count: int, size: int) -> tuple[torch.Tensor, ...]:
        if not kept:  # an encoded batch is used with three draws of noise
            kept.extend([encode_pair(vae, encoder, *crops.pairs(count, size))] * 3)
        return kept.pop()

    def loss_of(progress: float) -> torch.Tensor:
        hint, clean, degraded = batch(4, 96 if progress < 0.5 else 128)
        count = len(hint)
        bad = crops.rng.random(count) < 0.12
        context, vector = texts.pick(crops.rng, bad)
        # The words of the negative prompt stand for the degraded picture, as in SUPIR's training.
        clean = torch.where(torch.from_numpy(bad)[:, None, None, None], degraded, clean)
        spread = (torch.arange(count) + torch.rand(count)) / count
        index = (spread * 1000).long().clamp(max=999)
        sigma = table[index][:, None, None, None]
        noise = torch.randn_like(clean)
        x = (clean + sigma * noise) / (sigma**2 + 1.0).sqrt()
        error = (net(x, index.float(), hint, context, vector).float() - noise) ** 2
        return (error * (sigma**2 + 0.25).sqrt()).mean()

    dev = np.stack(list(demo_data.dev_set(args.photos).values()))
    hint, clean, _ = encode_pair(vae, encoder, degraded_dev(dev), dev)
    good = texts.contexts[1:2], texts.vectors[1:2]

    def look() -> str:
        found: list[str] = []
        for index in (940, 800, 640, 480, 320, 180):
            sigma = float(table[index])
            noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(5))
            x = (clean + sigma * noise) / (sigma**2 + 1.0) ** 0.5
            at = torch.tensor([float(index)])
            eps = in_batches(lambda a, h, at=at: net(a, at, h, *good), x, hint)
            error = ((clean + sigma * (noise - eps) - clean) ** 2).mean()
            found.append(f"{sigma:.2f}: {float(error):.3f}")
        return f"latent error {', '.join(found)}; hint {float(((hint - clean) ** 2).mean()):.3f}"

    stage.run(loss_of, look)


def fit(args: argparse.Namespace) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the weights of VAE and net brought into the range of 16 bits; print how far off that is."""
    vae, net = finished_vae(args.work), demo_nets.Restorer()
    net.load_state_dict(torch.load(args.work / "net.done.pt", weights_only=True))
    dev = demo_nets.to_tensor(np.stack(list(demo_data.dev_set(args.photos).values())))
    with torch.no_grad():
        latent = torch.cat([vae.encode(one[None]) for one in dev]) * SDXL_SCALE

    def decode() -> torch.Tensor:
        with torch.no_grad():
            return torch.cat([vae.decode(one[None] / SDXL_SCALE) for one in latent])

    def predict() -> torch.Tensor:
        found: list[torch.Tensor] = []
        generator = torch.Generator().manual_seed(3)
        words = (
            torch.randn(1, 77, 64, generator=generator),
            torch.randn(1, 1600, generator=generator),
        )
        with torch.no_grad():
            for index, one in zip((999, 930, 800, 600, 400, 200, 60, 10), latent[:8], strict=True):
                x = 0.5 * one[None] + torch.randn(one[None].shape, generator=generator)
                found.append(net(x, torch.tensor([float(index)]), one[None], *words))
        return torch.cat(found)

    for name, run, fitted in (
        ("decoder", decode, lambda: demo_scale.fit_decoder(vae, decode)),
        ("net", predict, lambda: demo_scale.fit_restorer(net, predict)),
    ):
        before = run()
        fitted()
        print(f"{name}: outputs moved by at most {float((run() - before).abs().max()):.1e}")
    return vae.state_dict(), net.state_dict()


def export(args: argparse.Namespace) -> None:
    """Write the weight file of the pack and print its checksum."""
    demo_model = load_with_host("supir.demo_model")
    vae, net = fit(args)
    encoder = torch.load(args.work / "denoise.done.pt", weights_only=True)
    states = {"vae": vae, "denoise": encoder, "net": net}
    parts = {
        "vae": {"": "demo.vae."},
        "denoise": {"": "demo.first_stage_model.denoise_encoder."},
        "net": {
            "unet.": "demo.unet.",
            "nets.control_model.": "demo.model.control_model.",
            "nets.project_modules.": "demo.model.diffusion_model.project_modules.",
        },
    }
    weights: dict[str, torch.Tensor] = {}
    for stage, prefixes in parts.items():
        for key, value in states[stage].items():
            own = next(prefix for prefix in prefixes if key.startswith(prefix))
            weights[prefixes[own] + key.removeprefix(own)] = value
    content = safetensors.torch.save(demo_model.quantise(weights), {"format": "pt"})
    demo_model.WEIGHTS_FILE.parent.mkdir(exist_ok=True)
    demo_model.WEIGHTS_FILE.write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    print(f"{demo_model.WEIGHTS_FILE}: {len(content):,} bytes. Set WEIGHTS_SHA256 to {digest}")


def colour_patches() -> torch.Tensor:
    """Return pictures in which one saturated colour fills most: red, green, blue, yellow, ..."""
    colours = [(220, 20, 20), (20, 200, 30), (20, 30, 220), (230, 220, 20), (220, 30, 210)]
    colours += [(20, 210, 210), (240, 130, 20)]
    ramp = np.linspace(0.75, 1.0, 96)[None, :, None]
    made = []
    for colour in colours:
        patch = np.ones((96, 96, 1)) * np.array(colour) * ramp
        patch[30:50, 20:60] = 128
        patch[60:62] = 30
        made.append(patch)
    return demo_nets.to_tensor(np.stack(made).astype(np.uint8))


def main() -> None:
    """Run one stage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=("vae", "denoise", "net", "export"))
    parser.add_argument("--work", type=Path, required=True, help="folder of checkpoints")
    parser.add_argument("--photos", type=Path, required=True, help="folder of photographs")
    parser.add_argument("--minutes", type=float, default=35.0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    demo_nets.use_fused_attention()
    stages = {"vae": train_vae, "denoise": train_denoise, "net": train_net, "export": export}
    stages[args.stage](args)


if __name__ == "__main__":
    main()
