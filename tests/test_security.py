"""What must not leave this machine's memory, and what files from elsewhere must not do. docs/security.md says it."""

import os
from pathlib import Path

import pytest
from tiny import MODEL, RECIPE, changed, recipe_file, spt
from typer.testing import CliRunner

from spt.config.load import load_recorded
from spt.errors import BackendError, UsageError, hide_assigned_secrets, hide_secrets, one_line
from spt.execution.slurm import Slurm
from spt.runtime.environment import command_line
from spt_cli import app

ROOT = Path(__file__).resolve().parent.parent

# ---------------------------------------------------------------------------------------------------------- secrets

SECRETS = {
    "HF_TOKEN": "hf_PLANTEDaaaa",
    "WANDB_API_KEY": "PLANTEDbbbb1234",
    "AWS_SECRET_ACCESS_KEY": "PLANTEDcccc/+x",
    "DB_PASSWORD": "PLANTED dddd\nPLANTED second line",
    "https_proxy": "http://planter:PLANTED%21eeee@127.0.0.1:9",
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
SLURM = {"sbatch": "#!/bin/sh\necho Submitted batch job 7\n", "squeue": "#!/bin/sh\n", "scancel": "#!/bin/sh\n"}


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
    assert "PLANTED" not in said and "planter" not in said, said
    for path in folder.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert b"PLANTED" not in content and b"planter" not in content, path


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
        raise RuntimeError(" ".join(SECRETS.values()))

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
        ("A_SECRET='a b' PGPASSWORD=\"c d\"", "A_SECRET=*** PGPASSWORD=***"),
        ("api_key=1 token=2", "api_key=*** token=***"),
        ("https://me:word@host/x and http://ghp_1@host", "https://***@host/x and http://***@host"),
        ("task.min_tokens=5 model.key=3 key_tokens=2", "task.min_tokens=5 model.key=3 key_tokens=2"),
        ("KEYBOARD=us MONKEY=1 AUTHOR=me TOKENS=3", "KEYBOARD=us MONKEY=1 AUTHOR=me TOKENS=3"),
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


def test_long_texts_take_no_time() -> None:
    for text in ("TOKEN_" * 20_000, "A='" * 30_000, "://" * 30_000, "TOKEN=" * 20_000):
        hide_assigned_secrets(text)


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
