"""Models by their id on the Hugging Face hub: found in its cache or downloaded into it, then used as a directory.

`huggingface_hub` does the work and reads its own environment: HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ..errors import LaunchError
from ..logs import say
from ..text import size

if TYPE_CHECKING:
    from huggingface_hub import DryRunFileInfo
    from tqdm.asyncio import tqdm_asyncio

FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
"""The files of a model that tilerank reads."""
OTHER_FILES = ("*/*", "consolidated*")
"""Other layouts of the same weights, in folders or under the name that Mistral gives to its own layout."""
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
OFFLINE = "HF_HUB_OFFLINE"
_OTHER_GGUF = ("mmproj", "mtp-", "imatrix")
"""Beginnings of the names of GGUF files that are no models."""
_PART = re.compile(r"-(\d{5})-of-\d{5}\.gguf$")


def add_model_argument(parser: argparse.ArgumentParser, nargs: str | None = None) -> None:
    """Add the positional argument MODEL, and --revision."""
    parser.add_argument(
        "model",
        nargs=nargs,
        type=Path,
        metavar="MODEL",
        help="a directory with a Hugging Face model, a GGUF file, or an id on the hub such as Qwen/Qwen3-0.6B",
    )
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of an id on the hub (default: main)")


def find_model(args: argparse.Namespace) -> None:
    """Replace an id in `args` by the directory that holds the model, which is downloaded unless the cache has it.

    Clients call the model by its id then, unless --served-model-name says otherwise. Processes that this one starts
    with the same arguments find the model in the cache. LaunchError if the id does not exist or cannot be downloaded.
    """
    for name in ("model", "model_path"):
        given = getattr(args, name, None)
        if given is None or given.is_file():
            continue
        if given.is_dir():
            setattr(args, name, _model_in(given))
            continue
        if _ID.fullmatch(str(given)) is None:
            raise LaunchError(
                f"{given} is not a directory; expected one with a Hugging Face model, a GGUF file, or an id on the hub "
                "such as Qwen/Qwen3-0.6B"
            )
        setattr(args, name, download(str(given), args.revision))
        if getattr(args, "served_model_name", "") is None:
            args.served_model_name = str(given)
        os.environ[OFFLINE] = "1"
        return
    if getattr(args, "revision", None) is not None:
        raise LaunchError("--revision is for an id on the hub; this model is a directory")


def _model_in(directory: Path) -> Path:
    """Return the GGUF file of a directory without a Hugging Face model; else the directory. LaunchError if it has the
    files of several models."""
    if os.path.lexists(directory / "config.json"):
        return directory
    files = [path for path in sorted(directory.glob("*.gguf")) if not path.name.startswith(_OTHER_GGUF)]
    files = [path for path in files if not (part := _PART.search(path.name)) or int(part[1]) == 1]
    if len(files) > 1:
        names = ", ".join(path.name for path in files[:5])
        raise LaunchError(f"{directory} has several models: {names}; expected the path of one")
    return files[0] if files else directory


def download(model: str, revision: str | None) -> Path:
    """Return the directory with the files of `model`, all of them present. Raises as `find_model` does."""
    from huggingface_hub import constants, errors, snapshot_download

    snapshot = partial(
        snapshot_download, model, revision=revision, allow_patterns=list(FILES), ignore_patterns=list(OTHER_FILES)
    )
    with _as_launch_errors(model, revision):
        if constants.HF_HUB_OFFLINE:
            return Path(snapshot(local_files_only=True))
        cache = Path(constants.HF_HUB_CACHE)
        with _one_at_a_time(cache, model):
            try:
                files = cast("list[DryRunFileInfo]", snapshot(dry_run=True, tqdm_class=_silent()))
                complete = _is_complete(model, files, cache)
            except errors.DryRunError:  # the hub cannot be asked: the next call finds the cache's copy or says why not
                complete = False
            return Path(snapshot(local_files_only=complete))


def _is_complete(model: str, files: list[DryRunFileInfo], cache: Path) -> bool:
    """Return whether the cache has all files; if not, say how much is downloaded.

    LaunchError if tilerank cannot read such files, or the disk cannot hold them.
    """
    for suffix in ("config.json", ".safetensors"):
        if not any(file.filename.endswith(suffix) for file in files):
            found = ", ".join(sorted(file.filename for file in files)[:5]) or "none"
            raise LaunchError(f"{model} on the hub: expected a {suffix} file, found {found}")
    need, free = sum(file.file_size or 0 for file in files if file.will_download), shutil.disk_usage(cache).free
    if need > free:
        raise LaunchError(
            f"{model} on the hub: {size(need)} to download, but {cache} has {size(free)} free; "
            "HF_HOME names another place"
        )
    if need:
        say(f"tilerank: {model}: downloading {size(need)} into {cache}")
    return not any(file.will_download for file in files)


def _silent() -> type[tqdm_asyncio]:
    """Return the class of a progress bar that is never shown."""
    from tqdm.asyncio import tqdm_asyncio

    class Silent(tqdm_asyncio):  # type: ignore[misc]  # tqdm has no types
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs | {"disable": True})

    return Silent


@contextmanager
def _one_at_a_time(cache: Path, model: str) -> Iterator[None]:
    """Ranks that another launcher started wait here while the first of them on this host downloads."""
    locks = cache / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    with open(locks / f"tilerank--{model.replace('/', '--')}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _as_launch_errors(model: str, revision: str | None) -> Iterator[None]:
    """Turn what huggingface_hub raises into a LaunchError."""
    from huggingface_hub import constants, errors

    either = f"{model} is no directory here either: give one with a Hugging Face model, or an id that exists"
    try:
        yield
    except errors.GatedRepoError as e:
        raise LaunchError(
            f"{model} on the hub wants its terms accepted by an account; accept them there and set HF_TOKEN"
        ) from e
    except errors.RepositoryNotFoundError as e:
        raise LaunchError(f"the hub has no model {model}, or it is private and HF_TOKEN is not set; {either}") from e
    except errors.RevisionNotFoundError as e:
        raise LaunchError(f"{model} on the hub has no revision {revision}") from e
    except errors.LocalEntryNotFoundError as e:
        why = f"{OFFLINE} is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        raise LaunchError(f"the cache does not hold {model}, and {why}; {either}") from e
    except errors.HfHubHTTPError as e:
        raise LaunchError(f"{model} on the hub: {str(e).strip().splitlines()[0]}") from e
    except OSError as e:
        raise LaunchError(f"{model} cannot be downloaded: {e}") from e
