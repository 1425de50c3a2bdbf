"""Models by their id on the Hugging Face hub: found in its cache or downloaded into it, then used as a directory, or as
the GGUF file of a quantisation.

`huggingface_hub` does the work and reads its own environment: HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..errors import LaunchError
from ..logs import say
from ..text import size
from .gguf_names import files_of, models_among, quantisations
from .mmproj import mmproj_of, takes_pictures

if TYPE_CHECKING:
    from huggingface_hub import DryRunFileInfo
    from tqdm.asyncio import tqdm_asyncio

SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
FILES = ("*.safetensors", *SMALL_FILES)
"""The files of a model directory that tilerank reads."""
OTHER_FILES = (*(f"*/{pattern}" for pattern in FILES), "consolidated*")
"""Other layouts of the same weights, in folders or under the name that Mistral gives to its own layout."""
_GGUF = "*.gguf"
_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::([\w.-]+))?")
OFFLINE = "HF_HUB_OFFLINE"


def add_model_argument(parser: argparse.ArgumentParser, nargs: str | None = None) -> None:
    """Add the positional argument MODEL, and --revision."""
    parser.add_argument(
        "model",
        nargs=nargs,
        type=Path,
        metavar="MODEL",
        help="a directory with a Hugging Face model, a GGUF file, an id on the hub such as Qwen/Qwen3-0.6B, or an id "
        "and a quantisation of its GGUF files such as Qwen/Qwen3-0.6B-GGUF:Q8_0",
    )
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of an id on the hub (default: main)")
    parser.add_argument(
        "--mmproj",
        type=Path,
        metavar="FILE",
        help="the GGUF file by which a model in GGUF takes pictures (default: the one beside it that fits, if any)",
    )


def find_model(args: argparse.Namespace) -> None:
    """Replace ids in `args` by the directories or files of the model and the draft model, and by the directory of the
    tokenizer, which are downloaded unless the cache has them.

    Clients call the model by its id then, unless --served-model-name says otherwise. Processes that this one starts
    with the same arguments find the model in the cache. LaunchError if the id does not exist or cannot be downloaded.
    """
    tokenizer = getattr(args, "tokenizer", None)
    if tokenizer is not None and not tokenizer.exists():
        args.tokenizer = _download_tokenizer(str(tokenizer))
    draft_model = getattr(args, "draft_model", None)
    if draft_model is not None:
        args.draft_model = _local(draft_model)
        if args.draft_model is None:
            args.draft_model = download(str(draft_model), None, mmproj=False)
            os.environ[OFFLINE] = "1"
    for name in ("model", "model_path"):
        given = getattr(args, name, None)
        if given is None:
            continue
        if (local := _local(given)) is not None:
            setattr(args, name, local)
            continue
        pictures = getattr(args, "mmproj", None) is None
        setattr(args, name, download(str(given), args.revision, mmproj=pictures))
        if getattr(args, "served_model_name", "") is None:
            args.served_model_name = [str(given)]
        os.environ[OFFLINE] = "1"
        return
    if getattr(args, "revision", None) is not None:
        raise LaunchError("--revision is for an id on the hub; this model is a directory")


def _local(given: Path) -> Path | None:
    """Return the directory or file of a model that is here; None for an id on the hub. LaunchError if it is neither."""
    if given.is_file():
        return given
    if given.is_dir():
        return _model_in(given)
    if _ID.fullmatch(str(given)) is None:
        raise LaunchError(
            f"{given} is not a directory; expected one with a Hugging Face model, a GGUF file, or an id on the hub "
            "such as Qwen/Qwen3-0.6B"
        )
    return None


def _model_in(directory: Path) -> Path:
    """Return the GGUF file of a directory without a Hugging Face model; else the directory. LaunchError if it has the
    files of several models."""
    if os.path.lexists(directory / "config.json"):
        return directory
    models = models_among(path.name for path in directory.glob(_GGUF))
    if len(models) > 1:
        names = ", ".join(files[0] for files in list(models.values())[:5])
        raise LaunchError(f"{directory} has several models: {names}; expected the path of one")
    return next((directory / files[0] for files in models.values()), directory)


def download(model: str, revision: str | None, *, mmproj: bool) -> Path:
    """Return the directory with the files of an id, or the GGUF file of `id:quantisation`, all of them present.

    mmproj: whether the file by which a GGUF file takes pictures is fetched as well. Raises as `find_model` does.
    """
    from huggingface_hub import constants, errors, snapshot_download

    found = _ID.fullmatch(model)
    assert found is not None
    id, quantisation = found.groups()
    snapshot = cast("Callable[..., Any]", partial(snapshot_download, id, revision=revision))
    cache = Path(constants.HF_HUB_CACHE)
    with _as_launch_errors(id, quantisation, revision):
        if constants.HF_HUB_OFFLINE:
            return _cached(partial(snapshot, local_files_only=True), id, quantisation)
        with _one_at_a_time(cache, id):
            try:
                listed: list[DryRunFileInfo] = snapshot(
                    allow_patterns=[*FILES, _GGUF],
                    ignore_patterns=list(OTHER_FILES),
                    dry_run=True,
                    tqdm_class=_silent(),
                )
            except errors.DryRunError:  # the hub cannot be asked: the next call finds the cache's copy or says why not
                return _cached(snapshot, id, quantisation)
            files = _chosen(id, quantisation, listed)

            def fetch(wanted: Sequence[DryRunFileInfo]) -> Path:
                patterns = [escape(file.filename) for file in wanted]
                return Path(snapshot(allow_patterns=patterns, local_files_only=_is_complete(id, wanted, cache)))

            folder = fetch(files)
            if quantisation is None:
                return folder
            path = folder / files[0].filename
            if mmproj and takes_pictures(path):
                others = {file.filename: file for file in listed}
                best = mmproj_of(files[0].filename, others, f"{id} on the hub")
                fetch([others[best]] if best is not None else [])
            return path


def _download_tokenizer(id: str) -> Path:
    """Return a directory with the small files of an id. Raises LaunchError."""
    found = _ID.fullmatch(id)
    if found is None or found[2] is not None:
        raise LaunchError(
            f"--tokenizer: {id} is not a directory; expected one with the files of a tokenizer, or an id on the hub"
        )
    from huggingface_hub import constants, snapshot_download

    cache = Path(constants.HF_HUB_CACHE)
    with _as_launch_errors(id, None, None), _one_at_a_time(cache, id):
        folder = snapshot_download(id, allow_patterns=list(SMALL_FILES), ignore_patterns=list(OTHER_FILES))
    os.environ[OFFLINE] = "1"
    return Path(folder)


def _cached(snapshot: Callable[..., Any], id: str, quantisation: str | None) -> Path:
    """Return what `download` does, of the files of the cache."""
    if quantisation is None:
        return Path(snapshot(allow_patterns=list(FILES), ignore_patterns=list(OTHER_FILES)))
    folder = Path(snapshot(allow_patterns=[]))
    models = models_among(str(path.relative_to(folder)) for path in folder.rglob(_GGUF))
    instead = f"; {_why_no_hub()}, and {_fetch(id, quantisation)}"
    return folder / files_of(quantisation, models, f"the cache of {id}", instead)[0]


def _chosen(id: str, quantisation: str | None, files: list[DryRunFileInfo]) -> list[DryRunFileInfo]:
    """Return the files of a model directory, or those of a quantisation. LaunchError if the hub has none of them."""
    by_name = {file.filename: file for file in files}
    models = models_among(by_name)
    if quantisation is not None:
        return [by_name[name] for name in files_of(quantisation, models, f"{id} on the hub")]
    for suffix in ("config.json", ".safetensors"):
        if not any(name.endswith(suffix) for name in by_name):
            if models:
                names = quantisations(models)
                raise LaunchError(
                    f"{id} on the hub has GGUF files: expected their quantisation as well, such as {id}:{names[0]}, "
                    f"one of {', '.join(names)}"
                )
            found = ", ".join(sorted(by_name)[:5]) or "none"
            raise LaunchError(f"{id} on the hub: expected a {suffix} file, found {found}")
    return [file for file in files if not file.filename.endswith(".gguf")]


def _is_complete(id: str, files: Sequence[DryRunFileInfo], cache: Path) -> bool:
    """Return whether the cache has all files; if not, say how much is downloaded. LaunchError if it does not fit."""
    need, free = sum(file.file_size or 0 for file in files if file.will_download), shutil.disk_usage(cache).free
    if need > free:
        raise LaunchError(
            f"{id} on the hub: {size(need)} to download, but {cache} has {size(free)} free; HF_HOME names another place"
        )
    if need:
        say(f"tilerank: {id}: downloading {size(need)} into {cache}")
    return not any(file.will_download for file in files)


def _silent() -> type[tqdm_asyncio]:
    """Return the class of a progress bar that is never shown."""
    from tqdm.asyncio import tqdm_asyncio

    class Silent(tqdm_asyncio):  # type: ignore[misc]  # tqdm has no types
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs | {"disable": True})

    return Silent


@contextmanager
def _one_at_a_time(cache: Path, id: str) -> Iterator[None]:
    """Ranks that another launcher started wait here while the first of them on this host downloads."""
    locks = cache / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    with open(locks / f"tilerank--{id.replace('/', '--')}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _why_no_hub() -> str:
    from huggingface_hub import constants

    return f"{OFFLINE} is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"


@contextmanager
def _as_launch_errors(id: str, quantisation: str | None, revision: str | None) -> Iterator[None]:
    """Turn what huggingface_hub raises into a LaunchError."""
    from huggingface_hub import errors

    either = f"{id} is no directory here either: give one with a Hugging Face model, or an id that exists"
    try:
        yield
    except errors.GatedRepoError as e:
        raise LaunchError(
            f"{id} on the hub wants its terms accepted by an account; accept them there and set HF_TOKEN"
        ) from e
    except errors.RepositoryNotFoundError as e:
        raise LaunchError(f"the hub has no model {id}, or it is private and HF_TOKEN is not set; {either}") from e
    except errors.RevisionNotFoundError as e:
        raise LaunchError(f"{id} on the hub has no revision {revision}") from e
    except errors.LocalEntryNotFoundError as e:
        instead = either if quantisation is None else _fetch(id, quantisation)
        raise LaunchError(f"the cache does not hold {id}, and {_why_no_hub()}; {instead}") from e
    except errors.HfHubHTTPError as e:
        raise LaunchError(f"{id} on the hub: {str(e).strip().splitlines()[0]}") from e
    except OSError as e:
        raise LaunchError(f"{id} cannot be downloaded: {e}") from e


def _fetch(id: str, quantisation: str) -> str:
    """Return what fetches the files of a quantisation where there is a network."""
    return f"`hf download {id} --include '*{quantisation}*.gguf'` fetches it"
