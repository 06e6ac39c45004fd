"""Steps of both sides in turn in one process: what ``bench --full`` judges speed by.

Two server processes minutes apart differ by more than the two sides do, because shared machines
change their speed. Here one SDXL serves both, and each side's run follows the other's at once.

    python tools/full_size_turns.py SCRATCH PAIRS     # prints JSON: [[ours, core], ...]
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from full_size_prompts import CFG, RESTORE_CFG, SDXL_NAME, SIDE_PX, SUPIR_NAME
from the_pack import load_with_host

STEPS = 2
SEED = 1
CELL_PX = 8

Run = Callable[[], torch.Tensor]


class TurnsError(RuntimeError):
    """The child process failed; the message holds the end of what it said."""


def measure(scratch: Path, pairs: int) -> list[tuple[float, float]]:
    """Return (ours, core) in processor seconds per step, measured in a child process.

    Raises: TurnsError.
    """
    command = [sys.executable, str(Path(__file__).resolve()), str(scratch), str(pairs)]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        said = (done.stderr or done.stdout)[-2000:]
        raise TurnsError(f"The steps in turn ended with exit code {done.returncode}:\n{said}")
    return [(ours, core) for ours, core in json.loads(lines[-1])]


def in_turn(ours: Run, core: Run, pairs: int) -> list[tuple[float, float]]:
    """Run both once to warm up, then in turn; who starts changes. Processor seconds per step."""
    ours(), core()
    found: list[tuple[float, float]] = []
    for k in range(pairs):
        if k % 2:
            late, early = cpu_seconds(core), cpu_seconds(ours)
            found.append((early, late))
        else:
            found.append((cpu_seconds(ours), cpu_seconds(core)))
    return found


def cpu_seconds(run: Run) -> float:
    """Return the processor seconds per step of a run, all threads."""
    started = time.process_time()
    run()
    return (time.process_time() - started) / STEPS


def both_sides(scratch: Path) -> tuple[Run, Run]:
    """Load the files of the scratch folder; return a run of our guider and one of the host's."""
    load_with_host("supir.striped")
    import comfy.samplers
    import comfy.sd
    import folder_paths
    from comfy_extras.nodes_model_patch import ModelPatchLoader, SUPIRApply
    from supir_xpu.nodes.custom import Guider
    from supir_xpu.nodes.load import LoadSUPIR
    from supir_xpu.supir.sigmas import ddpm_sigmas

    for name in ("checkpoints", "model_patches"):
        folder_paths.add_model_folder_path(name, str(scratch / "models" / name))
    path = str(scratch / "models" / "checkpoints" / SDXL_NAME)
    model = comfy.sd.load_checkpoint_guess_config(path, output_vae=False, output_clip=False)[0]
    supir = LoadSUPIR.execute(SUPIR_NAME).result[0]
    patch = ModelPatchLoader().load_model_patch(SUPIR_NAME)[0]
    make = torch.Generator().manual_seed(SEED)

    def words() -> list[list[Any]]:
        pooled = {"pooled_output": torch.randn(1, 1280, generator=make)}
        return [[torch.randn(1, 77, 2048, generator=make), pooled]]

    cells = SIDE_PX // CELL_PX
    positive, negative = words(), words()
    control, noise = (torch.randn(1, 4, cells, cells, generator=make) for _ in range(2))
    latent = {"samples": control}
    ends = (CFG, CFG, 1.0, 1.0, RESTORE_CFG)
    ours = Guider.execute(
        model, supir, positive, negative, latent, *ends, -1, 256, center=latent
    ).result[0]

    class Encoded(SUPIRApply):
        """The host's node, given a latent in place of a picture to encode."""

        @classmethod
        def _encode_with_denoise_encoder(cls, *_: Any, **__: Any) -> torch.Tensor:
            return control

    class NoVae:
        def encode(self, _: Any) -> torch.Tensor:
            return control

        def decode(self, _: Any) -> torch.Tensor:
            return torch.zeros(1, SIDE_PX, SIDE_PX, 3)

    picture = torch.zeros(1, SIDE_PX, SIDE_PX, 3)
    steered = Encoded.execute(
        model=model, model_patch=patch, vae=NoVae(), image=picture,
        strength_start=1.0, strength_end=1.0, restore_cfg=RESTORE_CFG, restore_cfg_s_tmin=0.05,
    ).result[0]  # fmt: skip
    core = comfy.samplers.CFGGuider(steered)
    core.set_conds(positive, negative)
    core.set_cfg(CFG)
    levels = ddpm_sigmas(STEPS)

    def sample(guider: Any) -> torch.Tensor:
        euler = comfy.samplers.sampler_object("euler")
        empty = torch.zeros_like(control)
        return guider.sample(noise, empty, euler, levels, disable_pbar=True, seed=SEED)

    return lambda: sample(ours), lambda: sample(core)


def main(scratch: str, pairs: str) -> None:
    """Measure and print; everything else that is said goes to stderr."""
    with torch.inference_mode(), contextlib.redirect_stdout(sys.stderr):
        found = in_turn(*both_sides(Path(scratch)), int(pairs))
    print(json.dumps(found))


if __name__ == "__main__":
    os.environ.setdefault("PYTHONIOENCODING", "utf-8")
    main(*sys.argv[1:])
