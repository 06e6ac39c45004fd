"""The demo model in this process, and short ways to run the nodes on it.

``demo`` has the demo's networks with computed random weights: there every layer acts strongly on the
result, so a test sees when one is left out or runs differently. ``trained`` is the demo as shipped.
"""

from __future__ import annotations

import hashlib
from types import SimpleNamespace

import pytest
import torch


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def random_weights(shapes, prefix):
    """In place of ``demo_model.state``; the denoise encoder is the VAE's encoder."""
    from supir_xpu.supir import demo_model

    own = "demo.vae.encoder." if prefix.endswith(".denoise_encoder.") else prefix
    return demo_model.computed(shapes, own)


@pytest.fixture(autouse=True)
def weights_of_the_demo(request, monkeypatch):
    """Random weights for whatever a test loads itself, unless it uses ``trained``."""
    from supir_xpu.supir import demo_model

    if "trained" not in request.fixturenames:
        monkeypatch.setattr(demo_model, "state", random_weights)


@pytest.fixture(scope="session")
def demo(tmp_path_factory):
    """The demo with random weights; see ``assemble``."""
    from supir_xpu.supir import demo_model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_model, "state", random_weights)
        return assemble(tmp_path_factory)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The demo as shipped; see ``assemble``."""
    from supir_xpu.supir import demo_model

    with pytest.MonkeyPatch.context() as patch:
        weights = {True: demo_model.computed, False: demo_model.trained}
        patch.setattr(
            demo_model,
            "state",
            lambda shapes, prefix: weights[prefix.startswith(demo_model.COMPUTED)](shapes, prefix),
        )
        return assemble(tmp_path_factory)


def assemble(tmp_path_factory):
    """MODEL, CLIP, VAE, SUPIR of the demo, the node functions, and prepared latents of one picture."""
    import folder_paths

    folder_paths.set_temp_directory(str(tmp_path_factory.mktemp("demo")))
    with torch.inference_mode():
        from supir_xpu.nodes import codec, color_fix, condition, first_stage, sample
        from supir_xpu.nodes import demo as demo_nodes

        model, clip, vae, supir = demo_nodes.LoadDemo.execute().result
        positive, negative = condition.Conditioning.execute([clip], ["sharp"], ["blurry"]).result
        generator = torch.Generator().manual_seed(3)
        image = torch.rand(1, 64, 64, 3, generator=generator)
        stage1, control, center = first_stage.FirstStage.execute(vae, supir, image, 1.0).result
    folder_paths.set_temp_directory(str(tmp_path_factory.mktemp("temp")))

    defaults = {
        "seed": 7,
        "steps": 3,
        "sampler": "restore_edm",
        "cfg_start": 2.0,
        "cfg_end": 4.0,
        "control_start": 1.0,
        "control_end": 0.9,
        "restore_cfg": 4.0,
        "s_churn": 5.0,
        "s_noise": 1.003,
        "eta": 1.0,
        "tile_px": -1,
        "tile_overlap_px": 64,
    }

    def run(**changes):
        args = {
            "model": model,
            "supir": supir,
            "positive": positive,
            "negative": negative,
            "control": control,
            "center": center,
            **defaults,
            **changes,
        }
        return sample.Sample.execute(**args)

    def run_latent(**changes):
        return run(**changes).result[0]["samples"]

    return SimpleNamespace(
        model=model,
        clip=clip,
        vae=vae,
        supir=supir,
        positive=positive,
        negative=negative,
        image=image,
        stage1=stage1,
        control=control,
        center=center,
        run=run,
        run_latent=run_latent,
        first_stage=first_stage.FirstStage.execute,
        condition=condition.Conditioning.execute,
        encode=codec.Encode.execute,
        decode=codec.Decode.execute,
        color_fix=color_fix.ColorFix.execute,
        digest=digest,
    )
