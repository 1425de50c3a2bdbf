"""Pages for operators: unit, manifests and scripts are well-formed; options, metrics and error codes exist."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from command import run
from kubernetes_validate import ValidationError, validate

from tests.runtime.test_metrics import RANKS, STATE, client_that_heard
from tilerank.launch.health import Listening, listening
from tilerank.runtime.server.chat.media import DECODE_S
from tilerank.runtime.server.http import memory
from tilerank.runtime.server.http.body import MAX_BODY, MAX_MEDIA_BODY
from tilerank.runtime.server.http.fetch import FETCH_S
from tilerank.runtime.server.http.json_values import MAX_NUMBERS, MAX_STRUCTURES, MAX_TOKEN_IDS
from tilerank.runtime.server.http.media_budget import MAX_DECODED, MAX_ENCODED, MAX_HELD, MAX_WAITING
from tilerank.runtime.server.monitoring.metrics import Metrics

ROOT = Path(__file__).parents[2]
KUBERNETES = "1.33"
PAGES = ("operations", "media", "monitoring", "failures")
TEXT = "\n".join((ROOT / "docs" / f"{page}.md").read_text() for page in PAGES)


def blocks(language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.M | re.S)
    assert found, language
    return found


def test_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed (package systemd)")
    (unit,) = blocks("ini")
    program, environment = tmp_path / "tilerank", tmp_path / "environment"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    environment.touch()
    for path, here in (("/opt/tilerank/bin/tilerank", program), ("/etc/tilerank/environment", environment)):
        assert path in unit
        unit = unit.replace(path, str(here))
    (tmp_path / "tilerank.service").write_text(unit)
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "tilerank.service")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, [line for line in done.stderr.splitlines() if "tilerank.service" in line]) == (0, [])


def manifests(name: str) -> list[Any]:
    """Return the objects of a manifest for Kubernetes."""
    return list(yaml.safe_load_all((ROOT / "docs" / "kubernetes" / f"{name}.yaml").read_text()))


def test_the_manifest_asks_for_no_privileges() -> None:
    deployment, service = manifests("one-host")
    assert (deployment["kind"], service["kind"]) == ("Deployment", "Service")
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_the_manifest_of_several_hosts() -> None:
    """Its pods are those of one host, but for the command and what only the leader has."""
    deployment = manifests("one-host")[0]["spec"]["template"]["spec"]
    group, service = manifests("several-hosts")
    template = group["spec"]["leaderWorkerTemplate"]
    assert template.keys() == {"size", "restartPolicy", "leaderTemplate", "workerTemplate"} and template["size"] == 2
    leader, worker = (template[f"{name}Template"]["spec"] for name in ("leader", "worker"))
    assert service["spec"]["selector"] == template["leaderTemplate"]["metadata"]["labels"]
    command, secret = [*leader["containers"][0]["command"]], leader["containers"][0]["env"][1]
    assert secret["name"] == "TILERANK_SECRET"
    one = deployment["containers"][0]
    only_leader = {name: one[name] for name in ("ports", "startupProbe", "readinessProbe")}
    both = {name: one[name] for name in ("name", "image", "resources", "securityContext", "volumeMounts")}
    own = {"command": command, "env": [*one["env"], secret]}
    assert worker == deployment | {"containers": [both | own]}
    assert leader == deployment | {"containers": [both | own | only_leader]}
    known = set(re.findall(r"--[a-z-]+", run("serve", "--help").out))
    assert {option.partition("=")[0] for option in command[3:]} <= known


def test_the_schemas_of_kubernetes_accept_the_manifests() -> None:
    """LeaderWorkerSet is no part of Kubernetes, but its pods are."""
    deployment, service = manifests("one-host")
    group, shared = manifests("several-hosts")
    pods = [group["spec"]["leaderWorkerTemplate"][f"{name}Template"]["spec"] for name in ("leader", "worker")]
    wrapped = [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "it"}, "spec": spec} for spec in pods]
    for manifest in (deployment, service, shared, *wrapped):
        validate(manifest, KUBERNETES, strict=True)
    pods[0]["containers"][0]["resource"] = {}
    with pytest.raises(ValidationError, match="resource"):
        validate(wrapped[0], KUBERNETES, strict=True)


def test_the_compose_file_starts_the_image() -> None:
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())
    (service,) = compose["services"].values()
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert service["build"] == "." and service["command"][0] in dockerfile
    assert [volume.split(":") for volume in service["volumes"]] == [["models", "/home/tilerank/models"]]
    assert "models" in compose["volumes"] and "VOLUME /home/tilerank/models\n" in dockerfile
    assert listening(["tilerank", "serve", *service["command"]]) == Listening(("127.0.0.1", 8000), tls=False)


def test_the_health_check_follows_the_command(tmp_path: Path) -> None:
    config = tmp_path / "options.yaml"
    config.write_text("port: 8123\nhost: '::'\nmodel: it\n")
    start = ["/usr/bin/python", "/usr/bin/tilerank", "serve"]
    started: list[tuple[list[str], Listening]] = [
        (["it", "--host", "0.0.0.0", "--tp", "3"], Listening(("127.0.0.1", 8000), tls=False)),
        (["--port=9000", "it", "--host=10.0.0.7"], Listening(("10.0.0.7", 9000), tls=False)),
        (["--config", str(config)], Listening(("::1", 8123), tls=False)),
        (["--config", str(config), "--port", "8124"], Listening(("::1", 8124), tls=False)),
        (["it", "--ssl-certfile", "cert.pem"], Listening(("127.0.0.1", 8000), tls=True)),
        (["it", "--uds", "/run/it"], Listening("/run/it", tls=False)),
    ]
    for options, found in started:
        assert listening([*start, *options]) == found


@pytest.mark.parametrize("script", blocks("bash"))
def test_scripts(script: str, tmp_path: Path) -> None:
    file = tmp_path / "script"
    file.write_text(script)
    subprocess.run(["bash", "-n", str(file)], check=True)


def test_options_are_those_of_the_command() -> None:
    known = set(re.findall(r"--[a-z-]+", run("serve", "--help").out + run("plan", "--help").out))
    commands = re.findall(r"tilerank serve(?:[^`\n]*\\\n)*[^`\n]*", TEXT)
    assert len(commands) > 8
    used = {option for command in commands for option in re.findall(r"(?<=\s)--[a-z-]+", command)}
    assert len(used) >= 8 and not used - known
    mentioned = set(re.findall(r"`(--(?:tp|m|h|a|b|c|n)[a-z-]*)", TEXT)) - {"--map-by", "--bind-to", "--cpu-bind"}
    assert not mentioned - known


def test_metrics_are_those_of_the_server() -> None:
    every = {"state_slots": 12, "source_pages": 40, "talker_pages": 8, "window_pages": 6, "kv_dir_capacity": 64}
    every |= {"transfer_slots": 10}
    text = Metrics(client_that_heard(RANKS, msgspec.structs.replace(STATE, **every)), "it", True).text().decode()
    exported = {name for name in re.findall(r"^# TYPE (tilerank_\S+)", text, re.M) if not name.endswith("_created")}
    documented = set(re.findall(r"\btilerank_[a-z0-9_]+", TEXT))
    assert documented == exported
    for labels in re.findall(r"tilerank_\w+\{(\w+)", TEXT):
        assert f'{labels}="' in text


def test_what_clients_see_is_what_the_server_says() -> None:
    assert f"The body is larger than {MAX_BODY >> 20} MiB." in TEXT
    read, made = memory.MAX_READ >> 20, memory.MAX_SMALL + memory.MAX_LARGE >> 20
    assert f"would take more than {read} MiB, or" in TEXT and f"more than {made} MiB for {memory.WAIT_S:g} s" in TEXT
    assert f"not streamed would take more than {memory.MAX_ANSWERS >> 20} MiB" in TEXT
    assert f"| {memory.MAX_MEDIA_READ >> 20} MiB instead of {read} MiB;" in TEXT
    media_made = memory.MAX_SMALL + memory.MAX_MEDIA_LARGE >> 20
    assert f"| {media_made:,} MiB instead of {made} MiB;" in TEXT
    assert f"{MAX_STRUCTURES:,} strings, keys, objects and lists, or more than {MAX_NUMBERS:,} numbers" in TEXT
    assert f"beside at most {MAX_TOKEN_IDS:,} token ids" in TEXT
    assert f"takes pictures, {MAX_MEDIA_BODY >> 20} MiB are allowed" in TEXT
    assert f"would take more than {MAX_HELD >> 30} GiB." in TEXT
    assert f"{MAX_ENCODED >> 20} MiB as files, {MAX_DECODED >> 20} MiB as decoded frames" in TEXT
    assert f"frames take more than {MAX_WAITING >> 20} MiB" in TEXT
    assert f"| time to decode the media of a request | {DECODE_S:g} s |" in TEXT
    assert f"| time to fetch the media of a request | {FETCH_S:g} s |" in TEXT
    source = "".join(path.read_text() for path in (ROOT / "tilerank" / "runtime" / "server").rglob("*.py"))
    documented = set(re.findall(r"^\| \d+ `(\w+)`", TEXT, re.M))
    assert documented <= set(re.findall(r'code="(\w+)"', source))
    assert set(re.findall(r'ApiError\(503, .*code="(\w+)"', source)) == set(re.findall(r"^\| 503 `(\w+)`", TEXT, re.M))
