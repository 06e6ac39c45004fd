"""The hint speaks when steps and settings belong to different base models, and only then."""

import pytest
from supir_xpu.supir.presets import Preset, hint, load_presets


def test_presets_of_the_pack_load():
    presets = load_presets()
    assert set(presets) == {"normal", "fast"}
    assert presets["fast"].sampler == "restore_dpmpp_2m"


@pytest.mark.parametrize(
    ("steps", "sampler", "cfg", "says"),
    [
        (45, "restore_edm", 4.0, None),
        (10, "restore_dpmpp_2m", 2.0, None),
        (14, "restore_dpmpp_2m", 2.5, None),
        (17, "restore_edm", 4.0, None),
        (10, "restore_edm", 2.0, "the sampler restore_dpmpp_2m"),
        (10, "restore_dpmpp_2m", 4.0, "cfg 0 to 2.5 (it is 4)"),
        (8, "restore_edm", 7.5, "the sampler restore_dpmpp_2m and cfg"),
        (45, "restore_dpmpp_2m", 4.0, "the sampler restore_edm"),
    ],
)
def test_hint(steps, sampler, cfg, says):
    text = hint(steps, sampler, cfg)
    assert text is None if says is None else says in text


def test_a_preset_with_wrong_bounds_is_refused():
    with pytest.raises(ValueError, match="steps"):
        Preset("x", "restore_edm", [5], [0.0, 1.0])
