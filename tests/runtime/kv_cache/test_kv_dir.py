"""Pages of the KV cache in files, on 1 to 3 ranks: what is read back gives the bits of what was computed."""

import os
import shutil
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from batching import DEMO, forget, single_engine
from ranks import run_ranks
from tiny import make_checkpoint

from tilerank.kernels.kv_pages import KVPages
from tilerank.loader.card import read_card
from tilerank.parallel.group import SingleGroup
from tilerank.parallel.join import Team
from tilerank.parallel.sharding import Sharding
from tilerank.runtime.lead.engine import Engine, Request
from tilerank.runtime.lead.sampling import SamplingParams
from tilerank.runtime.lead.transfers import page_reads
from tilerank.runtime.protocol.errors import EngineError
from tilerank.runtime.protocol.events import TokenEvent
from tilerank.runtime.protocol.prompt import Prompt
from tilerank.runtime.rank.page_files import CODE_BYTES, PageFiles
from tilerank.runtime.rank.page_store import PageStore, open_page_files
from tilerank.runtime.rank.rank_config import RankConfig
from tilerank.runtime.rank.worker import Worker
from tilerank.runtime.step.cache import CacheSpec, EncoderKV, PagedKV, RecurrentState

NEW = 6
LENGTH = 150
"""Tokens of a prompt: four full pages of 32, and 22 more."""
FULL = LENGTH // 32
# In the absorbed form, which this model always has: the other one has other bits.
DEEPSEEK: dict[str, Any] = {"hidden": 96, "vocab": 4200, "layers": 3, "inter": 200, "moe_inter": 80}
DEEPSEEK["config"] = {"kv_lora_rank": 64, "qk_nope_head_dim": 64, "v_head_dim": 64}
Answer = tuple[list[int], list[float], int]


def prompt_of(seed: int, length: int = LENGTH) -> list[int]:
    return torch.randint(0, 500, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def ask(engine: Engine, prompt: list[int], salt: str = "") -> Answer:
    """Return the tokens of an answer, their log-probabilities, and how many tokens of the prompt were cached. All that
    is kept of it is written then."""
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True, logprobs=1)
    events = list(engine.generate([Request(Prompt(prompt, salt=salt), params)]))
    logprobs = [event.logprobs.chosen for event in events if event.logprobs is not None]
    assert events[0].start is not None
    if engine.worker.store is not None:
        engine.worker.store.flush(60)
    return [event.token_id for event in events], logprobs, events[0].start.cached_tokens


def engine_in(directory: Path, model: Path = DEMO, **config: Any) -> Engine:
    kept: dict[str, Any] = {"dtype": torch.float32, "max_total_tokens": 320, "kv_dir": directory, "eager": True}
    return single_engine(model, **(kept | config))


def pages_in(directory: Path, rank: int = 0) -> list[Path]:
    """Return the files of a rank, those that were used last first: the pages of one prompt in order."""
    return sorted((directory / f"rank-{rank}").glob("*.page"), key=lambda path: -path.stat().st_mtime_ns)


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.fixture(scope="module")
def plain() -> Engine:
    """An engine without files."""
    return single_engine(DEMO, dtype=torch.float32, max_total_tokens=320, eager=True)


def lost_and_found(team: Team, *, model: str, directory: str, dtype: str, kv_dtype: str | None) -> dict[str, Any]:
    """Return answers to one prompt: with an empty directory, once other prompts have evicted its pages, after a
    restart, and after another one before which a file of the last rank is damaged. For each start also the pages that
    rank 0 has written and read, and how many tokens were found."""
    keep = PageStore.keep

    def keep_at_once(store: PageStore, pages: list[tuple[int, bytes]]) -> None:
        keep(store, pages)
        store.flush(60)

    mock.patch.object(PageStore, "keep", keep_at_once).start()  # in this process, which ends with the test
    config = RankConfig(
        dtype=getattr(torch, dtype),
        kv_dtype=getattr(torch, kv_dtype) if kv_dtype else None,
        max_total_tokens=320,
        kv_dir=Path(directory),
    )
    last = team.group.size - 1
    found: dict[str, Any] = {}
    for start in ("first", "second", "damaged"):
        if start == "damaged" and team.group.rank == last:
            damage(pages_in(Path(directory), last)[2])
        team.group.barrier()
        worker = Worker(Path(model), team, config)
        if team.group.rank != 0:
            worker.follow()
            continue
        engine = Engine(worker)
        found[start] = ask(engine, prompt_of(0))
        if start == "first":
            for seed in (1, 2, 3):
                ask(engine, prompt_of(seed))
            found["evicted"] = ask(engine, prompt_of(0))
        state = engine.state()
        found[f"{start}, pages"] = [state.kv_dir_written, state.kv_dir_read, state.hit_tokens]
        worker.stop()
    return found


@pytest.mark.parametrize(
    ("tp", "family", "dtype", "kv_dtype"),
    [
        (1, "demo", "bfloat16", "int8"),
        (2, "demo", "float32", None),
        (3, "demo", "bfloat16", None),
        (2, "deepseek_v3", "bfloat16", None),
    ],
)
def test_pages_read_back_give_the_bits_of_computed_ones(
    tmp_path: Path, tp: int, family: str, dtype: str, kv_dtype: str | None
) -> None:
    """The cache has ten pages, and a prompt with its answer takes five: three others evict all of the first."""
    model = DEMO if family == "demo" else make_checkpoint(family, tmp_path, seed=5, **DEEPSEEK)
    kwargs = {"model": str(model), "directory": str(tmp_path / "kv"), "dtype": dtype, "kv_dtype": kv_dtype}
    found = run_ranks(tp, "tests.runtime.kv_cache.test_kv_dir:lost_and_found", kwargs=kwargs)[0]
    tokens, logprobs, cached = found["first"]
    assert cached == 0 and len(tokens) == NEW
    assert found["evicted"] == found["second"] == [tokens, logprobs, FULL * 32]
    assert found["damaged"] == [tokens, logprobs, 2 * 32]
    assert found["first, pages"] == [4 * FULL, FULL, FULL * 32]
    assert found["second, pages"] == [0, FULL, FULL * 32]
    assert found["damaged, pages"][1:] == [2, 2 * 32]
    assert all(len(pages_in(tmp_path / "kv", rank)) == 4 * FULL for rank in range(tp))


def test_the_tokens_of_an_answer_are_kept_as_well(tmp_path: Path, plain: Engine) -> None:
    prompt = prompt_of(3, 91)  # 96 tokens are cached once the answer is complete but for its last token
    engine = engine_in(tmp_path)
    tokens, _, _ = ask(engine, prompt)
    longer = [*prompt, *tokens, *prompt_of(4, 20)]
    forget(engine)
    found = ask(engine, longer)
    forget(plain)
    assert found == (*ask(plain, longer)[:2], 96)
    engine.worker.stop()


def test_other_sequences_go_on_while_pages_are_read(
    tmp_path: Path, plain: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page is read at a time, and a request decodes meanwhile. A request that begins alike waits and shares them."""
    engine = engine_in(tmp_path, max_total_tokens=640)
    prompts = [prompt_of(1, 40), prompt_of(0), [*prompt_of(0)[:140], *prompt_of(5, 10)]]
    ask(engine, prompts[1])
    forget(engine)
    monkeypatch.setattr(page_reads, "PIECE_BYTES", 1)
    monkeypatch.setattr("tilerank.runtime.lead.media_encoding.BESIDE_S", 0.0)
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    requests = [Request(Prompt(prompt), params) for prompt in prompts]
    numbers = [engine.submit(requests[0])]
    (first,) = engine.step()
    assert isinstance(first, TokenEvent)
    numbers += [engine.submit(request) for request in requests[1:]]
    found: dict[int, list[int]] = {numbers[0]: [first.token_id], numbers[1]: [], numbers[2]: []}
    cached, before_second = {}, 0
    while engine.busy:
        for event in engine.step():
            assert isinstance(event, TokenEvent)
            found[event.request].append(event.token_id)
            if event.start is not None:
                cached[event.request] = event.start.cached_tokens
        before_second += not found[numbers[1]]
    assert before_second >= FULL  # steps of the first one alone
    assert [cached[number] for number in numbers[1:]] == [FULL * 32, 4 * 32]
    for request, number in zip(requests, numbers, strict=True):
        forget(plain)
        assert found[number] == [event.token_id for event in plain.generate([request])]
    engine.worker.stop()


def test_prompts_of_another_salt_share_nothing(tmp_path: Path) -> None:
    engine = engine_in(tmp_path)
    ask(engine, prompt_of(0), "one")
    forget(engine)
    assert ask(engine, prompt_of(0), "two")[2] == 0
    assert ask(engine, prompt_of(0), "one")[2] == FULL * 32
    engine.worker.stop()


def test_another_model_another_cache_and_a_changed_file_find_nothing(tmp_path: Path, plain: Engine) -> None:
    """The pages of the first are there again for it."""
    directory = tmp_path / "kv"
    model, other = tmp_path / "model", tmp_path / "other"
    shutil.copytree(DEMO, model)
    shutil.copytree(DEMO, other)
    forget(plain)
    expected = ask(plain, prompt_of(0))[:2]
    for path, config, cached in (
        (model, {}, 0),
        (other, {}, 0),
        (model, {"kv_dtype": torch.int8}, 0),
        (model, {}, FULL * 32),
    ):
        engine = engine_in(directory, path, **config)
        found = ask(engine, prompt_of(0))
        assert found[2] == cached
        assert config or found[:2] == expected
        engine.worker.stop()
    assert len(pages_in(directory)) == 3 * FULL
    os.utime(model / "config.json")
    engine = engine_in(directory, model)
    assert ask(engine, prompt_of(0))[2] == 0
    engine.worker.stop()


def test_the_least_recently_used_pages_make_room(tmp_path: Path) -> None:
    """There is room for nine pages, and a prompt has four. The first one is used again before the third one comes."""
    engine = engine_in(tmp_path)
    assert engine.worker.store is not None
    room = 9 * (engine.worker.store.page_bytes + CODE_BYTES)
    engine.worker.stop()
    engine = engine_in(tmp_path, kv_dir_bytes=room)
    for seed in (0, 1, 0, 2):
        forget(engine)
        ask(engine, prompt_of(seed))
    sizes = [path.stat().st_size for path in pages_in(tmp_path)]
    assert sum(sizes) == engine.state().kv_dir_bytes <= room
    for seed, cached in ((0, FULL * 32), (2, FULL * 32)):
        forget(engine)
        assert ask(engine, prompt_of(seed))[2] == cached
    forget(engine)
    assert ask(engine, prompt_of(1))[2] < FULL * 32
    forget(engine)
    ask(engine, prompt_of(6, 310))  # nine full pages, of which all that are kept make room
    assert engine.state().kv_dir_bytes <= room
    engine.worker.stop()


def test_a_full_disk_loses_pages_and_nothing_else(
    tmp_path: Path, plain: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_in(tmp_path)

    def rename(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("tilerank.runtime.rank.page_files.os.rename", rename)
        first = ask(engine, prompt_of(0))
    forget(plain)
    assert first == ask(plain, prompt_of(0))
    assert [path.name for path in (tmp_path / "rank-0").iterdir() if path.suffix in (".page", ".part")] == []
    assert engine.state().kv_dir_refused == FULL
    assert caplog.messages == [f"--kv-dir: {tmp_path / 'rank-0'}: a page cannot be written: No space left on device"]
    engine.worker.stop()


def test_a_directory_without_its_key_is_wiped(tmp_path: Path) -> None:
    engine = engine_in(tmp_path)
    ask(engine, prompt_of(0))
    engine.worker.stop()
    folder, kept = tmp_path / "rank-0", pages_in(tmp_path)
    assert len(kept) == FULL
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "key").unlink()
    (folder / "half.page.part").write_bytes(b"half")
    engine = engine_in(tmp_path)
    assert pages_in(tmp_path) == [] and not (folder / "half.page.part").exists()
    assert ask(engine, prompt_of(0))[2] == 0
    assert not set(pages_in(tmp_path)) & set(kept)  # the new key gives other names
    engine.worker.stop()


def test_links_and_half_written_files_are_no_pages(tmp_path: Path, plain: Engine) -> None:
    engine = engine_in(tmp_path)
    ask(engine, prompt_of(0))
    engine.worker.stop()
    first, second, *_ = pages_in(tmp_path)
    shutil.copy(first, tmp_path / "elsewhere")
    first.unlink()
    first.symlink_to(tmp_path / "elsewhere")
    engine = engine_in(tmp_path)
    assert not first.is_symlink()
    forget(plain)
    assert ask(engine, prompt_of(0)) == ask(plain, prompt_of(0))
    forget(engine)
    os.truncate(second, second.stat().st_size - 1)
    assert ask(engine, prompt_of(0))[2] == 32
    engine.worker.stop()


@pytest.mark.parametrize("problem", ["mode", "owner", "file", "link", "in use", "size", "missing"])
def test_directories_that_cannot_be_used_are_refused(
    tmp_path: Path, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, size = tmp_path / "kv", 1 << 30
    directory.mkdir(mode=0o700)
    user = os.geteuid()
    match problem:
        case "mode":
            directory.chmod(0o750)
            sentence = f"{directory}: expected a directory that only its owner can enter (mode 0700), found mode 0750"
        case "owner":
            monkeypatch.setattr("tilerank.runtime.rank.page_files.os.geteuid", lambda: user + 1)
            sentence = f"{directory}: expected a directory of user {user + 1}, found one of user {user}"
        case "file":
            (directory / "rank-0").write_bytes(b"")
            sentence = f"{directory / 'rank-0'}: expected a directory, found a file or a symbolic link"
        case "link":
            (tmp_path / "link").symlink_to(directory)
            directory = tmp_path / "link"
            sentence = f"{directory}: expected a directory, found a file or a symbolic link"
        case "in use":
            PageFiles(directory, 0, size, b"another server")
            sentence = f"{directory / 'rank-0'}: expected a directory that no running server uses, found one in use"
        case "size":
            size = 1000
            sentence = "-size: expected room for a page of 32 tokens"
        case "missing":
            directory = directory / "a" / "b"
            sentence = f"{directory / 'rank-0'}: expected a directory for pages, found: No such file or directory"
    with pytest.raises(EngineError) as error:
        engine_in(directory, kv_dir_bytes=size)
    assert sentence in str(error.value) and str(error.value).startswith("--kv-dir")


@pytest.mark.parametrize(
    ("kept", "named"),
    [
        (PagedKV(1, 8, torch.float32, window=8), "a window of the tokens in some layers"),
        (RecurrentState(8, 4, 1, 8, 8, torch.float32), "states in some layers"),
        (EncoderKV(1, 8, torch.float32), "keys and values of encodings in some layers"),
    ],
    ids=["window", "state", "encodings"],
)
def test_models_that_keep_something_else_are_refused(tmp_path: Path, kept: CacheSpec, named: str) -> None:
    config = RankConfig(dtype=torch.float32, kv_dir=tmp_path / "kv")
    specs = [PagedKV(1, 8, torch.float32), kept]
    with pytest.raises(EngineError) as error:
        open_page_files(DEMO, read_card(DEMO), config, Sharding(0, 1, torch.float32, None), specs)
    assert str(error.value) == (
        f"--kv-dir: {DEMO}: expected a model of which every layer keeps all tokens of a text, found one of type qwen3, "
        f"which keeps {named}"
    )
    assert not (tmp_path / "kv").exists()


def test_pages_that_are_overwritten_before_they_are_written_get_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer has begun with the first one when a step overwrites both."""
    files = PageFiles(tmp_path, 0, 1 << 20, b"a model")
    cache = KVPages.empty(4, 1, 8, torch.float32)
    store = PageStore(files, [cache], SingleGroup())
    begun, overwritten = threading.Event(), threading.Event()

    def touch(*_: Any) -> bool:
        begun.set()
        assert overwritten.wait(60)
        return False

    monkeypatch.setattr(files, "touch", touch)
    store.keep([(1, b"one"), (2, b"two")])
    assert begun.wait(60)
    store.forget([1, 2])
    cache.k[1:3] = 7.0
    overwritten.set()
    cache.k[3], cache.v[3] = 3.0, 4.0
    store.keep([(3, b"three")])
    store.flush(60)
    assert [digest in store for digest in (b"one", b"two", b"three")] == [False, False, True]
    assert store.load([(0, b"three"), (1, b"one")]) == 1
    assert (cache.k[0] == 3.0).all() and (cache.v[0] == 4.0).all() and (cache.k[1:3] == 7.0).all()
    assert (store.written, store.read, store.refused) == (1, 1, 1)
    store.close()
