"""The files of examples/deploy: valid by a schema or a parser, with flags, routes and metrics of the server."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from seqpar.serve.api.command import ServeArgs
from seqpar.serve.api.gate import OPEN
from seqpar.serve.api.telemetry import Metrics
from seqpar.types.flags import parsed
from tests.support.front import ROOT

FILES = ROOT / "examples" / "deploy"
KUBERNETES = "1.31"


def served(words: list[str]) -> ServeArgs:
    args = parsed(ServeArgs, words, "serve")
    assert args.host != "0.0.0.0" or args.keys is not None
    return args


def test_the_container_runs_the_command_from_files_that_are_there() -> None:
    parse = pytest.importorskip("dockerfile_parse", reason="needs dockerfile-parse, which pip has")
    with (FILES / "Dockerfile").open("rb") as file:
        structure = parse.DockerfileParser(fileobj=file, cache_content=True).structure
    steps = [(step["instruction"], step["value"]) for step in structure if step["instruction"] != "COMMENT"]
    assert steps[0][0] == "FROM"
    known = {"FROM", "RUN", "COPY", "ENV", "USER", "WORKDIR", "EXPOSE", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in steps} <= known
    sources = [word for name, value in steps if name == "COPY" for word in shlex.split(value)[:-1]]
    assert sources
    assert all((ROOT / source).exists() for source in sources)
    by_name = dict(steps)
    assert json.loads(by_name["ENTRYPOINT"]) == ["seqpar", "serve"]
    assert served(json.loads(by_name["CMD"])).port == int(by_name["EXPOSE"])
    assert by_name["USER"] != "root"


def objects() -> Iterator[dict[str, Any]]:
    for path in sorted((FILES / "kubernetes").glob("*.yaml")):
        yield from yaml.safe_load_all(path.read_text())


def test_kubernetes_takes_its_files() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate, which pip has")
    kinds = [x["kind"] for x in objects()]
    assert sorted(kinds) == ["Deployment", "HorizontalPodAutoscaler", "PersistentVolumeClaim", "Service"]
    for x in objects():
        validate.validate(x, KUBERNETES, strict=True)
    wrong = {**next(objects()), "kind": "Deployment", "apiVersion": "apps/v1", "spec": {"replicas": "two"}}
    with pytest.raises(validate.ValidationError):
        validate.validate(wrong, KUBERNETES, strict=True)


def test_probes_metrics_and_flags_of_kubernetes_are_those_of_the_server() -> None:
    by_kind = {x["kind"]: x for x in objects()}
    pod = by_kind["Deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    args = served(container["args"])
    assert container["ports"] == [{"name": "http", "containerPort": args.port}]
    probes = [container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")]
    assert probes == ["/ready", "/ready", "/health"]
    assert set(probes) <= set(OPEN)  # they have no key
    assert container["resources"]["limits"]["nvidia.com/gpu"] == args.gpus
    *_, before_s = container["lifecycle"]["preStop"]["exec"]["command"]
    assert pod["spec"]["terminationGracePeriodSeconds"] > args.grace_s + int(before_s)
    labels = pod["metadata"]["labels"]
    assert by_kind["Service"]["spec"]["selector"] == labels == by_kind["Deployment"]["spec"]["selector"]["matchLabels"]
    scaler = by_kind["HorizontalPodAutoscaler"]["spec"]
    assert scaler["scaleTargetRef"]["name"] == by_kind["Deployment"]["metadata"]["name"]
    name = scaler["metrics"][0]["pods"]["metric"]["name"]
    assert f"\n{name} 7.0\n" in Metrics(lambda: 7, int, tuple, dict).text().decode()
    (block,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "deploy" / "kubernetes.md").read_text(), re.DOTALL)
    assert yaml.safe_load(block)["rules"][0]["seriesQuery"] == name
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert all(any(str(path).startswith(f"{mount}/") for mount in mounts) for path in (args.keys, args.jobs))


def test_the_dashboard_shows_each_metric_of_the_server_with_its_labels() -> None:
    panels = json.loads((FILES / "grafana.json").read_text())["panels"]
    metrics = Metrics(int, int, tuple, dict)._registry._collector_to_names  # pyright: ignore[reportPrivateUsage]
    of = {name: metric for metric, names in metrics.items() for name in names}
    shown = set[Any]()
    for text in (target["expr"] for panel in panels for target in panel["targets"]):
        (name, selected), *more = re.findall(r"(seqpar_\w+)\{(.*?)\}", text)
        assert name in of, name
        assert name.endswith("_total") == (of[name]._type == "counter")
        used = {*re.findall(r"(\w+)=", selected), *", ".join(re.findall(r"by \((.*?)\)", text)).split(", ")}
        assert used <= {"instance", "le", "", *of[name]._labelnames}, text  # `instance` is the scraped server
        assert (text.count("("), more) == (text.count(")"), [])
        shown.add(of[name])
    assert shown == {*metrics}


def options(script: str) -> argparse.Namespace:
    """The options of a script for sbatch; an unknown one ends the test."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for name, kind in {"nodes": int, "ntasks": int, "gpus-per-node": int, "cpus-per-task": int}.items():
        parser.add_argument(f"--{name}", type=kind)
    for name in ("job-name", "array", "mem", "time", "signal", "output"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--requeue", action="store_true")
    lines = script.splitlines()
    first = next(index for index, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first:])  # sbatch reads none there
    words = [line.removeprefix("#SBATCH ") for line in lines[:first] if line.startswith("#SBATCH ")]
    return parser.parse_args(words)


def test_slurm_starts_a_server_on_each_node(tmp_path: Path) -> None:
    script = FILES / "slurm.sbatch"
    given = options(script.read_text())
    assert (given.nodes, given.ntasks) == (1, 1)
    subprocess.run(["bash", "-n", str(script)], check=True)
    stand_in, heard = tmp_path / "srun", tmp_path / "heard"
    save = f"import json, pathlib, sys\nfolder = pathlib.Path({str(tmp_path)!r})\n"
    save += "call = [sys.argv[1:], (folder / 'servers' / '1').read_text()]\n"
    stand_in.write_text(f"#!{sys.executable}\n{save}(folder / 'heard').write_text(json.dumps(call))\n")
    stand_in.chmod(0o700)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "SEQPAR_SHARED": str(tmp_path)}
    environment |= {"SLURM_ARRAY_TASK_ID": "1", "SLURM_GPUS_ON_NODE": str(given.gpus_per_node), "SEQPAR_PORT": "8123"}
    done = subprocess.run(["bash", str(script), "a/model"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    words, address = json.loads(heard.read_text())
    start = words.index("seqpar")
    assert words[start : start + 2] == ["seqpar", "serve"]
    args = served(words[start + 2 :])
    assert (args.models, args.gpus, args.jobs) == (("a/model",), given.gpus_per_node, tmp_path / "jobs")
    assert address.endswith(f":{args.port}\n")
    assert not (tmp_path / "servers" / "1").exists()  # as long as it runs
    assert args.grace_s < int(given.signal.partition("@")[2])
    assert subprocess.run(["bash", str(script)], env=environment, capture_output=True).returncode != 0
