"""What deploy/kubernetes says, held against the programs it starts: flags, ports, paths, labels, keys and graces.

No cluster is needed. The base is read as it is; what overlays and components make of it needs kubectl.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from baleen_worker.command_line import parse
from harness.processes import GATEWAY_BINARY, MICRO_MODEL, ROOT, Process, wait_for

DEPLOY = ROOT / "deploy" / "kubernetes"
OWN = {"app.kubernetes.io/name": "baleen"}
# The programs and Kubernetes have a margin between the drain and the kill.
MARGIN_S = 15
# Custom resources, whose schemas come with an operator.
CUSTOM = {"ServiceMonitor", "PodMonitor"}

Manifest = dict[str, Any]


def documents(path: Path) -> list[Manifest]:
    return [document for document in yaml.safe_load_all(path.read_text("utf-8")) if document]


def rendered(folder: Path) -> list[Manifest]:
    """What kustomize makes of a folder."""
    built = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return [document for document in yaml.safe_load_all(built.stdout) if document]


def base() -> list[Manifest]:
    folder = DEPLOY / "base"
    kustomization = documents(folder / "kustomization.yaml")[0]
    manifests = [manifest for name in kustomization["resources"] for manifest in documents(folder / name)]
    settings = dict(line.split("=", 1) for line in kustomization["configMapGenerator"][0]["literals"])
    return [*manifests, {"kind": "ConfigMap", "metadata": {"name": "baleen-settings"}, "data": settings}]


def with_monitoring(folder: Path) -> Path:
    """An overlay of the base with the component, in `folder`, which must lie in the checkout."""
    kustomization = {"resources": ["../base"], "components": ["../components/monitoring"]}
    (folder / "kustomization.yaml").write_text(json.dumps(kustomization))
    return folder


@pytest.fixture(scope="module", params=["base", "laptop", "monitoring"])
def manifests(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Manifest]:
    if request.param == "base":
        return base()
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl, for kustomize")
    if request.param == "laptop":
        return rendered(DEPLOY / "overlays" / "laptop")
    copy = tmp_path_factory.mktemp("deploy") / "kubernetes"
    shutil.copytree(DEPLOY, copy)
    (copy / "monitored").mkdir()
    return rendered(with_monitoring(copy / "monitored"))


def of_kind(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    return {manifest["metadata"]["name"]: manifest for manifest in manifests if manifest["kind"] == kind}


def pods(manifests: list[Manifest]) -> dict[str, Manifest]:
    return {name: manifest["spec"]["template"] for name, manifest in of_kind(manifests, "Deployment").items()}


def container(pod: Manifest) -> Manifest:
    (only,) = pod["spec"]["containers"]
    return only


def settings(manifests: list[Manifest]) -> dict[str, str]:
    (data,) = (m["data"] for m in manifests if m["kind"] == "ConfigMap" and "MODEL_DIR" in m["data"])
    return data


def arguments(pod: Manifest, manifests: list[Manifest]) -> list[str]:
    """The arguments as the kubelet would expand them; every variable must be known."""
    values = {"POD_NAMESPACE": "baleen", "POD_IP": "127.0.0.1"} | settings(manifests)
    given = {variable["name"] for variable in container(pod).get("env", [])}

    def value(match: re.Match[str]) -> str:
        assert match[1] in given, f"{match[0]} is no variable of the container"
        return values[match[1]]

    return [re.sub(r"\$\((\w+)\)", value, argument) for argument in container(pod)["args"]]


def flag(arguments: list[str], name: str) -> str | None:
    found = [word.partition("=")[2] for word in arguments if word.startswith(f"{name}=")]
    assert len(found) <= 1, f"{name} is given {len(found)} times"
    return found[0] if found else None


def selects(selector: Manifest, labels: dict[str, str]) -> bool:
    exact = selector.get("matchLabels", {}).items() <= labels.items()
    return exact and all(labels.get(e["key"]) in e["values"] for e in selector.get("matchExpressions", []))


def port_numbers(pod: Manifest) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container(pod)["ports"]}


def with_files(arguments: list[str], folder: Path) -> list[str]:
    """The same arguments with the mounted files in `folder`."""
    (folder / "key").write_text("0123456789abcdef")
    (folder / "keys.toml").write_text(f'[[key]]\nname = "me"\nsha256 = "{"0" * 64}"\n')
    return [re.sub(r"=/etc/baleen/[\w-]+/", f"={folder}/", argument) for argument in arguments]


def test_selectors_find_the_pods_they_mean(manifests: list[Manifest]) -> None:
    labels = {name: pod["metadata"]["labels"] for name, pod in pods(manifests).items()}
    assert set(labels) == {"gateway", "prefill", "decode"}
    for name, deployment in of_kind(manifests, "Deployment").items():
        assert [other for other in labels if selects(deployment["spec"]["selector"], labels[other])] == [name]
    for kind in ("Service", "PodDisruptionBudget"):
        found = of_kind(manifests, kind)
        assert set(found) == set(labels), kind
        for name, manifest in found.items():
            selector = manifest["spec"]["selector"]
            selector = selector if kind == "PodDisruptionBudget" else {"matchLabels": selector}
            assert [other for other in labels if selects(selector, labels[other])] == [name], kind
    for spec in pods(manifests)["gateway"]["spec"].get("topologySpreadConstraints", []):
        assert selects(spec["labelSelector"], labels["gateway"])
    for kind in CUSTOM:
        for monitor in of_kind(manifests, kind).values():
            assert any(selects(monitor["spec"]["selector"], known) for known in labels.values())


def test_network_policies_let_through_what_is_spoken_and_close_the_rest(manifests: list[Manifest]) -> None:
    labels = {name: pod["metadata"]["labels"] for name, pod in pods(manifests).items()}
    policies = [policy["spec"] for policy in of_kind(manifests, "NetworkPolicy").values()]
    closed = [spec for spec in policies if "ingress" not in spec and "egress" not in spec]
    assert all(any(selects(spec["podSelector"], known) for spec in closed) for known in labels.values())

    def lets(source: str, target: str, port: str) -> bool:
        number = port_numbers(pods(manifests)[target])[port]

        def opens(spec: Manifest, rules: str, peers: str, own: str, other: str) -> bool:
            if not selects(spec["podSelector"], labels[own]):
                return False
            for rule in spec.get(rules, []):
                reaches = any(
                    selects(peer.get("podSelector", {}), labels[other])
                    for peer in rule.get(peers, [])
                    if "namespaceSelector" not in peer
                )
                ports = [entry["port"] for entry in rule.get("ports", [])]
                if reaches and (port in ports or number in ports):
                    return True
            return False

        leaves = any(opens(spec, "egress", "to", source, target) for spec in policies)
        return leaves and any(opens(spec, "ingress", "from", target, source) for spec in policies)

    allowed = {
        (source, target, port)
        for source in labels
        for target, pod in pods(manifests).items()
        for port in port_numbers(pod)
        if lets(source, target, port)
    }
    assert allowed == {("gateway", "prefill", "grpc"), ("gateway", "decode", "grpc"), ("decode", "prefill", "pages")}


def test_ports_are_those_the_programs_listen_on(manifests: list[Manifest]) -> None:
    flags = {
        "http": "--port",
        "grpc": "--port",
        "pages": "--disaggregation-bootstrap-port",
        "metrics": "--metrics-port",
    }
    for name, pod in pods(manifests).items():
        ports = port_numbers(pod)
        listened = {port: int(flag(arguments(pod, manifests), flags[port]) or 0) for port in ports}
        assert ports == listened, name
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            (check,) = (
                container(pod)[probe].get(kind)
                for kind in ("httpGet", "tcpSocket", "grpc")
                if kind in container(pod)[probe]
            )
            assert check["port"] in ports or check["port"] in ports.values(), (name, probe)
        for port in of_kind(manifests, "Service")[name]["spec"]["ports"]:
            assert port["targetPort"] in ports


def test_the_gateway_follows_services_that_are_there_and_may_ask_for_them(manifests: list[Manifest]) -> None:
    pod = pods(manifests)["gateway"]
    services = of_kind(manifests, "Service")
    for role in ("prefill", "decode"):
        place = re.fullmatch(r"k8s://baleen/([\w-]+):([\w-]+)", flag(arguments(pod, manifests), f"--{role}") or "")
        assert place is not None
        spec = services[place[1]]["spec"]
        assert place[1] == role
        assert spec["clusterIP"] == "None"
        assert place[2] in [port["name"] for port in spec["ports"]]
        assert flag(arguments(pods(manifests)[role], manifests), "--disaggregation-mode") == role
    (role,) = of_kind(manifests, "Role").values()
    assert role["rules"] == [
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}
    ]
    (binding,) = of_kind(manifests, "RoleBinding").values()
    account = pod["spec"]["serviceAccountName"]
    assert account in of_kind(manifests, "ServiceAccount")
    assert [subject["name"] for subject in binding["subjects"]] == [account]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]


def test_the_file_that_a_refused_gateway_names_grants_what_it_lacks() -> None:
    source = (ROOT / "gateway/src/discovery/kubernetes/access.rs").read_text("utf-8")
    named = re.search(r'ROLE_FILE: &str = "([^"]+)"', source)
    assert named is not None
    assert "Role" in {manifest["kind"] for manifest in documents(ROOT / named[1])}


def test_every_mounted_file_is_where_a_flag_looks_for_it(manifests: list[Manifest]) -> None:
    for name, pod in pods(manifests).items():
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container(pod)["volumeMounts"]}
        assert set(volumes) == {mount["name"] for mount in container(pod)["volumeMounts"]}, name
        words = arguments(pod, manifests)
        looked_for = [word.partition("=")[2] for word in words if word.startswith("--") and "=/" in word]
        assert {str(Path(path).parent) for path in looked_for} == {path for path in mounts if path.startswith("/etc")}
        assert "/etc/baleen/worker-key/key" in looked_for
        secrets = {path: volume["secret"]["secretName"] for path, volume in mounts.items() if "secret" in volume}
        assert secrets["/etc/baleen/worker-key"] == "baleen-worker-key"
        if name != "gateway" and words[0] != "/models/micro":  # which is part of the image
            assert mounts[words[0]]["persistentVolumeClaim"]["claimName"] == "baleen-model"


def test_nothing_is_killed_before_it_has_drained(manifests: list[Manifest]) -> None:
    pod = pods(manifests)["gateway"]
    before = container(pod)["lifecycle"]["preStop"]["sleep"]["seconds"]
    drain = int(flag(arguments(pod, manifests), "--drain-timeout-s") or 60)
    assert pod["spec"]["terminationGracePeriodSeconds"] >= before + drain + MARGIN_S


def test_pods_have_no_privileges(manifests: list[Manifest]) -> None:
    for name, pod in pods(manifests).items():
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True, name
        assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        context = container(pod)["securityContext"]
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        if name != "gateway":
            assert pod["spec"]["automountServiceAccountToken"] is False


def test_workers_accept_their_flags(manifests: list[Manifest], tmp_path: Path) -> None:
    """By the worker's own parser and checks, which refuse what is unknown, idle or unsafe."""
    for role in ("prefill", "decode"):
        pod = pods(manifests)[role]
        assert container(pod)["command"] == ["python", "-m", "baleen_worker"]
        model, *rest = arguments(pod, manifests)
        assert model == settings(manifests)["MODEL_DIR"]
        config = parse(with_files([str(MICRO_MODEL), *rest], tmp_path))
        assert config.worker.disaggregation is not None
        assert config.worker.disaggregation.prefills == (role == "prefill")
        assert config.head.port == port_numbers(pod)["grpc"]


@pytest.fixture
def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_a_gateway_with_its_flags_answers_its_probes(tmp_path: Path, free_port: int) -> None:
    """The real one; in place of Services it gets addresses at which nobody is, so it lives and is not ready."""
    manifests = base()
    pod = pods(manifests)["gateway"]
    words = with_files(arguments(pod, manifests), tmp_path)
    words = [re.sub(r"=k8s://.*", f"=127.0.0.1:{1 + number}", word) for number, word in enumerate(words)]
    words = [word for word in words if not word.startswith("--port=")]
    probe = container(pod)
    probes = {name: probe[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
    with Process([str(GATEWAY_BINARY), *words, f"--port={free_port}"]) as gateway:

        def status(path: str) -> int | None:
            assert gateway.process.poll() is None, gateway.log()
            try:
                return httpx.get(f"http://127.0.0.1:{free_port}{path}").status_code
            except httpx.TransportError:
                return None

        wait_for("the gateway listens", lambda: status(probes["startup"]) == 200)
        assert status(probes["liveness"]) == 200
        assert status(probes["readiness"]) == 503
        assert status("/metrics") == 200
        # What is no probe asks for a key first.
        assert status("/nowhere") == 401


def test_schemas_of_kubernetes_accept_every_manifest(manifests: list[Manifest]) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for manifest in manifests:
        if "apiVersion" in manifest and manifest["kind"] not in CUSTOM:
            validate.validate(manifest, "1.30", strict=True)
