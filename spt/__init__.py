"""Compare sequence models fairly: self-pretrain on the task's own training inputs, finetune, report the gain."""

from pathlib import Path

__version__ = "0.1.0"

_root = Path(__file__).resolve().parent.parent
if (_root / "models" / "__init__.py").is_file() and (_root / "pyproject.toml").is_file():
    __path__.append(str(_root))  # a source checkout: models/, tasks/ and recipes/ lie beside spt/
