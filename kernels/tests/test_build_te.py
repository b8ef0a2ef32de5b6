"""TransformerEngine for a machine without a network: parts, their checksums, and the commands that
build it.
"""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
NAMES = (
    "transformer_engine-2.20.2-py3-none-any.whl",
    "transformer_engine_cu13-2.20.2-py3-none-manylinux.whl",
)
SOURCE = "transformer_engine_torch-2.20.2.tar.gz"
PYTHONS = ("3.11", "3.12", "3.13")
RELEASES = ("2.8.0", "2.9.0", "2.11.0", "2.12.0", "2.20.2", "2.21.0")


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the program as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "kernels" / "bench"))
    import build_te

    return build_te


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Return a folder with packages of one release: 0, 1, 2 and more parts of 100 bytes each."""
    folder = tmp_path / "packages"
    folder.mkdir()
    for i, name in enumerate((*NAMES, SOURCE, "wheel-0.45-py3-none-any.whl")):
        (folder / name).write_bytes(
            bytes((7 * i + k) % 251 for k in range(100 * i + 33 * (i != 2)))
        )
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_build_te_parts_are_small_and_reproducible(
    te: ModuleType, packages: Path, tmp_path: Path
) -> None:
    parts = te.split(sorted(packages.iterdir()), tmp_path / "parts", 100)
    assert max(part.stat().st_size for part in parts) == 100
    assert len({part.parent for part in parts}) == len(parts) == 1 + 2 + 2 + 4
    made = te.join(tmp_path / "parts", tmp_path / "joined")
    assert len(made) == 4
    assert files(tmp_path / "joined") == files(packages)


def test_build_te_bad_or_missing_parts_are_named(
    te: ModuleType, packages: Path, tmp_path: Path
) -> None:
    parts = te.split(sorted(packages.iterdir()), tmp_path / "parts", 100)
    kept = parts[3].read_bytes()
    parts[3].write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    with pytest.raises(te.Wrong, match=f"{parts[3].name} is not the part that was cut"):
        te.join(tmp_path / "parts", tmp_path / "joined")
    parts[3].unlink()
    with pytest.raises(te.Wrong, match=f"8 of 9 parts are here; absent: {parts[3].name}"):
        te.join(tmp_path / "parts", tmp_path / "joined")
    with pytest.raises(te.Wrong, match="is not empty"):
        te.split(sorted(packages.iterdir()), tmp_path / "parts", 100)
    te.split([packages / SOURCE], tmp_path / "parts" / "other", 100)
    with pytest.raises(te.Wrong, match=r"2 different parts\.json"):
        te.join(tmp_path / "parts", tmp_path / "joined")


def test_build_te_uses_local_headers_without_network(te: ModuleType, packages: Path) -> None:
    tools, wheel, install = te.steps(packages, Path("site"), 16, nvidia_wheels=True)
    for step in (tools, wheel, install):
        assert {"--no-index", "--no-deps"} <= set(step.argv)
    assert str(packages / "wheel-0.45-py3-none-any.whl") in tools.argv
    assert wheel.argv[-1] == str(packages / SOURCE)
    assert "--no-build-isolation" in wheel.argv
    assert wheel.environment["NVTE_PYTORCH_FORCE_BUILD"] == "TRUE"
    assert wheel.environment["NVTE_NO_LOCAL_VERSION"] == "1"
    assert wheel.environment["MAX_JOBS"] == "16"
    assert wheel.environment["NVTE_BUILD_USE_NVIDIA_WHEELS"] == "1"
    assert {str(packages / name) for name in NAMES} <= set(install.argv)
    assert install.argv[-1] == str(packages / "transformer_engine_torch-2.20.2-*.whl")
    assert str(packages / "wheel-0.45-py3-none-any.whl") not in install.argv
    others = te.steps(packages, Path("site"), 1, nvidia_wheels=False)
    assert "NVTE_BUILD_USE_NVIDIA_WHEELS" not in others[1].environment


def test_build_te_packages_of_two_releases_are_refused(te: ModuleType, packages: Path) -> None:
    (packages / NAMES[1]).rename(packages / NAMES[1].replace("2.20.2", "2.19.0"))
    with pytest.raises(te.Wrong, match="it holds none; the three packages are of one release"):
        te.steps(packages, Path("site"), 1, nvidia_wheels=False)


def test_build_te_unbuilt_wheel_is_named(
    te: ModuleType,
    packages: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Run the commands of the build in their order; the last one requires the output of an earlier
    one.
    """
    ran = []

    def run(argv: list[str], env: dict[str, str]) -> object:
        ran.append(argv)
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr(te.subprocess, "run", run)
    assert te.main(["build", str(packages), "--site", str(tmp_path / "site")]) == 3
    assert len(ran) == 2
    assert "transformer_engine_torch-2.20.2-*.whl was not built" in capfd.readouterr().err
    (packages / "transformer_engine_torch-2.20.2-cp312-cp312-linux_x86_64.whl").touch()
    assert te.main(["build", str(packages), "--site", str(tmp_path / "site")]) == 0
    assert ran[-1][-1].endswith("torch-2.20.2-cp312-cp312-linux_x86_64.whl")
    assert len(set(ran[-1])) == len(ran[-1])


def admitted(python: str, release: str) -> bool:
    """Return whether the extra `cuda` takes a release of TransformerEngine under a Python."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]["cuda"]
    wanted = [Requirement(text) for text in listed]
    counts = [
        each
        for each in wanted
        if each.marker is None or each.marker.evaluate({"python_version": python})
    ]
    return len(counts) == 1 and counts[0].specifier.contains(release)


def test_build_te_newest_is_taken_where_accepted() -> None:
    assert [
        admitted("3.11", release) for release in ("2.8.0", "2.9.0", "2.11.0", "2.12.0", "2.20.2")
    ] == [False, True, True, False, False]
    assert [admitted("3.12", release) for release in RELEASES] == [
        False,
        True,
        True,
        True,
        True,
        False,
    ]


def test_build_te_refused_by_megatron_is_not_admitted() -> None:
    """Compare with megatron-core: 0.16.1 names a range in an extra; 0.19.2 names TransformerEngine
    without one.

    `constraints.txt` says which release of megatron-core comes with a Python, and so which Pythons
    have this one.
    """
    installed = importlib.metadata.version("megatron-core")
    lines = [
        Requirement(text)
        for text in (ROOT / "constraints.txt").read_text().splitlines()
        if "megatron" in text
    ]
    wanted = [each.marker for each in lines if each.specifier.contains(installed)]
    pythons = [
        each
        for each in PYTHONS
        if any(m is None or m.evaluate({"python_version": each}) for m in wanted)
    ]
    assert pythons, f"constraints.txt has no line with megatron-core {installed}"
    said = [Requirement(text) for text in importlib.metadata.requires("megatron-core") or ()]
    (own,) = [each.specifier for each in said if each.name == "transformer-engine"]
    taken = [
        release for release in RELEASES if any(admitted(python, release) for python in pythons)
    ]
    assert taken
    assert [release for release in taken if not own.contains(release)] == []
