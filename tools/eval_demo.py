"""Judge the bundled demo model on the held-out pictures, through the pack's own nodes.

``eval_demo.py --photos FOLDER`` (docs/demo_model.md says what belongs into it) prints one table. Runs
inside ``.venv`` with the environment variable COMFYUI_ROOT naming ComfyUI's folder. The recipe is
the one of example_workflows/api/demo_restore.json; damage and noise are seeded.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from the_pack import load_with_host

sys.path.insert(0, str(Path(__file__).parent))
import demo_data
import demo_metrics as metrics
from demo_degrade import MILD, STRONG, degrade

WORKFLOW = Path(__file__).resolve().parents[1] / "example_workflows" / "api" / "demo_restore.json"
DAMAGE_SEED = 31

FIRST, RESTORED = "first stage", "restored"
OWN = ("degraded", FIRST, RESTORED)
"""All treatments but the plain filters."""


def read_recipe() -> dict[str, dict[str, Any]]:
    """Return the settings of the demo workflow by node class, links left out."""
    prompt = json.loads(WORKFLOW.read_text(encoding="utf-8"))
    return {
        node["class_type"]: {k: v for k, v in node["inputs"].items() if not isinstance(v, list)}
        for node in prompt.values()
    }


class Pipeline:
    """The demo workflow's nodes, called as ComfyUI calls them."""

    def __init__(self, recipe: dict[str, dict[str, Any]]) -> None:
        self.nodes = {n.define_schema().node_id: n for n in load_with_host("nodes").NODES}
        self.recipe = recipe
        self.model, self.clip, self.vae, self.supir = self.call("LoadDemo")
        texts = recipe["SUPIR_XPU_Conditioning"]
        self.prompts = self.node("Conditioning").execute(
            [self.clip], [texts["positive"]], [texts["negative"]]
        )

    def node(self, name: str) -> Any:
        """Return the class of one of the pack's nodes."""
        return self.nodes[f"SUPIR_XPU_{name}"]

    def call(self, name: str, *inputs: Any, **links: Any) -> Any:
        """Run a node with the workflow's settings."""
        settings = self.recipe[f"SUPIR_XPU_{name}"]
        return self.node(name).execute(*inputs, **links, **settings).result

    def restore(self, picture: np.ndarray) -> dict[str, np.ndarray]:
        """Return the first stage's picture and the restored one, in the first stage's colours."""
        image = torch.from_numpy(picture.astype(np.float32) / 255.0)[None]
        stage1, control, center = self.call(
            "FirstStage", vae=self.vae, supir=self.supir, image=image
        )
        (latent,) = self.call(
            "Sample", model=self.model, supir=self.supir,
            positive=self.prompts.result[0], negative=self.prompts.result[1],
            control=control, center=center,
        )  # fmt: skip
        (decoded,) = self.call("Decode", vae=self.vae, latent=latent)
        (fixed,) = self.call("ColorFix", image=decoded, reference=stage1)
        return {FIRST: to_uint8(stage1), RESTORED: to_uint8(fixed)}


def to_uint8(image: torch.Tensor) -> np.ndarray:
    """Return an IMAGE of one picture as ComfyUI saves it, uint8 [H, W, 3]."""
    return (image[0].numpy() * 255.0).clip(0.0, 255.0).astype(np.uint8)


@dataclass
class Scores:
    """The figures of one treatment over many pictures."""

    psnr: np.ndarray
    ssim: np.ndarray
    gmsd: np.ndarray
    colour: np.ndarray

    @classmethod
    def of(cls, made: list[np.ndarray], clean: list[np.ndarray]) -> Scores:
        """Compare pictures with their originals."""
        measures = (metrics.psnr, metrics.ssim, metrics.gmsd, metrics.colour_error)
        pairs = list(zip(made, clean, strict=True))
        return cls(*(np.array([measure(a, b) for a, b in pairs]) for measure in measures))

    def pick(self, chosen: np.ndarray) -> Scores:
        """Return the figures of some of the pictures."""
        return Scores(self.psnr[chosen], self.ssim[chosen], self.gmsd[chosen], self.colour[chosen])

    def row(self, name: str, before: Scores) -> str:
        """Return one line of the table."""
        gain = self.psnr - before.psnr
        better, structure = (gain > 0).mean(), (self.ssim > before.ssim).mean()
        return (
            f"| {name} | {self.psnr.mean():.2f} | {gain.mean():+.2f} | {better:.0%} | {gain.min():+.2f} "
            f"| {self.ssim.mean():.3f} | {structure:.0%} | {self.gmsd.mean():.3f} | {self.colour.mean():.1f} |"
        )


def table(scores: dict[str, Scores], chosen: np.ndarray) -> list[str]:
    """Return the lines of a table over the chosen pictures, the best trivial filter among them."""
    picked = {name: one.pick(chosen) for name, one in scores.items()}
    before = picked["degraded"]
    best = max((n for n in picked if n not in OWN), key=lambda n: picked[n].psnr.mean())
    lines = [
        "| | PSNR | gain | better | worst | SSIM | better | GMSD | colour error |",
        "|---|---|---|---|---|---|---|---|---|",
        picked["degraded"].row("degraded", before),
        picked[best].row(f"best plain filter: {best}", before),
    ]
    return lines + [picked[name].row(name, before) for name in OWN[1:]]


def targets(scores: dict[str, Scores]) -> list[str]:
    """Return each target with what was reached."""
    before, after, first = scores["degraded"], scores[RESTORED], scores[FIRST]
    best = max(scores[n].psnr.mean() for n in scores if n not in OWN)
    gain = after.psnr - before.psnr
    structure = (after.ssim > before.ssim).mean()
    stated = (
        ("mean PSNR gain >= +1.0 dB", gain.mean() >= 1.0, f"{gain.mean():+.2f} dB"),
        ("PSNR better on >= 80 %", (gain > 0).mean() >= 0.8, f"{(gain > 0).mean():.0%}"),
        (
            "mean PSNR >= best plain filter + 0.3 dB",
            after.psnr.mean() >= best + 0.3,
            f"{after.psnr.mean() - best:+.2f} dB",
        ),
        ("SSIM better on >= 80 %", structure >= 0.8, f"{structure:.0%}"),
        ("no picture worse than -1.5 dB", gain.min() >= -1.5, f"worst {gain.min():+.2f} dB"),
        ("mean colour error < 6 of 255", after.colour.mean() < 6.0, f"{after.colour.mean():.1f}"),
        (
            "restored >= first stage - 0.5 dB",
            after.psnr.mean() >= first.psnr.mean() - 0.5,
            f"{after.psnr.mean() - first.psnr.mean():+.2f} dB",
        ),
    )
    lines = ["| target | reached | |", "|---|---|---|"]
    return lines + [f"| {t} | {value} | {'yes' if ok else '**no**'} |" for t, ok, value in stated]


def judge(
    pipeline: Pipeline, pictures: dict[str, np.ndarray], mild: bool, sheet: Path | None
) -> dict[str, Scores]:
    """Damage, filter and restore every picture; return the figures by treatment."""
    rng = np.random.default_rng(DAMAGE_SEED)
    made: dict[str, list[np.ndarray]] = {}
    for clean in pictures.values():
        damaged = degrade(clean, rng, MILD if mild else STRONG)
        treated = {"degraded": damaged, **metrics.trivial_filters(damaged)}
        for name, picture in {**treated, **pipeline.restore(damaged)}.items():
            made.setdefault(name, []).append(picture)
    clean = list(pictures.values())
    if sheet is not None:
        from PIL import Image

        columns = [made["degraded"], made[FIRST], made[RESTORED], clean]
        rows = [np.concatenate(row, axis=1) for row in zip(*columns, strict=True)]
        half = (len(rows) + 1) // 2
        rows += [np.zeros_like(rows[0])] * (2 * half - len(rows))
        halves = [np.concatenate(part) for part in (rows[:half], rows[half:])]
        Image.fromarray(np.concatenate(halves, axis=1)).save(sheet)
    return {name: Scores.of(pictures, clean) for name, pictures in made.items()}


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--photos", type=Path, required=True, help="folder of photographs")
    parser.add_argument("--dev", action="store_true", help="the pictures that may guide choices")
    parser.add_argument("--mild", action="store_true", help="light damage instead of strong")
    parser.add_argument("--sheet", type=Path, help="picture file to show every result in")
    parser.add_argument("--set", action="append", default=[], help="Node.input=number, to compare")
    args = parser.parse_args()
    recipe = read_recipe()
    for change in args.set:
        key, value = change.split("=")
        node, name = key.split(".")
        recipe[f"SUPIR_XPU_{node}"][name] = type(recipe[f"SUPIR_XPU_{node}"][name])(value)
    pictures = demo_data.dev_set(args.photos) if args.dev else demo_data.test_set(args.photos)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temp, torch.inference_mode():
        load_with_host("supir.constants")
        import folder_paths

        folder_paths.set_temp_directory(temp)
        begun = time.monotonic()
        scores = judge(Pipeline(recipe), pictures, args.mild, args.sheet)
        seconds = time.monotonic() - begun
    drawn = np.array([name.startswith("synthetic") for name in pictures])
    kinds = {"All": drawn | True, "Photographs": ~drawn, "Synthetic": drawn}
    for title, chosen in kinds.items():
        print(f"\n{title}: {chosen.sum()} pictures\n", *table(scores, chosen), sep="\n")
    print("", *targets(scores), f"\n{seconds:.0f} s", sep="\n")


if __name__ == "__main__":
    main()
