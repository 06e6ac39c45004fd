"""Device profiles: which one is chosen, what each number rests on, what a user may change."""

import pytest
from omegaconf import OmegaConf
from supir_xpu.xpu.device import SUPPORTED_FAMILIES, UNSUPPORTED_FAMILIES, DeviceFacts
from supir_xpu.xpu.device_profiles import (
    PROFILE_DIR,
    ProfileError,
    bundled_profiles,
    compare_versions,
    load_profiles,
    version,
)

B70 = "Intel(R) Arc(TM) Pro B70 Graphics"


def pick(family="battlemage", os="Windows", driver="32.0.101.8629", name=B70, kind="xpu", guc=""):
    facts = DeviceFacts(kind, family=family, os=os, driver=driver, name=name)
    return bundled_profiles().pick(facts, guc)


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("32.0.101.8629", "battlemage-windows-known-bad"),
        ("32.0.101.6000", "battlemage-windows-known-bad"),
        ("32.0.101.8724", "battlemage-windows-known-bad"),
        ("32.0.101.8801", "battlemage-windows-known-bad"),
        ("32.0.101.8802", "battlemage-windows"),
        ("32.0.102.1", "battlemage-windows"),
        ("33.0.0.0", "battlemage-windows"),
        ("1.14.37111", "battlemage-windows-known-bad"),  # how the runtime names 8629
        ("1.15.37669", "battlemage-windows-known-bad"),  # 8724
        ("1.15.37670", "battlemage-windows"),
        ("", "battlemage-windows-known-bad"),
        ("no version", "battlemage-windows-known-bad"),
    ],
)
def test_windows_driver_ranges(driver, name):
    assert pick(driver=driver).name == name


@pytest.mark.parametrize(
    ("guc", "name"),
    [
        ("70.58.0", "battlemage-linux-old-firmware"),
        ("70.64.9", "battlemage-linux-old-firmware"),
        ("70.65", "battlemage"),
        ("70.65.0", "battlemage"),
        ("71.0", "battlemage"),
        ("", "battlemage-linux-unread-firmware"),
    ],
)
def test_linux_firmware_ranges(guc, name):
    assert pick(os="Linux", driver="1.6.33276", guc=guc).name == name


@pytest.mark.parametrize("family", [*SUPPORTED_FAMILIES, *UNSUPPORTED_FAMILIES])
@pytest.mark.parametrize("system", ["Windows", "Linux", ""])
def test_every_family_has_a_profile_of_its_own(family, system):
    profile = pick(family=family, os=system, driver="99.0", name="", guc="99.0")
    assert not profile.careful
    assert profile.unsupported is (family in UNSUPPORTED_FAMILIES)


@pytest.mark.parametrize("family", ["unknown", "jupiter-sound"])
def test_an_unknown_device_gets_the_careful_profile(family):
    profile = pick(family=family, driver="", name="")
    worst = pick()
    assert profile.careful
    for field in ("base_points", "gap_s", "heavy_gap_s", "load_settle_s", "image_settle_s"):
        assert getattr(profile, field) >= getattr(worst, field)
    assert profile.alloc_blocks


def test_other_devices_are_left_alone():
    profile = pick(kind="cuda", family="battlemage")
    assert profile.name == "other"
    assert (profile.base_points, profile.gap_s, profile.image_settle_s) == (0, 0, 0)


def test_cool_down_defaults():
    """8 s between runs and 6 s per heavy image where crashes are known, none elsewhere."""
    for profile in bundled_profiles().profiles:
        expected = (8, 6) if profile.known_bad else (0, 0)
        assert (profile.gap_s, profile.image_settle_s) == expected, profile.name


def test_rates_belong_to_the_card():
    b70, b50 = pick(), pick(name="Intel(R) Arc(TM) Pro B50 Graphics")
    assert (b70.bw_bytes_per_s, b70.flops_per_s) == (75e9, 30e12)
    assert b50.bw_bytes_per_s < b70.bw_bytes_per_s
    assert b50.name == b70.name


def test_every_number_has_a_source():
    numbers = 0
    for path in PROFILE_DIR.glob("*.yaml"):
        stack = [OmegaConf.to_container(OmegaConf.load(path))]
        while stack:
            item = stack.pop()
            if isinstance(item, dict) and "value" in item:
                assert set(item) == {"value", "source"}, path
                assert len(item["source"]) > 5, path
                numbers += 1
                continue
            values = item.values() if isinstance(item, dict) else item
            for value in values:
                assert not isinstance(value, (int, float)) or isinstance(value, bool), path
                if isinstance(value, (dict, list)):
                    stack.append(value)
    assert numbers > 40
    for profile in bundled_profiles().profiles:
        assert len(profile.sources) == 10
        assert profile.note


@pytest.mark.parametrize(
    ("a", "b", "order"),
    [
        ("32.0.101.8629", "32.0.101.8629", 0),
        ("32.0.101.999", "32.0.101.8629", -1),  # numbers, not text
        ("70.65", "70.65.0", 0),
        ("70.100", "70.65", 1),
        ("GuC 70.58.0", "70.65", -1),
        ("", "70.65", None),
        ("unknown", "70.65", None),
    ],
)
def test_compare_versions(a, b, order):
    assert compare_versions(a, b) == order
    back = compare_versions(b, a)
    assert back == (None if order is None else -order)


def test_version_reads_the_first_number():
    assert version("1.6.33276+11") == (1, 6, 33276)
    assert version("none") is None


def write(tmp_path, text):
    path = tmp_path / "supir_xpu.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_user_changes_one_profile(tmp_path):
    path = write(
        tmp_path,
        "other_section: 1\n"
        "profiles:\n"
        "  battlemage-windows-known-bad:\n"
        "    gap_s: 12\n"
        "    bw_bytes_per_s: {value: 9.0e+10, source: my bench}\n"
        "    known_bad: false\n",
    )
    changed = load_profiles(path)
    facts = DeviceFacts("xpu", family="battlemage", os="Windows", driver="32.0.101.8629", name=B70)
    profile = changed.pick(facts)
    assert (profile.gap_s, profile.bw_bytes_per_s, profile.known_bad) == (12, 9e10, False)
    assert profile.sources["gap_s"] == "set in supir_xpu.yaml"
    assert profile.sources["bw_bytes_per_s"] == "my bench"
    assert profile.image_settle_s == 6  # untouched
    untouched = {p.name: p for p in bundled_profiles().profiles}
    for other in changed.profiles:
        if other.name != profile.name and other.name not in ("battlemage", "alchemist"):
            assert untouched[other.name].gap_s == other.gap_s


@pytest.mark.parametrize("text", ["", "profiles:\n", "risk: {}\n"])
def test_a_file_without_changes_changes_nothing(tmp_path, text):
    assert load_profiles(write(tmp_path, text)) == bundled_profiles()


def test_a_missing_file_changes_nothing(tmp_path):
    assert load_profiles(tmp_path / "nowhere.yaml") == bundled_profiles()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("profiles: {battlemage-windos: {gap_s: 1}}", "'profiles.battlemage-windos'"),
        ("profiles: {alchemist: {gap: 1}}", "'profiles.alchemist.gap'"),
        ("profiles: {alchemist: {gap_s: soon}}", "'profiles.alchemist.gap_s'"),
        ("profiles: {alchemist: {gap_s: true}}", "'profiles.alchemist.gap_s'"),
        ("profiles: {alchemist: {gap_s: -1}}", "'profiles.alchemist.gap_s'"),
        ("profiles: {alchemist: {gap_s: .nan}}", "'profiles.alchemist.gap_s'"),
        ("profiles: {alchemist: {gap_s: {val: 1}}}", "'profiles.alchemist.gap_s'"),
        ("profiles: {alchemist: {memory_fraction: 2}}", "'profiles.alchemist.memory_fraction'"),
        ("profiles: {alchemist: {known_bad: 3}}", "'profiles.alchemist.known_bad'"),
        ("profiles: {alchemist: {name: x}}", "'profiles.alchemist.name'"),
        ("profiles: {alchemist: 3}", "'profiles.alchemist'"),
        ("profiles: 3", "'profiles'"),
        ("- a\n- b\n", "supir_xpu.yaml"),
        ("profiles: {a: [", "supir_xpu.yaml"),
    ],
)
def test_a_wrong_change_is_named(tmp_path, text, named):
    with pytest.raises(ProfileError, match=named.replace(".", r"\.")):
        load_profiles(write(tmp_path, text))


def test_a_misspelt_key_gets_a_hint(tmp_path):
    with pytest.raises(ProfileError, match="Did you mean 'image_settle_s'"):
        load_profiles(write(tmp_path, "profiles: {alchemist: {image_settle: 1}}"))
