"""What must not leave this machine's memory, and what files from elsewhere must not do. docs/security.md says it."""

import ast
import gzip
import io
import os
import pickle
import tarfile
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny import MODEL, RECIPE, changed, loaded, recipe_file, reseal, run, spt
from typer.testing import CliRunner

from spt.advisor.arrays import convert
from spt.config.job import Job
from spt.config.load import load_recorded
from spt.errors import (
    BackendError,
    CheckpointError,
    DataError,
    UsageError,
    hide_assigned_secrets,
    hide_secrets,
    one_line,
)
from spt.execution.slurm import Slurm
from spt.runtime.environment import command_line
from spt.tasks import custom
from spt.tasks.files import read_members, read_unzipped
from spt.tasks.own import arrays
from spt.training import stage
from spt_cli import app

ROOT = Path(__file__).resolve().parent.parent
CODE = [path for folder in ("spt", "models", "tasks") for path in sorted((ROOT / folder).rglob("*.py"))]

# ---------------------------------------------------------------------------------------------------------- secrets

SECRETS = {
    "HF_TOKEN": "hf_PLANTEDaaaa",
    "WANDB_API_KEY": "PLANTEDbbbb1234",
    "AWS_SECRET_ACCESS_KEY": "PLANTEDcccc/+x",
    "DB_PASSWORD": "PLANTED dddd\nPLANTED second line",
    "https_proxy": "http://planter:PLANTED%21eeee@127.0.0.1:9",
    "CHAT_TOKEN": "https://chat.example/services/PLANTEDgggg",  # an address that is itself the secret
    "all_proxy": "http://planter:PLAN@TEDhhhh@127.0.0.1:9",
    "SIGNING_KEYS": 'PLANTED\\iiii"x',  # which a quotation writes otherwise
    "STORAGE": "Endpoint=https://x.example;AccountKey=PLANTEDjjjj==;Version=2",
    # the remote's address, as git tells it
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": "remote.origin.url",
    "GIT_CONFIG_VALUE_0": "https://planter:PLANTEDffff@127.0.0.1/x.git",
}

# Tells them when it is built and, if causal, by failing there.
TELLING = f"""
import logging, os

def build(config):
    told = " ".join(f"{{name}}={{os.environ.get(name)}}" for name in {list(SECRETS)})
    logging.getLogger("spt.models.mine").info("built with %s", told)
    if config.causal:
        raise RuntimeError(told)
    return Backbone(config, lambda: [Map(config.d_model)])
"""

# A cluster that takes every job and forgets it.
SLURM = {
    "sbatch": "#!/bin/sh\necho Submitted batch job 7\n",
    **dict.fromkeys(("srun", "squeue", "scancel"), "#!/bin/sh\n"),
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with that model and a recipe; every folder that is written lies beside it."""
    folder, tools, scratch = (tmp_path / name for name in ("here", "tools", "scratch"))
    for each in (folder, tools, scratch):
        each.mkdir()
    model = MODEL.replace("FORWARD", "x").replace("EXTRA", "").partition("def build")[0]
    (folder / "mine.py").write_text(model + TELLING)
    recipe_file(folder, changed(RECIPE, model={"name": "./mine.py", "d_model": 16, "n_layers": 1}))
    for name, text in SLURM.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    own = {name: str(tmp_path / name.lower()) for name in ("SPT_RUNS_DIR", "SPT_CACHE_DIR")}
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    for name, value in {**SECRETS, **own, "TMPDIR": str(scratch), "PATH": path}.items():
        monkeypatch.setenv(name, value)
    return folder


def check_nothing_told(folder: Path, said: str) -> None:
    planted = ("PLANTED", "planter", "TEDhhhh")
    assert not [each for each in planted if each in said], said
    for path in folder.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert not [each for each in planted if each.encode() in content], path


def call(folder: Path, *arguments: str, code: int = 0) -> str:
    """A command in this process; what it says, and what it leaves under `folder`, holds no secret."""
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == code, done.output
    check_nothing_told(folder, done.output)
    return done.output


def test_no_secret_is_written_by_a_run(here: Path, tmp_path: Path) -> None:
    said = call(tmp_path, "finetune", "tiny.yaml", "--scratch", "--cpu")
    assert "HF_TOKEN=***" in said and "https_proxy=http://***@127.0.0.1:9" in said
    assert list(tmp_path.glob("spt_runs_dir/*/env.json"))


def test_no_secret_is_written_where_a_model_fails_with_them(here: Path, tmp_path: Path) -> None:
    said = call(tmp_path, "compare", "tiny.yaml", "model.causal=true", "--seeds", "1", "--debug", code=2)
    assert "build fails with RuntimeError: HF_TOKEN=***" in said


def test_no_secret_is_written_where_training_fails_with_them(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError(f"{' '.join(SECRETS.values())} {list(SECRETS.values())}")

    monkeypatch.setattr("spt.training.stage.fit", fail)
    call(tmp_path, "compare", "tiny.yaml", "--seeds", "1", "--cpu", code=8)
    (trace, *_) = tmp_path.rglob("traceback.txt")
    assert "RuntimeError: *** ***" in trace.read_text()


@pytest.mark.slow
def test_no_secret_is_written_by_workers_and_listings(here: Path, tmp_path: Path) -> None:
    for command in (
        ("compare", "tiny.yaml", "--seeds", "2", "--jobs", "2", "--cpu"),
        ("finetune", "tiny.yaml", "--scratch", "--seed", "5", "--num-processes", "2", "--cpu"),
        ("env", "--json"),
        ("show", "tiny.yaml"),
        ("report", str(tmp_path / "spt_runs_dir"), "--out", "again"),
    ):
        done = spt(*command, cwd=here, env={"SPT_RUNS_DIR": str(tmp_path / "spt_runs_dir")})
        assert done.returncode == 0, done.stderr
        check_nothing_told(tmp_path, done.stdout + done.stderr)
    assert (here / "again" / "report.html").is_file()


def test_no_secret_is_written_for_slurm(here: Path, tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    setup = "setup=export A=$HF_TOKEN"
    said = call(tmp_path, "compare", "tiny.yaml", "--seeds", "1", "--slurm", "poll=0.01", "--slurm", setup, code=8)
    assert "left the queue before it began" in said
    assert any(setup.partition("=")[2] in path.read_text() for path in tmp_path.rglob("*.sh"))


def test_a_secret_on_the_command_line_is_refused_for_slurm_and_hidden_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a secret would stand in the jobs' scripts") as error:
        Slurm.parse(["setup=export TOKEN=PLANTEDgggg"])
    assert "PLANTED" not in str(error.value)
    for harmless in ("export TOKENIZERS_PARALLELISM=false", "export HF_TOKEN=$MINE", 'export T_KEY="$(cat ~/k)"'):
        assert Slurm.parse([f"setup={harmless}"]).setup == (harmless,)


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("export HF_TOKEN=abc; x", "export HF_TOKEN=*** x"),
        (
            "STORAGEACCOUNTKEY=a X_KEYS=b DB_PASS2=c GH_PAT=d",
            "STORAGEACCOUNTKEY=*** X_KEYS=*** DB_PASS2=*** GH_PAT=***",
        ),
        ("A_SECRET='a b' PGPASSWORD=\"c d\"", "A_SECRET=*** PGPASSWORD=***"),
        ("api_key=1 token=2", "api_key=*** token=***"),
        ("https://me:word@host/x and http://ghp_1@host", "https://***@host/x and http://***@host"),
        ("task.min_tokens=5 model.key=3 key_tokens=2", "task.min_tokens=5 model.key=3 key_tokens=2"),
        ("KEYBOARD=us MONKEY=1 AUTHOR=me TOKENS=3 PATH=/b", "KEYBOARD=us MONKEY=1 AUTHOR=me TOKENS=3 PATH=/b"),
    ],
)
def test_what_a_text_assigns(text: str, hidden: str) -> None:
    assert hide_assigned_secrets(text) == hidden


def test_errors_hide_what_the_environment_holds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MY_KEY", str(tmp_path))  # where a key lies is no secret
    told = "hf_PLANTEDaaaa, PLANTED!eeee and PLANTED second line"
    assert str(BackendError(told)) == "***, *** and ***"
    assert one_line(RuntimeError(told)) == "RuntimeError: ***, *** and ***"
    assert hide_secrets(f"{tmp_path} as it is") == f"{tmp_path} as it is"


@pytest.mark.timeout(20)  # a pattern that tries every way to read them would take hours
@pytest.mark.parametrize("part", ["TOKEN_", "A='", "://", "TOKEN="])
def test_long_texts_are_read_in_one_pass(part: str) -> None:
    text = part * 30_000
    assert hide_assigned_secrets(text) == ("TOKEN=***" if part == "TOKEN=" else text)


def test_the_recorded_command_has_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DB_PASSWORD", SECRETS["DB_PASSWORD"])
    words = ["compare", "quickstart", "--slurm", "setup=export TOKEN=PLANTED", "PLANTED second line", "model.d_model=8"]
    monkeypatch.setattr("sys.argv", ["/usr/bin/spt", *words])
    assert command_line() == "spt compare quickstart --slurm 'setup=export TOKEN=***' '***' model.d_model=8"


# ----------------------------------------------------------------------------------------------------- code and pickles


@pytest.mark.parametrize("named", ["./evil.py", "{run}/evil.py", "{run}/../{name}/evil.py", "~/evil.py"])
def test_code_that_comes_with_a_run_folder_is_not_run(named: str, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "finetune-0123"
    run.mkdir(parents=True)
    (run / "evil.py").write_text(f"open({str(tmp_path / 'OWNED')!r}, 'w')\n")
    for place in ("model", "task"):
        (run / "recipe.yaml").write_text(f"{place}: {{name: {named.format(run=run, name=run.name)}}}\n")
        with pytest.raises(UsageError, match=f"its {place} is the file .*evil.py, which no run records"):
            load_recorded(run)
    assert not (tmp_path / "OWNED").exists()


class Evil:
    """Runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (open, (str(self.path), "w"))


def test_a_state_to_resume_from_is_not_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(loaded(tmp_path), "finetune", 0)
    monkeypatch.setattr(stage, "publish", interrupt)  # with the states still there
    with pytest.raises(KeyboardInterrupt):
        run(job, tmp_path, save_every=0.0)
    folder = max((tmp_path / job.name / "checkpoints").glob("step-*"))
    for name in ("optimizer.bin", "random_states_0.pkl"):
        right = (folder / name).read_bytes()
        for content in (pickle.dumps(Evil(tmp_path / "OWNED"), protocol=2), right):
            (folder / name).write_bytes(content)
            reseal(folder)
            if content != right:
                with pytest.raises((CheckpointError, KeyboardInterrupt)):  # Accelerate does without random states
                    run(job, tmp_path)
    assert not (tmp_path / "OWNED").exists()


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


PICKLES = ("pickle", "dill", "joblib", "cloudpickle", "marshal", "torch", "torch.jit")
UNSAFE = {
    *(f"{module}.{name}" for module in PICKLES for name in ("load", "loads")),
    *("pandas.read_pickle", "pd.read_pickle", "yaml.unsafe_load", "yaml.full_load"),
    *("os.system", "os.popen", "shutil.unpack_archive", "eval", "exec"),
}
# Messages between a study and the workers that it has started itself, over pipes.
ALLOWED = {("spt/execution/local.py", "pickle.load")}
UNPACKING = ("extractall", "extract")  # methods of archives


def name_of(function: ast.expr) -> str:
    """`np.load`, as it is written; of other expressions the last attribute."""
    if isinstance(function, ast.Attribute):
        return f"{name_of(function.value)}.{function.attr}"
    return function.id if isinstance(function, ast.Name) else ""


def test_nothing_in_the_code_unpickles_unpacks_or_runs_a_shell() -> None:
    found = set()
    for path in CODE:
        file = path.relative_to(ROOT).as_posix()
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(call, ast.Call):
                continue
            name, where = name_of(call.func), f"{file}:{call.lineno}"
            options = {option.arg: ast.unparse(option.value) for option in call.keywords if option.arg in CHECKED}
            if name in UNSAFE:
                found.add((file, name))
            assert options.get("shell", "False") == "False", where
            assert options.get("trust_remote_code", "False") == "False", where
            assert name.rpartition(".")[2] not in UNPACKING, where
            if name in ("np.load", "np.lib.format.read_array"):
                assert options.get("allow_pickle") == "False", where
            if name == "yaml.load":
                assert ast.unparse(call.args[1]) in ("RecipeLoader", "yaml.BaseLoader"), where
    assert found == ALLOWED


CHECKED = ("shell", "allow_pickle", "trust_remote_code")


# ------------------------------------------------------------------------------------------------------------- archives


def tar_file(path: Path, *members: tarfile.TarInfo, packed: bool = True) -> Path:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for member in members:
            archive.addfile(member, io.BytesIO(bytes(member.size)))
    path.write_bytes(gzip.compress(content.getvalue()) if packed else content.getvalue())
    return path


def member(name: str, **changes: object) -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    for key, value in changes.items():
        setattr(found, key, value)
    return found


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (member("../x"), "leads outside"),
        (member("a/../../x"), "leads outside"),
        (member("/etc/x"), "leads outside"),
        (member("x", type=tarfile.SYMTYPE, linkname="/etc/passwd"), "is not a regular file"),
        (member("x", type=tarfile.LNKTYPE, linkname="../../y"), "is not a regular file"),
        (member("x", type=tarfile.CHRTYPE, devmajor=1, devminor=5), "is not a regular file"),
        (member("x", type=tarfile.FIFOTYPE), "is not a regular file"),
        (member("x", size=2**22), "unpacks to more than 1,048,576 bytes"),
        (member("x", type=tarfile.GNUTYPE_LONGNAME, size=2**21), "is damaged"),
        (member("x", type=tarfile.XHDTYPE, size=2**21), "is damaged"),
    ],
)
@pytest.mark.parametrize("packed", [True, False])
def test_members_that_lead_elsewhere_or_are_too_large(
    made: tarfile.TarInfo, words: str, packed: bool, tmp_path: Path
) -> None:
    path = tar_file(tmp_path / "a.tar.gz", made, member("y", size=10), packed=packed)
    with pytest.raises(ValueError, match=words):
        list(read_members(path, lambda name: True, 2**20))
    assert [each.name for each in tmp_path.iterdir()] == ["a.tar.gz"]


def test_archives_that_go_on_behind_their_end_or_consist_of_notes(tmp_path: Path) -> None:
    path = tar_file(tmp_path / "a.tar", member("x", size=10), packed=False)
    end = path.read_bytes()
    (tmp_path / "b.tar.gz").write_bytes(gzip.compress(end + bytes(2**23)))
    with pytest.raises(ValueError, match="unpacks to more than"):
        list(read_members(tmp_path / "b.tar.gz", lambda name: True, 2**20))
    notes = [member("x", type=tarfile.GNUTYPE_LONGNAME, size=3) for _ in range(3000)]
    with pytest.raises(ValueError, match="is damaged"):
        list(read_members(tar_file(tmp_path / "c.tar", *notes), lambda name: True, 2**23))
    (tmp_path / "d.gz").write_bytes(gzip.compress(bytes(2**22)))
    with pytest.raises(ValueError, match="holds more than the 1,024 bytes"):
        read_unzipped(tmp_path / "d.gz", 2**10)


def npy(header: str, body: bytes = b"") -> bytes:
    text = header.encode() + b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + body


HEADERS = {
    "huge": "{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000000,)}",
    "beyond 64 bits": "{'descr': '<f8', 'fortran_order': False, 'shape': (2**70, 3)}",
    "negative": "{'descr': '<f8', 'fortran_order': False, 'shape': (-1,)}",
    "objects": "{'descr': '|O', 'fortran_order': False, 'shape': (1,)}",
    "deep": "(" * 5000,
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
@pytest.mark.parametrize("packed", [True, False])
def test_arrays_with_headers_that_lie(header: str, packed: bool, tmp_path: Path) -> None:
    content = npy(header, pickle.dumps(Evil(tmp_path / "OWNED")))
    path = tmp_path / ("a.npz" if packed else "a.npy")
    if packed:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a.npy", content)
    else:
        path.write_bytes(content)
    with pytest.raises(ValueError, match="cannot be read as an array"):
        arrays.read(path, None, "row 1")
    assert not (tmp_path / "OWNED").exists()


def test_archives_of_arrays_that_unpack_to_too_much(tmp_path: Path) -> None:
    body = npy("{'descr': '|u1', 'fortran_order': False, 'shape': (33554432,)}", bytes(2**25))
    with zipfile.ZipFile(tmp_path / "one.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("X.npy", body)
    with zipfile.ZipFile(tmp_path / "out.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("../X.npy", body[:200])
    with pytest.raises(ValueError, match="unpacks to 33,554,560 bytes"):
        arrays.read(tmp_path / "one.npz", None, "row 1")
    with pytest.raises(ValueError, match="leads outside"):
        arrays.read(tmp_path / "out.npz", None, "row 1")
    small = npy("{'descr': '|u1', 'fortran_order': False, 'shape': (8388608,)}", bytes(2**23))
    with zipfile.ZipFile(tmp_path / "many.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        for i in range(4):
            archive.writestr(f"X{i}.npy", small)
    for name in ("one.npz", "many.npz"):
        with pytest.raises(DataError, match="unpacks to 33,554,"):
            convert(tmp_path / name, tmp_path / "data.parquet")
    assert not (tmp_path / "data.parquet").exists()


def test_tables_that_repeat_themselves_without_end(tmp_path: Path) -> None:
    rows = pa.table({"a": ["x" * 2**25], "y": [0]})
    pq.write_table(rows, tmp_path / "a.parquet", compression="zstd", use_dictionary=False)
    with pytest.raises(ValueError, match=r"a\.parquet unpacks to 33,554,[0-9]+ bytes or cells"):
        custom.load(custom.Config(path=tmp_path / "a.parquet", text_column="a", label_column="y"), tmp_path)
