"""Write requirements.lock and requirements-cuda.lock: constraints.txt, with the hash of every file to be installed.

    python .ci/lock.py [WHEEL ...]        needs uv

requirements.lock pins what constraints.txt pins, for every platform and every Python from the oldest on;
requirements-cuda.lock what torch for CUDA brings besides. Neither names an index. A WHEEL is a build that PyPI does not
have, such as torch for CPUs (`make lock ARGS=torch-2.13.0+cpu-….whl`): its hash is added to those of its version.
"""

import hashlib
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CUDA = re.compile(r"(nvidia|cuda)-")
HEAD = """\
# {what}
# Written by .ci/lock.py; not edited by hand. To install, with {files}:
#   pip install --require-hashes {options} && pip install --no-deps -e .
"""
HEADS = {
    "requirements.lock": HEAD.format(
        what="The versions of constraints.txt, each with the hashes of its published files.",
        files="torch for CPUs, or on macOS and Windows",
        options="-r requirements.lock",
    ),
    "requirements-cuda.lock": HEAD.format(
        what="What torch for CUDA brings on Linux, with hashes; beside requirements.lock.",
        files="torch for CUDA",
        options="-r requirements.lock -r requirements-cuda.lock",
    ),
}


def resolve() -> list[str]:
    """One text a package: `name==version ; marker`, and its hashes in further lines."""
    command = ["uv", "pip", "compile", "pyproject.toml", "--extra", "dev", "--constraint", "constraints.txt"]
    options = ["--universal", "--generate-hashes", "--no-header", "--no-annotate", "--no-emit-index-url", "--quiet"]
    lock = subprocess.run(
        [*command, *options, "--python-version", "3.11"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return re.split(r"\n(?=\S)", lock.stdout.strip())


def add_wheel(packages: list[str], wheel: Path) -> None:
    name, version, *_ = wheel.name.split("-")
    start = f"{name.replace('_', '-').lower()}=={version.partition('+')[0]} "
    (at,) = [i for i, package in enumerate(packages) if package.startswith(start)]
    with wheel.open("rb") as file:
        packages[at] += f" \\\n    --hash=sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def main() -> None:
    packages = resolve()
    for wheel in sys.argv[1:]:
        add_wheel(packages, Path(wheel))
    for name, head in HEADS.items():
        chosen = [package for package in packages if bool(CUDA.match(package)) == ("cuda" in name)]
        (ROOT / name).write_text(head + "\n".join(chosen) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
