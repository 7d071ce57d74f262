"""The distributions hold all they should: every tracked file of the packages and of the model, and the binary."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from harness.processes import Gateway

# Another build may hold cargo's lock for minutes.
pytestmark = pytest.mark.timeout(1200)

ROOT = Path(__file__).resolve().parents[2]


def tracked(folder: str) -> set[str]:
    """Paths, relative to `folder`, of the files git tracks there."""
    listing = subprocess.run(["git", "ls-files", "."], cwd=ROOT / folder, stdout=subprocess.PIPE, text=True, check=True)
    paths = set(listing.stdout.splitlines())
    assert paths, f"git tracks nothing in {folder}"
    return paths


def build(project: Path, kind: str, out: Path) -> Path:
    """Builds one distribution with the ordinary front end and returns its file. `kind` is "wheel" or "sdist"."""
    command = [sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", str(out), str(project)]
    environment = os.environ | {"BALEEN_CARGO_PROFILE": os.environ.get("BALEEN_CARGO_PROFILE", "ci")}
    built = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert built.returncode == 0, built.stdout
    (path,) = out.iterdir()
    return path


def names_of(archive: Path) -> set[str]:
    """Member names; those of an sdist without its top folder."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return set(wheel.namelist())
    with tarfile.open(archive) as sdist:
        return {name.partition("/")[2] for name in sdist.getnames()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def kernels_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT / "kernels", "wheel", tmp_path_factory.mktemp("kernels"))


def test_wheel_holds_every_file_of_the_worker(wheel: Path) -> None:
    assert {f"baleen_worker/{path}" for path in tracked("worker/baleen_worker")} <= names_of(wheel)


def test_wheel_holds_every_file_of_the_evaluation(wheel: Path) -> None:
    assert {f"baleen_eval/{path}" for path in tracked("eval/baleen_eval")} <= names_of(wheel)


def test_evaluation_needs_no_checkout(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path, [name for name in archive.namelist() if name.startswith("baleen_eval/")])
    code = (
        "import sys, baleen_eval.suites as s; assert 'models' not in sys.modules; print(s.__file__);"
        "print(sum(len(s.choose(n).questions(s.Choice(num=3))) for n in ('needle', 'track', 'arith', 'tools')))"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-P", "-c", code]
    made = subprocess.run(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    file, count = made.stdout.split()
    assert Path(file).is_relative_to(tmp_path)
    assert int(count) == 18 + 18 + 3 + 3


def test_wheel_holds_every_file_of_the_model(wheel: Path) -> None:
    data = f"{wheel.name.split('-py3')[0]}.data/data/share/baleen/models/micro"
    assert {f"{data}/{path}" for path in tracked("models/micro")} <= names_of(wheel)


def test_wheel_holds_the_gateway_as_a_command(wheel: Path, tmp_path: Path) -> None:
    member = f"{wheel.name.split('-py3')[0]}.data/scripts/gateway"
    with zipfile.ZipFile(wheel) as archive:
        binary = Path(archive.extract(member, tmp_path))
    binary.chmod(0o755)
    shown = subprocess.run([str(binary), "--version"], stdout=subprocess.PIPE, text=True, check=True)
    assert shown.stdout.split()[-1] == wheel.name.split("-")[1]


def test_wheel_fits_any_python_of_this_platform(wheel: Path) -> None:
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.name.endswith(f"-py3-none-{platform}.whl")


def test_kernels_wheel_is_pure_and_whole(kernels_wheel: Path) -> None:
    assert kernels_wheel.name.endswith("-py3-none-any.whl")
    assert {f"baleen_kernels/{path}" for path in tracked("kernels/baleen_kernels")} <= names_of(kernels_wheel)


def test_wheels_hold_nothing_of_a_test_or_a_cache(wheel: Path, kernels_wheel: Path) -> None:
    names = names_of(wheel) | names_of(kernels_wheel)
    assert not [name for name in names if "__pycache__" in name or "tests/" in name or name.startswith("gateway/")]


def test_missing_cargo_is_named_in_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(tmp_path), str(ROOT)]
    environment = os.environ | {"PATH": str(Path(sys.executable).parent)}
    refused = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert refused.returncode != 0
    (sentence,) = [line for line in refused.stdout.splitlines() if "cargo" in line]
    assert sentence.startswith("error: building baleen needs Rust's cargo, which is not on PATH; install it with: ")


def test_sdist_holds_what_its_build_needs(tmp_path: Path) -> None:
    names = names_of(build(ROOT, "sdist", tmp_path))
    needed = {
        "Cargo.toml",
        "Cargo.lock",
        "eval/baleen_eval/__main__.py",
        "LICENSE",
        "README.md",
        "pyproject.toml",
        "packaging/cargo_hook.py",
    }
    for folder in ("gateway", "proto", "models/micro", "worker/baleen_worker", "eval/baleen_eval"):
        needed |= {f"{folder}/{path}" for path in tracked(folder)}
    assert needed <= names


@pytest.mark.slow
def test_wheel_built_from_the_sdist_equals_the_wheel_built_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    sdist = build(ROOT, "sdist", tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    again = build(source, "wheel", tmp_path / "wheel")
    assert names_of(again) == names_of(wheel)


@pytest.mark.slow
def test_installed_wheels_serve_the_micro_model(wheel: Path, kernels_wheel: Path, tmp_path: Path) -> None:
    """A virtual environment far from any checkout: the command finds its Python and its model beside itself."""
    environment = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    uv = shutil.which("uv", path=str(Path(sys.executable).parent))
    assert uv is not None
    install = [uv, "pip", "install", "--quiet", "--no-deps", "--python", str(environment / "bin/python")]
    subprocess.run([*install, str(wheel), str(kernels_wheel)], check=True)
    # The dependencies, torch among them, are borrowed from this environment; a path file is not followed any further,
    # so that the editable packages of this checkout stay out.
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    borrowed = environment / "lib" / version / "site-packages" / "borrowed.pth"
    borrowed.write_text(sysconfig.get_path("purelib") + "\n")
    with (
        Gateway("serve", binary=environment / "bin" / "gateway", cwd=tmp_path) as gateway,
        gateway.ready().client() as client,
    ):
        assert [model.id for model in client.models.list()] == ["micro"]
        assert client.completions.create(model="micro", prompt="The sea", max_tokens=2).choices[0].text
        interpreter = gateway.worker_head().cmdline()[0]
    assert Path(interpreter).parent == environment / "bin"
