"""Making, stamping and repairing .venv, with a fake pip."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


class FakeRun:
    """Plays venv and pip: a real bare environment, and packages that are empty modules."""

    def __init__(self, packages=("good",)) -> None:
        self.commands: list[list[str]] = []
        self.packages = packages
        self.fail: tuple[int, bool] | None = None
        self.die: type[BaseException] | None = None

    def __call__(self, command, env):
        command = list(command)
        self.commands.append(command)
        self.env = env
        if command[1:3] == ["-m", "venv"]:
            made = subprocess.run([*command[:3], "--without-pip", command[3]], check=True)
            (self._site(Path(command[3])) / "pip.py").write_text("")
            return made.returncode, False
        if self.die:
            raise self.die
        if self.fail:
            return self.fail
        site = self._site(Path(command[0]).parents[1])
        for name in self.packages:
            (site / f"{name}.py").write_text("")
        return 0, True

    @staticmethod
    def _site(folder: Path) -> Path:
        return next(p for p in folder.rglob("site-packages") if p.is_dir())

    def pips(self):
        return [c[3:] for c in self.commands if c[1:3] == ["-m", "pip"]]

    def venvs(self):
        return [c for c in self.commands if c[1:3] == ["-m", "venv"]]


@pytest.fixture
def run():
    return FakeRun()


@pytest.fixture
def said():
    return []


@pytest.fixture
def environment(setup_env, tmp_path, run, said):
    return setup_env.Environment(tmp_path, run, said.append)


@pytest.fixture
def profile(setup_env):
    return setup_env.Profile("fast", ("good==1",), ("apart==2",), ("good",))


def test_first_call_makes_installs_and_stamps(environment, profile, run):
    assert not environment.holds(profile)
    environment.make()
    environment.install(profile)
    assert environment.holds(profile)
    assert run.pips() == [["install", "good==1"], ["install", "--no-deps", "apart==2"]]


def test_second_call_runs_nothing(environment, setup_env, profile, run, tmp_path):
    environment.make()
    environment.install(profile)
    before = len(run.commands)
    again = setup_env.Environment(tmp_path, run, lambda _: None)
    assert again.holds(profile)
    again.make()
    assert len(run.commands) == before


@pytest.mark.parametrize(
    "changed", [{"requirements": ("good==2",)}, {"apart": ()}, {"name": "full"}]
)
def test_a_changed_profile_is_not_held(environment, setup_env, profile, changed):
    environment.make()
    environment.install(profile)
    facts = {**profile.__dict__, **changed}
    assert not environment.holds(setup_env.Profile(**facts))


def test_key_depends_on_python_version(setup_env, profile, monkeypatch):
    before = setup_env.key(profile)
    monkeypatch.setattr(sys, "version_info", (3, 99, 0))
    assert setup_env.key(profile) != before


@pytest.mark.parametrize("text", ["", "{", "[]", '{"done": 3}', '{"done": {"fast": 1}}'])
def test_a_damaged_stamp_counts_as_none(environment, setup_env, profile, text):
    environment.make()
    environment.install(profile)
    (environment.folder / setup_env.STAMP_NAME).write_text(text)
    assert not environment.holds(profile)
    environment.make()
    environment.install(profile)
    assert environment.holds(profile)


def test_killed_pip_leads_to_a_new_environment(environment, profile, run, said):
    environment.make()
    run.die = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        environment.install(profile)
    assert not environment.holds(profile)
    run.die = None
    environment.make()
    environment.install(profile)
    assert environment.holds(profile)
    assert len(run.venvs()) == 2
    assert any("interrupted" in line for line in said)


@pytest.mark.parametrize(("changing", "venvs"), [(False, 1), (True, 2)])
def test_failed_pip_is_an_error_and_the_next_call_repairs(
    environment, setup_env, profile, run, changing, venvs
):
    environment.make()
    run.fail = (1, changing)
    with pytest.raises(setup_env.SetupError, match="exit code 1"):
        environment.install(profile)
    assert not environment.holds(profile)
    run.fail = None
    environment.make()
    environment.install(profile)
    assert environment.holds(profile)
    assert len(run.venvs()) == venvs


def test_environment_whose_python_does_not_start_is_made_again(environment, profile, run):
    environment.make()
    environment.install(profile)
    environment.python.unlink()
    assert not environment.holds(profile)
    environment.make()
    environment.install(profile)
    assert environment.holds(profile)
    assert len(run.venvs()) == 2


def test_lost_package_leads_to_a_new_environment(environment, profile, run):
    environment.make()
    environment.install(profile)
    next(environment.folder.rglob("good.py")).unlink()
    assert not environment.holds(profile)
    environment.make()
    environment.install(profile)
    assert environment.holds(profile)
    assert len(run.venvs()) == 2


def test_venv_killed_half_way_is_made_again(environment, setup_env, profile, run):
    environment.make()
    (environment.folder / setup_env.MARKER_NAME).write_text("")
    environment.make()
    assert len(run.venvs()) == 2


def test_pip_that_installs_nothing_is_not_stamped(environment, setup_env, profile, run):
    environment.make()
    run.packages = ()
    with pytest.raises(setup_env.SetupError, match="good cannot be found"):
        environment.install(profile)
    assert not environment.holds(profile)


def test_pip_sees_no_foreign_paths_and_caches_here(environment, profile, run, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    monkeypatch.setenv("PIP_TARGET", "elsewhere")
    monkeypatch.delenv("PIP_CACHE_DIR", raising=False)
    monkeypatch.delenv("PIP_NO_CACHE_DIR", raising=False)
    environment.make()
    environment.install(profile)
    assert not {"PYTHONPATH", "PIP_TARGET"} & set(run.env)
    assert run.env["PIP_CACHE_DIR"] == str(environment.cache / "pip")


def test_source_download_is_pinned_before_it_is_read(environment, run, tmp_path):
    environment.make()
    environment.download_source("thing==1", "ab" * 32, tmp_path)
    assert "--require-hashes" in run.pips()[0]
    assert (tmp_path / "pinned.txt").read_text() == f"thing==1 --hash=sha256:{'ab' * 32}\n"


def test_profiles_take_the_pack_and_the_host(setup_env, tmp_path):
    (tmp_path / "requirements.txt").write_text("torch\nomegaconf\n")
    host = tmp_path / "host"
    host.mkdir()
    (host / "requirements.txt").write_text("torch\ntorchaudio\ntorchsde  # x\n\n# y\naiohttp>=3\n")
    fast, full = setup_env.fast_profile(tmp_path), setup_env.full_profile(tmp_path, host)
    assert {setup_env.TORCH, "omegaconf", "pytest", "hypothesis"} <= set(fast.requirements)
    assert set(fast.requirements) <= set(full.requirements)
    assert "aiohttp>=3" in full.requirements
    assert "torchsde" in full.requirements
    assert full.apart == (setup_env.TORCHAUDIO,)
    assert not [r for r in full.requirements if "torchaudio" in r]


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("torch", "torch"),
        ("Torch_Audio>=2", "torch-audio"),
        ("av [x] ; y", "av"),
        ("a.b~=2", "a.b"),
    ],
)
def test_requirement_name(setup_env, line, name):
    assert setup_env.requirement_name(line) == name


def test_stamp_is_json_in_the_environment(environment, setup_env, profile):
    environment.make()
    environment.install(profile)
    stamp = json.loads((environment.folder / setup_env.STAMP_NAME).read_text(encoding="utf-8"))
    assert stamp["done"]["fast"]["key"] == setup_env.key(profile)


def test_only_one_set_up_at_a_time(setup_env, tmp_path, monkeypatch):
    lock, said = tmp_path / "x" / "lock", []

    class WaitedError(Exception):
        pass

    def stop_waiting(_):
        raise WaitedError

    monkeypatch.setattr(setup_env.time, "sleep", stop_waiting)
    with setup_env.only_one(lock, said.append):
        assert said == []
        with pytest.raises(WaitedError), setup_env.only_one(lock, said.append):
            pass
    assert len(said) == 1
    with setup_env.only_one(lock, said.append):
        assert len(said) == 1


def front_end_pip(die=None):
    """A pip that puts a front end package where ``--target`` says."""

    def run(command, env):
        run.commands.append(list(command))
        target = Path(command[command.index("--target") + 1])
        static = target / "comfyui_frontend_package" / "static"
        static.mkdir(parents=True)
        if run.die:
            raise run.die
        (static / "index.html").touch()
        return 0, True

    run.commands, run.die = [], die
    return run


def test_an_old_front_end_is_installed_once_beside_the_environment(setup_env, tmp_path):
    run = front_end_pip()
    environment = setup_env.Environment(tmp_path, run, lambda _: None)
    static = environment.front_end("1.39.19")
    assert (static / "index.html").is_file()
    assert static.relative_to(tmp_path).parts[:2] == (".cache", "frontend-1.39.19")
    assert environment.front_end("1.39.19") == static
    ((*_, no_deps, _, _, requirement),) = run.commands
    assert (no_deps, requirement) == ("--no-deps", "comfyui-frontend-package==1.39.19")


def test_an_interrupted_front_end_is_installed_again_and_leaves_the_environment_alone(
    setup_env, tmp_path
):
    run = front_end_pip(KeyboardInterrupt)
    environment = setup_env.Environment(tmp_path, run, lambda _: None)
    with pytest.raises(KeyboardInterrupt):
        environment.front_end("1.39.19")
    assert not (environment.folder / setup_env.MARKER_NAME).exists()
    run.die = None
    assert (environment.front_end("1.39.19") / "index.html").is_file()
    assert len(run.commands) == 2
