"""jobset.yaml and trainjob.yaml against the object models of their custom resources.

The models are those that the project Kubeflow generates from the resources' own definitions and
publishes on PyPI; JobSet is among them, because its TrainJob is made of JobSets.
"""

import copy
import shlex
import sys
from pathlib import Path

import pytest
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob

LAUNCH = Path(__file__).parents[1]
sys.path.insert(0, str(LAUNCH.parent))
import options  # noqa: E402 - found through the line above


def fields(tree, prefix=""):
    """All fields of a tree with their values, by path."""
    if isinstance(tree, dict):
        pairs = tree.items()
    elif isinstance(tree, list):
        pairs = enumerate(tree)
    else:
        number = isinstance(tree, (int, float)) and not isinstance(tree, bool)
        return {prefix: f"{float(tree):g}" if number else str(tree)}
    found = {}
    for name, value in pairs:
        found |= fields(value, f"{prefix}.{name}")
    return found


def check_model(model, tree):
    """Every field is one of the resource's, with a value of its type."""
    known = fields(model.from_dict(copy.deepcopy(tree)).to_dict())
    lost = {path: value for path, value in fields(tree).items() if known.get(path) != value}
    assert not lost, f"{model.__name__} has no such fields, or no such values: {lost}"


def check_asked(args, processes, devices):
    """The first assertion of the job asks for what the job asks the cluster for."""
    asked = args.processes, args.devices
    assert asked == (processes, devices), f"asked for {asked}, started {(processes, devices)}"


def check_jobset(tree):
    check_model(JobsetV1alpha2JobSet, tree)
    (job,) = tree["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert spec["parallelism"] == spec["completions"], "not all pods would run at once"
    (container,) = spec["template"]["spec"]["containers"]
    assert container["command"] == ["python", "examples/train.py"]
    args = options.parse([each.replace("$(INDEX)", "1") for each in container["args"]], "")
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    check_asked(args, spec["completions"], spec["completions"] * gpus)
    name, port = tree["metadata"]["name"], container["ports"][0]["containerPort"]
    first = f"{name}-{job['name']}-0-0.{name}:{port}"
    assert args.coordinator == first, f"pod 0 is {first}, not {args.coordinator}"
    assert args.process == 1, "each pod must give its own index"
    mounted = [mount["mountPath"] for mount in container["volumeMounts"]]
    kept = any(Path(args.checkpoints).is_relative_to(path) for path in mounted)
    assert kept, "checkpoints would die with the pod"


def check_trainjob(tree):
    check_model(TrainerV1alpha1TrainJob, tree)
    trainer = tree["spec"]["trainer"]
    (script,) = trainer["args"]
    script = script.replace("$JAX_COORDINATOR_ADDRESS", "pod:1").replace("$JAX_PROCESS_ID", "1")
    words = shlex.split(script)
    assert words[:3] == ["exec", "python", "examples/train.py"]
    args, nodes = options.parse(words[3:], ""), trainer["numNodes"]
    check_asked(args, nodes, nodes * trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"])
    assert (args.coordinator, args.process) == ("pod:1", 1)


CHECKS = {"jobset.yaml": check_jobset, "trainjob.yaml": check_trainjob}


def read(name):
    return (LAUNCH / name).read_text()


@pytest.mark.parametrize("name", CHECKS)
def test_file_fits_its_object_model(name):
    CHECKS[name](yaml.safe_load(read(name)))


@pytest.mark.parametrize(
    ("name", "right", "wrong", "said"),
    [
        ("jobset.yaml", "completionMode:", "completionsMode:", "no such fields"),
        ("jobset.yaml", "fieldPath:", "path:", "no such fields|validation error"),
        ("jobset.yaml", "parallelism: 2", "parallelism: 1", "not all pods"),
        ("jobset.yaml", "--processes=2", "--processes=4", "asked for"),
        ("jobset.yaml", "nvidia.com/gpu: 4", "nvidia.com/gpu: 1", "asked for"),
        ("jobset.yaml", "tiny-workers-0-0.tiny:8476", "tiny-0-0.tiny:8476", "pod 0 is"),
        ("jobset.yaml", "containerPort: 8476", "containerPort: 8477", "pod 0 is"),
        ("jobset.yaml", "--process=$(INDEX)", "--process=0", "its own index"),
        ("jobset.yaml", "mountPath: /runs", "mountPath: /run", "die with the pod"),
        ("trainjob.yaml", "numNodes: 2", "numNodes: two", "validation error"),
        ("trainjob.yaml", "numNodes: 2", "numNodes: 4", "asked for"),
        ("trainjob.yaml", "resourcesPerNode:", "resources:", "no such fields|resourcesPerNode"),
        ("trainjob.yaml", "runtimeRef:", "runtime:", "no such fields|validation error"),
        ("trainjob.yaml", "--devices 8", "--devices 2", "asked for"),
    ],
)
def test_planted_mistake_is_noticed(name, right, wrong, said):
    text = read(name)
    assert right in text
    with pytest.raises(Exception, match=said):  # pydantic's, or an assertion
        CHECKS[name](yaml.safe_load(text.replace(right, wrong)))
