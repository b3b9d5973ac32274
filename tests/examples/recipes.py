"""The recipes of `examples`, read as limits, volumes and commands of containers."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import yaml

EXAMPLES = Path(__file__).parents[2] / "examples"
COMPOSE, KUBERNETES = EXAMPLES / "compose", EXAMPLES / "kubernetes"
OVERLAYS = ("base", "shared-store")
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
SHM = "/dev/shm"  # noqa: S108 - the mount point in a container


def quantity(text):
    """Bytes of a quantity of Kubernetes."""
    number, unit = re.fullmatch(r"(\d+)([A-Za-z]*)", str(text)).groups()
    return int(number) * _UNITS[unit]


def bytes_of_docker(text):
    """Bytes of a size of Docker and of Valkey, whose units are powers of 1024."""
    number, unit = re.fullmatch(r"(\d+)([kmg])b?", text).groups()
    return int(number) << {"k": 10, "m": 20, "g": 30}[unit]


def load(file):
    """The one document of a file of YAML."""
    return yaml.safe_load(file.read_text())


@dataclass
class Engine:
    """Limits, volumes and command of a container of the engine.

    Attributes:
        words: its command.
        config: the value of `--kv-transfer-config`.
        memory: bytes of its limit of memory.
        shm: bytes of its `/dev/shm`.
        disk: bytes of the volume of the disk tier; None if they are not limited.
        mounts: what it has by path in the container.
        image: its image.
    """

    words: list[str]
    config: str
    memory: int
    shm: int
    disk: int | None
    mounts: dict[str, str]
    image: str

    def tiers(self):
        return json.loads(self.config)["kv_connector_extra_config"]["tiers"]


def compose_engine(document, service):
    """Return the limits, volumes and command of a service of a compose file."""
    found = document["services"][service]
    words = found["entrypoint"]
    return Engine(
        words=words,
        config=words[words.index("--kv-transfer-config") + 1],
        memory=bytes_of_docker(found["mem_limit"]),
        shm=bytes_of_docker(found["shm_size"]),
        disk=None,
        mounts={path: name for name, path in (each.split(":")[:2] for each in found["volumes"])},
        image=found["image"],
    )


def kustomization(name):
    """The documents of an overlay, with generated ConfigMaps, as `kubectl kustomize` merges them.

    Names of ConfigMaps have no suffix.
    """
    folder = KUBERNETES / name
    read = load(folder / "kustomization.yaml")
    documents = []
    for resource in read["resources"]:
        at = (folder / resource).resolve()
        if at.is_dir():
            documents += kustomization(at.name)
        else:
            documents += yaml.safe_load_all(at.read_text())
    for each in read["configMapGenerator"]:
        data = {file: (folder / file).read_text() for file in each["files"]}
        if each.get("behavior") == "merge":
            one(documents, "ConfigMap", each["name"])["data"].update(data)
        else:
            made = {"apiVersion": "v1", "kind": "ConfigMap"}
            documents.append(made | {"metadata": {"name": each["name"]}, "data": data})
    return documents


def one(documents, kind, name):
    """The document of a kind and a name."""
    (found,) = [
        each for each in documents if each["kind"] == kind and each["metadata"]["name"] == name
    ]
    return found


def pod(documents, name="vllm"):
    return one(documents, "Deployment", name)["spec"]["template"]["spec"]


def kubernetes_engine(documents, container):
    """Return those of a container of the Deployment of vLLM."""
    spec = pod(documents)
    (found,) = [
        each for each in spec["initContainers"] + spec["containers"] if each["name"] == container
    ]
    (variable,) = [each for each in found["env"] if each["name"] == "KV_TRANSFER_CONFIG"]
    source = variable["valueFrom"]["configMapKeyRef"]
    volumes = {each["name"]: each for each in spec["volumes"]}
    mounts = {each["mountPath"]: each["name"] for each in found["volumeMounts"]}
    claim = volumes[mounts["/kv"]]["persistentVolumeClaim"]["claimName"]
    request = one(documents, "PersistentVolumeClaim", claim)["spec"]["resources"]["requests"]
    return Engine(
        words=found["command"],
        config=one(documents, "ConfigMap", source["name"])["data"][source["key"]],
        memory=quantity(found["resources"]["limits"]["memory"]),
        shm=quantity(volumes[mounts[SHM]]["emptyDir"]["sizeLimit"]),
        disk=quantity(request["storage"]),
        mounts=mounts,
        image=found["image"],
    )
