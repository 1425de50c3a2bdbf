"""Metrics and the data of the status page from the reports of engines: arithmetic by hand."""

import asyncio
import re
import socket
from collections.abc import Sequence

from msgspec.structs import replace

from tilerank.runtime.protocol.engine_state import EngineState
from tilerank.runtime.protocol.framing import encode
from tilerank.runtime.rank.counters import RankCounters
from tilerank.runtime.server.link.client import EngineClient
from tilerank.runtime.server.link.messages import Counters, FromEngine, RankInfo, Ranks
from tilerank.runtime.server.monitoring.metrics import Metrics
from tilerank.runtime.server.monitoring.recent_requests import RecentRequests
from tilerank.runtime.server.monitoring.status import status_json

RANKS = Ranks(
    [
        RankInfo(0, "one", "0", "0-42", "amx", 1000, 500, 1.0),
        RankInfo(1, "two", "any", "any", "avx2", 900, 400, None),
    ]
)
STATE = EngineState(4096, 640, 0.25, 3, 2, 1, 1000, 50)


def client_that_heard(*messages: FromEngine) -> EngineClient:
    async def listen() -> EngineClient:
        client = EngineClient()
        ours, theirs = socket.socketpair()
        with theirs:
            talking = asyncio.create_task(client.attach(0, ours))
            theirs.sendall(b"".join(map(encode, messages)))
            for _ in range(10_000):
                await asyncio.sleep(0)
                if client.state == messages[-1]:
                    break
            received_all = client.state == messages[-1]
            engine = client._engines[0]  # its state is cleared when the socket closes
            state = client.state
        await talking
        assert received_all
        engine.state = state
        return client

    return asyncio.run(listen())


def samples(client: EngineClient) -> dict[str, float]:
    """Return the samples of the server's metrics by their names with labels, but for the model's."""
    lines = [line for line in Metrics(client, "it", False).text().decode().splitlines() if line.startswith("tilerank_")]
    assert lines and all('model_name="it"' in line for line in lines)
    found = (re.sub(r'model_name="it",?', "", line).replace(",}", "}").replace("{}", "") for line in lines)
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in found)}


def counted(*ranks: Sequence[float]) -> Counters:
    return Counters([RankCounters(*rank) for rank in ranks])


def test_ranks_that_have_done_nothing_yet() -> None:
    found = samples(client_that_heard(RANKS, STATE))
    assert found["tilerank_engine_up"] == 1
    assert found["tilerank_decode_read_bytes_per_second"] == found["tilerank_all_reduce_wait_share"] == 0
    assert found['tilerank_rank_info{cores="0-42",host="one",isa="amx",node="0",rank="0"}'] == 1
    assert found['tilerank_rank_info{cores="any",host="two",isa="avx2",node="any",rank="1"}'] == 1
    assert found['tilerank_rank_local_memory_share{rank="0"}'] == 1
    assert 'tilerank_rank_local_memory_share{rank="1"}' not in found
    assert found['tilerank_rank_step_seconds_total{phase="decode",rank="1"}'] == 0


def test_models_with_states_report_their_slots() -> None:
    assert not [name for name in samples(client_that_heard(RANKS, STATE)) if "state_" in name]
    found = samples(client_that_heard(RANKS, EngineState(4096, 640, 0.25, 3, 2, 1, 1000, 50, 12, 5)))
    assert found["tilerank_state_slots"] == 12 and found["tilerank_state_snapshots"] == 5
    assert found["tilerank_state_slots_usage_perc"] == 3 / 12


def test_drafts_are_counted() -> None:
    found = samples(client_that_heard(RANKS, STATE, replace(STATE, drafted_tokens=30, accepted_tokens=12)))
    counts = [found[f"tilerank_spec_decode_num_{name}_tokens_total"] for name in ("draft", "accepted")]
    assert counts == [30, 12]


def test_models_with_cross_attention_report_the_pages_of_sources() -> None:
    assert not [name for name in samples(client_that_heard(RANKS, STATE)) if "source_" in name]
    client = client_that_heard(RANKS, replace(STATE, source_pages=40, source_pages_used=10))
    found, status = samples(client), status_json(client, RecentRequests(), Metrics(client, "it", False), {})
    assert found["tilerank_source_pages"] == 40 and found["tilerank_source_pages_usage_perc"] == 10 / 40
    assert (status["source_pages"], status["source_pages_used"]) == (40, 10)


def test_servers_that_keep_pages_in_files_report_them() -> None:
    assert not [name for name in samples(client_that_heard(RANKS, STATE)) if "kv_dir" in name]
    kept = replace(STATE, kv_dir_capacity=1000, kv_dir_bytes=250, kv_dir_written=7, kv_dir_read=3, kv_dir_refused=1)
    found = samples(client_that_heard(RANKS, STATE, kept))
    assert found["tilerank_kv_dir_usage_perc"] == 250 / 1000
    counts = [found[f"tilerank_kv_dir_pages_{name}_total"] for name in ("written", "read", "refused")]
    assert counts == [7, 3, 1]


def test_servers_with_prefill_ranks_report_the_pages_between_the_groups() -> None:
    assert not [name for name in samples(client_that_heard(RANKS, STATE)) if "transfer_" in name]
    moved = replace(STATE, transfer_slots=8, transfer_slots_used=2, given_pages=9, taken_pages=7, taken_bytes=700)
    found = samples(client_that_heard(RANKS, STATE, replace(moved, missed_prompts=1)))
    names = ("usage_perc", "pages_given_total", "pages_taken_total", "bytes_taken_total", "prompts_missed_total")
    assert [found[f"tilerank_transfer_{name}"] for name in names] == [2 / 8, 9, 7, 700, 1]


def test_rates_are_of_the_latest_report() -> None:
    """Rank 0 read 3000 bytes in 2 s, rank 1 1200 bytes in 1 s; they waited 1 of 4 s and 1.5 of 2 s."""
    client = client_that_heard(
        RANKS, counted((1, 1, 1000, 0.5), (1, 1, 900, 0.5)), counted((3, 3, 4000, 1.5, 0.75), (2, 2, 2100, 2)), STATE
    )
    found = samples(client)
    assert found["tilerank_decode_read_bytes_per_second"] == 3000 / 2 + 1200 / 1
    assert found["tilerank_all_reduce_wait_share"] == (1 / 4 + 1.5 / 2) / 2
    assert found['tilerank_rank_all_reduce_wait_seconds_total{rank="0"}'] == 1.5
    assert found['tilerank_rank_step_seconds_total{phase="prefill",rank="0"}'] == 3
    assert found['tilerank_rank_step_seconds_total{phase="decode",rank="1"}'] == 2
    assert found['tilerank_rank_step_seconds_total{phase="encode",rank="0"}'] == 0.75
    assert found['tilerank_rank_decode_read_bytes_total{rank="1"}'] == 2100


def test_bandwidth_is_of_the_last_time_that_there_were_decode_steps() -> None:
    client = client_that_heard(
        RANKS, counted((0, 2, 3000, 0), (0, 2, 1000, 1)), counted((1, 2, 3000, 0.5), (1, 2, 1000, 1)), STATE
    )
    found = samples(client)
    assert found["tilerank_decode_read_bytes_per_second"] == 2000
    assert found["tilerank_all_reduce_wait_share"] == 0.25


def test_a_stopped_engine_has_counters_alone() -> None:
    found = samples(EngineClient())
    assert found["tilerank_engine_up"] == 0
    assert [found[f"tilerank_{name}_total"] for name in ("prompt_tokens", "generation_tokens", "num_preemptions")] == [
        0
    ] * 3
    assert not [name for name in found if re.search("rank|running|kv_cache", name.removeprefix("tilerank_"))]


def test_counters_never_go_down_when_a_replica_does() -> None:
    """Two replicas generate tokens, from 10 to 50 and from 0 to 7. The second one restarts from 0 and gets to 5.

    The totals are 40, 40 + 7, the same while it is gone, and 40 + 7 + 5.
    """

    async def listen() -> list[tuple[float, ...]]:
        client, found = EngineClient(), []

        async def hear(theirs: socket.socket, *messages: FromEngine) -> None:
            theirs.sendall(b"".join(map(encode, messages)))
            for _ in range(10_000):
                await asyncio.sleep(0)
                if any(engine.state == messages[-1] for engine in client._engines.values()):
                    break
            names = ("generation_tokens", "prompt_tokens", "num_preemptions")
            sums = samples(client)
            prompt, generated = (
                status_json(client, RecentRequests(), Metrics(client, "it", False), {})[name]
                for name in ("prompt_tokens", "generated_tokens")
            )
            assert (prompt, generated) == (
                sums["tilerank_prompt_tokens_total"],
                sums["tilerank_generation_tokens_total"],
            )
            found.append(tuple(sums[f"tilerank_{name}_total"] for name in names))

        def state(*counts: int) -> EngineState:
            return EngineState(4096, 640, 0.25, 3, 2, *counts)

        pairs = [socket.socketpair() for _ in range(3)]
        talks = [asyncio.create_task(client.attach(replica, pairs[replica][0])) for replica in (0, 1)]
        await hear(pairs[0][1], RANKS, state(1, 1000, 10), state(3, 1100, 50))
        await hear(pairs[1][1], RANKS, state(0, 0, 0), state(4, 20, 7))
        pairs[1][1].close()
        await talks[1]
        await hear(pairs[0][1], state(3, 1100, 50))
        talks.append(asyncio.create_task(client.attach(1, pairs[2][0])))
        await hear(pairs[2][1], RANKS, state(0, 0, 0), state(1, 2, 5))
        for _, theirs in pairs:
            theirs.close()
        await asyncio.gather(*talks)
        return found

    assert asyncio.run(listen()) == [(40, 100, 2), (47, 120, 6), (47, 120, 6), (52, 122, 7)]


def test_the_status_page_gets_the_same_values() -> None:
    client = client_that_heard(RANKS, counted((1, 1, 1000, 0.5), (1, 3, 900, 0.5)), STATE)
    answer = status_json(client, RecentRequests(), Metrics(client, "it", False), {"model": "it"})
    assert answer["ready"] is True and answer["model"] == "it" and answer["latest"] == []
    assert (answer["running"], answer["waiting"], answer["cache_tokens"]) == (3, 2, 640)
    assert answer["bytes_per_s"] == 1000 + 300
    assert [rank["wait_share"] for rank in answer["ranks"]] == [0.25, 0.125]
    assert [(rank["host"], rank["cores"]) for rank in answer["ranks"]] == [("one", "0-42"), ("two", "any")]
    client = EngineClient()
    gone = status_json(client, RecentRequests(), Metrics(client, "it", False), {"model": "it"})
    nothing = {"ended_in_last_minute": {}, "errors": 0, "first_token_s": None, "inter_token_s": None}
    assert gone == {"model": "it", "ready": False, "restarts": 0, "latest": []} | nothing


def test_metrics_of_the_process_and_of_speech() -> None:
    texts, speaks = (Metrics(EngineClient(), "it", speaks).text().decode() for speaks in (False, True))
    (resident,) = re.findall(r"^process_resident_memory_bytes (\S+)$", texts, re.M)
    assert 1e7 < float(resident) < 1e11
    names = {"tilerank_speech_frames_total", "tilerank_speech_seconds_total", "tilerank_time_to_first_sound_seconds"}
    for name in names:
        assert f"# TYPE {name} " in speaks and name not in texts
