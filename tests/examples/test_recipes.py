"""`examples/compose` and `examples/kubernetes`: valid, and their sizes, ports and paths agree.

`kvtrie doctor` reads the settings of a container, with the limits that the files give it. No
container is started.
"""

import json
import shutil
import subprocess
import sys

import kubernetes_validate
import pytest
import yaml
from tests.examples.recipes import (
    COMPOSE,
    EXAMPLES,
    KUBERNETES,
    OVERLAYS,
    SHM,
    bytes_of_docker,
    compose_engine,
    kubernetes_engine,
    kustomization,
    load,
    one,
    pod,
    quantity,
)

from kvtrie.cli import doctor_disk, doctor_memory, main
from kvtrie.cli.doctor import ENGINES as ENGINES_OF_DOCTOR
from kvtrie.cli.doctor_memory import taken_at_most
from kvtrie.engines.vllm.settings import Settings

GB, ANY = 10**9, 2**60
KUBECTL = shutil.which("kubectl")
FILE = COMPOSE / "compose.yaml"


def engines():
    """Every container of the engine, by recipe and name."""
    compose = load(FILE)
    found = {("compose", name): compose_engine(compose, name) for name in ("doctor", "vllm")}
    for overlay in OVERLAYS:
        documents = kustomization(overlay)
        found |= {
            (overlay, name): kubernetes_engine(documents, name) for name in ("doctor", "vllm")
        }
    return found


ENGINES = engines()


@pytest.fixture
def doctor(monkeypatch, tmp_path, capsys):
    """Returns the lines of `kvtrie doctor` in a container, by name."""

    def run(engine):
        def file_system(path):
            return "tmpfs" if str(path).startswith(SHM) else "ext4"

        for module in (doctor_memory, doctor_disk):
            monkeypatch.setattr(module, "file_system", file_system)
        monkeypatch.setattr(doctor_memory, "all_memory", lambda: engine.memory)
        monkeypatch.setattr(doctor_memory, "free_memory", lambda: engine.memory)
        monkeypatch.setattr(doctor_memory, "locked_limit", lambda: None)
        monkeypatch.setattr(doctor_memory, "all_disk", lambda _: engine.shm)
        monkeypatch.setattr(doctor_disk, "free_disk", lambda _: engine.disk or ANY)
        config = json.loads(engine.config)
        for tier in config["kv_connector_extra_config"]["tiers"]:
            if tier["kind"] == "disk":
                tier["path"] = str(tmp_path / "kv")
        main(["doctor", "--json", "--kv-transfer-config", json.dumps(config)])
        return {row["name"]: row for row in json.loads(capsys.readouterr().out)}

    return run


SIZES = ("host tier", "locked memory", "shared memory", "keep", "disk", "disk space")


@pytest.mark.parametrize("engine", ENGINES.values(), ids=map("-".join, ENGINES))
def test_doctor_finds_room_for_each_tier_of_a_recipe(doctor, engine):
    lines = doctor(engine)
    assert {name: lines[name]["state"] for name in SIZES if name in lines} == {
        name: "ok" for name in SIZES if name != "keep" or "keep" in engine.tiers()[0]
    }


@pytest.mark.parametrize(
    ("change", "line", "numbers"),
    [
        ({"memory": 32 * GB}, "host tier", ("32.0 GB", "35.2 GB")),
        ({"shm": 32 * GB}, "keep", ("32.0 GB", "35.2 GB")),
        ({"disk": 100 * GB}, "disk space", ("100.0 GB", "200.0 GB")),
    ],
)
def test_doctor_refuses_a_size_that_contradicts_another(doctor, change, line, numbers):
    engine = engines()["base", "vllm"]
    vars(engine).update(change)
    lines = doctor(engine)
    assert [row["name"] for row in lines.values() if row["state"] == "error"] == [line]
    assert all(number in lines[line]["found"] for number in numbers)


@pytest.mark.parametrize("recipe", ["compose", *OVERLAYS])
def test_doctor_runs_first_with_what_the_server_gets(recipe):
    first, server = ENGINES[recipe, "doctor"], ENGINES[recipe, "vllm"]
    assert first.words[:2] == ["kvtrie", "doctor"]
    assert server.words[:2] == ["vllm", "serve"]
    for name in ("config", "memory", "shm", "disk", "mounts", "image"):
        assert getattr(first, name) == getattr(server, name)
    assert first.words[-2:] == server.words[-2:]


@pytest.mark.parametrize("recipe", ["compose", *OVERLAYS])
def test_paths_of_settings_are_mounted(recipe):
    engine = ENGINES[recipe, "vllm"]
    host, disk, *remote = engine.tiers()
    assert disk["path"] in engine.mounts
    assert host.get("keep", SHM).startswith(SHM)
    assert [tier["kind"] for tier in remote] == ["remote"] * (recipe != "base")


def test_the_image_has_the_version_of_vllm_that_was_tested():
    _, tested, _, _ = ENGINES_OF_DOCTOR["vllm"]
    version = ".".join(map(str, tested))
    assert f"FROM vllm/vllm-openai:v{version}." in (COMPOSE / "Dockerfile").read_text()
    assert {engine.image for engine in ENGINES.values()} == {f"kvtrie-vllm:{version}"}


def test_a_server_reads_the_settings(monkeypatch):
    monkeypatch.setattr("kvtrie.engines.vllm.settings._writable", lambda _: None)
    for engine in ENGINES.values():
        read = Settings.read(json.loads(engine.config)["kv_connector_extra_config"])
        assert [tier.bytes for tier in read.tiers[:2]] == [32 * GB, 200 * GB]


def test_the_compose_file_has_the_form_of_its_specification():
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    subprocess.run([*command, str(FILE)], check=True, capture_output=True)


def test_services_of_the_compose_file_reach_each_other():
    services = load(FILE)["services"]
    port = services["vllm"]["entrypoint"][services["vllm"]["entrypoint"].index("--port") + 1]
    assert services["vllm"]["ports"][0].endswith(f":{port}")
    assert f"http://localhost:{port}/health" in services["vllm"]["healthcheck"]["test"]
    (scraped,) = load(COMPOSE / "prometheus.yml")["scrape_configs"]
    assert scraped["static_configs"] == [{"targets": [f"vllm:{port}"]}]
    (store,) = [
        tier["path"] for tier in ENGINES["compose", "vllm"].tiers() if tier["kind"] == "remote"
    ]
    ping = services["valkey"]["healthcheck"]["test"]
    assert store == f"redis://valkey:{ping[ping.index('-p') + 1]}/0"
    for service in services["vllm"]["depends_on"]:
        assert service in services
    for name, service in services.items():
        for mount in service.get("volumes", ()):
            source = mount.split(":")[0]
            if source.startswith("."):
                assert (COMPOSE / source).is_file(), (name, source)


def test_prometheus_and_grafana_of_compose_have_the_files_of_observability():
    services = load(FILE)["services"]
    mounts = {
        name: dict(reversed(each.split(":")[:2]) for each in services[name]["volumes"])
        for name in ("prometheus", "grafana")
    }
    config = load(COMPOSE / "prometheus.yml")
    shipped = load(EXAMPLES / "observability/prometheus.yml")
    assert config["rule_files"] == shipped["rule_files"] == ["alerts.yml"]
    assert config["scrape_configs"][0] | {"static_configs": 0} == shipped["scrape_configs"][0] | {
        "static_configs": 0
    }
    assert mounts["prometheus"]["/etc/prometheus/alerts.yml"] == "../observability/alerts.yml"
    (provider,) = load(COMPOSE / "grafana/dashboards.yml")["providers"]
    (board,) = [path for path in mounts["grafana"] if path.startswith(provider["options"]["path"])]
    (source,) = load(COMPOSE / "grafana/datasources.yml")["datasources"]
    variables = json.loads((COMPOSE / mounts["grafana"][board]).read_text())["templating"]["list"]
    (wanted,) = [each["query"] for each in variables if each["type"] == "datasource"]
    assert source["type"] == wanted
    assert source["isDefault"]
    assert source["url"] == "http://prometheus:9090"  # Prometheus's port by default


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubernetes_accepts_every_document(overlay):
    for document in kustomization(overlay):
        kubernetes_validate.validate(document, "1.37", strict=True)


@pytest.mark.skipif(KUBECTL is None, reason="there is no kubectl")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubectl_makes_the_same_documents(overlay):
    command = [KUBECTL, "kustomize", str(KUBERNETES / overlay)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (suffix,) = {
        each["metadata"]["name"].removeprefix("kvtrie")
        for each in yaml.safe_load_all(output)
        if each["kind"] == "ConfigMap"
    }
    made = list(yaml.safe_load_all(output.replace(f"kvtrie{suffix}\n", "kvtrie\n")))
    ours = kustomization(overlay)
    assert len(made) == len(ours)
    assert all(document in ours for document in made)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_services_of_kubernetes_reach_their_pods(overlay):
    documents = kustomization(overlay)
    for service in (each for each in documents if each["kind"] == "Service"):
        name = service["metadata"]["name"]
        deployment = one(documents, "Deployment", name)["spec"]
        labels = deployment["template"]["metadata"]["labels"]
        assert service["spec"]["selector"] == deployment["selector"]["matchLabels"] == labels
        (container,) = pod(documents, name)["containers"]
        ports = {port["name"] for port in container["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} == ports
        for probe in ("readinessProbe", "livenessProbe"):
            (check,) = [each for each in container[probe].values() if isinstance(each, dict)]
            assert check["port"] in ports
    words = ENGINES[overlay, "vllm"].words
    (server,) = pod(documents)["containers"]
    assert words[words.index("--port") + 1] == str(server["ports"][0]["containerPort"])
    assert server["startupProbe"]["httpGet"] == server["livenessProbe"]["httpGet"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_volumes_of_kubernetes_are_there(overlay):
    documents = kustomization(overlay)
    spec = pod(documents)
    assert set(ENGINES[overlay, "vllm"].mounts.values()) == {
        each["name"] for each in spec["volumes"]
    }
    for volume in spec["volumes"]:
        if "persistentVolumeClaim" in volume:
            one(documents, "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"])
    claim = one(documents, "PersistentVolumeClaim", "kv")["spec"]
    disk = one(documents, "PersistentVolume", "kv")["spec"]
    assert "local" in disk
    assert disk["storageClassName"] == claim["storageClassName"]
    one(documents, "StorageClass", disk["storageClassName"])
    asked = quantity(claim["resources"]["requests"]["storage"])
    assert quantity(disk["capacity"]["storage"]) >= asked


def test_one_pod_at_a_time_writes_to_the_disk():
    deployment = one(kustomization("base"), "Deployment", "vllm")["spec"]
    assert deployment["replicas"] == 1
    assert deployment["strategy"] == {"type": "Recreate"}
    assert pod(kustomization("base"))["enableServiceLinks"] is False  # VLLM_PORT would be a URL


def test_a_shared_store_has_room_for_what_it_keeps():
    documents = kustomization("shared-store")
    (valkey,) = pod(documents, "valkey")["containers"]
    service = load(FILE)["services"]["valkey"]
    limits = (
        quantity(valkey["resources"]["limits"]["memory"]),
        bytes_of_docker(service["mem_limit"]),
    )
    for words, limit in zip((valkey["args"], service["command"]), limits, strict=True):
        assert limit >= taken_at_most(bytes_of_docker(words[words.index("--maxmemory") + 1]))
    (port,) = one(documents, "Service", "valkey")["spec"]["ports"]
    (store,) = [
        tier for tier in ENGINES["shared-store", "vllm"].tiers() if tier["kind"] == "remote"
    ]
    assert store["path"] == f"redis://valkey:{port['port']}/0"
    assert valkey["ports"][0]["containerPort"] == port["port"]
