"""The versions of installed packages."""

from importlib import metadata


def version_of(package: str) -> str:
    """The version of an installed package; empty if it is missing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
