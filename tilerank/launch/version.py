"""Versions of installed distributions."""

import importlib.metadata


def own_version() -> str | None:
    """Return the installed version, or None if the project runs from its source tree."""
    return installed_version("tilerank")


def installed_version(distribution: str) -> str | None:
    """Return the version of a distribution, or None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
